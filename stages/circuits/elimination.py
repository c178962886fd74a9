"""Elimination: edges of the full model left out one after another, each step tested by an exact run.

One loop, two rules. ACDC (Conmy et al. 2023, "Towards Automated Circuit Discovery", algorithm 1) goes from
the logits to the input and leaves out an edge if this makes the metric worse by less than a threshold. As in
its published code, all edges into each query, key and value of a layer's heads are first tried together, then
the remaining ones edge by edge. By budget, edges are tried in ascending order of |score|, and each is left
out as long as all edges left out make the metric worse by no more than the threshold.

Steps are sequential, but most steps leave their edge out. So the next few are run in one batch as if all did,
with the batch doubled each time. Results up to the first edge that must stay are valid; the rest is run
again, starting from a batch of one.

Border: masks and a function that measures them; no model.

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
"""Edge that is tested, as (source, destination); source None stands for all edges into the destination."""
Measure = Callable[[Bools, int], Floats]
"""Function that returns how much worse than the full model each of some circuits is [circuit].

Its arguments are their edges [circuit, source, destination], and the first layer into which any edge is left
out.
"""
IsLeftOut = Callable[[float, float], bool]
"""Function that decides from the circuit's loss without and with an edge whether the edge is left out."""
AT_ONCE = 16
"""Largest number of steps that are run in one batch."""


@dataclass(frozen=True)
class Elimination:
    """The circuit that elimination leaves, and the cost of finding it."""

    chosen: Bools
    """Remaining edges, bool [source, destination]."""
    worse: float
    """How much worse than the full model the remaining circuit is, in the unit of the measure."""
    steps: int
    """Number of tests; all edges into a destination together count as one."""
    runs: int
    """Number of circuits that were run, repeated steps included."""


def eliminated(
    layout: Layout, order: Sequence[Step], measure: Measure, is_left_out: IsLeftOut, at_once: int = AT_ONCE
) -> Elimination:
    """Remove edges one by one from the full model, as long as the rule `is_left_out` allows it.

    Edges into a node without outgoing edges have no effect and are left out without a run; edges that are
    already left out are no step.

    Arguments:
        layout: Graph of the model.
        order: Edges in the order in which they are tested.
        measure: Measures how much worse circuits are than the full model.
        is_left_out: The rule by which an edge is left out.
        at_once: Largest number of steps in one batch; the result does not depend on it.
    """
    # A copy: the graph's own edges are shared by all circuits.
    edges, worse = layout.edges.copy(), 0.0
    waiting, steps, runs = list(order), 0, 0
    # Below the lowest layer tested so far the circuit equals the full model: its activations are reused.
    lowest, batch_size = layout.num_layers - 1, 1
    while waiting:
        if not edges[index := _index(waiting[0])].any():
            waiting.pop(0)
            continue
        if _is_unread(layout, edges, waiting[0]):
            waiting.pop(0)
            edges[index] = False
            steps += 1
            continue
        batch = waiting[:batch_size]
        # Doubling after success and restarting at 1 bounds the wasted runs by the useful ones.
        batch_size = min(2 * batch_size, at_once)
        lowest = min(lowest, *(layout.layer_of(destination) for _, destination in batch))
        masks = np.repeat(edges[None], len(batch), axis=0)
        for number, edge in enumerate(batch):
            # Circuit `number` leaves out all edges of the batch up to its own.
            masks[(slice(number, None), *_index(edge))] = False
        measured = measure(masks, lowest)
        runs += len(batch)
        for edge, without in zip(batch, measured.tolist(), strict=True):
            waiting.pop(0)
            if not edges[index := _index(edge)].any():
                continue
            steps += 1
            if _is_unread(layout, edges, edge):
                edges[index] = False
                continue
            # Later circuits of the batch leave this edge out, so their results are invalid: they run again.
            if not is_left_out(without, worse):
                batch_size = 1
                break
            edges[index], worse = False, without
    return Elimination(edges, worse, steps, runs)


def downwards(layout: Layout) -> list[Step]:
    """Order in which ACDC's published code tests edges, from the logits to the input.

    Destinations in descending order (values before keys before queries, last head first); the inputs of a
    layer's heads first as a whole, then edge by edge, with sources in descending order.
    """
    steps: list[Step] = []
    for destination in reversed(range(len(layout.destinations))):
        layer = layout.layer_of(destination)
        if layer < layout.num_layers and destination == layout.mlp_input(layer) - 1:
            inputs = layout.inputs(layer)
            steps += [(None, column) for column in reversed(range(inputs.start, inputs.stop))]
        steps += [(source, destination) for source in reversed(range(int(layout.read[destination])))]
    return steps


def _index(step: Step) -> tuple[int | slice, int]:
    """Index of a step's edges in a mask [source, destination]."""
    source, destination = step
    return slice(None) if source is None else source, destination


def _is_unread(layout: Layout, edges: Bools, step: Step) -> bool:
    """Whether the node into which the step's edges lead has no outgoing edge; never for the logits."""
    node = int(layout.owner[step[1]])
    return node >= 0 and not edges[node].any()
