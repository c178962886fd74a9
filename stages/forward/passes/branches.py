"""Branches: a list of runs as a tree, each branch computing only what differs from the one it leaves.

Runs on the same tokens share their passes up to the first intervention in which they differ: a trie over
interventions in execution order. A branch leaves its parent in the layer of its first own intervention, and
from there on holds only positions the intervention can reach (its cone of influence): in a causal model a
change at layer l and position p changes nothing before p; in one that looks ahead it changes all positions,
from the next layer on. Everything else it reads from its parent, keys and values above all.

Where in its layer an intervention acts decides how far it reaches there, which the architecture says
(`reach`): in a transformer, before keys and values are made it reaches every later position through
attention; after that, only the positions it touches, and later ones from the next layer on.

Layers are counted as slots 0 ... L: slot l is layer l and, at its entry, the residual stream that comes into
it (the embedding, or the output of layer l - 1, with what is changed and read there); slot L is the final
norm.

Border: specs, prompts and positions as integers; knows no tensors. Never imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ....store.digest import canonical_json
from ..architectures.architecture import Architecture
from ..architectures.points import HookPoint
from ..hooks.interventions import Intervention
from ..hooks.spec import BoundSpec, Capture
from ..hooks.wants import Logits

__all__ = ["Branch", "Wanted", "grow"]

PlacedIntervention = tuple[HookPoint, Intervention]
Positions = npt.NDArray[np.int64]

ENTERS = ("embed", "resid_post")
"""Points of the stream that enters the next slot."""


@dataclass(frozen=True)
class Wanted:
    """A run with its prompt and spec resolved against a model."""

    tokens: tuple[int, ...]
    spec: BoundSpec
    want: Logits | None

    def wanted_positions(self) -> Positions:
        """Positions whose logits are wanted."""
        length = len(self.tokens)
        if self.want is None:
            return np.zeros(0, np.int64)
        if self.want.positions is None:
            return np.arange(length)
        return np.array([position % length for position in self.want.positions], np.int64)


@dataclass(eq=False)
class Branch:
    """What a set of runs with the same interventions computes beyond its parent.

    changes: all interventions, in execution order; the first `shared` are the parent's. runs: indices of the
    runs that end here; a branch may have none and only be shared.
    """

    tokens: tuple[int, ...]
    parent: Branch | None
    changes: tuple[PlacedIntervention, ...]
    shared: int
    architecture: Architecture
    runs: list[int] = field(default_factory=list)
    captures: tuple[Capture, ...] = ()
    """What its own runs want to read."""
    logits: Positions = field(default_factory=lambda: np.zeros(0, np.int64))
    """Positions whose logits are wanted here or further down the tree."""
    last: tuple[int, bool] = (-1, False)
    """The last slot anybody needs of it, and whether the inside of the slot or only what enters it."""
    whole: bool = False
    """Whether somebody reads activations at the very end, or looks at all of them to change them, so that no
    position may be left out there."""
    widened: bool = False
    """Whether it computes positions that cannot differ, as somebody reads raw scores."""

    def __post_init__(self) -> None:
        length, slots = len(self.tokens), self.n_layers + 1
        reach, ahead = self.architecture.reach, self.architecture.looks_ahead
        placed = [(slot_of(point, self.n_layers), point, change) for point, change in self.changes]
        own = placed[self.shared :]
        self.start = 0 if self.parent is None else min(slot for slot, _, _ in own)
        """Slot in which it leaves its parent."""
        # In that slot it makes its parent's changes again, for which it needs all that they look at.
        again = [
            (slot, point, change)
            for slot, point, change in placed[: self.shared]
            if slot >= self.start and change.needs_all_positions
        ]
        own = again + own
        self._reach: list[Positions] = []
        first = 0 if self.parent is None else length  # the earliest position that differs as a slot begins
        for slot in range(slots):
            touched: set[int] = set()
            entering = HookPoint("resid_post", slot - 1) if slot else HookPoint("embed")
            spreading = self._from(first) if first < length and reach(entering) == "all" else first
            for _, point, change in (each for each in own if each[0] == slot):
                positions = None if change.needs_all_positions else change.touched(length, ahead=ahead)
                where = range(length) if positions is None else positions
                touched.update(where)
                if reach(point) != "here":
                    reached = where if reach(point) == "later" else map(self._from, where)
                    spreading = min([spreading, *reached])
            self._reach.append(np.array(sorted(touched.union(range(spreading, length))), np.int64))
            first = min([first, spreading, *touched])

    def _from(self, position: int) -> int:
        """The first position that a change at one reaches, where it reaches all that it can."""
        return self.architecture.reaches_from(self.tokens, position)

    @property
    def n_layers(self) -> int:
        """Layers of the model, computed here or not."""
        return self.architecture.num_layers

    @property
    def length(self) -> int:
        """Positions of the prompt."""
        return len(self.tokens)

    def held(self, slot: int) -> Positions:
        """Positions it computes by itself in a slot, ascending."""
        positions = self._reach[slot]
        return self._wanted_of(positions) if slot == self.n_layers else positions

    def kept(self, slot: int) -> Positions:
        """Those of `held` whose output of the layer somebody needs; the others give keys and values."""
        positions = self._reach[slot]
        return self._wanted_of(positions) if slot == self.n_layers - 1 else positions

    def hold_all(self, slot: int) -> None:
        """Compute every position in a slot, whether or not it can differ."""
        self._reach[slot] = np.arange(self.length)
        self.widened = True

    def _wanted_of(self, positions: Positions) -> Positions:
        return positions if self.whole else np.intersect1d(positions, self.logits)

    def is_needed(self, slot: int, *, inside: bool) -> bool:
        """Whether it takes part in a slot: in what enters it, or in the layer itself."""
        return self.start <= slot and self.last >= (slot, inside)

    def ends_changing(self, slot: int) -> bool:
        """Whether all its interventions are made when a slot is done."""
        return all(slot_of(point, self.n_layers) <= slot for point, _ in self.changes)

    def positions_computed(self) -> int:
        """Layer-positions it costs: the sum of `held` over the layers it takes part in."""
        layers = (slot for slot in range(self.n_layers) if self.is_needed(slot, inside=True))
        return sum(len(self.held(slot)) for slot in layers)


def slot_of(point: HookPoint, n_layers: int) -> int:
    """The slot in which a point is met."""
    if point.layer is None:
        return 0 if point.kind == "embed" else n_layers
    return point.layer + (point.kind == "resid_post")


def grow(wanted: Sequence[Wanted], architecture: Architecture) -> list[Branch]:
    """The branches of all runs, parents before children, prompts in order of first appearance."""
    by_prompt: dict[tuple[int, ...], list[int]] = {}
    for index, run in enumerate(wanted):
        by_prompt.setdefault(run.tokens, []).append(index)
    branches: list[Branch] = []
    for tokens, indices in by_prompt.items():
        lists = {i: _ordered(wanted[i].spec) for i in indices}
        names = _Names()
        if not architecture.shares_prefixes:
            branches += _apart(tokens, lists, names, architecture)
            continue
        _grow(Branch(tokens, None, (), 0, architecture), indices, 0, lists, names, branches)
    for branch in reversed(branches):
        _settle(branch, wanted)
    return branches


def _apart(
    tokens: tuple[int, ...],
    lists: dict[int, tuple[PlacedIntervention, ...]],
    names: _Names,
    architecture: Architecture,
) -> list[Branch]:
    """A root for each set of interventions, where no layer can be shared."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for index, changes in lists.items():
        groups.setdefault(tuple(names.of(change) for change in changes), []).append(index)
    return [
        Branch(tokens, None, lists[members[0]], 0, architecture, runs=members) for members in groups.values()
    ]


