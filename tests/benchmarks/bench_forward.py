"""Forward passes and captures against transformers' plain forward, measured in alternation in one process.

    python tests/benchmarks/bench_forward.py [--rounds 9] [--threads 2]

A random Llama of 8 layers, hidden 512, 8 heads, 4 key/value heads, MLP 1408, vocabulary 4096, float32, 8
prompts of 256 tokens. Each over transformers' sdpa forward with logits, targets in the last column: an
empty spec and every hook point of the field's table plus per-head z, captured in memory (time, lower is
better); resid_post of all layers into a durable store, end to end, for one batch and for eight (tokens per
second, higher is better).
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from harness import alternate, print_table, ratio

import mizarr
from mizarr.stages.forward.architectures.points import HookPoint

PROMPTS, LENGTH, LAYERS = 8, 256, 8
EVERY_POINT = (
    "resid_pre",
    "q",
    "k",
    "v",
    "scores",
    "pattern",
    "z",
    "attn_out",
    "resid_mid",
    "mlp_pre",
    "mlp_post",
    "mlp_out",
    "resid_post",
)


def save_random_llama(folder: Path, **sizes: Any) -> Any:
    """The benchmark model in a directory, or one of other sizes; returns transformers' own copy of it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "num_hidden_layers": LAYERS,
        "hidden_size": 512,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "intermediate_size": 1408,
        "vocab_size": 4096,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "attn_implementation": "sdpa",
    }
    config = LlamaConfig(**shape | sizes)
    model = LlamaForCausalLM(config).to(sizes.get("dtype", torch.float32)).eval()
    model.save_pretrained(folder)
    return model


def main() -> None:
    """Run the rounds and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        reference = save_random_llama(folder / "model")
        model = mizarr.Model.from_pretrained(folder / "model")
        in_memory(reference, model, args.rounds)
        for batches in (1, 8):
            into_the_store(reference, model, folder, batches, max(7, args.rounds if batches == 1 else 7))


def draw(prompts: int) -> torch.Tensor:
    """Random token ids, [prompts, LENGTH]."""
    return torch.randint(0, 4096, (prompts, LENGTH), generator=torch.Generator().manual_seed(prompts))


def plain(reference: Any, ids: torch.Tensor) -> None:
    """transformers' forward with logits, in batches of PROMPTS."""
    with torch.no_grad():
        for batch in ids.split(PROMPTS):
            reference(batch, use_cache=False)


def in_memory(reference: Any, model: mizarr.Model, rounds: int) -> None:
    """Forward passes that store nothing."""
    ids = draw(PROMPTS)
    every = [HookPoint(kind, layer) for layer in range(LAYERS) for kind in EVERY_POINT]
    everything = mizarr.HookSpec().capture(HookPoint.embed(), *every, HookPoint.final_norm())
    seconds = alternate(
        {
            "transformers, sdpa": lambda: plain(reference, ids),
            "empty spec": lambda: model.forward(ids),
            "every hook point, in memory": lambda: model.forward(ids, everything),
        },
        rounds,
    )
    with torch.no_grad():
        difference = (reference(ids).logits - model.forward(ids).logits).abs().max().item()
    targets = {"empty spec": "<= 1.03", "every hook point, in memory": "<= 1.15"}
    base = seconds["transformers, sdpa"]
    rows = [
        (name, f"{statistics.median(taken):.3f}", f"{ratio(taken, base):.3f}", targets.get(name, ""))
        for name, taken in seconds.items()
    ]
    title = f"{PROMPTS} x {LENGTH} tokens, {rounds} rounds; max |logit difference| {difference:.1e}"
    print_table(title, ("", "seconds", "x time", "target"), rows)


def into_the_store(reference: Any, model: mizarr.Model, folder: Path, batches: int, rounds: int) -> None:
    """resid_post of all layers, into a new durable store each time: from token ids to an open dataset."""
    ids = draw(PROMPTS * batches)
    hooks = mizarr.HookSpec().capture("blocks.*.hook_resid_post")
    numbers = itertools.count()

    def capture() -> None:
        store = mizarr.open_store(folder / f"{batches}" / f"{next(numbers)}")
        mizarr.capture(model, ids, hooks, store=store, progress=False)

    seconds = alternate({"transformers": lambda: plain(reference, ids), "captured": capture}, rounds)
    shutil.rmtree(folder / f"{batches}")
    rows = []
    for name, taken in seconds.items():
        speed = ratio(seconds["transformers"], taken)
        throughput = f"{ids.numel() / statistics.median(taken):,.0f}"
        target = ">= 1.0" if name == "captured" else ""
        rows.append((name, f"{statistics.median(taken):.3f}", throughput, f"{speed:.3f}", target))
    tokens = f"{batches} x {PROMPTS} x {LENGTH} tokens"
    title = f"resid_post of {LAYERS} layers into the store, {tokens}, {rounds} rounds"
    print_table(title, ("", "seconds", "tokens/s", "x tokens/s", "target"), rows)


if __name__ == "__main__":
    main()
