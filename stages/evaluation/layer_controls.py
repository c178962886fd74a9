"""Layer controls: hook points of the same kinds in random other layers, as the control of a changed model.

Border: hook points in, sets of hook points out; no model.

Ablating anything costs loss. Whether *these* hook points cost more is judged by the same kinds in other
layers: layers are drawn at random, and hook points that were changed together in one layer stay together in
the drawn one. Hook points without a layer (the embedding) are in every draw.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from ..forward.architectures.points import HookPoint

__all__ = ["layer_controls"]

TRIES = 200
"""Largest number of draws per requested set; in hybrid models a drawn layer may lack the hook points."""
REPEATS = 20
"""After this many draws per known set without a new one, all sets are taken to be known; a further one would
go unseen with probability e^-20.
"""


def layer_controls(
    points: Sequence[HookPoint], available: Sequence[HookPoint], count: int, *, seed: int
) -> list[tuple[HookPoint, ...]]:
    """Control sets of hook points: the same kinds as in `points`, moved together to random layers.

    Arguments:
        points: The hook points that are changed in the model.
        available: Every hook point of the model.
        count: Number of sets; fewer are returned if fewer exist.
        seed: Seed of the draws.

    >>> model = [HookPoint("mlp_out", layer) for layer in range(3)]
    >>> sorted(layer_controls([model[1]], model, 9, seed=0), key=str)
    [(HookPoint.mlp_out(0),), (HookPoint.mlp_out(2),)]
    >>> layer_controls(model, model, 9, seed=0)
    []
    """
    original = frozenset(points)
    kinds_together, kinds_of_layer = list(_kinds(points).values()), _kinds(available)
    fixed = [point for point in original if point.layer is None]
    candidates = [
        layer for layer, kinds in kinds_of_layer.items() if any(group <= kinds for group in kinds_together)
    ]
    rng = np.random.default_rng(seed)
    sets: dict[frozenset[HookPoint], None] = {}
    repeats = 0
    for _ in range(TRIES * count):
        if len(sets) == count or repeats > REPEATS * (1 + len(sets)):
            break
        # Drawn by rejection: uniform over valid sets, which are hard to enumerate in hybrid models.
        layers = rng.permutation(candidates)[: len(kinds_together)].tolist()
        assigned = list(zip(layers, kinds_together, strict=True))
        if not all(group <= kinds_of_layer[layer] for layer, group in assigned):
            continue
        moved = [HookPoint(kind, layer) for layer, group in assigned for kind in group]
        control = frozenset([*moved, *fixed])
        repeats = repeats + 1 if control in sets or control == original else 0
        if not repeats:
            sets[control] = None
    return [tuple(sorted(control_set, key=lambda point: point.order)) for control_set in sets]


def _kinds(points: Sequence[HookPoint]) -> dict[int, frozenset[str]]:
    """Hook point kinds by layer, in ascending order; hook points without a layer are ignored."""
    kinds_of: dict[int, set[str]] = defaultdict(set)
    for point in points:
        if point.layer is not None:
            kinds_of[point.layer].add(point.kind)
    return {layer: frozenset(kinds) for layer, kinds in sorted(kinds_of.items())}