def _grow(
    branch: Branch,
    indices: Sequence[int],
    depth: int,
    lists: dict[int, tuple[PlacedIntervention, ...]],
    names: _Names,
    branches: list[Branch],
) -> None:
    """Hang runs that share the first `depth` changes under a branch that makes just those."""
    branch.runs = [i for i in indices if len(lists[i]) == depth]
    groups: dict[Any, list[int]] = {}
    for i in indices:
        if len(lists[i]) > depth:
            groups.setdefault(names.of(lists[i][depth]), []).append(i)
    if not branch.runs and len(groups) == 1 and branch.parent is None:
        # Nobody wants the plain run: what all share is the root.
        (members,) = groups.values()
        common = _common(members, depth, lists, names)
        root = Branch(branch.tokens, None, lists[members[0]][:common], 0, branch.architecture)
        _grow(root, members, common, lists, names, branches)
        return
    branches.append(branch)
    for members in groups.values():
        common = _common(members, depth, lists, names)
        child = Branch(branch.tokens, branch, lists[members[0]][:common], depth, branch.architecture)
        _grow(child, members, common, lists, names, branches)


def _common(
    members: Sequence[int], depth: int, lists: dict[int, tuple[PlacedIntervention, ...]], names: _Names
) -> int:
    """How many changes all of them share; they agree on more than the first `depth`."""
    common = min(len(lists[i]) for i in members)
    if len(members) == 1:
        return common
    for at in range(depth, common):
        if len({names.of(lists[i][at]) for i in members}) > 1:
            return at
    return common


