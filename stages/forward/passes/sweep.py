"""The sweep: one pass over the layers for a whole forest of branches.

Layer by layer, branches join the row where they leave their parents, positions that a change has newly
reached are copied from the parent, and all tokens go through the layer together. A branch whose interventions
turn out to change no value is dropped, and its parent stands for it. The planner decides which branches share
a sweep.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from ....store.arrays import Ints
from ..hooks.payloads import copy_payloads
from ..hooks.spec import Capture
from ..hooks.taps import EarlyStop, RunTaps
from ..hooks.wants import Logits
from ..networks.kernels.company import beside_others
from ..networks.loop import Network, through_layers
from .branch_taps import BranchTaps
from .branches import Wanted
from .forest import Forest, Row
from .plain import forward
from .planner import Block
from .spread import BranchHistory

__all__ = ["Result", "one_by_one", "sweep"]

Result = tuple[int, Tensor | None, dict[Capture, Tensor]]
"""(index of a run, its logits [1, positions, tokens] or None, its captures)."""


def sweep(network: Network, block: Block, wanted: Sequence[Wanted], room: int) -> Iterator[Result]:
    """Compute all runs of a block together, in one pass over the layers.

    Arguments:
        network: network of the model.
        block: branches of the runs, which share the pass.
        wanted: all runs of the plan.
        room: bytes that gathered keys and logits may take beside the activations of the tokens.

    Yields:
        (index of a run, its logits [1, positions, tokens] or None, its captures).
    """
    forest = Forest(block.branches)
    taps = BranchTaps(forest, block.ending)
    history = BranchHistory(forest, taps, room=room, device=network.device)
    # So that no last bit depends on which runs share the sweep (DESIGN.md, "What last bits depend on").
    with beside_others():
        states = _final_states(network, history, taps)
    runs = [
        (number, index)
        for number, branch in enumerate(block.branches)
        if branch in block.ending
        for index in branch.runs
    ]
    logits = _logits_by_run(network, states, history.row, runs, wanted, room)
    for (number, index), run_logits in zip(runs, logits, strict=True):
        captured = {capture: taps.captured[number][capture] for capture in wanted[index].spec.captures}
        # Runs of one branch must not share tensors: a caller may write to its captures.
        is_shared = len(block.branches[number].runs) > 1
        yield index, run_logits, copy_payloads(captured) if is_shared else captured


def one_by_one(network: Network, block: Block, wanted: Sequence[Wanted], room: int) -> Iterator[Result]:
    """Compute each run of a block in a pass of its own, for models whose runs share nothing.

    Arguments:
        network: network of the model.
        block: branches of the runs.
        wanted: all runs of the plan.
        room: unused; a pass takes the memory of one prompt.

    Yields:
        (index of a run, its logits [1, positions, tokens] or None, its captures).
    """
    for index in (index for branch in block.branches for index in branch.runs):
        run = wanted[index]
        captured: dict[Capture, Tensor] = {}
        ids = torch.tensor([run.tokens], dtype=torch.long, device=network.device)
        taps = RunTaps(run.spec, captured.__setitem__, stop_early=run.want is None)
        yield index, forward(network, ids, taps, run.want), captured


def _final_states(network: Network, history: BranchHistory, taps: BranchTaps) -> Tensor | None:
    """Run all layers; returns the stream after the final norm, [token, D], or None if no run needs it."""
    try:
        return network.finish(through_layers(network, history.ids(), history, taps), taps, None)[0]
    except EarlyStop:
        return None


def _logits_by_run(
    network: Network,
    states: Tensor | None,
    row: Row,
    runs: Sequence[tuple[int, int]],
    wanted: Sequence[Wanted],
    room: int,
) -> Iterator[Tensor | None]:
    """Logits of each run in turn, computed for as many runs at a time as memory allows.

    Arguments:
        network: network of the model.
        states: stream after the final norm, [token, D]; None if no run needs logits.
        row: token of each branch and position.
        runs: (index of the branch, index of the run) pairs.
        wanted: all runs of the plan.
        room: bytes that logits may take.
    """
    start = 0
    while start < len(runs):
        want = wanted[runs[start][1]].want
        if want is None or states is None:
            yield None
            start += 1
            continue
        width = network.config.n_logits if want.tokens is None else len(want.tokens)
        token_lists: list[Ints] = []
        stop, cost = start, 0
        while stop < len(runs) and _selects_same_tokens(wanted[runs[stop][1]].want, want):
            number, index = runs[stop]
            tokens = row.where[number, wanted[index].wanted_positions()]
            cost += len(tokens) * width * states.element_size()
            if cost > room and token_lists:
                break
            token_lists.append(tokens)
            stop += 1
        # Runs often read logits of the same token (one branch, or unchanged positions): unembed it once.
        distinct, table_rows = np.unique(np.concatenate(token_lists), return_inverse=True)
        distinct_states = states[torch.from_numpy(distinct).to(states.device)]
        with beside_others():
            table = network.unembed(distinct_states, want)
        ends = np.cumsum([len(tokens) for tokens in token_lists])
        for run_rows in np.split(table_rows, ends[:-1]):
            yield table[torch.from_numpy(run_rows).to(table.device)][None]
        start = stop


def _selects_same_tokens(want: Logits | None, other: Logits) -> bool:
    return want is not None and want.tokens == other.tokens
