"""Forest and Row: the tokens of many branches side by side, and which token stands for each position.

Where a branch does not compute a position, an index names the token of the nearest ancestor that does, so
that no key is ever computed or stored twice.

Axes: branch, position; token = an index in the row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ....store.arrays import Ints
from ..hooks.interventions import PositionSubset
from .branches import Branch


class Forest:
    """The branches (runs with equal interventions) that are computed together, parents before children.

    Attributes:
        branches: the branches.
        parent: int [branch], index of each branch's parent; -1 without parent.
        depth: int [branch], number of ancestors of each branch.
        longest: number of tokens of the longest prompt.
    """

    def __init__(self, branches: Sequence[Branch]) -> None:
        self.branches = branches
        number = {branch: i for i, branch in enumerate(branches)}
        parents = [-1 if branch.parent is None else number[branch.parent] for branch in branches]
        depths: list[int] = []
        for parent in parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        self.parent: Ints = np.array(parents, np.int64)
        self.depth: Ints = np.array(depths, np.int64)
        self.longest = max(branch.length for branch in branches)


class Row:
    """Layout of the tokens of many branches side by side on one axis.

    It knows branch and position of each token, and the token for each branch and position.

    Attributes:
        held: branch -> positions that it computes, ascending.
    """

    def __init__(self, forest: Forest, held: dict[int, Ints]) -> None:
        """Lay tokens out side by side, branch by branch.

        Arguments:
            forest: branches of the sweep.
            held: branch -> positions that it computes, ascending; branches without positions are left out.
        """
        self.held = {branch: positions for branch, positions in held.items() if len(positions)}
        sizes = [len(positions) for positions in self.held.values()]
        ends = np.cumsum(sizes).tolist()
        self.slices = {
            branch: slice(end - size, end) for branch, size, end in zip(self.held, sizes, ends, strict=True)
        }
        """Branch -> range of its tokens."""
        self.branch = np.repeat(np.array(list(self.held), np.int64), sizes)
        """Branch of each token, [token]."""
        self.position = np.concatenate([*self.held.values(), np.zeros(0, np.int64)])
        """Position of each token, [token]."""
        self.where = np.zeros((len(forest.branches), forest.longest), np.int64)
        """[branch, position] -> token of the branch, or of its nearest ancestor that has the position."""
        depth_of_token = forest.depth[self.branch]
        # Level by level, so that a parent's row is complete before its children copy and overwrite it.
        for depth in range(int(forest.depth.max()) + 1):
            level = np.flatnonzero(forest.depth == depth)
            if depth:
                self.where[level] = self.where[forest.parent[level]]
            tokens = np.flatnonzero(depth_of_token == depth)
            self.where[self.branch[tokens], self.position[tokens]] = tokens

    def __len__(self) -> int:
        return len(self.position)

    def part(self, branch: int, length: int) -> PositionSubset:
        """The positions that a branch computes, in the form that interventions are applied to.

        Arguments:
            branch: index of the branch.
            length: number of tokens of its prompt.
        """
        return PositionSubset(self.held[branch], length)


@dataclass(frozen=True)
class AttentionGroup:
    """Branches whose queries share one attention call, one branch per row."""

    branches: list[int]
    """[row] -> branch."""
    counts: list[int]
    """[row] -> number of queries; fewer than the width of `queries` where padded."""
    queries: Ints
    """Token of each query, [row, query]; rows are padded with their last query."""
    positions: Ints
    """Position of each query, [row, query]."""
    keys: Ints
    """Token of each key, [row, key]."""
    lengths: list[int]
    """[row] -> tokens of the prompt."""

    def with_keys(self, count: int) -> AttentionGroup:
        """A copy with `count` keys per row; the added keys lie past every prompt and are masked."""
        missing = count - self.keys.shape[1]
        return replace(self, keys=np.pad(self.keys, ((0, 0), (0, missing)))) if missing else self

    @property
    def is_whole(self) -> bool:
        """Whether all rows query every position of prompts of one length, so that no padding is masked."""
        return bool(self.keys.shape[1] == min(self.counts) == min(self.lengths))