def _ordered(spec: BoundSpec) -> tuple[PlacedIntervention, ...]:
    """Interventions in execution order; those at one point in the order they were given."""
    return tuple(sorted(spec.interventions, key=lambda change: change[0].order))


def _settle(branch: Branch, wanted: Sequence[Wanted]) -> None:
    """What a branch must give: to its own runs, and, by the time this is called, to its children."""
    captures: dict[Capture, None] = {}
    logits = set(branch.logits.tolist())
    for index in branch.runs:
        run = wanted[index]
        captures.update(dict.fromkeys(run.spec.captures))
        logits.update(run.wanted_positions().tolist())
        if run.want is not None:
            branch.last = (branch.n_layers, True)
    for capture in captures:
        slot = slot_of(capture.point, branch.n_layers)
        branch.last = max(branch.last, (slot, capture.point.kind not in ENTERS))
        is_whole = branch.architecture.looks_ahead and branch.architecture.target_start is None
        if capture.point.kind in ("scores", "cross_scores") and not is_whole:
            _widen(branch, slot)
        branch.whole |= (slot, capture.point.kind not in ENTERS) > (branch.n_layers - 1, False)
    branch.whole |= any(
        change.needs_all_positions and slot_of(point, branch.n_layers) >= branch.n_layers - 1
        for point, change in branch.changes
    )
    branch.captures = tuple(captures)
    branch.logits = np.array(sorted(logits), np.int64)
    if branch.parent is not None:
        parent = branch.parent
        parent.last = max(parent.last, branch.last)
        parent.whole |= branch.whole
        parent.logits = np.union1d(parent.logits, branch.logits)


def _widen(branch: Branch, slot: int) -> None:
    """Hold every position in a slot: raw scores of early queries with later keys are no longer causal.

    Nothing else is read that depends on what comes after it. A branch that has not left its parent yet reads
    its parent's.
    """
    while branch.parent is not None and branch.start > slot:
        branch = branch.parent
    branch.hold_all(slot)


class _Names:
    """Names of changes, equal when the changes are."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[PlacedIntervention, str]] = {}

    def of(self, change: PlacedIntervention) -> str:
        """The name; remembered by the intervention's identity, which is kept alive meanwhile."""
        point, intervention = change
        found = self._known.get(id(intervention))
        if found is None or found[0][0] != point:
            name = canonical_json([str(point), intervention.canonical()])
            self._known[id(intervention)] = found = (change, name)
        return found[1]
