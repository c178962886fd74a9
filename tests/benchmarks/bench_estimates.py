"""Seconds that `explain` and `capture --dry-run` expect, against the seconds that the work takes.

    python tests/benchmarks/bench_estimates.py [MODEL …]

Each model (default: the shipped specimen; a path or hub id for others) captures the residual stream of all
layers for prompts of random token ids: first with nothing known, then eight times as many tokens after a run
of few, and then again as many. Each line: what was expected over what it took. Asked: between 0.5 and 2.
"""

from __future__ import annotations

import argparse
import tempfile
import time

import numpy as np
from harness import print_table

from mizarr.pipeline.execute import run
from mizarr.pipeline.plan import plan
from mizarr.stages.forward.capture.capture import CaptureNode
from mizarr.stages.forward.models import source as sources
from mizarr.store import open_store

SIZES = ((8, 64), (64, 128), (64, 256))
"""Prompts and tokens of each, one run after another in one store."""


def main() -> None:
    """Print expected and measured seconds of every run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", default=["specimen"])
    rows: list[tuple[str, ...]] = []
    for model in parser.parse_args().models:
        for is_known in (False, True):
            rows += [(model[-40:], *row) for row in _runs(model, is_known=is_known)]
    print_table("Expected seconds", ("model", "tokens", "known", "expected", "took", "ratio"), rows)


def _runs(model: str, *, is_known: bool) -> list[tuple[str, ...]]:
    """A row for each size. is_known: whether runs share a store, so that a later one knows the earlier."""
    rng = np.random.default_rng(0)
    rows: list[tuple[str, ...]] = []
    with tempfile.TemporaryDirectory() as shared:
        for prompts, length in SIZES:
            with tempfile.TemporaryDirectory() as alone:
                store = open_store(shared if is_known else alone)
                ids = rng.integers(300, size=(prompts, length)).tolist()
                node = CaptureNode(model, prompts=ids, hooks="blocks.*.hook_resid_post")
                sources._cache.clear()  # the model is read anew, as in a process of its own
                expected = plan(node, store).seconds
                begun = time.perf_counter()
                run(node, store, quiet=True)
                took = time.perf_counter() - begun
                ratio = "unknown" if expected is None else f"{expected / took:.2f}"
                shown = "unknown" if expected is None else f"{expected:.2f}"
                rows.append((str(prompts * length), str(is_known), shown, f"{took:.2f}", ratio))
    return rows


if __name__ == "__main__":
    main()
