"""The features that read one layer: their weights, memory-mapped, and their arithmetic.

Weights are tensors in the dtype of their file, usually views of a memory map: nothing is read before it is
used, and of decoders only the rows of active features. Rows are features in all matrices, so that selecting
features gathers rows; formats with the other orientation are given as transposed views. Arithmetic is
float32, or float64 for float64 input.

Border: knows rows of activations; dictionary.py knows the hook points, formats the files.

Axes: feature; target = the layers a feature writes to, in order; d_in = width read, d_out = width written.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ....pipeline.ambient import plain_torch
from ....store.errors import DictionaryError
from .scaling import AsIs, Scaling

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from .activations import Activation

__all__ = ["LayerFeatures", "layers_text"]

BLOCK_BYTES = 1 << 28
"""Largest size in bytes of the encoder rows, and of the pre-activations, that are in memory at once."""


@dataclass(frozen=True, eq=False)
class LayerFeatures:
    """The features that read one layer: their encoder, activation function and decoders."""

    layer: int
    """Layer that the features read."""
    W_enc: Tensor
    """Encoder [feature, d_in]."""
    W_dec: Mapping[int, Tensor]
    """By layer that is written, the decoder [feature, d_out]; it may be a strided view."""
    activation: Activation
    """Activation function, with its thresholds or gates."""
    b_enc: Tensor | None = None
    """Encoder bias [feature]."""
    b_dec: Tensor | None = None
    """Decoder bias [d_out], added to the output at `layer` only."""
    W_skip: Tensor | None = None
    """Matrix [d_out, d_in] of the linear skip connection of a skip transcoder, whose output gets W_skip x."""
    scaling: Scaling = field(default_factory=AsIs)
    """Normalisation of each input vector, which is undone in the output."""
    centred: bool = False
    """Whether b_dec is subtracted from the scaled input before the encoder."""
    gain: float = 1.0
    """Factor that multiplies every input; outputs, with their bias, are divided by it."""
    unit: Tensor | None = None
    """Factor [feature] that multiplies pre-activations and divides decoder rows; None for 1 (the setting
    rescale_acts_by_decoder_norm of SAELens)."""
    device: torch.device | str = "cpu"
    """Device that encodes and decodes."""

    @property
    def n_features(self) -> int:
        """Number of features (rows of the encoder)."""
        return self.W_enc.shape[0]

    @property
    def targets(self) -> tuple[int, ...]:
        """Layers that these features write to, ascending."""
        return tuple(sorted(self.W_dec))

    def on(self, device: torch.device | str) -> LayerFeatures:
        """The same features with arithmetic and encoder on a device; decoders stay where they are."""
        from .activations import to_device

        def on_device(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(device)

        return replace(
            self,
            W_enc=self.W_enc.to(device),
            b_enc=on_device(self.b_enc),
            unit=on_device(self.unit),
            activation=to_device(self.activation, device),
            device=device,
        )

    # -- encoding

    @plain_torch()
    def preactivations(self, x: Tensor, features: slice | Tensor = slice(None)) -> Tensor:
        """Pre-activations [..., feature]; for gated dictionaries, before the biases of gate and magnitude.

        Arguments:
            x: Inputs [..., d_in].
            features: Range or indices of the features; all by default.
        """
        rows = self._encoder_input(x)
        return self._products(rows, self.W_enc[features].to(rows), features)

    def _products(self, rows: Tensor, encoder: Tensor, features: slice | Tensor) -> Tensor:
        """Pre-activations [row, feature] of scaled inputs.

        Arguments:
            rows: Inputs as `_encoder_input` returns them.
            encoder: Encoder rows of `features`, in the dtype of `rows`.
            features: Range or indices of the features.
        """
        from ...forward.networks.kernels.products import product

        # Not torch.matmul: here a row's result does not depend on the other rows (kernels/products.py).
        out = product(rows, encoder)
        if self.b_enc is not None:
            out += self.b_enc[features].to(out)
        if self.unit is not None:
            out *= self.unit[features].to(out)
        return out

    @plain_torch()
    def encode(self, x: Tensor) -> Tensor:
        """Dense activations [..., feature] of inputs [..., d_in]; `active` needs less memory."""
        return self.activation(self.preactivations(x))

    @plain_torch()
    def active(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Active features of inputs [row, d_in]: three tensors (row, feature, activation) [n].

        They are sorted by row, then feature. They are computed in blocks of rows and features, so that not
        all
        pre-activations are in memory at once.
        """
        import torch

        parts = [part for features in self._feature_blocks(x) for part in self._active_in_block(x, features)]
        row, feature, value = (torch.cat([part[i] for part in parts]) for i in range(3))
        # NaN compares unequal to 0, so it is among the active values.
        if not bool(value.isfinite().all()):
            raise self._not_finite(x, "activations")
        # Blocks of features come one after the other, so rows are interleaved again here.
        order = torch.argsort(row * self.n_features + feature)
        return row[order], feature[order], value[order]

    def _active_in_block(self, x: Tensor, features: slice) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """As `active` for a range of features, one block of rows after the other."""
        encoder = None
        bytes_per_row = max(x.element_size(), 4) * (features.stop - features.start)
        block_rows = max(1, BLOCK_BYTES // bytes_per_row)
        for start in range(0, max(len(x), 1), block_rows):
            rows = self._encoder_input(x[start : start + block_rows])
            # Converted to the dtype of the rows once, for all blocks of rows.
            encoder = self.W_enc[features].to(rows) if encoder is None else encoder
            values = self.activation(self._products(rows, encoder, features), features)
            row, feature = values.nonzero(as_tuple=True)
            yield row + start, feature + features.start, values[row, feature]

    def _feature_blocks(self, x: Tensor) -> Iterator[slice]:
        """Ranges of features whose encoder rows fit in BLOCK_BYTES; one range if features compete (TopK)."""
        step = self.n_features
        # TopK compares all features of a row; ReLU and JumpReLU can be computed feature by feature.
        if not self.activation.per_row:
            step = min(step, max(1, BLOCK_BYTES // (max(x.element_size(), 4) * self.W_enc.shape[1])))
        for start in range(0, self.n_features, step):
            yield slice(start, min(start + step, self.n_features))

    # -- decoding

    @plain_torch()
    def decode(self, activations: Tensor, target: int | None = None) -> Tensor:
        """Sum of activation times decoder vector over all features, without the bias: [..., d_out].

        Arguments:
            activations: Dense activations [..., feature].
            target: Layer that is written; None for the layer that the features read.
        """
        decoder = self._decoder(self.layer if target is None else target)
        if self.unit is not None:
            activations = activations / self.unit.to(activations)
        written = activations @ decoder.to(activations)
        return written if self.gain == 1 else written / self.gain

    @plain_torch()
    def finish(self, y: Tensor, x: Tensor) -> Tensor:
        """Output at the layer [..., d_out]: adds bias and skip connection, undoes the scaling of the input.

        Arguments:
            y: What the features write to the layer, summed over them [..., d_out].
            x: States that were read at this layer [..., d_in].
        """
        x = self._arithmetic(x)
        _, undo = self.scaling(x)
        # The gain multiplies the input, so bias and features' contributions are divided by it.
        return undo(y if self.b_dec is None else y + self.b_dec.to(y) / self.gain) + self.skip(x)

    @plain_torch()
    def reconstruct(self, activations: Tensor, x: Tensor) -> Tensor:
        """Reconstruction of the written state by features that write to their own layer, [..., d_out].

        Arguments:
            activations: Dense activations [..., feature], from `encode`.
            x: Inputs [..., d_in].
        """
        return self.finish(self.decode(activations), x)

    @plain_torch()
    def skip(self, x: Tensor) -> Tensor | float:
        """Output [..., d_out] of the linear skip connection for inputs x [..., d_in]; 0.0 without one."""
        x = self._arithmetic(x)
        return 0.0 if self.W_skip is None else x @ self.W_skip.to(x).T

    # -- rows of some features

    @plain_torch()
    def encoder_rows(self, features: Any) -> Tensor:
        """Encoder rows [n, d_in] of some features (indices or a slice), float32, times `gain` and `unit`."""
        import torch

        rows = self.W_enc[features].to(device=self.device, dtype=torch.float32)
        rows = rows if self.gain == 1 else rows * self.gain
        return rows if self.unit is None else rows * self.unit[features].to(rows)[:, None]

    @plain_torch()
    def decoder_rows(self, features: Any, target: int | None = None) -> Tensor:
        """Decoder vectors [n, d_out] of some features for a layer, float32; only these are read from disk.

        Arguments:
            features: Indices of the features, or a slice.
            target: Layer that is written; None for the layer that the features read.

        Raises:
            DictionaryError: The features do not write to that layer, or rows are not finite.
        """
        import torch

        # Indexed before conversion, so that only these rows are read from disk.
        rows = self._decoder(self.layer if target is None else target)[features]
        rows = rows.to(device=self.device, dtype=torch.float32)
        if not bool(rows.isfinite().all()):
            raise DictionaryError(
                f"the decoder of layer {self.layer} holds infinite or NaN numbers; its file is damaged, "
                "fetch the dictionary again"
            )
        rows = rows if self.gain == 1 else rows / self.gain
        return rows if self.unit is None else rows / self.unit[features].to(rows)[:, None]

    # -- helpers

    def _encoder_input(self, x: Tensor) -> Tensor:
        """What the encoder multiplies [..., d_in]: inputs scaled, and less the bias if `centred`."""
        x = self._arithmetic(x)
        if x.shape[-1] != self.W_enc.shape[1]:
            raise DictionaryError(
                f"expected inputs of width {self.W_enc.shape[1]} for the features of layer {self.layer}, "
                f"found {x.shape[-1]}; give states of the model that the dictionary was trained on"
            )
        rows, _ = self.scaling(x)
        rows = rows * self.gain if self.gain != 1 else rows
        return rows - self.b_dec.to(rows) if self.centred and self.b_dec is not None else rows

    def _not_finite(self, x: Tensor, quantity: str) -> DictionaryError:
        """Error for infinite or NaN `quantity` that says whether the states x or the encoder cause them."""
        cause = (
            "the encoder holds such numbers, so fetch the dictionary again"
            if bool(x.isfinite().all())
            else "the states it read hold such numbers, so check the model's precision (dtype)"
        )
        return DictionaryError(f"the {quantity} of layer {self.layer} are infinite or NaN: {cause}")

    def _arithmetic(self, x: Tensor) -> Tensor:
        """x as float32 (float64 stays float64) on the device that encodes and decodes."""
        import torch

        # Products in bfloat16 could change which features fire.
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        return x.to(device=self.device, dtype=dtype)

    def _decoder(self, target: int) -> Tensor:
        """Decoder [feature, d_out] for a layer; DictionaryError if the features do not write to it."""
        if target not in self.W_dec:
            raise DictionaryError(
                f"features of layer {self.layer} write to {layers_text(self.targets)}, not to layer {target}"
            )
        return self.W_dec[target]


def layers_text(layers: Iterable[int]) -> str:
    """Layers as text: "layers 0 to 15", "layers 3, 7, 12", "layer 5"."""
    numbers = sorted(layers)
    if len(numbers) == 1:
        return f"layer {numbers[0]}"
    if numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"layers {numbers[0]} to {numbers[-1]}"
    return f"layers {', '.join(map(str, numbers))}"
