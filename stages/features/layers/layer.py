"""The features that read one layer: their weights, lazily, and their arithmetic.

Weights are tensors in the dtype of their file, usually views of a memory map: nothing is read before it is
used, and of decoders only the rows of features that are active. Rows are features everywhere, so that a few
features are a gather of rows; formats that lie the other way round are given as transposed views. Arithmetic
is float32, or float64 for float64 input.

Border: knows rows of activations; which hook point they are from is dictionary.py's, which file the weights
are from a format's.

Axes: feature; target = the layers a feature writes to, in order; d_in = width read, d_out = width written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ....pipeline.ambient import plain_torch
from ....store.errors import DictionaryError
from .scaling import AsIs, Scaling

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from .activations import Activation

__all__ = ["LayerFeatures"]

BLOCK_BYTES = 1 << 28
"""Of encoder rows and of pre-activations that exist at a time, in the dtype of the arithmetic."""


@dataclass(frozen=True, eq=False)
class LayerFeatures:
    """Encoder, activation and decoders of the features that read `layer`.

    W_enc [feature, d_in], b_enc [feature] or None; W_dec: target layer -> [feature, d_out], each maybe a
    strided view; b_dec [d_out] of the output of `layer`, or None; W_skip [d_out, d_in]: the linear part x
    W_skip' of a skip transcoder. centred: b_dec is subtracted from the (scaled) input first. gain: one factor
    for all inputs, by which what is read is multiplied and what is written, bias included, divided. unit:
    [feature], what SAELens' rescale_acts_by_decoder_norm multiplies pre-activations by and divides decoder
    rows by.
    """

    layer: int
    W_enc: Tensor
    W_dec: Mapping[int, Tensor]
    activation: Activation
    b_enc: Tensor | None = None
    b_dec: Tensor | None = None
    W_skip: Tensor | None = None
    scaling: Scaling = field(default_factory=AsIs)
    centred: bool = False
    gain: float = 1.0
    unit: Tensor | None = None
    device: torch.device | str = "cpu"

    @property
    def n_features(self) -> int:
        """How many rows the encoder has."""
        return self.W_enc.shape[0]

    @property
    def targets(self) -> tuple[int, ...]:
        """Layers these features write to, ascending."""
        return tuple(sorted(self.W_dec))

    def on(self, device: torch.device | str) -> LayerFeatures:
        """The same features, computed on a device, with the encoder there; decoders stay where they are."""
        from .activations import moved

        def there(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(device)

        return replace(
            self,
            W_enc=self.W_enc.to(device),
            b_enc=there(self.b_enc),
            unit=there(self.unit),
            activation=moved(self.activation, device),
            device=device,
        )

    # -- encoding

    @plain_torch()
    def preactivations(self, x: Tensor, features: slice | Tensor = slice(None)) -> Tensor:
        """Pre-activations [..., feature] of inputs [..., d_in], of all features or some.

        For gated dictionaries the gate's product before its bias.
        """
        rows = self._prepared(x)
        return self._products(rows, self.W_enc[features].to(rows), features)

    def _products(self, rows: Tensor, encoder: Tensor, features: slice | Tensor) -> Tensor:
        """Pre-activations of prepared rows, given the encoder rows of these features in their dtype."""
        from ...forward.networks.kernels.products import product

        out = product(rows, encoder)
        if self.b_enc is not None:
            out += self.b_enc[features].to(out)
        if self.unit is not None:
            out *= self.unit[features].to(out)
        return out

    @plain_torch()
    def encode(self, x: Tensor) -> Tensor:
        """Activations [..., feature] of inputs [..., d_in], dense. See `active` for many rows and
        features.
        """
        return self.activation(self.preactivations(x))

    @plain_torch()
    def active(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(row, feature, activation) of everything active in inputs [row, d_in], sorted by row, then feature.

        Never holds all pre-activations of many rows: rows and features are taken in blocks.
        """
        import torch

        found = [part for features in self._feature_blocks(x) for part in self._active(x, features)]
        row, feature, value = (torch.cat([part[i] for part in found]) for i in range(3))
        if not bool(value.isfinite().all()):  # a NaN passes every activation function, so it is seen here
            raise self._not_finite(x, "activations")
        order = torch.argsort(row * self.n_features + feature)
        return row[order], feature[order], value[order]

    def _active(self, x: Tensor, features: slice) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        encoder = None
        step = max(1, BLOCK_BYTES // (max(x.element_size(), 4) * (features.stop - features.start)))
        for first in range(0, max(len(x), 1), step):
            rows = self._prepared(x[first : first + step])
            encoder = self.W_enc[features].to(rows) if encoder is None else encoder  # widened once
            values = self.activation(self._products(rows, encoder, features), features)
            row, feature = values.nonzero(as_tuple=True)
            yield row + first, feature + features.start, values[row, feature]

    def _feature_blocks(self, x: Tensor) -> Iterator[slice]:
        """Ranges of features whose encoder rows fit a block; all of them where they compete."""
        step = self.n_features
        if not self.activation.per_row:
            step = min(step, max(1, BLOCK_BYTES // (max(x.element_size(), 4) * self.W_enc.shape[1])))
        for start in range(0, self.n_features, step):
            yield slice(start, min(start + step, self.n_features))

    # -- decoding

    @plain_torch()
    def decode(self, activations: Tensor, target: int | None = None) -> Tensor:
        """What dense activations [..., feature] write to a layer, without bias: [..., d_out].

        target: default, the layer that is read.
        """
        decoder = self._decoder(self.layer if target is None else target)
        if self.unit is not None:
            activations = activations / self.unit.to(activations)
        written = activations @ decoder.to(activations)
        return written if self.gain == 1 else written / self.gain

    @plain_torch()
    def finish(self, y: Tensor, x: Tensor) -> Tensor:
        """The layer's output from what features wrote to it, y [..., d_out]: bias, scale and skip added.

        x [..., d_in]: what was read at this layer.
        """
        x = self._arithmetic(x)
        _, undo = self.scaling(x)
        return undo(y if self.b_dec is None else y + self.b_dec.to(y) / self.gain) + self.skip(x)

    @plain_torch()
    def reconstruct(self, activations: Tensor, x: Tensor) -> Tensor:
        """What a per-layer dictionary gives for inputs x [..., d_in]: [..., d_out].

        activations: dense [..., feature], as `encode` gives them.
        """
        return self.finish(self.decode(activations), x)

    @plain_torch()
    def skip(self, x: Tensor) -> Tensor | float:
        """The linear part of the output for inputs x [..., d_in]; 0 where there is none."""
        x = self._arithmetic(x)
        return 0.0 if self.W_skip is None else x @ self.W_skip.to(x).T

    # -- rows of some features

    @plain_torch()
    def encoder_rows(self, features: Any) -> Tensor:
        """Encoder rows [n, d_in] of some features, float32, in the units of their pre-activations."""
        import torch

        rows = self.W_enc[features].to(device=self.device, dtype=torch.float32)
        rows = rows if self.gain == 1 else rows * self.gain
        return rows if self.unit is None else rows * self.unit[features].to(rows)[:, None]

    @plain_torch()
    def decoder_rows(self, features: Any, target: int | None = None) -> Tensor:
        """Decoder rows [n, d_out] of some features into a layer, float32; only they are read.

        target: default, the layer that is read. Raises DictionaryError for a layer they do not write to, and
        for rows that are not finite.
        """
        import torch

        rows = self._decoder(self.layer if target is None else target)[features]
        rows = rows.to(device=self.device, dtype=torch.float32)
        if not bool(rows.isfinite().all()):
            raise DictionaryError(
                f"the decoder of layer {self.layer} holds numbers that are not finite; fetch it again"
            )
        rows = rows if self.gain == 1 else rows / self.gain
        return rows if self.unit is None else rows / self.unit[features].to(rows)[:, None]

    # -- the rest

    def _prepared(self, x: Tensor) -> Tensor:
        x = self._arithmetic(x)
        if x.shape[-1] != self.W_enc.shape[1]:
            raise DictionaryError(
                f"expected inputs of width {self.W_enc.shape[1]} for the features of layer {self.layer}, "
                f"found {x.shape[-1]}; was this dictionary made for another model?"
            )
        rows, _ = self.scaling(x)
        rows = rows * self.gain if self.gain != 1 else rows
        return rows - self.b_dec.to(rows) if self.centred and self.b_dec is not None else rows

    def _not_finite(self, x: Tensor, what: str) -> DictionaryError:
        found = "the encoder holds" if bool(x.isfinite().all()) else "the states it read hold"
        return DictionaryError(
            f"the {what} of layer {self.layer} are not finite: {found} numbers that are not; check where "
            "they come from"
        )

    def _arithmetic(self, x: Tensor) -> Tensor:
        import torch

        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        return x.to(device=self.device, dtype=dtype)

    def _decoder(self, target: int) -> Tensor:
        if target not in self.W_dec:
            raise DictionaryError(
                f"features of layer {self.layer} write to {_told(self.targets)}, not to layer {target}"
            )
        return self.W_dec[target]


def _told(layers: Sequence[int]) -> str:
    if len(layers) == 1:
        return f"layer {layers[0]}"
    return f"layers {layers[0]} to {layers[-1]}"
