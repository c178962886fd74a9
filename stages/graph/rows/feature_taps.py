"""Taps that set features to other values while a forward pass runs.

At a layer's read hook the features are encoded; what a set feature changes, (new value - present one) times
its decoder vectors, is added at the write hook of every layer it writes to. What is frozen is replaced at its
own hook point. The change depends on the pass itself, so it cannot be a HookSpec's payload, made before the
pass begins; everything around it is the forward room's.

Border: one prompt, or the newest position of it; which passes are made is interventions.py's.
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
    """A feature set to a value at a position, or at a slice of positions; values are absolute."""

    layer: int
    position: int | slice
    feature: int
    value: float

    @property
    def is_open_ended(self) -> bool:
        """Whether it goes on for tokens to come."""
        return isinstance(self.position, slice) and self.position.stop is None


@dataclass(frozen=True, eq=False)
class Frozen:
    """What is held at the values of a clean pass.

    values: hook point -> activation. activations: layer -> [position, feature], clean. reads: layer -> what
    was read, where a skip must be corrected. layers: those that are constrained.
    """

    values: Mapping[HookPoint, Tensor] = field(default_factory=dict)
    activations: Mapping[int, Tensor] = field(default_factory=dict)
    reads: Mapping[int, Tensor] = field(default_factory=dict)
    layers: frozenset[int] | None = None


class FeatureTaps:
    """Taps of a pass of one prompt (batch axis of one) in which features are set.

    zero_positions: the first positions of the pass at which features count as 0. keep: layers whose
    activations are kept; before: kept before the activation function, not after.
    """

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
        """Activations [position, feature] by layer."""

    def __call__(self, kind: str, layer: int | None, x: Tensor, allowed: Tensor | None = None) -> Tensor:
        """The value to go on with at a hook point."""
        place = (kind, layer)
        x = self._pinned.get(place, x)
        if layer is not None and place in self._reads:
            self._read(layer, x)
        if layer is not None and place in self._writes and layer in self._pending:
            x = x + self._pending.pop(layer).to(x)
        return x

    def captures(self, layer: int | None, *kinds: str) -> bool:
        """Whether features read one of these points."""
        return any((kind, layer) in self._reads for kind in kinds)

    def changes(self, layer: int | None, *kinds: str) -> bool:
        """Whether one of these points is frozen or written to."""
        return any((kind, layer) in self._pinned or (kind, layer) in self._writes for kind in kinds)

    def touches(self, layer: int | None, *kinds: str) -> bool:
        """Whether one of these points is read or changed."""
        return self.captures(layer, *kinds) or self.changes(layer, *kinds)

    def changes_attention(self, layer: int) -> bool:
        """Whether the pattern of a layer is frozen."""
        return ("pattern", layer) in self._pinned

    def cut(self, layer: int, heads: int, queries: int, keys: int, device: Any) -> Tensor | None:
        """No attention edge is cut."""
        return None

    def of_states(self, layer: int, kind: str, length: int) -> None:
        """No state is read or changed."""

    def _read(self, layer: int, x: Tensor) -> None:
        """Encode what is read at a layer, and prepare what its set features change further up."""
        settings, frozen = self._settings.get(layer, ()), self._frozen
        features = self._dictionary.layer(layer)
        if layer in self._keep or (settings and frozen.layers is None):
            pre = features.preactivations(x[0])
            kept = pre if self._before else features.activation(pre)
            kept[: self._zero] = 0
            if layer in self._keep:
                self.kept[layer] = kept
        if layer in frozen.reads:
            clean = frozen.reads[layer]
            self._add(layer, features.skip(x[0]) - features.skip(clean))
        if settings:
            if frozen.layers is not None:
                current = frozen.activations[layer]
            else:
                current = features.activation(kept) if self._before else kept
            self._set(layer, settings, current)

    def _set(self, layer: int, settings: Sequence[SetFeature], current: Tensor) -> None:
        """Decode the changes of a layer's features into the layers they write to; the last of several
        settings of one feature counts."""
        change: dict[tuple[int, int], float] = {}
        for setting in settings:
            for position in _positions(setting.position, len(current)):
                value = float(current[position, setting.feature])
                change[position, setting.feature] = setting.value - value
        places = torch.tensor([at for at, _ in change], device=current.device)
        feature = torch.tensor([index for _, index in change], dtype=torch.long)
        amount = torch.tensor(list(change.values()), dtype=torch.float32, device=current.device)
        for target in self._dictionary.targets(layer):
            if self._frozen.layers is not None and target not in self._frozen.layers:
                continue
            rows = self._dictionary.layer(layer).decoder_rows(feature, target) * amount[:, None]
            found = rows.new_zeros(len(current), rows.shape[1])
            self._add(target, found.index_add_(0, places, rows))

    def _add(self, layer: int, change: Any) -> None:
        self._pending[layer] = self._pending[layer] + change if layer in self._pending else change


def _positions(position: int | slice, length: int) -> list[int]:
    if isinstance(position, slice):
        return list(range(*position.indices(length)))
    return [position % length]
