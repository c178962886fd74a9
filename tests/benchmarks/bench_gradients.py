"""Attribution over all heads and positions, and exact runs of what it proposes, against plain forward passes.

    python tests/benchmarks/bench_gradients.py [--rounds 9] [--threads 2] [--device cpu]

The random Llama of bench_runs.py (8 layers, hidden 512, 8 heads, 4 key/value heads, MLP 1408, vocabulary
4096, float32); two prompts of 20 random tokens that share their first. Times over plain forward passes of the
same prompt, logits at the last position, by our model and by transformers' sdpa; lower is better, targets in
the last column: attribution of z by layer, head and position (both prompts, one way back, 1280 sums; 3.5
passes), gradients at every resid_post alone, and exact runs of the 50 largest cells (0.15 of 50 passes).
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bench_forward import save_random_llama
from bench_runs import BAD, GOOD, LENGTH
from harness import alternate, print_table, ratio

import mizarr
from mizarr.stages.causal.attribution.patching import AttributionPatching
from mizarr.stages.causal.grids.patching import ActivationPatching
from mizarr.stages.causal.grids.patching_grid import GridPlace
from mizarr.stages.causal.grids.patching_metrics import LogitDifference
from mizarr.stages.forward.hooks.spec import HookSpec
from mizarr.stages.forward.runs.run import Run, stream

CELLS = 50


def main() -> None:
    """Run the rounds and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        reference = save_random_llama(folder).to(args.device)
        compare(mizarr.Model.from_pretrained(folder, device=args.device), reference, args)


class Attribution:
    """Estimates of a grid of heads, and exact runs of the largest."""

    def __init__(self, model: mizarr.Model) -> None:
        both = torch.randint(2, 4096, (2, LENGTH), generator=torch.Generator().manual_seed(0))
        both[1, 0] = both[0, 0]
        self.model = model
        self.clean, self.corrupted = (tuple(row) for row in both.tolist())
        self.given: dict[str, Any] = {
            "clean": self.clean,
            "corrupted": self.corrupted,
            "kinds": ("z",),
            "over": "head_position",
            "metrics": (LogitDifference(GOOD, BAD),),
        }
        self.grid = AttributionPatching(**self.given)
        self.largest: list[tuple[int, GridPlace]] = []

    def estimates(self) -> list[Any]:
        """Of every layer, [head and position, metric]."""
        prepared = self.grid.prepare(self.model)
        return [self.grid.estimates(prepared, "z", layer) for layer in range(self.model.config.num_layers)]

    def gradients(self) -> None:
        """At every resid_post."""
        spec = HookSpec().capture("grad:blocks.*.hook_resid_post").gradient_of(LogitDifference(GOOD, BAD))
        self.model.forward(list(self.corrupted), spec, want=None)

    def exact(self) -> None:
        """The largest cells by runs, their clean activations known."""
        specs = [
            self.patching.change(HookSpec(), self.prepared, "z", [layer], place, 0)
            for layer, place in self.largest
        ]
        for _ in stream(self.model, [Run(self.corrupted, spec, self.patching.want) for spec in specs]):
            pass

    def choose(self) -> None:
        """The cells with the largest estimates."""
        self.patching = ActivationPatching(**self.given)
        self.prepared = self.patching.prepare(self.model)
        unpatched = self.prepared.unpatched[0]
        effects = [
            (abs(float(value[0]) - (unpatched[0] - unpatched[1])), layer, place)
            for layer, values in enumerate(self.estimates())
            for place, value in zip(self.grid.places(self.model.config, "z"), values, strict=True)
        ]
        effects.sort(key=lambda each: -each[0])
        self.largest = [(layer, place) for _, layer, place in effects[:CELLS]]


def passes(count: int, run: Callable[[], Any]) -> Callable[[], None]:
    """So many passes, one after the other."""

    def loop() -> None:
        with torch.no_grad():
            for _ in range(count):
                run()

    return loop


def compare(model: mizarr.Model, reference: Any, args: argparse.Namespace) -> None:
    """Time each beside plain passes."""
    told = Attribution(model)
    told.choose()
    ids = torch.tensor([told.corrupted], device=args.device)
    plain = {
        "ours": lambda: model.forward(ids, want=mizarr.logits(position=-1)).logits.sum().item(),
        "transformers": lambda: reference(ids, use_cache=False).logits[0, -1].sum().item(),
    }
    cases: list[tuple[str, Callable[[], Any], int, str]] = [
        ("attribution of z, all heads and positions", told.estimates, 1, "3.5"),
        ("gradients at every resid_post", told.gradients, 1, ""),
        (f"exact runs of the {CELLS} largest", told.exact, CELLS, "0.15"),
    ]
    rows = []
    for name, run, count, target in cases:
        contestants = {"this": run, **{who: passes(count, each) for who, each in plain.items()}}
        seconds = alternate(contestants, args.rounds)
        middle = sorted(seconds["this"])[args.rounds // 2]
        over = [f"{ratio(seconds['this'], seconds[who]):.3f}" for who in plain]
        rows.append((name, str(count), f"{middle:.4f}", *over, target))
    columns = ("", "passes", "seconds", "over ours", "over transformers", "target")
    print_table("Gradients: time over that of plain passes", columns, rows)


if __name__ == "__main__":
    main()
