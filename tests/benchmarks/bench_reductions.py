"""What reductions at capture cost beside the pass they are made in.

    python tests/benchmarks/bench_reductions.py [--rounds 7] [--prompts 48]

Prompts of 128 tokens through 4 layers of 512 and a vocabulary of 32,768, into a new store each time. "logits
alone" is a plain pass that makes all logits and keeps nothing: what reductions of logits cannot be faster
than. Prints seconds, each over those of the last layer stored whole, and bytes that are written. The head is
a large part of such a small model, so that ratios of logits are an upper bound.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
from harness import alternate, print_table, ratio
from large_models import write_llama

import mizarr
from mizarr import HookSpec
from mizarr.stages.forward.capture.capture import CaptureNode

RESID, LAST, LOGITS = "blocks.*.hook_resid_post", "blocks.3.hook_resid_post", "hook_logits"
SPECS = {
    "last layer, whole": HookSpec().capture(LAST),
    "all layers, run_mean": HookSpec().capture(RESID, reduce="run_mean"),
    "topk:10": HookSpec().capture(LOGITS, reduce="topk:10"),
    "logsumexp": HookSpec().capture(LOGITS, reduce="logsumexp"),
    "topk:10 and logsumexp": HookSpec().capture(LOGITS, reduce="topk:10").capture(LOGITS, reduce="logsumexp"),
}


def main(rounds: int, prompts: int) -> None:
    """Run the rounds and print the table."""
    ids = np.random.default_rng(0).integers(0, 32768, (prompts, 128))
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "m"
        write_llama(place, layers=4, hidden=512, inner=2048, heads=8, vocab=32768)
        model, made = mizarr.Model.from_pretrained(place), iter(range(10**6))

        def captured(spec: HookSpec) -> Callable[[], object]:
            def capture() -> object:
                store = mizarr.open_store(Path(folder) / f"store{next(made)}", durability="process")
                return mizarr.capture(model, ids, spec, store=store, progress=False)

            return capture

        def logits() -> None:
            for start in range(0, prompts, 16):
                model.forward(ids[start : start + 16].tolist())

        contestants = {name: captured(spec) for name, spec in SPECS.items()} | {"logits alone": logits}
        seconds = alternate(contestants, rounds)
        empty = mizarr.open_store(Path(folder) / "empty")
        sizes = {
            name: CaptureNode(model, ids, spec).estimate(empty).bytes_written for name, spec in SPECS.items()
        }
    base = seconds["last layer, whole"]
    rows = [
        (name, f"{median(taken):.2f}", f"{ratio(taken, base):.2f}", f"{sizes.get(name, 0):,}")
        for name, taken in seconds.items()
    ]
    print_table(f"{ids.size:,} tokens", ("", "s", "over the last layer, whole", "bytes"), rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--prompts", type=int, default=48)
    chosen = parser.parse_args()
    main(chosen.rounds, chosen.prompts)
