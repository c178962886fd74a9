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
    """Branches of runs that are computed together, in one pass over the layers (a sweep)."""

    branches: tuple[Branch, ...]
    """The branches, parents before children."""
    ending: frozenset[Branch]
    """Branches whose runs this sweep finishes; other branches are computed only for their children."""
    widest: int
    """Largest number of tokens that are computed in any layer."""


@dataclass(frozen=True)
class SweepPlan:
    """Plan that computes a list of runs in few passes over the layers (sweeps)."""

    runs: int
    """Number of runs."""
    blocks: tuple[Block, ...]
    """Branches of runs that are computed together, one block per sweep."""
    naive: int
    """Positions times layers that one full forward pass per run would compute."""
    room: int
    """Bytes that a sweep may allocate beside the activations of its tokens."""

    @property
    def positions(self) -> int:
        """Positions times layers that the plan computes; compare with `naive`."""
        return sum(branch.positions_computed() for block in self.blocks for branch in block.branches)

    @property
    def branches(self) -> int:
        """Number of distinct sets of interventions among the runs."""
        return sum(len(block.ending) for block in self.blocks)

    def describe(self) -> str:
        """One line of text: runs, sweeps, and the cost compared with one forward pass per run."""
        all_branches = [branch for block in self.blocks for branch in block.branches]
        n_widened = sum(branch.widened for branch in all_branches)
        widened_note = (
            f"; {n_widened} compute every position, as raw scores are captured" if n_widened else ""
        )
        share = self.positions / max(1, self.naive)
        widest = max((block.widest for block in self.blocks), default=0)
        return (
            f"{self.runs} runs, {self.branches} of them distinct, in {len(self.blocks)} sweeps of at most "
            f"{widest} tokens: {self.positions:,} layer-positions instead of {self.naive:,} ({share:.0%})"
            + widened_note
        )

    def _repr_html_(self) -> str:
        """HTML table for a notebook: runs, sweeps and their size."""
        share = self.positions / max(1, self.naive)
        facts = [
            ("runs requested", f"{self.runs:,}"),
            ("distinct runs", f"{self.branches:,}"),
            ("sweeps (passes over the layers)", f"{len(self.blocks):,}"),
            ("tokens of the widest sweep", f"{max((block.widest for block in self.blocks), default=0):,}"),
            ("positions x layers of this plan", f"{self.positions:,}"),
            ("positions x layers of one pass per run", f"{self.naive:,}"),
            ("plan / one pass per run", f"{share:.0%}"),
            ("memory beside activations of tokens", f"{self.room:,} bytes"),
        ]
        return html.shown("Plan of runs", html.table(["", ""], facts, right=[1]))


def plan_runs(
    wanted: Sequence[Wanted], config: Architecture, itemsize: int, memory: int = MEMORY
) -> SweepPlan:
    """Plan which runs, layers and positions are computed together, within a memory limit.

    Arguments:
        wanted: runs with prompt, captures, interventions and logits.
        config: architecture of the model.
        itemsize: bytes of a number in the model's dtype.
        memory: bytes that a sweep may take beside the model.

    Raises:
        PlanError: if a single run needs more memory.
    """
    layers = config.num_layers
    branches = grow(wanted, config)
    per_token = config.bytes_per_token(itemsize)
    # A third of the memory is left for gathered keys, scores and logits of a sweep.
    room = memory // 3
    most_tokens = min((memory - room) // per_token, MOST_TOKENS)
    naive = sum(len(run.tokens) for run in wanted) * layers
    blocks = tuple(_pack_into_blocks(branches, layers, most_tokens, per_token, memory))
    return SweepPlan(len(wanted), blocks, naive, room)


def _pack_into_blocks(
    branches: Sequence[Branch], layers: int, most_tokens: int, per_token: int, memory: int
) -> Iterator[Block]:
    """Pack branches with their ancestors, in order, into blocks of at most `most_tokens` in any layer."""
    none = np.zeros(layers + 1, np.int64)
    members: dict[Branch, None] = {}
    width, ending = none, set[Branch]()
    for branch in branches:
        if not branch.runs:
            continue
        joining = _lineage_outside(branch, members)
        added = sum((_tokens_by_slot(member, layers) for member in joining), none)
        if ending and int((width + added).max()) > most_tokens:
            yield Block(tuple(members), frozenset(ending), int(width.max()))
            members, width, ending = {}, none, set()
            joining = _lineage_outside(branch, members)
            added = sum((_tokens_by_slot(member, layers) for member in joining), none)
        # Only the first branch of a block can be too large: for a later one the block is closed before.
        branch_bytes = int(added.max()) * per_token
        if not ending and branch_bytes > memory:
            raise PlanError(
                f"memory: expected {branch_bytes:,} bytes for a run of {branch.length} tokens, found only "
                f"{memory:,}; raise memory=, or shorten the prompt"
            )
        members.update(dict.fromkeys(joining))
        ending.add(branch)
        width = width + added
    if ending:
        yield Block(tuple(members), frozenset(ending), int(width.max()))


def _lineage_outside(branch: Branch, members: dict[Branch, None]) -> list[Branch]:
    """The branch and its ancestors that are not yet in the block, oldest first."""
    lineage: list[Branch] = []
    ancestor: Branch | None = branch
    while ancestor is not None and ancestor not in members:
        lineage.append(ancestor)
        ancestor = ancestor.parent
    return lineage[::-1]


def _tokens_by_slot(branch: Branch, layers: int) -> Positions:
    """Number of tokens that a branch computes in each layer and the final norm, int [layers + 1]."""
    return np.array(
        [len(branch.held(slot)) * branch.is_needed(slot, inside=False) for slot in range(layers + 1)]
    )
