"""The sweep: one pass over the layers for a whole forest of branches.

Layer by layer, branches join the row where they leave their parents, positions that a change has reached are
taken over from the parent, and all tokens go through the layer together. A branch whose interventions turn
out to change nothing is dropped: its parent stands for it.

Border: branches, tensors and a network; which branches share a sweep is decided by the planner.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from ....store.arrays import Ints
from ..hooks.payloads import copied
from ..hooks.spec import Capture
from ..hooks.taps import EverythingHeld
from ..hooks.wants import Logits
from ..networks.kernels.company import beside_others
from ..networks.loop import Network, through_layers
from .branch_taps import BranchTaps
from .branches import Wanted
from .forest import Forest, Row
from .planner import Block
from .spread import BranchHistory

__all__ = ["Result", "sweep"]

Result = tuple[int, Tensor | None, dict[Capture, Tensor]]
"""Index of a run, the logits it wants [1, positions, tokens], and what it captured."""


def sweep(network: Network, block: Block, wanted: Sequence[Wanted], room: int) -> Iterator[Result]:
    """The results of all runs that end in a block.

    room: bytes that may be taken beside the row itself, for keys gathered and logits.
    """
    forest = Forest(block.branches)
    taps = BranchTaps(forest, block.ending)
    history = BranchHistory(forest, taps, room=room, device=network.device)
    with beside_others():
        states = _states(network, history, taps)
    runs = [
        (number, index)
        for number, branch in enumerate(block.branches)
        if branch in block.ending
        for index in branch.runs
    ]
    logits = _logits(network, states, history.row, runs, wanted, room)
    for (number, index), found in zip(runs, logits, strict=True):
        captured = {capture: taps.captured[number][capture] for capture in wanted[index].spec.captures}
        yield index, found, captured if len(block.branches[number].runs) == 1 else copied(captured)


def _states(network: Network, history: BranchHistory, taps: BranchTaps) -> Tensor | None:
    """States after the final norm [token, D]; None if nobody needs them."""
    try:
        return network.finish(through_layers(network, history.ids(), history, taps), taps, None)[0]
    except EverythingHeld:
        return None


def _logits(
    network: Network,
    states: Tensor | None,
    row: Row,
    runs: Sequence[tuple[int, int]],
    wanted: Sequence[Wanted],
    room: int,
) -> Iterator[Tensor | None]:
    """The logits of each run in turn, computed for as many runs at once as there is room for."""
    start = 0
    while start < len(runs):
        want = wanted[runs[start][1]].want
        if want is None or states is None:
            yield None
            start += 1
            continue
        width = network.config.vocab_size if want.tokens is None else len(want.tokens)
        places: list[Ints] = []
        stop, cost = start, 0
        while stop < len(runs) and _reads_alike(wanted[runs[stop][1]].want, want):
            number, index = runs[stop]
            place = row.where[number, wanted[index].wanted_positions()]
            cost += len(place) * width * states.element_size()
            if cost > room and places:
                break
            places.append(place)
            stop += 1
        distinct, back = np.unique(np.concatenate(places), return_inverse=True)
        chosen = states[torch.from_numpy(distinct).to(states.device)]
        with beside_others():
            table = network.unembed(chosen, want)
        for part in np.split(back, np.cumsum([len(place) for place in places])[:-1]):
            yield table[torch.from_numpy(part).to(table.device)][None]
        start = stop


def _reads_alike(want: Logits | None, other: Logits) -> bool:
    return want is not None and want.tokens == other.tokens
