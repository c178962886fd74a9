"""BranchTaps: taps of a sweep, whose hook points show the tokens of many branches side by side.

Each branch's interventions apply to its own tokens. What a branch captures is gathered position by position,
from its own tokens and its ancestors'. Scores and patterns are seen per group of branches (`GroupTaps`).

An intervention that changes no value (such as a patch with the value that is already there) is noticed here:
a branch that never differed equals its parent and need not be computed further.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from functools import reduce
from operator import or_
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..architectures.points import HookPoint
from ..hooks.interventions import Intervention, PositionSubset
from ..hooks.spec import Capture
from ..hooks.taps import EarlyStop, Place
from .branches import ENTERS, Branch
from .forest import AttentionGroup, Forest, Row

ATTENTION = ("scores", "attn_scores", "pattern")
CROSS = tuple(f"cross_{kind}" for kind in ATTENTION)


class BranchTaps:
    """Captures and interventions of many branches, whose tokens are computed side by side."""

    def __init__(self, forest: Forest, ending: Collection[Branch]) -> None:
        """Collect captures and interventions of all branches.

        Arguments:
            forest: branches of the sweep.
            ending: branches whose runs end in this sweep; only their captures are kept.
        """
        self._forest = forest
        self._changes: dict[Place, list[tuple[int, Intervention]]] = defaultdict(list)
        self._captures: dict[tuple[str, int | None, str], list[int]] = defaultdict(list)
        self._reading: dict[int | None, set[int]] = defaultdict(set)
        """Layer -> branches whose scores or patterns are captured or changed, their ancestors included."""
        for number, branch in enumerate(forest.branches):
            for point, change in branch.changes:
                self._changes[point.kind, point.layer].append((number, change))
                if point.kind in (*ATTENTION, *CROSS) and not change.cuts_edges:
                    self._reading[point.layer].add(number)
            for capture in branch.captures if branch in ending else ():
                point = capture.point
                self._captures[point.kind, point.layer, capture.when].append(number)
                if point.kind in (*ATTENTION, *CROSS):
                    self._reading[point.layer].update(self._lineage(number))
        self._touched = {*self._changes, *((kind, layer) for kind, layer, _ in self._captures)}
        # Attention of an ancestor's queries fills the rows of its descendants' captures, so it is read as
        # well.
        self.captured: dict[int, dict[Capture, Tensor]] = defaultdict(dict)
        """Branch -> captured values."""
        self._moved: dict[int, list[Tensor]] = defaultdict(list)
        self._row = self._kept = Row(forest, {})
        self._is_last = False
        self._attention: dict[tuple[str, str], Tensor] = {}

    def _lineage(self, number: int) -> list[int]:
        lineage = []
        while number >= 0:
            lineage.append(number)
            number = int(self._forest.parent[number])
        return lineage

    # -- a slot of the sweep: one layer with the stream that enters it

    def begin(self, row: Row, kept: Row, *, is_last: bool) -> None:
        """Start a layer.

        Arguments:
            row: tokens that enter the layer.
            kept: tokens whose output of the layer is needed.
            is_last: whether only the stream that enters is needed, so that the pass ends there.
        """
        self._row, self._kept, self._is_last = row, kept, is_last

    def unmoved(self) -> list[int]:
        """Branches (by number) whose interventions so far changed no value; called once per layer.

        Empty where gradients are recorded: there an intervention counts even without changing the value.
        """
        if not self._moved or torch.is_grad_enabled():
            return []
        numbers = list(self._moved)
        # One transfer from the device for all branches.
        moved = torch.stack([torch.stack(self._moved[number]).any() for number in numbers]).tolist()
        return [number for number, has_moved in zip(numbers, moved, strict=True) if not has_moved]

    # -- calls of the loop over layers

    def __call__(self, kind: str, layer: int | None, x: Tensor, allowed: Tensor | None = None) -> Tensor:
        """Capture or change the value x, [1, token, ...] or [1, head, token, ...], of each branch's tokens.

        Returns:
            The value to continue with.
        """
        if (kind, layer) in self._touched:
            # Inside a layer, the tokens whose output nobody needs are dropped once keys and values are
            # computed.
            has_all = x.shape[-2] == len(self._row)
            x = self._visit(kind, layer, x, self._row if has_all else self._kept)
        if self._is_last and kind in ENTERS:
            raise EarlyStop
        return x

    def captures(self, layer: int | None, *kinds: str) -> bool:
        """Whether any branch captures one of these points."""
        return any((kind, layer, when) in self._captures for kind in kinds for when in ("after", "before"))

    def changes(self, layer: int | None, *kinds: str) -> bool:
        """Whether any branch changes one of these points."""
        return any((kind, layer) in self._changes for kind in kinds)

    def touches(self, layer: int | None, *kinds: str) -> bool:
        """Whether any branch captures or changes one of these points."""
        return any((kind, layer) in self._touched for kind in kinds)

    # -- attention

    def reads_attention(self, branch: int, layer: int) -> bool:
        """Whether scores or patterns of a branch must be computed explicitly.

        Arguments:
            branch: index of the branch.
            layer: layer index.
        """
        return branch in self._reading[layer]

    def of_group(self, group: AttentionGroup, kept: Row, layer: int, room: str = "") -> GroupTaps:
        """Captures and interventions of the branches in one attention call.

        Arguments:
            group: branches of the call.
            kept: tokens whose output of the layer is needed.
            layer: layer index.
            room: prefix of its hook point kinds, e.g. "cross_".
        """
        return GroupTaps(self, group, kept, layer, room)

    def attention_done(self, layer: int, kept: Row) -> None:
        """Give branches the captured scores and patterns of a layer, after its last attention call.

        Arguments:
            layer: layer index.
            kept: tokens whose output of the layer is needed.
        """
        for (kind, when), table in self._attention.items():
            for number in self._captures[kind, layer, when]:
                length = self._forest.branches[number].length
                query_rows = table[torch.from_numpy(kept.where[number, :length]).to(table.device)]
                value = query_rows[..., :length].transpose(0, 1)[None]
                self._store_capture(number, kind, layer, when, value.contiguous())
        self._attention.clear()

    # -- states of recurrences

    def changes_of_states(self, layer: int, kind: str) -> dict[int, list[Intervention]]:
        """Branch (by number) -> its interventions on the recurrent states of a layer, in order.

        Arguments:
            layer: layer index.
            kind: hook point kind of the state sequence.
        """
        changes: dict[int, list[Intervention]] = defaultdict(list)
        for number, change in self._changes.get((kind, layer), ()):
            changes[number].append(change)
        return changes

    def changed_state(self, number: int, layer: int, kind: str, state: Tensor, position: int) -> Tensor:
        """The state [1, head, key, value] with which a branch continues after a position.

        Arguments:
            number: index of the branch.
            layer: layer index.
            kind: hook point kind of the state sequence.
            state: state after the position, [1, head, key, value].
            position: position in the prompt.
        """
        subset = PositionSubset(np.array([position]), self._forest.branches[number].length)
        new = state.unsqueeze(2)
        for change in self.changes_of_states(layer, kind)[number]:
            new = change.applied(new, HookPoint(kind, layer), None, subset)
        self.note(number, new, state.unsqueeze(2))
        return new.squeeze(2)

    def readers(self, layer: int, kind: str) -> list[int]:
        """Branches (by number, ascending) that capture a hook point, before or after its interventions.

        Arguments:
            layer: layer index.
            kind: hook point kind.
        """
        numbers_by_when = (self._captures.get((kind, layer, when), ()) for when in ("after", "before"))
        return sorted({number for numbers in numbers_by_when for number in numbers})

    def give(self, number: int, kind: str, layer: int, before: Tensor, after: Tensor) -> None:
        """Store a value for a branch if the branch captures it, for hook points that are computed only then.

        Arguments:
            number: index of the branch.
            kind: hook point kind.
            layer: layer index.
            before: value before interventions at the point.
            after: value after them.
        """
        for when, value in (("before", before), ("after", after)):
            if number in self._captures.get((kind, layer, when), ()):
                self._store_capture(number, kind, layer, when, value)

    # -- applying and capturing

    def _visit(self, kind: str, layer: int | None, x: Tensor, row: Row) -> Tensor:
        """Capture x, apply each branch's interventions to its own tokens, and capture the result."""
        self._capture(kind, layer, "before", x, row)
        changes = self._changes.get((kind, layer), ())
        if changes and torch.is_grad_enabled():
            # Autograd needs the old values: without a copy they would be overwritten in place.
            x = x.clone()
        for number, change in changes:
            if number not in row.slices:
                continue
            tokens, branch = row.slices[number], self._forest.branches[number]
            part = x[..., tokens, :]
            new = change.applied(part, HookPoint(kind, layer), None, row.part(number, branch.length))
            self.note(number, new, part)
            x[..., tokens, :] = new
        self._capture(kind, layer, "after", x, row)
        return x

    def note(self, number: int, new: Tensor, old: Tensor) -> None:
        """Record whether an intervention of a branch changed any value, without waiting for the device.

        Arguments:
            number: index of the branch.
            new: value after the intervention.
            old: value before it.
        """
        self._moved[number].append((new != old).any())

    def _capture(self, kind: str, layer: int | None, when: str, x: Tensor, row: Row) -> None:
        """Gather the captured value of each branch from its own tokens and its ancestors'."""
        for number in self._captures.get((kind, layer, when), ()):
            length = self._forest.branches[number].length
            tokens = torch.from_numpy(row.where[number, :length]).to(x.device)
            self._store_capture(number, kind, layer, when, x.index_select(-2, tokens))

    def _store_capture(self, number: int, kind: str, layer: int | None, when: Any, value: Tensor) -> None:
        self.captured[number][Capture(HookPoint(kind, layer), when)] = value


