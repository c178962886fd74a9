"""Taps that set features to other values during a forward pass.

At the read hook of a layer the features are encoded. The change of a set feature, (new value - present value)
times its decoder vectors, is added at the write hook of every layer it writes to. Frozen activations replace
those at their hook points. The change depends on activations of the pass itself, so it cannot be the payload
of a HookSpec, which exists before the pass.

A pass covers one prompt, or only its newest position.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ...features.dictionary import Dictionary
    from ...forward.architectures.points import HookPoint

__all__ = ["FeatureTaps", "Frozen", "SetFeature"]


@dataclass(frozen=True)
class SetFeature:
    """An intervention that sets a feature to an activation at some positions."""

    layer: int
    """Layer of the feature."""
    position: int | slice
    """Position or positions; negative ones count from the end."""
    feature: int
    """Index of the feature in its layer."""
    value: float
    """The new activation, not a difference."""

    @property
    def is_open_ended(self) -> bool:
        """Whether the intervention also applies to tokens that are generated after the prompt."""
        return isinstance(self.position, slice) and self.position.stop is None


@dataclass(frozen=True, eq=False)
class Frozen:
    """Values of a run without interventions that stay fixed in a run with them."""

    values: Mapping[HookPoint, Tensor] = field(default_factory=dict)
    """Activations that replace those of the run, by hook point."""
    activations: Mapping[int, Tensor] = field(default_factory=dict)
    """Feature activations [position, feature] from which set features change, by layer."""
    reads: Mapping[int, Tensor] = field(default_factory=dict)
    """Inputs of transcoders with a skip connection, whose output changes with the input, by layer."""
    layers: frozenset[int] | None = None
    """Layers whose MLP outputs are frozen; None if features change relative to the run."""


class FeatureTaps:
    """Hooks of a forward pass over one prompt that set features to other activations and freeze values."""

    def __init__(
        self,
        dictionary: Dictionary,
        settings: Sequence[SetFeature],
        frozen: Frozen,
        *,
        zero_positions: int,
        keep: Sequence[int],
        before: bool = False,
    ) -> None:
        """Prepare one pass.

        Arguments:
            dictionary: Dictionary of the features.
            settings: Features that are set.
            frozen: Values that stay fixed.
            zero_positions: Number of positions at the start of the pass where features count as 0.
            keep: Layers whose feature activations are recorded in `kept`.
            before: Whether to record pre-activations instead.
        """
        self._dictionary, self._frozen = dictionary, frozen
        self._zero, self._keep, self._before = zero_positions, frozenset(keep), before
        self._settings: dict[int, list[SetFeature]] = {}
        for setting in settings:
            self._settings.setdefault(setting.layer, []).append(setting)
        self._pinned = {(point.kind, point.layer): value for point, value in frozen.values.items()}
        read, write = dictionary.layout.read, dictionary.layout.write
        self._reads = {(read, layer) for layer in dictionary.layers}
        self._writes = {(write, layer) for layer in dictionary.write_layers}
        self._pending: dict[int, Tensor] = {}
        self.kept: dict[int, Tensor] = {}
        """Recorded feature activations [position, feature], by layer."""

    def __call__(self, kind: str, layer: int | None, x: Tensor, allowed: Tensor | None = None) -> Tensor:
        """Replace or change the activation at a hook point.

        Arguments:
            kind: kind of the hook point.
            layer: its layer; None for hook points outside of layers.
            x: its activation, [1, position, ...].
            allowed: mask of attention scores, unused here (see `AttentionTaps`).

        Returns:
            The activation with which the pass continues.
        """
        place = (kind, layer)
        # Frozen values first: features read, and add to, the frozen activation.
        x = self._pinned.get(place, x)
        if layer is not None and place in self._reads:
            self._read(layer, x)
        if layer is not None and place in self._writes and layer in self._pending:
            # Not in place: x may be a frozen value, which belongs to the clean pass.
            x = x + self._pending.pop(layer).to(x)
        return x

    def captures(self, layer: int | None, *kinds: str) -> bool:
        """Whether features read one of these hook points."""
        return any((kind, layer) in self._reads for kind in kinds)

    def changes(self, layer: int | None, *kinds: str) -> bool:
        """Whether one of these hook points is frozen, or features write to it."""
        return any((kind, layer) in self._pinned or (kind, layer) in self._writes for kind in kinds)

    def touches(self, layer: int | None, *kinds: str) -> bool:
        """Whether one of these hook points is read or changed."""
        return self.captures(layer, *kinds) or self.changes(layer, *kinds)

    def changes_attention(self, layer: int) -> bool:
        """Whether the pattern of a layer is frozen."""
        return ("pattern", layer) in self._pinned

    def cut(self, layer: int, heads: int, queries: int, keys: int, device: Any) -> Tensor | None:
        """Mask of cut attention edges: always None, as no edge is cut (`AttentionTaps.cut`).

        Arguments:
            layer: layer of the attention.
            heads: number of query heads.
            queries: number of queries.
            keys: number of keys.
            device: device of the mask.
        """
        return None

    def of_states(self, layer: int, kind: str, length: int) -> None:
        """Callbacks for recurrent states: always None, as no state is read or changed (`PassTaps.of_states`).

        Arguments:
            layer: layer of the recurrence.
            kind: hook point kind of its state sequence.
            length: positions of the prompt.
        """

    def _read(self, layer: int, x: Tensor) -> None:
        """Encode the input of a layer's features, and queue the changes that set features write."""
        settings, frozen = self._settings.get(layer, ()), self._frozen
        features = self._dictionary.layer(layer)
        if layer in self._keep or (settings and frozen.layers is None):
            pre = features.preactivations(x[0])
            activations = pre if self._before else features.activation(pre)
            activations[: self._zero] = 0
            if layer in self._keep:
                self.kept[layer] = activations
        if layer in frozen.reads:
            # The frozen MLP output contains the skip of the clean input; the difference is added.
            clean = frozen.reads[layer]
            self._add(layer, features.skip(x[0]) - features.skip(clean))
        if settings:
            if frozen.layers is not None:
                current = frozen.activations[layer]
            else:
                current = features.activation(activations) if self._before else activations
            self._set(layer, settings, current)

    def _set(self, layer: int, settings: Sequence[SetFeature], current: Tensor) -> None:
        """Queue what changed features of a layer add at the layers they write to.

        If a feature is set several times at one position, the last setting counts.

        Arguments:
            layer: Layer of the features.
            settings: New activations of features.
            current: Activations from which they change [position, feature].
        """
        change: dict[tuple[int, int], float] = {}
        for setting in settings:
            for position in _positions(setting.position, len(current)):
                value = float(current[position, setting.feature])
                change[position, setting.feature] = setting.value - value
        positions = torch.tensor([position for position, _ in change], device=current.device)
        feature = torch.tensor([index for _, index in change], dtype=torch.long)
        amount = torch.tensor(list(change.values()), dtype=torch.float32, device=current.device)
        for target in self._dictionary.targets(layer):
            # As circuit-tracer: with constrained layers, features write to these only.
            if self._frozen.layers is not None and target not in self._frozen.layers:
                continue
            rows = self._dictionary.layer(layer).decoder_rows(feature, target) * amount[:, None]
            # index_add_ sums several features set at one position.
            by_position = rows.new_zeros(len(current), rows.shape[1])
            self._add(target, by_position.index_add_(0, positions, rows))

    def _add(self, layer: int, change: Any) -> None:
        """Queue a change [position, d_out] for the write hook of a layer."""
        self._pending[layer] = self._pending[layer] + change if layer in self._pending else change


def _positions(position: int | slice, length: int) -> list[int]:
    """Positions, from 0 to length - 1, that a position (negative: from the end) or a slice names."""
    if isinstance(position, slice):
        return list(range(*position.indices(length)))
    return [position % length]
