"""Taps: a bound HookSpec during a forward pass.

A network calls its taps at every hook point with the value there, and continues with the value it gets back.
A hook point without capture or intervention costs one set lookup. Captured tensors go to a sink by reference;
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
from .interventions import Intervention, PositionSubset
from .spec import BoundSpec, Capture, refuse_gradients

if TYPE_CHECKING:
    from torch import Tensor

Sink = Callable[[Capture, "Tensor"], None]
"""Receives each captured tensor."""
Place = tuple[str, int | None]
"""(kind, layer) of a hook point; a tuple of plain values hashes faster than a HookPoint."""


class EarlyStop(Exception):
    """Raised at the last captured point of a pass that needs nothing after it.

    Like StopIteration not an error: it leaves the nested layers and blocks from any depth.
    """


class AttentionTaps(Protocol):
    """Callbacks that attention calls with its scores and patterns, to capture or change them."""

    def __call__(self, kind: str, layer: int | None, x: Tensor, allowed: Tensor | None = None) -> Tensor:
        """Capture or change the value at a hook point; returns the value to continue with.

        Arguments:
            kind: hook point kind.
            layer: layer of the hook point; None outside the layers.
            x: value there.
            allowed: attention mask, bool [query, key], for interventions on patterns.
        """
        ...

    def captures(self, layer: int | None, *kinds: str) -> bool:
        """Whether one of these hook points is captured.

        Arguments:
            layer: layer of the hook points; None outside the layers.
            kinds: hook point kinds.
        """
        ...

    def changes_attention(self, layer: int) -> bool:
        """Whether an intervention changes scores or pattern, other than by a mask that cuts edges."""
        ...

    def cut(self, layer: int, heads: int, queries: int, keys: int, device: Any) -> Tensor | None:
        """Bool [head, query, key], or with a batch axis, True at edges that are cut; None if none are.

        Arguments:
            layer: layer of the attention.
            heads: number of query heads.
            queries: number of queries.
            keys: number of keys.
            device: device of the result.
        """
        ...


class Taps(Protocol):
    """Callbacks that the loop over layers calls at every hook point, to capture or change the value there."""

    def __call__(self, kind: str, layer: int | None, x: Tensor, allowed: Tensor | None = None) -> Tensor:
        """Capture or change the value x at a hook point; returns the value to continue with."""
        ...

    def captures(self, layer: int | None, *kinds: str) -> bool:
        """Whether one of these hook points is captured.

        Arguments:
            layer: layer of the hook points; None outside the layers.
            kinds: hook point kinds.
        """
        ...

    def changes(self, layer: int | None, *kinds: str) -> bool:
        """Whether one of these hook points has an intervention.

        Arguments:
            layer: layer of the hook points; None outside the layers.
            kinds: hook point kinds.
        """
        ...

    def touches(self, layer: int | None, *kinds: str) -> bool:
        """Whether one of these hook points is captured or has an intervention.

        Arguments:
            layer: layer of the hook points; None outside the layers.
            kinds: hook point kinds.
        """
        ...


class StateTaps(Protocol):
    """Callbacks of a recurrent layer that computes its states one position after another."""

    def changed(self, state: Tensor, position: int) -> Tensor:
        """The state [batch, head, key, value] to continue with after a position.

        Arguments:
            state: state after the position, [batch, head, key, value].
            position: position in the prompt.
        """
        ...

    def seen(self, before: Tensor, after: Tensor) -> None:
        """Capture recurrent states [batch, head, position, key, value], a matrix per head and position,
        before and after their interventions.

        Arguments:
            before: states before their interventions.
            after: states after them.
        """
        ...


class PassTaps(Taps, AttentionTaps, Protocol):
    """Callbacks of a pass over prompts of one length: in layers, in attention, and at recurrent states."""

    def of_states(self, layer: int, kind: str, length: int) -> StateTaps | None:
        """Callbacks for the recurrent states of a layer.

        Arguments:
            layer: layer of the recurrence.
            kind: hook point kind of its state sequence.
            length: positions of the prompt.

        Returns:
            None where the states are neither captured nor changed, so that a fused kernel may run.
        """
        ...


class RunTaps:
    """Captures and interventions of one bound HookSpec, called at every hook point of a forward pass."""

    def __init__(
        self, spec: BoundSpec, sink: Sink, *, stop_early: bool = False, subset: PositionSubset | None = None
    ) -> None:
        """Prepare a pass.

        Arguments:
            spec: bound spec of the pass.
            sink: receives captured tensors.
            stop_early: whether to raise `EarlyStop` after the last capture.
            subset: positions that the pass computes; None for all.

        Raises:
            HookPointNotFound: for a spec that captures gradients.
        """
        self._before: dict[Place, Capture] = {}
        self._after: dict[Place, Capture] = {}
        self._changes: dict[Place, list[Intervention]] = defaultdict(list)
        self._sink, self._subset = sink, subset
        self.spec = spec
        # GradientTaps (passes/gradient_taps.py) removes gradient captures before it makes a RunTaps.
        refuse_gradients(spec, "this pass")
        for capture in spec.captures:
            wanted = self._after if capture.when == "after" else self._before
            wanted[capture.point.kind, capture.point.layer] = capture
        for point, change in spec.interventions:
            self._changes[point.kind, point.layer].append(change)
        # One set lookup per hook point: most points of a pass have neither capture nor intervention.
        self._touched = frozenset((*self._before, *self._after, *self._changes))
        self._unseen = {*self._before, *self._after} if stop_early else set()
        """Captured points not seen yet, where the pass is to stop after the last of them."""

    def __call__(self, kind: str, layer: int | None, x: Tensor, allowed: Tensor | None = None) -> Tensor:
        """Capture or change the value x at a hook point; returns the value to continue with."""
        key = (kind, layer)
        if key not in self._touched:
            return x
        if key in self._before:
            self._sink(self._before[key], x)
        for change in self._changes.get(key, ()):
            if not change.cuts_edges:  # attention applies these together with the causal mask
                x = change.applied(x, HookPoint(kind, layer), allowed, self._subset)
        if key in self._after:
            self._sink(self._after[key], x)
        self._mark_seen(key)
        return x

    def captures(self, layer: int | None, *kinds: str) -> bool:
        """Whether one of these hook points is captured."""
        return any((kind, layer) in self._after or (kind, layer) in self._before for kind in kinds)

    def changes(self, layer: int | None, *kinds: str) -> bool:
        """Whether one of these hook points has an intervention."""
        return any((kind, layer) in self._changes for kind in kinds)

    def touches(self, layer: int | None, *kinds: str) -> bool:
        """Whether one of these hook points is captured or has an intervention."""
        return any((kind, layer) in self._touched for kind in kinds)

    def changes_attention(self, layer: int) -> bool:
        """Whether an intervention changes scores or pattern, other than by a mask that cuts edges."""
        scores = (*self._changes.get(("scores", layer), ()), *self._changes.get(("attn_scores", layer), ()))
        return self.changes(layer, "pattern") or any(not change.cuts_edges for change in scores)

    def cut(self, layer: int, heads: int, queries: int, keys: int, device: Any) -> Tensor | None:
        """Bool [head, query, key], True at cut attention edges; None without cut edges.

        Arguments:
            layer: layer of the attention.
            heads: number of query heads.
            queries: number of queries.
            keys: number of keys.
            device: device of the result.
        """
        scores = (*self._changes.get(("scores", layer), ()), *self._changes.get(("attn_scores", layer), ()))
        # Masks and edges from the end refer to the whole prompt, of which a subset computes some queries.
        length = queries if self._subset is None else self._subset.length
        masks = [change.cut(heads, length, keys, device) for change in scores if change.cuts_edges]
        if not masks:
            return None
        edges: Tensor = reduce(or_, masks)
        return edges if self._subset is None else edges[:, self._subset.positions]

    def _mark_seen(self, key: Place) -> None:
        """Raise EarlyStop at the last captured point, if the pass is to stop there."""
        if key in self._unseen:
            self._unseen.remove(key)
            if not self._unseen:
                raise EarlyStop

    def of_states(self, layer: int, kind: str, length: int) -> StateTaps | None:
        """Callbacks for a layer's recurrent states; None where states are neither captured nor changed.

        Arguments:
            layer: layer of the recurrence.
            kind: hook point kind of its state sequence.
            length: positions of the prompt.
        """
        return RunStateTaps(self, kind, layer, length) if self.touches(layer, kind) else None


class RunStateTaps:
    """Captures and interventions of one bound HookSpec at the recurrent states of one layer."""

    def __init__(self, taps: RunTaps, kind: str, layer: int, length: int) -> None:
        """Prepare the states of one layer.

        Arguments:
            taps: taps of the pass.
            kind: hook point kind of the state sequence.
            layer: layer of the recurrence.
            length: tokens of the prompt.
        """
        self._taps, self._place, self._length = taps, (kind, layer), length

    def changed(self, state: Tensor, position: int) -> Tensor:
        """The state [batch, head, key, value] after a position, with the interventions applied."""
        # Interventions expect the hook point's position axis, which a single state lacks.
        subset, x = PositionSubset(np.array([position]), self._length), state.unsqueeze(2)
        for change in self._taps._changes.get(self._place, ()):
            x = change.applied(x, HookPoint(*self._place), None, subset)
        return x.squeeze(2)

    def seen(self, before: Tensor, after: Tensor) -> None:
        """Capture recurrent states [batch, head, position, key, value], a matrix per head and position,
        before and after their interventions."""
        taps, place = self._taps, self._place
        for captures, states in ((taps._before, before), (taps._after, after)):
            if place in captures:
                taps._sink(captures[place], states)
        taps._mark_seen(place)
