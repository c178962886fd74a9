"""The same change elsewhere: what a change of some hook points is held against.

Border: hook points in, sets of hook points out; knows no model.

Whatever is set to zero costs something. Whether *these* hook points cost more than others is seen beside
the same kinds in other layers: layers are drawn anew, and whatever was changed in one layer is changed
together in the one that stands for it. Hook points of no layer (the embedding) are in every draw.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from ..forward.architectures.points import HookPoint

__all__ = ["elsewhere"]

TRIES = 200
"""For each set that is asked for: where layers differ in kind, not every draw of them has what is changed."""
KNOWN = 20
"""Times the sets that are known, so often in a row may nothing new be drawn before it is said that there is
nothing new: were there one more, that would be so once in e^20."""


def elsewhere(
    points: Sequence[HookPoint], available: Sequence[HookPoint], count: int, *, seed: int
) -> list[tuple[HookPoint, ...]]:
    """Up to `count` other sets of as many of the same kinds, by layer, evenly drawn, all different; fewer
    where there are fewer. available: every hook point of the model.

    >>> model = [HookPoint("mlp_out", layer) for layer in range(3)]
    >>> sorted(elsewhere([model[1]], model, 9, seed=0), key=str)
    [(HookPoint.mlp_out(0),), (HookPoint.mlp_out(2),)]
    >>> elsewhere(model, model, 9, seed=0)
    []
    """
    own = frozenset(points)
    slots, held = list(_kinds(points).values()), _kinds(available)
    fixed = [point for point in own if point.layer is None]
    room = [layer for layer, has in held.items() if any(slot <= has for slot in slots)]
    rng = np.random.default_rng(seed)
    found: dict[frozenset[HookPoint], None] = {}
    known = 0
    for _ in range(TRIES * count):
        if len(found) == count or known > KNOWN * (1 + len(found)):
            break
        layers = rng.permutation(room)[: len(slots)].tolist()
        if not all(slot <= held[layer] for slot, layer in zip(slots, layers, strict=True)):
            continue
        moved = [HookPoint(kind, layer) for slot, layer in zip(slots, layers, strict=True) for kind in slot]
        drawn = frozenset([*moved, *fixed])
        known = known + 1 if drawn in found or drawn == own else 0
        if not known:
            found[drawn] = None
    return [tuple(sorted(each, key=lambda point: point.order)) for each in found]


def _kinds(points: Sequence[HookPoint]) -> dict[int, frozenset[str]]:
    """Which kinds there are of each layer."""
    found: dict[int, set[str]] = defaultdict(set)
    for point in points:
        if point.layer is not None:
            found[point.layer].add(point.kind)
    return {layer: frozenset(kinds) for layer, kinds in sorted(found.items())}
