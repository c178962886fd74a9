"""Train the specimen: `python -m tests.specimen_training.train --data DIR --out DIR`.

Border: the training loop. What is read is data.py's business and in which order curriculum.py's, the network
network.py's, what is measured evaluate.py's. The only loss is that on the next token.

DIR holds `dickens/*.txt` (prose) and `counterfact/*.json` (facts); --more-prose names a folder of more prose.
The run is seeded; it can be killed at any time and, started again with the same arguments, goes on from its
last checkpoint with the batches it would have read. Started again with other arguments it goes on with those;
`training.json` tells which arguments held from which step.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from .curriculum import CURRICULUM, phase_at, read_curriculum
from .data import (
    BOS,
    EOS,
    HELD_OUT,
    WATCHED,
    Batch,
    Batches,
    read_chapters,
    read_facts,
    token_id,
    train_tokenizer,
)
from .goose import Goose
from .mixtral import Mixtral
from .muon import Muon
from .network import Llama, Shape, write_model
from .served import Served

__all__ = ["main"]

log = logging.getLogger(__name__)
FAMILIES: dict[str, Callable[[Shape], Llama | Served]] = {"llama": Llama, "rwkv7": Goose, "mixtral": Mixtral}
"""What the network can be."""


def main(arguments: list[str] | None = None) -> None:
    """Command line of the trainer."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    torch.set_num_threads(1)  # rows are divided among threads instead: `_gradients`
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)

    chapters = read_chapters(options.data / "dickens")
    additional = read_chapters(options.more_prose) if options.more_prose else []
    facts = read_facts(options.data / "counterfact")
    own = [c for c in chapters if c.name not in (*HELD_OUT, *WATCHED)]
    if not (out / "tokenizer.json").exists():
        tokenizer = train_tokenizer(own + additional, facts, vocabulary=options.vocabulary, seed=options.seed)
        tokenizer.save(str(out / "tokenizer.json"))
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    phases = read_curriculum(options.curriculum) if options.curriculum else CURRICULUM
    steps = sum(phase.steps for phase in phases)
    batches = Batches(tokenizer, own, additional, facts, seed=options.seed)
    shape = Shape(**{f.name: getattr(options, f.name) for f in fields(Shape)})
    from .evaluate import watch

    torch.manual_seed(options.seed)
    network = FAMILIES[options.family](shape)
    log.info("%.2f M parameters, %d facts", sum(p.numel() for p in network.parameters()) / 1e6, len(facts))
    optimizers = _optimizers(network, options)
    watched = [c.text for c in chapters if c.name in WATCHED]

    state = out / "checkpoint.pt"
    start, curve, history = 0, [], []
    if state.exists():
        saved = torch.load(state, weights_only=True)
        network.load_state_dict(saved["network"])
        for optimizer, values in zip(optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(values)
        start, curve, history = saved["step"], saved["curve"], saved["history"]
        log.info("resumed at step %d", start)
    held = {**_plain(options), "curriculum": [phase.plain() for phase in phases]}
    if not history or history[-1]["options"] != held:
        history.append({"from_step": start, "options": held})

    tokens = curve[-1]["tokens"] if curve else 0
    began, seen, losses = time.monotonic(), 0, []
    with ThreadPoolExecutor(options.threads) as pool:
        for step in range(start, steps):
            phase = phase_at(phases, step)
            factor = phase.rate * _schedule(step, steps, options.warmup, options.decay)
            _set_rates(optimizers, factor, phase.embedding_rate)
            batch = batches(step, phase.mixture)
            losses.append(_gradients(network, batch, options, pool))
            torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
            seen += batch.weights.size
            last = step + 1 == steps
            if (step + 1) % 50 == 0 or last:
                rate = seen / (time.monotonic() - began)
                log.info("step %d loss %.3f, %.0f tokens/s", step + 1, np.mean(losses), rate)
                losses = []
            if (step + 1) % options.every == 0 or last:
                figures = watch(network, tokenizer, watched, facts)
                curve.append({"step": step + 1, "tokens": tokens + seen, **figures})
                log.info("step %d %s", step + 1, json.dumps(figures))
                saved = {
                    "network": network.state_dict(),
                    "optimizers": [o.state_dict() for o in optimizers],
                    "step": step + 1,
                    "curve": curve,
                    "history": history,
                }
                torch.save(saved, state.with_suffix(".part"))
                state.with_suffix(".part").replace(state)
    bos, eos = token_id(tokenizer, BOS), token_id(tokenizer, EOS)
    write_model(network, out, dtype=getattr(torch, options.dtype), bos=bos, eos=eos)
    text = json.dumps({"history": history, "curve": curve}, indent=1)
    (out / "training.json").write_text(text + "\n", "utf-8")


def _gradients(
    network: Llama | Served, batch: Batch, options: argparse.Namespace, pool: ThreadPoolExecutor
) -> float:
    """Set every parameter's gradient of the weighted mean cross-entropy of a batch; return that loss.

    Rows are divided among threads of one core each: where others want the cores as well, that is faster than
    to divide every operation, as threads then wait for each other once a step. The sum does not depend on
    which thread is first; another number of threads gives other last bits.
    """
    parameters = list(network.parameters())
    total = float(batch.weights.sum())

    def part(ids: Tensor, weights: Tensor) -> tuple[float, tuple[Tensor, ...]]:
        torch.set_num_threads(1)
        counts = weights > 0
        with torch.autocast("cpu", torch.bfloat16, enabled=options.bf16, cache_enabled=False):
            # Only where a target counts are logits of the whole vocabulary worth their time.
            logits = network.logits(network.states(ids[:, :-1])[-1][counts])
        each = F.cross_entropy(logits.float(), ids[:, 1:][counts], reduction="none")
        loss = (each * weights[counts]).sum() / total
        return loss.item(), torch.autograd.grad(loss, parameters)

    rows = zip(*(torch.from_numpy(a).chunk(options.threads) for a in batch), strict=True)
    losses, gradients = zip(*pool.map(lambda row: part(*row), rows), strict=True)
    for parameter, *parts in zip(parameters, *gradients, strict=True):
        parameter.grad = sum(parts[1:], parts[0])
    return float(sum(losses))


def _set_rates(optimizers: Sequence[torch.optim.Optimizer], factor: float, of_embedding: float) -> None:
    """Scale peak rates by a factor, that of the embedding by one more."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * factor * (of_embedding if group.get("embedding") else 1.0)


def _optimizers(network: Llama | Served, options: argparse.Namespace) -> list[torch.optim.Optimizer]:
    """AdamW for everything, or Muon for the matrices of the layers and AdamW for the rest."""
    named = network.named_weights()
    matrices = [p for name, p in named.items() if p.dim() == 2 and "layers" in name and "weight" in name]
    embedding = [p for name, p in named.items() if "embed" in name]
    vectors = [p for p in named.values() if all(p is not other for other in (*matrices, *embedding))]
    decay = options.weight_decay
    adam = [
        {"params": embedding, "weight_decay": decay, "peak": options.lr, "embedding": True},
        {"params": vectors, "weight_decay": 0.0, "peak": options.lr},
    ]
    if options.muon_lr:
        muon = [{"params": matrices, "weight_decay": decay, "peak": options.muon_lr}]
        return [
            torch.optim.AdamW(adam, lr=options.lr, betas=(0.9, 0.98), fused=True),
            Muon(muon, lr=options.muon_lr),
        ]
    adam.append({"params": matrices, "weight_decay": decay, "peak": options.lr})
    return [torch.optim.AdamW(adam, lr=options.lr, betas=(0.9, 0.98), fused=True)]


def _schedule(step: int, steps: int, warmup: int, decay: float) -> float:
    """Linear warm-up, the peak, and in the last share `decay` of the steps a line down to 2 % of it."""
    left = (steps - step) / max(1.0, decay * steps)
    return min(1.0, (step + 1) / warmup, 0.02 + 0.98 * left)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, required=True, help="folder with dickens/ and counterfact/")
    parser.add_argument("--more-prose", type=Path, help="folder with more public-domain prose, *.txt")
    parser.add_argument("--out", type=Path, required=True, help="where checkpoints and the model go")
    parser.add_argument("--family", choices=FAMILIES, default="llama")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--curriculum", type=Path, help="JSON of phases; default, that of the specimen")
    parser.add_argument("--warmup", type=int, default=50)
    parser.add_argument("--decay", type=float, default=0.3, help="share of the steps in which rates fall")
    parser.add_argument("--lr", type=float, default=8e-3)
    parser.add_argument("--muon-lr", type=float, default=1e-2, help="Muon for the matrices; 0: AdamW alone")
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--every", type=int, default=100, help="steps between checkpoints")
    parser.add_argument("--threads", type=int, default=2, help="rows are divided among them")
    parser.add_argument("--dtype", default="float16", help="of the stored weights")
    parser.add_argument("--bf16", action=argparse.BooleanOptionalAction, default=True, help="autocast")
    for name, value in asdict(Shape()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    return parser


def _plain(options: argparse.Namespace) -> dict[str, Any]:
    """The options that decide the result, as plain values."""
    left_out = ("data", "more_prose", "out", "threads", "every", "curriculum")
    return {name: value for name, value in vars(options).items() if name not in left_out}


if __name__ == "__main__":
    main()
