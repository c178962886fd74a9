"""Branches: runs as a tree, in which each branch computes only what differs from its parent.

Runs on the same tokens share their passes up to the first intervention in which they differ: a trie over
interventions in execution order. A branch leaves its parent in the layer of its first own intervention. From
there it computes only positions that the intervention can reach (its cone of influence): in a causal model a
change at layer l and position p changes nothing before p; without a causal mask it changes all positions from
the next layer on. It reads everything else from its parent, above all keys and values.

How far an intervention reaches within its own layer depends on the hook point (`Architecture.reach`): before
keys and values are computed, it reaches every later position through attention; after that, only the
positions it changes, and later ones from the next layer on.

Layers are counted as slots 0 ... L. Slot l is layer l together with the residual stream that enters it (the
embedding, or the output of layer l - 1, with the captures and interventions there); slot L is the final norm.

Works on specs, prompts and integer positions; never imports torch.
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
"""Hook points of the stream that enters the next slot."""


@dataclass(frozen=True)
class Wanted:
    """A run whose prompt is tokenised, and whose hook points are those of a model."""

    tokens: tuple[int, ...]
    """Token ids of the prompt."""
    spec: BoundSpec
    """Captures and interventions."""
    want: Logits | None
    """Selection of logits; None computes no logits."""

    def wanted_positions(self) -> Positions:
        """Positions whose logits are computed, counted from 0."""
        length = len(self.tokens)
        if self.want is None:
            return np.zeros(0, np.int64)
        if self.want.positions is None:
            return np.arange(length)
        return np.array([position % length for position in self.want.positions], np.int64)


@dataclass(eq=False)
class Branch:
    """Node in a tree of runs: runs on one prompt with the same interventions.

    It computes only what can differ from its parent, whose interventions are the first of its own.
    """

    tokens: tuple[int, ...]
    """Token ids of the prompt."""
    parent: Branch | None
    """Parent branch; None for a root."""
    changes: tuple[PlacedIntervention, ...]
    """All interventions in execution order."""
    shared: int
    """Number of first interventions in `changes` that the parent has as well."""
    architecture: Architecture
    """Architecture of the model."""
    runs: list[int] = field(default_factory=list)
    """Indices of the runs that end here; empty for a branch that exists only for its children."""
    captures: tuple[Capture, ...] = ()
    """What its runs capture."""
    logits: Positions = field(default_factory=lambda: np.zeros(0, np.int64))
    """Positions whose logits this branch or a descendant needs."""
    last: tuple[int, bool] = (-1, False)
    """Last slot (layer with the stream that enters it) that the branch or a descendant needs, and whether the
    layer itself is needed or only the stream that enters it."""
    whole: bool = False
    """Whether the last layer must compute every position, because its activations are captured or an
    intervention reads all of them."""
    widened: bool = False
    """Whether the branch computes positions that cannot differ, because raw scores are captured."""

    def __post_init__(self) -> None:
        length, slots = len(self.tokens), self.n_layers + 1
        reach, ahead = self.architecture.reach, self.architecture.looks_ahead
        placed = [(slot_of(point, self.n_layers), point, change) for point, change in self.changes]
        changes = placed[self.shared :]
        self.start = 0 if self.parent is None else min(slot for slot, _, _ in changes)
        """Slot in which the branch begins to differ from its parent."""
        # In that slot it applies its parent's interventions again, so it needs every position that they read.
        repeated = [
            (slot, point, change)
            for slot, point, change in placed[: self.shared]
            if slot >= self.start and change.needs_all_positions
        ]
        changes = repeated + changes
        self._reach: list[Positions] = []
        first_changed = 0 if self.parent is None else length  # earliest position that differs in this slot
        for slot in range(slots):
            touched: set[int] = set()
            entering = HookPoint("resid_post", slot - 1) if slot else HookPoint("embed")
            spreading = (
                self._reached_from(first_changed)
                if first_changed < length and reach(entering) == "all"
                else first_changed
            )
            for _, point, change in (placement for placement in changes if placement[0] == slot):
                positions = None if change.needs_all_positions else change.touched(length, ahead=ahead)
                where = range(length) if positions is None else positions
                touched.update(where)
                if reach(point) != "here":
                    reached = where if reach(point) == "later" else map(self._reached_from, where)
                    spreading = min([spreading, *reached])
            self._reach.append(np.array(sorted(touched.union(range(spreading, length))), np.int64))
            first_changed = min([first_changed, spreading, *touched])

    def _reached_from(self, position: int) -> int:
        """The first position that a change at a position reaches through attention."""
        return self.architecture.reaches_from(self.tokens, position)

    @property
    def n_layers(self) -> int:
        """Number of layers of the model."""
        return self.architecture.num_layers

    @property
    def length(self) -> int:
        """Number of tokens of the prompt."""
        return len(self.tokens)

    def held(self, slot: int) -> Positions:
        """Positions that the branch computes itself in a slot (layer), ascending."""
        positions = self._reach[slot]
        return self._with_logits_only(positions) if slot == self.n_layers else positions

    def kept(self, slot: int) -> Positions:
        """Positions whose output of a layer is needed, ascending.

        The other positions of `held` only provide keys and values.
        """
        positions = self._reach[slot]
        return self._with_logits_only(positions) if slot == self.n_layers - 1 else positions

    def hold_all(self, slot: int) -> None:
        """Make the branch compute every position in a slot (layer), even positions that cannot differ."""
        self._reach[slot] = np.arange(self.length)
        self.widened = True

    def _with_logits_only(self, positions: Positions) -> Positions:
        return positions if self.whole else np.intersect1d(positions, self.logits)

    def is_needed(self, slot: int, *, inside: bool) -> bool:
        """Whether the branch computes anything in a slot (a layer with the stream that enters it).

        Arguments:
            slot: index of the slot.
            inside: whether the layer itself is meant, instead of the stream that enters it.
        """
        return self.start <= slot and self.last >= (slot, inside)

    def ends_changing(self, slot: int) -> bool:
        """Whether every intervention of the branch has been applied at the end of a slot (layer)."""
        return all(slot_of(point, self.n_layers) <= slot for point, _ in self.changes)

    def positions_computed(self) -> int:
        """Cost of the branch: number of positions that it computes, summed over layers."""
        layers = (slot for slot in range(self.n_layers) if self.is_needed(slot, inside=True))
        return sum(len(self.held(slot)) for slot in layers)


def slot_of(point: HookPoint, n_layers: int) -> int:
    """Slot of a hook point: slot l is layer l with the stream that enters it, the last one the final norm.

    Arguments:
        point: the hook point.
        n_layers: number of layers of the model.
    """
    if point.layer is None:
        return 0 if point.kind == "embed" else n_layers
    return point.layer + (point.kind == "resid_post")


def grow(wanted: Sequence[Wanted], architecture: Architecture) -> list[Branch]:
    """Arrange runs as trees, one per prompt, in which runs with equal first interventions share a branch.

    Arguments:
        wanted: runs of a plan.
        architecture: architecture of the model.

    Returns:
        All branches: parents before children, prompts in order of first appearance.
    """
    by_prompt: dict[tuple[int, ...], list[int]] = {}
    for index, run in enumerate(wanted):
        by_prompt.setdefault(run.tokens, []).append(index)
    branches: list[Branch] = []
    for tokens, indices in by_prompt.items():
        lists = {i: _in_execution_order(wanted[i].spec) for i in indices}
        # Names are cached per prompt, since many runs share intervention objects.
        names = _Names()
        if not architecture.shares_prefixes:
            branches += _unshared_branches(tokens, lists, names, architecture)
            continue
        _grow_subtree(Branch(tokens, None, (), 0, architecture), indices, 0, lists, names, branches)
    # Children first: each adds its needs to its parent.
    for branch in reversed(branches):
        _collect_needs(branch, wanted)
    return branches


def _unshared_branches(
    tokens: tuple[int, ...],
    lists: dict[int, tuple[PlacedIntervention, ...]],
    names: _Names,
    architecture: Architecture,
) -> list[Branch]:
    """One branch without parent per set of interventions, for models that transformers runs as a whole."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for index, changes in lists.items():
        groups.setdefault(tuple(names.of(change) for change in changes), []).append(index)
    return [
        Branch(tokens, None, lists[members[0]], 0, architecture, runs=members) for members in groups.values()
    ]


