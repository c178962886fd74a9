"""Pairs of random prompts."""

from __future__ import annotations

import numpy as np

from mizarr.stages.causal.grids.patching_metrics import LogitDifference
from mizarr.stages.circuits.pairs import Pair


def draw_pairs(count: int, length: int = 9, seed: int = 0) -> tuple[Pair, ...]:
    """Pairs of random prompts, each with two tokens of its own to tell apart."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        clean, corrupted = (tuple(map(int, rng.integers(2, 300, length))) for _ in range(2))
        right, wrong = map(int, rng.choice(300, 2, replace=False))
        found.append(Pair(clean, corrupted, LogitDifference(right, wrong)))
    return tuple(found)
