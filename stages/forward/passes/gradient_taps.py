"""Taps of a pass that will be gone back through: a bound spec, and where in the graph its gradients are.

A wanted point gets a node of its own, so that its gradient is that of everything that reads it there, as an
intervention would reach it. Recording begins at the first of them: what lies before costs what it costs in a
plain pass. Kept is the place in autograd's graph, never the value.

A layer may be dropped: what it adds to the stream is then a constant on the way back, which goes past it by
the stream alone (the gradient dropout of AtP*, Kramar et al. 2024, section 3).

To a layer these taps look like ones that change what is wanted, because attention, norms and recurrences then
take the road on which the point lies.

Border: tensors and specs; the way back is backward.py's.

Axes: as in hooks/points; states are [batch, head, key, value] one at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ..hooks.spec import BoundSpec, Capture, When
from ..hooks.taps import Place, RunTaps, Sink, StateTaps

__all__ = ["GradientTaps", "WatchedPlace"]


@dataclass(frozen=True)
class WatchedPlace:
    """Where in autograd's graph a wanted gradient is: one place, or one for each position of states."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    is_by_position: bool
    edges: list[GradientEdge] = field(default_factory=list)

    def gradient(self, parts: Sequence[Tensor | None]) -> Tensor:
        """The gradient from those at the edges; zero where no path leads from there to the metric."""
        zeros = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        made = [zeros if part is None else part for part in parts]
        return torch.stack(made, 2) if self.is_by_position else made[0]


class GradientTaps:
    """`PassTaps` of a bound spec whose gradients are wanted."""

    def __init__(self, spec: BoundSpec, sink: Sink, dropped: int | None = None) -> None:
        """sink: told the plain captures of the spec, detached. dropped: a layer, if any."""
        plain = tuple(capture for capture in spec.captures if not capture.is_gradient)
        self._run = RunTaps(replace(spec, captures=plain), lambda c, x: sink(c, x.detach()))
        self._wanted = {(c.point.kind, c.point.layer, c.when): c for c in spec.gradients}
        self._places = frozenset((c.point.kind, c.point.layer) for c in spec.gradients)
        self.watched: dict[Capture, WatchedPlace] = {}
        self._dropped = dropped
        self._entered: Tensor | None = None

    def __call__(self, kind: str, layer: int | None, x: Tensor, allowed: Tensor | None = None) -> Tensor:
        """The value to go on with at a hook point."""
        place = (kind, layer)
        if place == ("resid_post", self._dropped):
            x = self._past(x)
        x = self.watch(place, "after", self._run(kind, layer, self.watch(place, "before", x), allowed))
        if place == ("resid_pre", self._dropped) and self._entered is None:
            self._entered = x  # the first time: a layer computed again on the way back is not gone past again
        return x

    def _past(self, x: Tensor) -> Tensor:
        """The stream behind the dropped layer, on the way back what entered it."""
        entered = self._entered
        return x.detach() if entered is None else x.detach() + (entered - entered.detach())

    def captures(self, layer: int | None, *kinds: str) -> bool:
        """Whether the value of one of these points is wanted."""
        return self._run.captures(layer, *kinds)

    def changes(self, layer: int | None, *kinds: str) -> bool:
        """Whether one of these points is changed, or its gradient wanted."""
        return self._run.changes(layer, *kinds) or self._wants(layer, *kinds)

    def touches(self, layer: int | None, *kinds: str) -> bool:
        """Whether one of these points is read or changed, or its gradient wanted."""
        return self._run.touches(layer, *kinds) or self._wants(layer, *kinds)

    def changes_attention(self, layer: int) -> bool:
        """Whether scores and pattern must be computed one by one."""
        return self._run.changes_attention(layer) or self._wants(layer, "scores", "attn_scores", "pattern")

    def cut(self, layer: int, heads: int, queries: int, keys: int, device: Any) -> Tensor | None:
        """See `AttentionTaps`."""
        return self._run.cut(layer, heads, queries, keys, device)

    def of_states(self, layer: int, kind: str, length: int) -> StateTaps | None:
        """See `PassTaps`."""
        plain = self._run.of_states(layer, kind, length)
        return _GradientStateTaps(self, plain, (kind, layer)) if self._wants(layer, kind) else plain

    def watch(self, place: Place, when: When, x: Tensor, position: int | None = None) -> Tensor:
        """x, where its gradient is wanted with a node of its own. position: of the state it is, if any."""
        capture = self._wanted.get((*place, when))
        if capture is None:
            return x
        x = x.view_as(x) if x.requires_grad else x.detach().requires_grad_()
        told = WatchedPlace(x.shape, x.dtype, x.device, position is not None)
        edges = self.watched.setdefault(capture, told).edges
        if len(edges) <= (position or 0):  # a layer computed again on the way back meets its taps again
            edges.append(get_gradient_edge(x))
        return x

    def _wants(self, layer: int | None, *kinds: str) -> bool:
        return any((kind, layer) in self._places for kind in kinds)


class _GradientStateTaps:
    """Taps for the states of one layer (`StateTaps`), whose gradients are wanted."""

    def __init__(self, taps: GradientTaps, plain: StateTaps | None, place: Place) -> None:
        self._taps, self._plain, self._place = taps, plain, place

    def changed(self, state: Tensor, position: int) -> Tensor:
        """See `StateTaps`."""
        state = self._taps.watch(self._place, "before", state, position)
        state = state if self._plain is None else self._plain.changed(state, position)
        return self._taps.watch(self._place, "after", state, position)

    def seen(self, before: Tensor, after: Tensor) -> None:
        """See `StateTaps`."""
        if self._plain is not None:
            self._plain.seen(before, after)
