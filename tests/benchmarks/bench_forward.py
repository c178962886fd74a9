"""Forward passes and captures against transformers' plain forward, measured in alternation in one process.

    python tests/benchmarks/bench_forward.py [--rounds 9] [--threads 2]

A random Llama of 8 layers, hidden 512, 8 heads, 4 key/value heads, MLP 1408, vocabulary 4096, float32, 8
prompts of 256 tokens. Rows, each over transformers' sdpa forward with logits (1.0 = as fast; targets in the
last column): an empty spec; every hook point of the field's table plus per-head z, captured in memory;
resid_post of all layers into a durable store, end to end (tokens per second, so higher is better).
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from harness import alternate, print_table, ratio

import mizarr
from mizarr.stages.forward.points import HookPoint

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


def save_random_llama(folder: Path) -> Any:
    """The benchmark model in a directory; returns transformers' own copy of it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        num_hidden_layers=LAYERS,
        hidden_size=512,
        num_attention_heads=8,
        num_key_value_heads=4,
        intermediate_size=1408,
        vocab_size=4096,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    return model


def main() -> None:
    """Run the rounds and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as scratch:
        measure(Path(scratch), args.rounds)


def measure(scratch: Path, rounds: int) -> None:
    """All contestants, then the table."""
    reference = save_random_llama(scratch / "model")
    model = mizarr.Model.from_pretrained(scratch / "model")
    ids = torch.randint(0, 4096, (PROMPTS, LENGTH), generator=torch.Generator().manual_seed(1))
    every = [HookPoint(kind, layer) for layer in range(LAYERS) for kind in EVERY_POINT]
    everything = mizarr.HookSpec().capture(HookPoint.embed(), *every, HookPoint.final_norm())

    def plain() -> None:
        with torch.no_grad():
            reference(ids, use_cache=False)

    contestants: dict[str, Callable[[], Any]] = {
        "transformers, sdpa": plain,
        "mizarr, empty spec": lambda: model.forward(ids),
        "mizarr, every hook point in memory": lambda: model.forward(ids, everything),
        "mizarr, resid_post into the store": into_store(model, ids, scratch / "store"),
    }
    with torch.no_grad():
        difference = (reference(ids).logits - model.forward(ids).logits).abs().max().item()
    seconds = alternate(contestants, rounds)
    base = seconds["transformers, sdpa"]
    goals = {"mizarr, empty spec": "<= 1.03 x time", "mizarr, every hook point in memory": "<= 1.15 x time"}
    rows = []
    for name, taken in seconds.items():
        over = ratio(taken, base)
        throughput = PROMPTS * LENGTH / statistics.median(taken)
        rows.append(
            (
                name,
                f"{statistics.median(taken):.3f}",
                f"{over:.3f}",
                f"{1 / over:.3f}",
                f"{throughput:,.0f}",
                goals.get(name, ""),
            )
        )
    rows[-1] = (*rows[-1][:-1], ">= 1.0 x tokens/s")
    title = f"{PROMPTS} x {LENGTH} tokens, {rounds} rounds; max |logit difference| {difference:.1e}"
    print_table(title, ("", "seconds", "x time", "x tokens/s", "tokens/s", "target"), rows)


def into_store(model: mizarr.Model, ids: torch.Tensor, root: Path) -> Callable[[], None]:
    """A capture that finds nothing stored: the store is emptied before each round, outside of nothing;
    removal is cheap beside it."""
    hooks = mizarr.HookSpec().capture("blocks.*.hook_resid_post")

    def capture() -> None:
        shutil.rmtree(root, ignore_errors=True)
        mizarr.capture(model, ids, hooks, store=mizarr.open_store(root), progress=False)

    return capture


if __name__ == "__main__":
    main()
