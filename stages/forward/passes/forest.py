"""Which tokens of which branches lie side by side in a row, and which of them stands for a position.

Where a branch does not hold a position, an index says which ancestor's token stands for it, so that no key is
ever computed or kept twice.

Axes: branch, position; token = a place in the row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ....store.arrays import Ints
from ..hooks.interventions import Held
from .branches import Branch


class Forest:
    """The branches of a sweep, parents before children.

    parent: int [branch], index of each branch's parent, -1 for roots. depth: int [branch]. longest: positions
    of the longest prompt.
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
    """Which tokens lie in a row, in order of branches, and which token stands for each position of each.

    held: branch -> its positions, ascending.
    """

    def __init__(self, forest: Forest, held: dict[int, Ints]) -> None:
        self.held = {branch: positions for branch, positions in held.items() if len(positions)}
        sizes = [len(positions) for positions in self.held.values()]
        ends = np.cumsum(sizes).tolist()
        self.slices = {
            branch: slice(end - size, end) for branch, size, end in zip(self.held, sizes, ends, strict=True)
        }
        """Tokens of each branch."""
        self.branch = np.repeat(np.array(list(self.held), np.int64), sizes)
        """[token]"""
        self.position = np.concatenate([*self.held.values(), np.zeros(0, np.int64)])
        """[token]"""
        self.where = np.zeros((len(forest.branches), forest.longest), np.int64)
        """[branch, position] -> token: its own, or that of the nearest ancestor that holds the position."""
        own_depth = forest.depth[self.branch]
        for depth in range(int(forest.depth.max()) + 1):
            level = np.flatnonzero(forest.depth == depth)
            if depth:
                self.where[level] = self.where[forest.parent[level]]
            mine = np.flatnonzero(own_depth == depth)
            self.where[self.branch[mine], self.position[mine]] = mine

    def __len__(self) -> int:
        return len(self.position)

    def part(self, branch: int, length: int) -> Held:
        """What the row holds of a branch."""
        return Held(self.held[branch], length)


@dataclass(frozen=True)
class AttentionGroup:
    """Branches whose queries share one attention call.

    branches: [row]; counts: queries of each. queries: token of each query, [row, query], padded with its last
    one; positions: likewise. keys: token of each key, [row, key].
    """

    branches: list[int]
    counts: list[int]
    queries: Ints
    positions: Ints
    keys: Ints
    lengths: list[int]

    def with_keys(self, count: int) -> AttentionGroup:
        """The same over so many keys, with some behind the longest prompt that nobody sees."""
        more = count - self.keys.shape[1]
        return replace(self, keys=np.pad(self.keys, ((0, 0), (0, more)))) if more else self

    @property
    def is_whole(self) -> bool:
        """Whether every position of prompts of one length is asked: attention is then plainly causal, or of
        everything."""
        return bool(self.keys.shape[1] == min(self.counts) == min(self.lengths))
