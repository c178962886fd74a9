"""Train the specimen: `python -m mizarr.workflows.specimen.train --data DIR --out DIR`.

Border: the training loop. What is read is data.py's business, the network network.py's, what is measured
evaluate.py's.

DIR holds `dickens/*.txt` (prose) and `counterfact/*.json` (facts); --more-prose names a folder of more prose.
The run is seeded; it can be stopped at any time and, started again with the same arguments, goes on from its
last checkpoint with the batches it would have read. Started again with other arguments it goes on with those;
`training.json` tells which arguments held from which step.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import time
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from .data import (
    BOS,
    EOS,
    HELD_OUT,
    WATCHED,
    Batches,
    Mixture,
    read_chapters,
    read_facts,
    token_id,
    train_tokenizer,
)
from .guides import Guides
from .muon import Muon
from .network import Llama, Shape, write_model

__all__ = ["main"]

log = logging.getLogger(__name__)


def main(arguments: list[str] | None = None) -> None:
    """Command line of the trainer."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    torch.set_num_threads(options.threads)
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
    mixture = Mixture(**{f.name: getattr(options, f.name) for f in fields(Mixture)})
    batches = Batches(tokenizer, own, additional, facts, mixture, seed=options.seed)
    shape = Shape(**{f.name: getattr(options, f.name) for f in fields(Shape)})
    from .evaluate import watch

    torch.manual_seed(options.seed)
    network = Llama(shape, options.dropout)
    log.info("%.2f M parameters, %d facts", sum(p.numel() for p in network.parameters()) / 1e6, len(facts))
    guides = Guides(shape)
    optimizers = _optimizers(network, guides, options)
    watched = [c.text for c in chapters if c.name in WATCHED]

    state = out / "checkpoint.pt"
    start, curve, history = 0, [], []
    if state.exists():
        saved = torch.load(state, weights_only=True)
        network.load_state_dict(saved["network"])
        guides.load_state_dict(saved["guides"])
        for optimizer, values in zip(optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(values)
        start, curve, history = saved["step"], saved["curve"], saved["history"]
        log.info("resumed at step %d", start)
    if not history or history[-1]["options"] != _plain(options):
        history.append({"from_step": start, "options": _plain(options)})

    loss_of = torch.compile(_loss, dynamic=False) if options.compile else _loss
    began, seen, losses = time.monotonic(), 0, []
    for step in range(start, options.steps):
        torch.manual_seed(options.seed * 1_000_003 + step)  # dropout, so that resuming repeats it
        factor = _schedule(step, options.steps, options.warmup)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * factor
        guide = torch.tensor([options.guide_attention, options.guide_count]) * _guidance(step, options)
        loss, guided = loss_of(network, guides, [torch.from_numpy(a) for a in batches(step)], options.bf16)
        (loss + guided @ guide).backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        losses.append([loss.item(), *guided.tolist()])
        seen += mixture.rows * mixture.size
        last = step + 1 == options.steps
        if (step + 1) % 50 == 0 or last:
            rate = seen / (time.monotonic() - began)
            left = (options.steps - step - 1) * (time.monotonic() - began) / (step + 1 - start)
            plain, attention, count = np.mean(losses, axis=0)
            log.info("step %d loss %.3f, attention %.2f, count %.2f", step + 1, plain, attention, count)
            log.info("%.0f tokens/s, %.0f s left", rate, left)
            losses = []
        if (step + 1) % options.every == 0 or last:
            network.eval()
            figures = watch(network, tokenizer, watched, facts)
            network.train()
            curve.append({"step": step + 1, **figures})
            log.info("step %d %s", step + 1, json.dumps(figures))
            saved = {
                "network": network.state_dict(),
                "guides": guides.state_dict(),
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


def _optimizers(network: Llama, guides: Guides, options: argparse.Namespace) -> list[torch.optim.Optimizer]:
    """AdamW for everything, or Muon for the matrices of the layers and AdamW for the rest."""
    matrices = [p for name, p in network.named_parameters() if p.dim() == 2 and "layers" in name]
    embedding = [network.model.embed_tokens.weight, *guides.parameters()]
    vectors = [p for p in network.parameters() if p.dim() == 1]
    decay = options.weight_decay
    adam = [
        {"params": embedding, "weight_decay": decay, "peak": options.lr},
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


def _loss(network: Llama, guides: Guides, batch: list[Tensor], bf16: bool) -> tuple[Tensor, Tensor]:
    """Weighted mean cross-entropy, and the guides' losses; one function, so that it compiles as a whole."""
    ids, weights, sources, counts = batch
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        states = network.states(ids[:, :-1])
        logits = network.logits(states[-1])
        guided = guides(network, states, sources, counts)
    each = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    return (each * weights.flatten()).sum() / weights.sum(), guided


def _guidance(step: int, options: argparse.Namespace) -> float:
    """1 for the first half of the guided steps, then down to 0 in a straight line."""
    end = options.guided * options.steps
    return min(1.0, max(0.0, 2 * (1 - step / end))) if end else 0.0


def _schedule(step: int, steps: int, warmup: int) -> float:
    """Linear warm-up, then half a cosine to 2 % of the peak."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, required=True, help="folder with dickens/ and counterfact/")
    parser.add_argument("--more-prose", type=Path, help="folder with more public-domain prose, *.txt")
    parser.add_argument("--out", type=Path, required=True, help="where checkpoints and the model go")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--warmup", type=int, default=100)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--muon-lr", type=float, default=0.0, help="Muon for the matrices; 0: AdamW alone")
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--guide-attention", type=float, default=0.1, help="loss weight of the guided heads")
    parser.add_argument("--guide-count", type=float, default=0.1, help="loss weight of the guided count")
    parser.add_argument("--guided", type=float, default=0.7, help="share of the steps with guides")
    parser.add_argument("--every", type=int, default=250, help="steps between checkpoints")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="float16", help="of the stored weights")
    parser.add_argument("--bf16", action=argparse.BooleanOptionalAction, default=True, help="autocast")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=False)
    for values in (Shape(), Mixture()):
        for name, value in asdict(values).items():
            parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    return parser


def _plain(options: argparse.Namespace) -> dict[str, Any]:
    """The options that decide the result, as plain values."""
    left_out = ("data", "more_prose", "out", "threads", "every")
    return {name: value for name, value in vars(options).items() if name not in left_out}


if __name__ == "__main__":
    main()
