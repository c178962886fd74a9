"""Elimination: edges of the whole model left out one after the other, each step an exact run.

One loop, two rules. ACDC (Conmy et al., Towards Automated Circuit Discovery, 2023, algorithm 1) goes from the
logits down to the input and leaves an edge out where that makes the metric worse by less than a threshold.
As its published code has it, each query, key and value of a layer's heads is first tried as a whole, all
edges into it at once, and then what is left edge by edge. By budget, edges go in the order of a score, the
smallest first, and each is left out while all that is left out has made the metric worse by no more than an
allowance.

A step depends on those before it, but most steps leave their edge out. So the next few are run at once, as if
all of them did, twice as many each time; what stands is everything up to the first that did not, and the rest
is run again, from one step on.

Border: masks and a function that measures them; knows no model.

Axes: source, destination.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ...store.arrays import Floats
from ..forward.edges.layout import Bools, Layout

__all__ = ["Elimination", "Step", "downwards", "eliminated"]

Step = tuple[int | None, int]
"""Source and destination of an edge; None for all edges into the destination at once."""
Measure = Callable[[Bools, int], Floats]
"""Masks [circuit, source, destination], and the first layer into which they leave edges out -> how much worse
than the model each is, [circuit]."""
IsLeftOut = Callable[[float, float], bool]
"""How much worse the circuit is without the edge, and with it -> whether it is left out."""
AT_ONCE = 16


@dataclass(frozen=True)
class Elimination:
    """What is left, and what it took. worse: of what is left. steps: edges put to the test, or all into a
    destination at once; runs: circuits run for it, as steps behind one that left nothing out are run
    again."""

    chosen: Bools
    worse: float
    steps: int
    runs: int


def eliminated(
    layout: Layout, order: Sequence[Step], measure: Measure, is_left_out: IsLeftOut, at_once: int = AT_ONCE
) -> Elimination:
    """The edges that are left of the whole model.

    order: of what is put to the test. at_once: most steps run together; changes no result. Edges into a node
    that no edge leaves any more change nothing, and go without a run; those that are gone are no step.
    """
    held, worse = layout.edges.copy(), 0.0
    waiting, steps, runs = list(order), 0, 0
    # Below the layers of destinations seen so far everything is still the model.
    lowest, together = layout.num_layers - 1, 1
    while waiting:
        if not held[place := _place(waiting[0])].any():
            waiting.pop(0)
            continue
        if _is_unread(layout, held, waiting[0]):
            waiting.pop(0)
            held[place] = False
            steps += 1
            continue
        coming = waiting[:together]
        together = min(2 * together, at_once)
        lowest = min(lowest, *(layout.layer_of(destination) for _, destination in coming))
        masks = np.repeat(held[None], len(coming), axis=0)
        for number, edge in enumerate(coming):
            masks[(slice(number, None), *_place(edge))] = False
        found = measure(masks, lowest)
        runs += len(coming)
        for edge, without in zip(coming, found.tolist(), strict=True):
            waiting.pop(0)
            if not held[place := _place(edge)].any():
                continue
            steps += 1
            if _is_unread(layout, held, edge):
                held[place] = False
                continue
            if not is_left_out(without, worse):
                together = 1
                break
            held[place], worse = False, without
    return Elimination(held, worse, steps, runs)


def downwards(layout: Layout) -> list[Step]:
    """As the published code goes: destinations from the logits down, values before keys before queries and
    the last head first, those of a layer each as a whole before any edge; into each the sources from the last
    one down."""
    found: list[Step] = []
    for destination in reversed(range(len(layout.destinations))):
        layer = layout.layer_of(destination)
        if layer < layout.num_layers and destination == layout.mlp_input(layer) - 1:
            inputs = layout.inputs(layer)
            found += [(None, each) for each in reversed(range(inputs.start, inputs.stop))]
        found += [(source, destination) for source in reversed(range(int(layout.read[destination])))]
    return found


def _place(step: Step) -> tuple[int | slice, int]:
    source, destination = step
    return slice(None) if source is None else source, destination


def _is_unread(layout: Layout, held: Bools, edge: Step) -> bool:
    node = int(layout.owner[edge[1]])
    return node >= 0 and not held[node].any()
