"""Taps of a sweep: the hook points of many branches whose tokens lie side by side.

A hook point shows the tokens of all branches at once; each branch's interventions are applied to its own, and
what a branch wants to read is gathered position by position, its own tokens and its ancestors'. Scores and
patterns are seen group by group (`GroupTaps`).

An intervention that changes nothing (a patch with the very values that stand there) is noticed here: a branch
that never moved is its parent, and need not be computed.
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
from ..hooks.interventions import Held, Intervention
from ..hooks.spec import Capture
from ..hooks.taps import EverythingHeld, Place
from .branches import ENTERS, Branch
from .forest import AttentionGroup, Forest, Row

ATTENTION = ("scores", "attn_scores", "pattern")
CROSS = tuple(f"cross_{kind}" for kind in ATTENTION)


class BranchTaps:
    """What the decoder consults at its hook points while it computes a row of branches."""

    def __init__(self, forest: Forest, ending: Collection[Branch]) -> None:
        self._forest = forest
        self._changes: dict[Place, list[tuple[int, Intervention]]] = defaultdict(list)
        self._captures: dict[tuple[str, int | None, str], list[int]] = defaultdict(list)
        self._reading: dict[int | None, set[int]] = defaultdict(set)
        """Layer -> branches whose scores or patterns somebody reads or changes, their ancestors included."""
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
        self.captured: dict[int, dict[Capture, Tensor]] = defaultdict(dict)
        """What each branch read."""
        self._moved: dict[int, list[Tensor]] = defaultdict(list)
        self._row = self._kept = Row(forest, {})
        self._is_last = False
        self._attention: dict[tuple[str, str], Tensor] = {}

    def _lineage(self, number: int) -> list[int]:
        found = []
        while number >= 0:
            found.append(number)
            number = int(self._forest.parent[number])
        return found

    # -- a slot of the sweep

    def begin(self, row: Row, kept: Row, *, is_last: bool) -> None:
        """A new slot, with these tokens. is_last: nothing is needed of it but the stream that enters it."""
        self._row, self._kept, self._is_last = row, kept, is_last

    def unmoved(self) -> list[int]:
        """Branches whose interventions so far all gave what stood there before; told once per slot.

        None where gradients are recorded: what an intervention could change counts there as well.
        """
        if not self._moved or torch.is_grad_enabled():
            return []
        numbers = list(self._moved)
        moved = torch.stack([torch.stack(self._moved[n]).any() for n in numbers]).tolist()
        return [n for n, has_moved in zip(numbers, moved, strict=True) if not has_moved]

    # -- what the decoder asks

    def __call__(self, kind: str, layer: int | None, x: Tensor, allowed: Tensor | None = None) -> Tensor:
        """The value to go on with at a hook point, [1, token, ...] or [1, head, token, ...]."""
        if (kind, layer) in self._touched:
            # Until a layer drops what nobody needs of it, it has all tokens of the row.
            has_all = x.shape[-2] == len(self._row)
            x = self._visit(kind, layer, x, self._row if has_all else self._kept)
        if self._is_last and kind in ENTERS:
            raise EverythingHeld
        return x

    def captures(self, layer: int | None, *kinds: str) -> bool:
        """Whether a branch reads one of these points."""
        return any((kind, layer, when) in self._captures for kind in kinds for when in ("after", "before"))

    def changes(self, layer: int | None, *kinds: str) -> bool:
        """Whether a branch changes one of these points."""
        return any((kind, layer) in self._changes for kind in kinds)

    def touches(self, layer: int | None, *kinds: str) -> bool:
        """Whether a branch reads or changes one of these points."""
        return any((kind, layer) in self._touched for kind in kinds)

    # -- attention

    def reads_attention(self, branch: int, layer: int) -> bool:
        """Whether scores or patterns of a branch must be computed by hand."""
        return branch in self._reading[layer]

    def of_group(self, group: AttentionGroup, kept: Row, layer: int, room: str = "") -> GroupTaps:
        """Taps for the attention of some branches. room: what stands before the kinds of its hook points."""
        return GroupTaps(self, group, kept, layer, room)

    def attention_done(self, layer: int, kept: Row) -> None:
        """Hands over the scores and patterns of a layer that somebody wants to read."""
        for (kind, when), held in self._attention.items():
            for number in self._captures[kind, layer, when]:
                length = self._forest.branches[number].length
                rows = held[torch.from_numpy(kept.where[number, :length]).to(held.device)]
                value = rows[..., :length].transpose(0, 1)[None]
                self._keep(number, kind, layer, when, value.contiguous())
        self._attention.clear()

    # -- states of recurrences

    def changes_of_states(self, layer: int, kind: str) -> dict[int, list[Intervention]]:
        """Interventions of each branch on the states of a layer."""
        found: dict[int, list[Intervention]] = defaultdict(list)
        for number, change in self._changes.get((kind, layer), ()):
            found[number].append(change)
        return found

    def changed_state(self, number: int, layer: int, kind: str, state: Tensor, position: int) -> Tensor:
        """The state [1, head, key, value] a branch goes on with behind a position."""
        held = Held(np.array([position]), self._forest.branches[number].length)
        new = state.unsqueeze(2)
        for change in self.changes_of_states(layer, kind)[number]:
            new = change.applied(new, HookPoint(kind, layer), None, held)
        self.note(number, new, state.unsqueeze(2))
        return new.squeeze(2)

    def readers(self, layer: int, kind: str) -> list[int]:
        """Branches that read a point, before or after it is changed."""
        found = (self._captures.get((kind, layer, when), ()) for when in ("after", "before"))
        return sorted({number for numbers in found for number in numbers})

    def give(self, number: int, kind: str, layer: int, before: Tensor, after: Tensor) -> None:
        """Hands a branch what it reads at a point that is worked out for it."""
        for when, value in (("before", before), ("after", after)):
            if number in self._captures.get((kind, layer, when), ()):
                self._keep(number, kind, layer, when, value)

    # -- helpers

    def _visit(self, kind: str, layer: int | None, x: Tensor, row: Row) -> Tensor:
        self._read(kind, layer, "before", x, row)
        changes = self._changes.get((kind, layer), ())
        if changes and torch.is_grad_enabled():
            x = x.clone()
        for number, change in changes:
            if number not in row.slices:
                continue
            tokens, branch = row.slices[number], self._forest.branches[number]
            part = x[..., tokens, :]
            new = change.applied(part, HookPoint(kind, layer), None, row.part(number, branch.length))
            self.note(number, new, part)
            x[..., tokens, :] = new
        self._read(kind, layer, "after", x, row)
        return x

    def note(self, number: int, new: Tensor, old: Tensor) -> None:
        """Remember whether an intervention changed anything."""
        self._moved[number].append((new != old).any())

    def _read(self, kind: str, layer: int | None, when: str, x: Tensor, row: Row) -> None:
        for number in self._captures.get((kind, layer, when), ()):
            length = self._forest.branches[number].length
            places = torch.from_numpy(row.where[number, :length]).to(x.device)
            self._keep(number, kind, layer, when, x.index_select(-2, places))

    def _keep(self, number: int, kind: str, layer: int | None, when: Any, value: Tensor) -> None:
        self.captured[number][Capture(HookPoint(kind, layer), when)] = value


class GroupTaps:
    """Taps for the attention of a group of branches: [row, head, query, key], queries padded."""

    def __init__(
        self, taps: BranchTaps, group: AttentionGroup, kept: Row, layer: int, room: str = ""
    ) -> None:
        self._room = room
        self._taps, self._group, self._kept, self._layer = taps, group, kept, layer
        members = set(group.branches)
        self._changes: dict[str, dict[int, list[Intervention]]] = {}
        for kind in (f"{room}{each}" for each in ATTENTION):
            chosen: dict[int, list[Intervention]] = defaultdict(list)
            for number, change in taps._changes.get((kind, layer), ()):
                if number in members:
                    chosen[number].append(change)
            self._changes[kind] = chosen

    def __call__(self, kind: str, layer: int | None, x: Tensor, allowed: Tensor | None = None) -> Tensor:
        """The value to go on with, changed row by row (in place, where no gradient is recorded)."""
        kind = self._room + kind
        self._read(kind, "before", x)
        if any(self._changes[kind].values()):
            x = x.clone() if torch.is_grad_enabled() else x
            for place, (number, count, length) in enumerate(self._members()):
                changes = [c for c in self._changes[kind].get(number, ()) if not c.cuts_edges]
                for change in changes:
                    part = x[place : place + 1, :, :count, :length]
                    seen = allowed if allowed is None or allowed.ndim == 2 else allowed[place]
                    seen = None if seen is None else seen[..., :count, :length]
                    held = self._kept.part(number, length)
                    new = change.applied(part, HookPoint(kind, layer), seen, held)
                    self._taps.note(number, new, part)
                    x[place : place + 1, :, :count, :length] = new
        self._read(kind, "after", x)
        return x

    def captures(self, layer: int | None, *kinds: str) -> bool:
        """Whether a branch of the group, or one that descends from it, reads one of these points."""
        here = any(self._taps.reads_attention(number, self._layer) for number in self._group.branches)
        return here and self._taps.captures(layer, *(self._room + kind for kind in kinds))

    def changes_attention(self, layer: int) -> bool:
        """Whether scores or patterns are changed by more than cutting edges."""
        return any(
            not change.cuts_edges
            for chosen in self._changes.values()
            for changes in chosen.values()
            for change in changes
        )

    def cut(self, layer: int, heads: int, queries: int, keys: int, device: Any) -> Tensor | None:
        """Bool [row, head, query, key], True at edges that are cut; None if none are."""
        found: Tensor | None = None
        for place, (number, count, length) in enumerate(self._members()):
            masks = [
                change.cut(heads, length, length, device)
                for kind in (f"{self._room}scores", f"{self._room}attn_scores")
                for change in self._changes[kind].get(number, ())
                if change.cuts_edges
            ]
            if not masks:
                continue
            if found is None:
                rows = len(self._group.branches)
                found = torch.zeros(rows, heads, queries, keys, dtype=torch.bool, device=device)
            held = torch.from_numpy(self._kept.held[number]).to(device)
            found[place, :, :count, :length] = reduce(or_, masks)[:, held]
            self._taps._moved[number].append(found.new_ones(()))
        return found

    def _members(self) -> list[tuple[int, int, int]]:
        """(branch, queries, length of its prompt) of each row."""
        group = self._group
        return list(zip(group.branches, group.counts, group.lengths, strict=True))

    def _read(self, kind: str, when: str, x: Tensor) -> None:
        if not self._taps._captures.get((kind, self._layer, when)):
            return
        longest = self._taps._forest.longest
        if (kind, when) not in self._taps._attention:
            shape = (len(self._kept), x.shape[1], longest)
            self._taps._attention[kind, when] = x.new_zeros(shape)
        table = self._taps._attention[kind, when]
        for place, (number, count, length) in enumerate(self._members()):
            part = x[place, :, :count, :length].transpose(0, 1)
            table[self._kept.slices[number], :, :length] = part
