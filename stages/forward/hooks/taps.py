"""Taps: a bound HookSpec while a forward pass runs.

A model calls its taps at every hook point with the value it has there, and goes on with the value it gets
back. A point nobody asked about costs one set lookup. Captured tensors are handed to a sink by reference;
nothing is copied here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ..architectures.points import HookPoint
from .interventions import Held, Intervention
from .spec import BoundSpec, Capture, refuse_gradients

if TYPE_CHECKING:
    from torch import Tensor

Sink = Callable[[Capture, "Tensor"], None]
Place = tuple[str, int | None]


class EverythingHeld(Exception):
    """Raised at the last wanted point of a pass that has nothing left to compute.

    Like StopIteration an end, not an error: it leaves the nest of blocks from wherever the last wanted
    value appears.
    """


class AttentionTaps(Protocol):
    """What attention consults at scores and patterns."""

    def __call__(self, kind: str, layer: int | None, x: Tensor, allowed: Tensor | None = None) -> Tensor:
        """The value to go on with at a hook point. allowed: where attention may look, for interventions on
        patterns."""
        ...

    def captures(self, layer: int | None, *kinds: str) -> bool:
        """Whether someone reads one of these points."""
        ...

    def changes_attention(self, layer: int) -> bool:
        """Whether someone changes scores or patterns by more than cutting edges, which is a mask."""
        ...

    def cut(self, layer: int, heads: int, queries: int, keys: int, device: Any) -> Tensor | None:
        """Bool [head, query, key] (or with a batch axis), True at edges that are cut; None if none are."""
        ...


class Taps(Protocol):
    """What the loop over layers consults at hook points: a bound spec, those of many branches, or features to
    be set."""

    def __call__(self, kind: str, layer: int | None, x: Tensor, allowed: Tensor | None = None) -> Tensor:
        """The value to go on with at a hook point."""
        ...

    def captures(self, layer: int | None, *kinds: str) -> bool:
        """Whether someone reads one of these points."""
        ...

    def changes(self, layer: int | None, *kinds: str) -> bool:
        """Whether someone changes one of these points."""
        ...

    def touches(self, layer: int | None, *kinds: str) -> bool:
        """Whether someone reads or changes one of these points."""
        ...


class StateTaps(Protocol):
    """What a recurrence consults where states are met one after another, because each decides the next."""

    def changed(self, state: Tensor, position: int) -> Tensor:
        """The state [B, head, key, value] to go on with behind a position."""
        ...

    def seen(self, before: Tensor, after: Tensor) -> None:
        """Hands over all of them [B, head, position, key, value], before and after their interventions."""
        ...


class PassTaps(Taps, AttentionTaps, Protocol):
    """What a pass over prompts of one length consults: in layers, at scores and patterns, at states."""

    def of_states(self, layer: int, kind: str, length: int) -> StateTaps | None:
        """Taps for the states of a layer, of sequences of `length` positions; None where nobody reads or
        changes them."""
        ...


class RunTaps:
    """Taps of a plain forward pass under one spec."""

    def __init__(
        self, spec: BoundSpec, sink: Sink, *, stop_early: bool = False, held: Held | None = None
    ) -> None:
        """held: which positions the pass computes; None for all."""
        self._before: dict[Place, Capture] = {}
        self._after: dict[Place, Capture] = {}
        self._changes: dict[Place, list[Intervention]] = defaultdict(list)
        self._sink, self._held = sink, held
        self.spec = spec
        refuse_gradients(spec, "this pass")
        for capture in spec.captures:
            wanted = self._after if capture.when == "after" else self._before
            wanted[capture.point.kind, capture.point.layer] = capture
        for point, change in spec.interventions:
            self._changes[point.kind, point.layer].append(change)
        self._touched = frozenset((*self._before, *self._after, *self._changes))
        self._awaited = {*self._before, *self._after} if stop_early else set()
        """Places still to be met by a pass that ends behind the last of them."""

    def __call__(self, kind: str, layer: int | None, x: Tensor, allowed: Tensor | None = None) -> Tensor:
        """The value to go on with at a hook point. allowed: where attention may look, for interventions on
        patterns."""
        place = (kind, layer)
        if place not in self._touched:
            return x
        if place in self._before:
            self._sink(self._before[place], x)
        for change in self._changes.get(place, ()):
            if not change.cuts_edges:  # cut with the causal mask, by attention itself
                x = change.applied(x, HookPoint(kind, layer), allowed, self._held)
        if place in self._after:
            self._sink(self._after[place], x)
        self._met(place)
        return x

    def captures(self, layer: int | None, *kinds: str) -> bool:
        """Whether someone reads one of these points."""
        return any((kind, layer) in self._after or (kind, layer) in self._before for kind in kinds)

    def changes(self, layer: int | None, *kinds: str) -> bool:
        """Whether someone changes one of these points."""
        return any((kind, layer) in self._changes for kind in kinds)

    def touches(self, layer: int | None, *kinds: str) -> bool:
        """Whether someone reads or changes one of these points."""
        return any((kind, layer) in self._touched for kind in kinds)

    def changes_attention(self, layer: int) -> bool:
        """Whether someone changes scores or patterns by more than cutting edges, which is a mask."""
        scores = (*self._changes.get(("scores", layer), ()), *self._changes.get(("attn_scores", layer), ()))
        return self.changes(layer, "pattern") or any(not change.cuts_edges for change in scores)

    def cut(self, layer: int, heads: int, queries: int, keys: int, device: Any) -> Tensor | None:
        """Bool [head, query, key], True at attention edges that are cut; None if none are."""
        places = self._changes.get(("scores", layer), ()), self._changes.get(("attn_scores", layer), ())
        length = queries if self._held is None else self._held.length
        masks = [
            change.cut(heads, length, keys, device)
            for place in places
            for change in place
            if change.cuts_edges
        ]
        if not masks or self._held is None:
            return reduce(or_, masks) if masks else None
        return reduce(or_, masks)[:, self._held.positions]

    def _met(self, place: Place) -> None:
        """Raise EverythingHeld if nothing is wanted any more."""
        if place in self._awaited:
            self._awaited.remove(place)
            if not self._awaited:
                raise EverythingHeld

    def of_states(self, layer: int, kind: str, length: int) -> StateTaps | None:
        """Taps for the states of a layer; None where nobody reads or changes them."""
        return RunStateTaps(self, kind, layer, length) if self.touches(layer, kind) else None


class RunStateTaps:
    """Taps for the states of one layer under one spec (`StateTaps`)."""

    def __init__(self, taps: RunTaps, kind: str, layer: int, length: int) -> None:
        self._taps, self._place, self._length = taps, (kind, layer), length

    def changed(self, state: Tensor, position: int) -> Tensor:
        """See `StateTaps`."""
        held, x = Held(np.array([position]), self._length), state.unsqueeze(2)
        for change in self._taps._changes.get(self._place, ()):
            x = change.applied(x, HookPoint(*self._place), None, held)
        return x.squeeze(2)

    def seen(self, before: Tensor, after: Tensor) -> None:
        """See `StateTaps`."""
        taps, place = self._taps, self._place
        for wanted, states in ((taps._before, before), (taps._after, after)):
            if place in wanted:
                taps._sink(wanted[place], states)
        taps._met(place)
