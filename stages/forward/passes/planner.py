"""The run planner: a list of runs as few passes of little more than what differs between them.

1. runs become branches of a tree (branches.py): equal runs are one, shared prefixes are computed once, each
   branch holds only positions its interventions can reach, no layer is run above the last thing wanted, and
   in the last layer only positions whose logits are wanted go through MLP and LM head;
2. branches are packed, in order, into blocks whose widest layer fits the memory; a block is one sweep over
   the layers (passes/sweep.py), after which its runs are done;
3. a branch whose ancestors lie in an earlier block has them computed again in its own: they are few.

Planned results equal plain forward passes within rounding.

Border: runs and numbers; tensors are the sweep's business. Never imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ....store.display import html
from ....store.errors import PlanError
from ..architectures.architecture import Architecture
from .branches import Branch, Positions, Wanted, grow

__all__ = ["SweepPlan", "plan_runs"]

MEMORY = 1 << 30
"""Bytes the passes of a plan may take unless told otherwise."""
MOST_TOKENS = 4096
"""Tokens of a block at which matrix products are as fast as they get; more only take memory."""


@dataclass(frozen=True)
class Block:
    """Branches that are computed in one sweep, parents before children.

    ending: those whose runs this sweep gives; the others are there for their children.
    """

    branches: tuple[Branch, ...]
    ending: frozenset[Branch]
    widest: int
    """Tokens of the layer that has most."""


@dataclass(frozen=True)
class SweepPlan:
    """Which passes a list of runs takes.

    room: bytes a sweep may take beside its row of tokens.
    """

    runs: int
    blocks: tuple[Block, ...]
    naive: int
    """Layer-positions of a full forward pass for each run."""
    room: int

    @property
    def positions(self) -> int:
        """Layer-positions that all branches compute together; `naive` is what they are compared with."""
        return sum(branch.positions_computed() for block in self.blocks for branch in block.branches)

    @property
    def branches(self) -> int:
        """Distinct sets of interventions among the runs."""
        return sum(len(block.ending) for block in self.blocks)

    def describe(self) -> str:
        """In one line: runs asked, what is computed, what a loop of forward passes would compute."""
        every = [branch for block in self.blocks for branch in block.branches]
        widened = sum(branch.widened for branch in every)
        wider = f"; {widened} widened to every position, as raw scores are read" if widened else ""
        share = self.positions / max(1, self.naive)
        widest = max((block.widest for block in self.blocks), default=0)
        return (
            f"{self.runs} runs, {self.branches} of them distinct, in {len(self.blocks)} sweeps of at most "
            f"{widest} tokens: {self.positions:,} layer-positions instead of {self.naive:,} ({share:.0%})"
            + wider
        )

    def _repr_html_(self) -> str:
        """For a notebook: what is asked, what is computed, and how large each sweep is."""
        share = self.positions / max(1, self.naive)
        facts = [
            ("runs asked", f"{self.runs:,}"),
            ("distinct", f"{self.branches:,}"),
            ("sweeps", f"{len(self.blocks):,}"),
            ("widest sweep", f"{max((block.widest for block in self.blocks), default=0):,} tokens"),
            ("layer-positions", f"{self.positions:,}"),
            ("of a loop of passes", f"{self.naive:,}"),
            ("share", f"{share:.0%}"),
            ("room beside the tokens", f"{self.room:,} bytes"),
        ]
        return html.shown("Plan of runs", html.table(["", ""], facts, right=[1]))


def plan_runs(
    wanted: Sequence[Wanted], config: Architecture, itemsize: int, memory: int = MEMORY
) -> SweepPlan:
    """How to compute these runs in at most `memory` bytes beside the model; itemsize: of the model's dtype.

    Raises PlanError if one run alone needs more.
    """
    layers = config.num_layers
    branches = grow(wanted, config)
    per_token = config.bytes_per_token(itemsize)
    room = memory // 3
    most = min((memory - room) // per_token, MOST_TOKENS)
    naive = sum(len(run.tokens) for run in wanted) * layers
    return SweepPlan(len(wanted), tuple(_blocks(branches, layers, most, per_token, memory)), naive, room)


def _blocks(
    branches: Sequence[Branch], layers: int, most: int, per_token: int, memory: int
) -> Iterator[Block]:
    """Branches with runs in order, each with its ancestors, cut where the widest layer would pass `most`."""
    none = np.zeros(layers + 1, np.int64)
    chosen: dict[Branch, None] = {}
    width, ending = none, set[Branch]()
    for branch in branches:
        if not branch.runs:
            continue
        joining = _unchosen(branch, chosen)
        added = sum((_widths(each, layers) for each in joining), none)
        if ending and int((width + added).max()) > most:
            yield Block(tuple(chosen), frozenset(ending), int(width.max()))
            chosen, width, ending = {}, none, set()
            joining = _unchosen(branch, chosen)
            added = sum((_widths(each, layers) for each in joining), none)
        alone = int(added.max()) * per_token
        if not ending and alone > memory:
            raise PlanError(
                f"a run of {branch.length} tokens needs about {alone:,} bytes, more than the memory of "
                f"{memory:,}; raise memory=, or shorten the prompt"
            )
        chosen.update(dict.fromkeys(joining))
        ending.add(branch)
        width = width + added
    if ending:
        yield Block(tuple(chosen), frozenset(ending), int(width.max()))


def _unchosen(branch: Branch, chosen: dict[Branch, None]) -> list[Branch]:
    """The branch and those of its ancestors that are not in the block yet, the eldest first."""
    found: list[Branch] = []
    each: Branch | None = branch
    while each is not None and each not in chosen:
        found.append(each)
        each = each.parent
    return found[::-1]


def _widths(branch: Branch, layers: int) -> Positions:
    """Tokens it adds to every slot."""
    return np.array([len(branch.held(s)) * branch.is_needed(s, inside=False) for s in range(layers + 1)])