def _grow_subtree(
    branch: Branch,
    indices: Sequence[int],
    depth: int,
    lists: dict[int, tuple[PlacedIntervention, ...]],
    names: _Names,
    branches: list[Branch],
) -> None:
    """Append a branch, and the branches below it, to the list of branches.

    Arguments:
        branch: branch that applies the first `depth` interventions of the runs.
        indices: the runs, which share these interventions.
        depth: number of interventions that the branch applies.
        lists: run -> its interventions in execution order.
        names: names by which interventions are compared.
        branches: list to which branches are appended, parents before children.
    """
    branch.runs = [i for i in indices if len(lists[i]) == depth]
    groups: dict[Any, list[int]] = {}
    for i in indices:
        if len(lists[i]) > depth:
            groups.setdefault(names.of(lists[i][depth]), []).append(i)
    if not branch.runs and len(groups) == 1 and branch.parent is None:
        # No run is without interventions: the common ones are the root.
        (members,) = groups.values()
        n_shared = _n_shared(members, depth, lists, names)
        root = Branch(branch.tokens, None, lists[members[0]][:n_shared], 0, branch.architecture)
        _grow_subtree(root, members, n_shared, lists, names, branches)
        return
    branches.append(branch)
    for members in groups.values():
        n_shared = _n_shared(members, depth, lists, names)
        child = Branch(branch.tokens, branch, lists[members[0]][:n_shared], depth, branch.architecture)
        _grow_subtree(child, members, n_shared, lists, names, branches)


