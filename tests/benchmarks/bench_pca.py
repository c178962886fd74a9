"""PCA moments against their limit, one BLAS pass X'X, measured in alternation in one process.

    python tests/benchmarks/bench_pca.py [--tokens 200000] [--hidden 512] [--rounds 9]

Prints one row per way of computing: median seconds, and the median over rounds of limit / own time (1.0 = as
fast as the bare product; the target is 0.9). Alternation within a round cancels the drift of a shared
machine; still, take figures on a quiet one. Peak extra memory is measured in a pass of its own.
"""

from __future__ import annotations

import argparse
import statistics
import tracemalloc
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import xarray as xr
from harness import alternate, print_table, ratio

from mizarr.stages.geometry.pca import moments, pca


def contestants(tokens: int, hidden: int) -> dict[str, Callable[[], Any]]:
    """The limit first, then ours: float32, far from the origin, as bfloat16, and the whole of PCA."""
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((tokens, hidden), dtype=np.float32)
    rows *= np.linspace(0.1, 3, hidden, dtype=np.float32)
    wide = xr.DataArray(rows, dims=("token", "hidden"))
    offset = xr.DataArray(rows + np.float32(50), dims=("token", "hidden"))
    narrow = xr.DataArray(rows.astype(ml_dtypes.bfloat16), dims=("token", "hidden"))
    return {
        "X'X, one BLAS call (limit)": lambda: rows.T @ rows,
        "moments, float32": lambda: moments(wide),
        "moments, float32, far from 0": lambda: moments(offset),
        "moments, bfloat16 bits": lambda: moments(narrow),
        "pca, 6 components, float32": lambda: pca(wide, n_components=6),
    }


def main() -> None:
    """Run the rounds and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=200_000)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    runs = contestants(args.tokens, args.hidden)
    seconds = alternate(runs, args.rounds)
    limit = next(iter(runs))
    rows = []
    for name, run in runs.items():
        speed = f"{ratio(seconds[limit], seconds[name]):.2f}"
        rows.append((name, f"{statistics.median(seconds[name]):.3f}", speed, f"{_peak(run):.0f}"))
    title = f"PCA of {args.tokens} x {args.hidden}, {args.rounds} rounds; target: moments at 0.9 of the limit"
    print_table(title, ("", "seconds", "of the limit", "extra MB"), rows)


def _peak(run: Callable[[], Any]) -> float:
    """Peak of allocations during one call, MB (numpy reports its buffers to tracemalloc)."""
    tracemalloc.start()
    run()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak / 1e6


if __name__ == "__main__":
    main()
