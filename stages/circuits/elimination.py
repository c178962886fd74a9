"""Elimination: edges of the whole model left out one after the other, each step an exact run.

One loop, two rules. ACDC (Conmy et al., Towards Automated Circuit Discovery, 2023, algorithm 1) goes from the
logits down to the input and leaves an edge out where that makes the metric worse by less than a threshold. By
budget, edges go in the order of a score, the smallest first, and each is left out while all that is left out
has made the metric worse by no more than an allowance.

A step depends on those before it, but most steps leave their edge out. So the next few are run at once, as if
all of them did; what stands is everything up to the first that did not, and the rest is run again.

Border: masks and a function that measures them; knows no model.

Axes: source, destination.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ...store.arrays import Floats
from ..forward.edges.layout import Bools, Layout

__all__ = ["Elimination", "downwards", "eliminated"]

Edge = tuple[int, int]
Measure = Callable[[Bools, int], Floats]
"""Masks [circuit, source, destination], and the first layer into which they leave edges out -> how much worse
than the model each is, [circuit]."""
IsLeftOut = Callable[[float, float], bool]
"""How much worse the circuit is without the edge, and with it -> whether it is left out."""
AT_ONCE = 16


@dataclass(frozen=True)
class Elimination:
    """What is left, and what it took. worse: of what is left. steps: edges put to the test; runs: circuits
    run for it, as steps behind one that did not leave its edge out are run again."""

    chosen: Bools
    worse: float
    steps: int
    runs: int


def eliminated(
    layout: Layout, order: Sequence[Edge], measure: Measure, is_left_out: IsLeftOut, at_once: int = AT_ONCE
) -> Elimination:
    """The edges that are left of the whole model.

    order: of the edges put to the test. at_once: steps run together; changes no result. Edges into a node
    that no edge leaves any more change nothing, and go without a run.
    """
    held, worse = layout.edges.copy(), 0.0
    waiting, steps, runs = list(order), 0, 0
    # Below the layers of destinations seen so far everything is still the model.
    lowest = layout.num_layers - 1
    while waiting:
        if _is_unread(layout, held, waiting[0]):
            held[waiting.pop(0)] = False
            steps += 1
            continue
        coming = waiting[:at_once]
        lowest = min(lowest, *(layout.layer_of(destination) for _, destination in coming))
        masks = np.repeat(held[None], len(coming), axis=0)
        for number, edge in enumerate(coming):
            masks[(slice(number, None), *edge)] = False
        found = measure(masks, lowest)
        runs += len(coming)
        for edge, without in zip(coming, found.tolist(), strict=True):
            waiting.pop(0)
            steps += 1
            if _is_unread(layout, held, edge):
                held[edge] = False
                continue
            if not is_left_out(without, worse):
                break
            held[edge], worse = False, without
    return Elimination(held, worse, steps, runs)


def downwards(layout: Layout) -> list[Edge]:
    """Every edge, destinations from the logits down, and into each the sources from the last one down."""
    found = []
    for destination in reversed(range(len(layout.destinations))):
        found += [(source, destination) for source in reversed(range(int(layout.read[destination])))]
    return found


def _is_unread(layout: Layout, held: Bools, edge: Edge) -> bool:
    node = int(layout.owner[edge[1]])
    return node >= 0 and not held[node].any()
