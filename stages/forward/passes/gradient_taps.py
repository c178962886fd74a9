"""GradientTaps: taps of a pass that is differentiated; they remember where in the graph gradients are wanted.

A captured point gets a graph node of its own, so its gradient is that of everything that reads the value
there, as an intervention would reach it. Recording begins at the first of them: earlier layers cost as much
as in a plain pass. Stored is the node (an edge of autograd's graph), never the value.

A layer may be dropped: its contribution to the stream then counts as constant in the backward pass (the
gradient dropout of AtP*, Kramar et al. 2024, section 3).

Layers are told that the captured points are changed, because attention, norms and recurrences then compute
them explicitly instead of in a fused kernel.

Axes: as in hooks/points; states are [batch, head, key, value], one position at a time.
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
    """Nodes of autograd's graph at which the gradient of one captured activation is read."""

    shape: torch.Size
    """Shape of the activation; for recurrent states, the shape at one position."""
    dtype: torch.dtype
    """Dtype of the activation."""
    device: torch.device
    """Device of the activation."""
    is_by_position: bool
    """Whether there is one node per position (recurrent states), to be stacked on axis 2."""
    edges: list[GradientEdge] = field(default_factory=list)
    """One node, or one per position."""

    def gradient(self, parts: Sequence[Tensor | None]) -> Tensor:
        """Gradient of the metric with respect to the activation: that of its node, or those of all positions
        stacked on axis 2.

        Arguments:
            parts: gradient at each node; None, where the metric does not depend on it, becomes zeros.
        """
        zeros = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        gradients = [zeros if part is None else part for part in parts]
        return torch.stack(gradients, 2) if self.is_by_position else gradients[0]


class GradientTaps:
    """Captures, interventions and gradient captures of a bound HookSpec, called at every hook point."""

    def __init__(self, spec: BoundSpec, sink: Sink, dropped: int | None = None) -> None:
        """Prepare a pass.

        Arguments:
            spec: bound spec with gradient captures.
            sink: receives the plain captures, detached.
            dropped: layer whose contribution counts as constant; None for none.
        """
        plain = tuple(capture for capture in spec.captures if not capture.is_gradient)
        # Detached: a capture that is part of the graph would keep all of it in memory.
        self._run = RunTaps(replace(spec, captures=plain), lambda capture, x: sink(capture, x.detach()))
        self._wanted = {
            (capture.point.kind, capture.point.layer, capture.when): capture for capture in spec.gradients
        }
        self._places = frozenset((capture.point.kind, capture.point.layer) for capture in spec.gradients)
        self.watched: dict[Capture, WatchedPlace] = {}
        """Gradient capture -> its nodes in autograd's graph."""
        self._dropped = dropped
        self._entered: Tensor | None = None

    def __call__(self, kind: str, layer: int | None, x: Tensor, allowed: Tensor | None = None) -> Tensor:
        """Capture or change the value x; returns the value to continue with."""
        place = (kind, layer)
        if place == ("resid_post", self._dropped):
            x = self._bypassed(x)
        x = self.watch(place, "after", self._run(kind, layer, self.watch(place, "before", x), allowed))
        # Only the first time: activation checkpointing calls the taps of a layer again in the backward pass.
        if place == ("resid_pre", self._dropped) and self._entered is None:
            self._entered = x
        return x

    def _bypassed(self, x: Tensor) -> Tensor:
        """The stream after the dropped layer, whose gradient goes straight to the layer's input."""
        entered = self._entered
        # The difference is zero in value and carries the gradient.
        return x.detach() if entered is None else x.detach() + (entered - entered.detach())

    def captures(self, layer: int | None, *kinds: str) -> bool:
        """Whether the value of one of these points is captured."""
        return self._run.captures(layer, *kinds)

    def changes(self, layer: int | None, *kinds: str) -> bool:
        """Whether one of these points is changed or its gradient captured."""
        return self._run.changes(layer, *kinds) or self._wants(layer, *kinds)

    def touches(self, layer: int | None, *kinds: str) -> bool:
        """Whether one of these points is captured or changed, or its gradient captured."""
        return self._run.touches(layer, *kinds) or self._wants(layer, *kinds)

    def changes_attention(self, layer: int) -> bool:
        """Whether scores and pattern must be computed explicitly."""
        return self._run.changes_attention(layer) or self._wants(layer, "scores", "attn_scores", "pattern")

    def cut(self, layer: int, heads: int, queries: int, keys: int, device: Any) -> Tensor | None:
        """Bool [head, query, key], True at cut attention edges; None without cut edges.

        Arguments:
            layer: layer of the attention.
            heads: number of query heads.
            queries: number of queries.
            keys: number of keys.
            device: device of the result.
        """
        return self._run.cut(layer, heads, queries, keys, device)

    def of_states(self, layer: int, kind: str, length: int) -> StateTaps | None:
        """Callbacks for a layer's recurrent states; None where states are neither captured nor changed.

        Arguments:
            layer: layer of the recurrence.
            kind: hook point kind of its state sequence.
            length: positions of the prompt.
        """
        plain = self._run.of_states(layer, kind, length)
        return _GradientStateTaps(self, plain, (kind, layer)) if self._wants(layer, kind) else plain

    def watch(self, place: Place, when: When, x: Tensor, position: int | None = None) -> Tensor:
        """Register a separate autograd node for x where its gradient is captured.

        Arguments:
            place: (kind, layer) of the hook point.
            when: before or after its interventions.
            x: value there.
            position: position of a recurrent state; None elsewhere.

        Returns:
            x, or a view of it with a new node.
        """
        capture = self._wanted.get((*place, when))
        if capture is None:
            return x
        # A view is a node of its own; a tensor outside the graph becomes a leaf, where recording begins.
        x = x.view_as(x) if x.requires_grad else x.detach().requires_grad_()
        node = WatchedPlace(x.shape, x.dtype, x.device, position is not None)
        edges = self.watched.setdefault(capture, node).edges
        # A layer that activation checkpointing computes again calls its taps a second time.
        if len(edges) <= (position or 0):
            edges.append(get_gradient_edge(x))
        return x

    def _wants(self, layer: int | None, *kinds: str) -> bool:
        return any((kind, layer) in self._places for kind in kinds)


class _GradientStateTaps:
    """Callbacks of one recurrent layer whose states' gradients are captured."""

    def __init__(self, taps: GradientTaps, plain: StateTaps | None, place: Place) -> None:
        self._taps, self._plain, self._place = taps, plain, place

    def changed(self, state: Tensor, position: int) -> Tensor:
        """The state [batch, head, key, value] after a position, with interventions and gradient nodes."""
        state = self._taps.watch(self._place, "before", state, position)
        state = state if self._plain is None else self._plain.changed(state, position)
        return self._taps.watch(self._place, "after", state, position)

    def seen(self, before: Tensor, after: Tensor) -> None:
        """Capture the states [batch, head, position, key, value] before and after their interventions."""
        if self._plain is not None:
            self._plain.seen(before, after)
