"""The run planner: computes a list of runs in few passes, with little more work than their differences.

1. Runs become branches of a tree (branches.py): equal runs are one branch, shared prefixes are computed once,
   each branch computes only positions that its interventions can reach, no layer runs after the last capture,
   and in the last layer only positions whose logits are wanted go through MLP and LM head.
2. Branches are packed, in order, into blocks whose widest layer fits into memory. A block is one sweep over
   the layers (passes/sweep.py), after which its runs are done.
3. Ancestors of a branch that lie in an earlier block are computed again in its own; they are few.

Planned results equal plain forward passes within rounding. Never imports torch.
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
"""Default memory limit of the passes of a plan, in bytes."""
MOST_TOKENS = 4096
"""Tokens of a block above which matrix products get no faster; more would only take memory."""


@dataclass(frozen=True)
class Block:
    """Branches that are computed in one sweep."""

    branches: tuple[Branch, ...]
    """Parents before children."""
    ending: frozenset[Branch]
    """Branches whose runs end in this sweep; the others are computed for their children."""
    widest: int
    """Largest number of tokens in any layer."""


@dataclass(frozen=True)
class SweepPlan:
    """The sweeps that a list of runs takes."""

    runs: int
    """Number of runs."""
    blocks: tuple[Block, ...]
    """One block per sweep."""
    naive: int
    """Layer-positions of one full forward pass per run."""
    room: int
    """Bytes that a sweep may allocate beside its row of tokens."""

    @property
    def positions(self) -> int:
        """Layer-positions that the sweeps compute; compare with `naive`."""
        return sum(branch.positions_computed() for block in self.blocks for branch in block.branches)

    @property
    def branches(self) -> int:
        """Number of distinct sets of interventions among the runs."""
        return sum(len(block.ending) for block in self.blocks)

    def describe(self) -> str:
        """One line: runs, sweeps, and layer-positions compared with a loop of forward passes."""
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
        """HTML table for a notebook: runs, sweeps and their size."""
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
    """Plan runs within a memory limit.

    Arguments:
        wanted: runs with prompt, spec and logits.
        config: architecture of the model.
        itemsize: bytes of a number in the model's dtype.
        memory: bytes that a sweep may take beside the model.

    Raises:
        PlanError: if a single run needs more.
    """
    layers = config.num_layers
    branches = grow(wanted, config)
    per_token = config.bytes_per_token(itemsize)
    # A third of the memory is left for gathered keys, scores and logits of a sweep.
    room = memory // 3
    most = min((memory - room) // per_token, MOST_TOKENS)
    naive = sum(len(run.tokens) for run in wanted) * layers
    return SweepPlan(len(wanted), tuple(_blocks(branches, layers, most, per_token, memory)), naive, room)


def _blocks(
    branches: Sequence[Branch], layers: int, most: int, per_token: int, memory: int
) -> Iterator[Block]:
    """Blocks of branches with their ancestors; a new one where the widest layer would pass `most` tokens."""
    none = np.zeros(layers + 1, np.int64)
    members: dict[Branch, None] = {}
    width, ending = none, set[Branch]()
    for branch in branches:
        if not branch.runs:
            continue
        joining = _missing(branch, members)
        added = sum((_widths(member, layers) for member in joining), none)
        if ending and int((width + added).max()) > most:
            yield Block(tuple(members), frozenset(ending), int(width.max()))
            members, width, ending = {}, none, set()
            joining = _missing(branch, members)
            added = sum((_widths(member, layers) for member in joining), none)
        # Only the first branch of a block can be too large: for a later one the block is closed before.
        alone = int(added.max()) * per_token
        if not ending and alone > memory:
            raise PlanError(
                f"a run of {branch.length} tokens needs about {alone:,} bytes, more than the memory of "
                f"{memory:,}; raise memory=, or shorten the prompt"
            )
        members.update(dict.fromkeys(joining))
        ending.add(branch)
        width = width + added
    if ending:
        yield Block(tuple(members), frozenset(ending), int(width.max()))


def _missing(branch: Branch, members: dict[Branch, None]) -> list[Branch]:
    """Branch and ancestors missing from the block, oldest first."""
    lineage: list[Branch] = []
    ancestor: Branch | None = branch
    while ancestor is not None and ancestor not in members:
        lineage.append(ancestor)
        ancestor = ancestor.parent
    return lineage[::-1]


def _widths(branch: Branch, layers: int) -> Positions:
    """Tokens that a branch adds to every slot, [slot]."""
    return np.array([len(branch.held(s)) * branch.is_needed(s, inside=False) for s in range(layers + 1)])