class GroupTaps:
    """Captures and interventions of one attention call, [row, head, query, key], with one branch per row."""

    def __init__(
        self, taps: BranchTaps, group: AttentionGroup, kept: Row, layer: int, room: str = ""
    ) -> None:
        """Select the interventions of the group's branches.

        Arguments:
            taps: taps of the sweep.
            group: branches of the call.
            kept: tokens whose output of the layer is needed.
            layer: layer index.
            room: prefix of its hook point kinds, e.g. "cross_".
        """
        self._room = room
        self._taps, self._group, self._kept, self._layer = taps, group, kept, layer
        members = set(group.branches)
        self._changes: dict[str, dict[int, list[Intervention]]] = {}
        for kind in (f"{room}{attention_kind}" for attention_kind in ATTENTION):
            by_branch: dict[int, list[Intervention]] = defaultdict(list)
            for number, change in taps._changes.get((kind, layer), ()):
                if number in members:
                    by_branch[number].append(change)
            self._changes[kind] = by_branch

    def __call__(self, kind: str, layer: int | None, x: Tensor, allowed: Tensor | None = None) -> Tensor:
        """Capture or change scores or patterns, branch by branch, and return the value to continue with.

        They are changed in place unless gradients are recorded.
        """
        kind = self._room + kind
        self._capture(kind, "before", x)
        if any(self._changes[kind].values()):
            x = x.clone() if torch.is_grad_enabled() else x
            for row, (number, n_queries, length) in enumerate(self._members()):
                # Cut edges are a mask, which attention applies before.
                changes = [change for change in self._changes[kind].get(number, ()) if not change.cuts_edges]
                for change in changes:
                    part = x[row : row + 1, :, :n_queries, :length]
                    visible = allowed if allowed is None or allowed.ndim == 2 else allowed[row]
                    visible = None if visible is None else visible[..., :n_queries, :length]
                    subset = self._kept.part(number, length)
                    new = change.applied(part, HookPoint(kind, layer), visible, subset)
                    self._taps.note(number, new, part)
                    x[row : row + 1, :, :n_queries, :length] = new
        self._capture(kind, "after", x)
        return x

    def captures(self, layer: int | None, *kinds: str) -> bool:
        """Whether a group member or one of its descendants captures one of these hook points."""
        is_read = any(self._taps.reads_attention(number, self._layer) for number in self._group.branches)
        return is_read and self._taps.captures(layer, *(self._room + kind for kind in kinds))

    def changes_attention(self, layer: int) -> bool:
        """Whether an intervention changes scores or patterns, other than by a mask that cuts edges."""
        return any(
            not change.cuts_edges
            for by_branch in self._changes.values()
            for changes in by_branch.values()
            for change in changes
        )

    def cut(self, layer: int, heads: int, queries: int, keys: int, device: Any) -> Tensor | None:
        """Bool [row, head, query, key], True at cut attention edges, with one row per branch of the group;
        None without cut edges.

        Arguments:
            layer: unused, as these taps serve a single layer.
            heads: number of query heads.
            queries: number of queries of the mask, padding included.
            keys: number of keys of the mask, padding included.
            device: device of the result.
        """
        cut_edges: Tensor | None = None
        for row, (number, n_queries, length) in enumerate(self._members()):
            masks = [
                change.cut(heads, length, length, device)
                for kind in (f"{self._room}scores", f"{self._room}attn_scores")
                for change in self._changes[kind].get(number, ())
                if change.cuts_edges
            ]
            if not masks:
                continue
            if cut_edges is None:
                rows = len(self._group.branches)
                cut_edges = torch.zeros(rows, heads, queries, keys, dtype=torch.bool, device=device)
            positions = torch.from_numpy(self._kept.held[number]).to(device)
            cut_edges[row, :, :n_queries, :length] = reduce(or_, masks)[:, positions]
            # A cut always counts as a change: whether weights differ shows only after the softmax.
            self._taps._moved[number].append(cut_edges.new_ones(()))
        return cut_edges

    def _members(self) -> list[tuple[int, int, int]]:
        """(branch, number of queries, tokens of its prompt) of each row."""
        group = self._group
        return list(zip(group.branches, group.counts, group.lengths, strict=True))

    def _capture(self, kind: str, when: str, x: Tensor) -> None:
        """Copy scores or patterns into a table [token, head, key] of all branches, where any is captured."""
        if not self._taps._captures.get((kind, self._layer, when)):
            return
        longest = self._taps._forest.longest
        if (kind, when) not in self._taps._attention:
            shape = (len(self._kept), x.shape[1], longest)
            self._taps._attention[kind, when] = x.new_zeros(shape)
        table = self._taps._attention[kind, when]
        for row, (number, n_queries, length) in enumerate(self._members()):
            part = x[row, :, :n_queries, :length].transpose(0, 1)
            table[self._kept.slices[number], :, :length] = part
