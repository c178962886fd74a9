"""The sweep: one pass over the layers for a whole forest of branches.

Layer by layer, branches join the row where they leave their parents, positions that a change has reached are
taken over from the parent, and all tokens go through the layer together. A branch whose interventions turn
out to change nothing is dropped: its parent stands for it.

Border: branches, weights and tensors; which branches share a sweep is decided by the planner.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ..branches import Wanted
from ..hooks import Capture
from ..planner import Block
from ..wants import Logits
from .branch_taps import BranchTaps
from .spread import Forest, Ints, Row, Spread

if TYPE_CHECKING:
    from .decoder import Decoder

Result = tuple[int, Tensor | None, dict[Capture, Tensor]]
"""Index of a run, the logits it wants [1, positions, tokens], and what it captured."""


def sweep(decoder: Decoder, block: Block, wanted: Sequence[Wanted], room: int) -> Iterator[Result]:
    """The results of all runs that end in a block.

    room: bytes that may be taken beside the row itself, for keys gathered and logits.
    """
    forest = Forest(block.branches)
    taps = BranchTaps(forest, block.ending)
    with torch.no_grad():
        states, where = _through_the_layers(decoder, forest, taps, room)
        runs = [
            (number, index)
            for number, branch in enumerate(block.branches)
            if branch in block.ending
            for index in branch.runs
        ]
        logits = _logits(decoder, states, where, runs, wanted, room)
        for (number, index), found in zip(runs, logits, strict=True):
            captured = taps.captured[number]
            yield index, found, {capture: captured[capture] for capture in wanted[index].spec.captures}


def _through_the_layers(
    decoder: Decoder, forest: Forest, taps: BranchTaps, room: int
) -> tuple[Tensor | None, Row]:
    """States after the final norm [token, D], None if nobody needs them, and which token stands for what."""
    branches, weights = forest.branches, decoder.weights
    slots = len(weights.layers)
    device = weights.embed.device
    dropped: set[int] = set()
    x = torch.empty(0)
    before = Row(forest, {})
    for slot in range(slots + 1):
        held = {
            n: branch.held(slot)
            for n, branch in enumerate(branches)
            if n not in dropped and branch.is_needed(slot, inside=False)
        }
        row = Row(forest, held)
        x = _entering(decoder, forest, row, before, x, slot, device)
        layer = {n: branches[n].kept(slot) for n in row.held if branches[n].is_needed(slot, inside=True)}
        kept = row if slot == slots else Row(forest, layer)
        taps.begin(row, kept)
        x = taps.enter("embed", None, x) if slot == 0 else taps.enter("resid_post", slot - 1, x)
        if not layer:
            return None, row
        if slot == slots:
            return decoder.finish(x, taps, None)[0], row
        spread = Spread(decoder.config, forest, row, kept, taps, room=room, device=device)
        x = taps("resid_pre", slot, x)
        x = decoder.block(x, slot, weights.layers[slot], spread, taps)
        dropped.update(
            n for n in taps.unmoved() if branches[n].parent is not None and branches[n].ends_changing(slot)
        )
        before = kept
    return None, before


def _entering(
    decoder: Decoder, forest: Forest, row: Row, before: Row, x: Tensor, slot: int, device: torch.device
) -> Tensor:
    """The stream [1, token, D] as it enters a slot: a branch's own, or that of the ancestor it leaves."""
    if slot == 0:
        tokens = np.zeros((len(forest.branches), forest.longest), np.int64)
        for number, branch in enumerate(forest.branches):
            tokens[number, : branch.length] = branch.tokens
        return decoder.embed(torch.from_numpy(tokens[row.branch, row.position])[None].to(device))
    source = torch.from_numpy(before.where[row.branch, row.position]).to(device)
    return x.index_select(1, source)


def _logits(
    decoder: Decoder,
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
        width = len(want.tokens) if want.tokens is not None else decoder.config.vocab_size
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
        table = decoder.unembed(states[torch.from_numpy(distinct).to(states.device)], want)
        for part in np.split(back, np.cumsum([len(place) for place in places])[:-1]):
            yield table[torch.from_numpy(part).to(table.device)][None]
        start = stop


def _reads_alike(want: Logits | None, other: Logits) -> bool:
    return want is not None and want.tokens == other.tokens