def _n_shared(
    members: Sequence[int], depth: int, lists: dict[int, tuple[PlacedIntervention, ...]], names: _Names
) -> int:
    """Number of first interventions that some runs share; known to be more than `depth`."""
    shortest = min(len(lists[i]) for i in members)
    if len(members) == 1:
        return shortest
    for number in range(depth, shortest):
        if len({names.of(lists[i][number]) for i in members}) > 1:
            return number
    return shortest


def _in_execution_order(spec: BoundSpec) -> tuple[PlacedIntervention, ...]:
    """Interventions in execution order; those at one point stay in the order of registration."""
    # `sorted` is stable, which keeps the order of registration at one point.
    return tuple(sorted(spec.interventions, key=lambda change: change[0].order))


def _collect_needs(branch: Branch, wanted: Sequence[Wanted]) -> None:
    """Set captures, logits and depth of a branch for its runs, and extend its parent's logits and depth.

    Called for children before their parents.
    """
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
        # Without a causal mask a branch computes every position anyway.
        is_whole = branch.architecture.looks_ahead and branch.architecture.target_start is None
        if capture.point.kind in ("scores", "cross_scores") and not is_whole:
            _compute_all_positions(branch, slot)
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


def _compute_all_positions(branch: Branch, slot: int) -> None:
    """Make a branch compute every position of a layer, because raw scores of later keys are captured there.

    Scores before the mask are the only captured values that depend on later positions. A branch that has not
    left its parent in this slot reads the parent's scores.
    """
    while branch.parent is not None and branch.start > slot:
        branch = branch.parent
    branch.hold_all(slot)


class _Names:
    """Names of interventions at hook points, by which runs are compared: equal interventions, equal names."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[PlacedIntervention, str]] = {}

    def of(self, change: PlacedIntervention) -> str:
        """The name of an intervention at a hook point."""
        # Canonical forms hash payloads, so they are cached by `id`; the entry keeps the intervention alive,
        # which keeps its `id` unique.
        point, intervention = change
        entry = self._known.get(id(intervention))
        if entry is None or entry[0][0] != point:
            name = canonical_json([str(point), intervention.canonical()])
            self._known[id(intervention)] = entry = (change, name)
        return entry[1]
