"""The two types of AlgZoo networks, without their computation: sizes, hook points, tensors of a checkpoint.

    RNN          p_t = W_ih x_t + W_hh h_{t-1},  h_t = relu(p_t),  h_{-1} = 0,  y = W_oh h_{T-1}
    transformer  z = embed[x] + pos_embed;  per layer z += softmax(Q K^T / sqrt(d)) V O^T, unmasked;
                 y = unembed z[last]

Neither has biases or norms. The type is recognised by names and shapes of the tensors alone (`shape_of`).

Border: numpy and labels; never imports torch. forward.py computes.

Axes: neuron of the RNN; output; hidden of the transformer's stream; layer, head, position. `neuron_` and
`hidden_` are the axes that a matrix reads: rows are targets, columns sources.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from ...store.arrays import Array
from ...store.digest import array_digest, digest
from ...store.errors import WeightsError
from ..forward.architectures.points import HookPoint, points_of

if TYPE_CHECKING:
    import xarray as xr

__all__ = [
    "RnnShape",
    "Shape",
    "TransformerShape",
    "digest_of",
    "labelled",
    "parameters",
    "shape_of",
    "tensors_digest",
    "tensors_of",
]

LARGEST = 4096
"""Largest width, number of classes or time steps that is accepted; AlgZoo's largest is 32."""


@dataclass(frozen=True)
class RnnShape:
    """A single-layer ReLU RNN over numbers."""

    kind: ClassVar[str] = "rnn"
    """Network type, in digests and attributes."""
    version: ClassVar[str] = "algzoo-rnn/1"
    """Version of the forward pass; changes when numbers change."""
    hidden: int
    """Neurons of the state."""
    outputs: int
    """Classes, or 1 for a scalar answer."""

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name in a checkpoint -> shape."""
        return {
            "rnn.weight_ih_l0": (self.hidden, 1),
            "rnn.weight_hh_l0": (self.hidden, self.hidden),
            "linear.weight": (self.outputs, self.hidden),
        }

    @property
    def dims(self) -> dict[str, tuple[str, tuple[str, ...]]]:
        """Name in a checkpoint -> name and dims of the labelled array."""
        return {
            "rnn.weight_ih_l0": ("weight_ih", ("neuron", "input")),
            "rnn.weight_hh_l0": ("weight_hh", ("neuron", "neuron_")),
            "linear.weight": ("weight_oh", ("output", "neuron")),
        }

    def hook_points(self, sequence: int) -> tuple[HookPoint, ...]:
        """Hook points for inputs of `sequence` time steps, in execution order."""
        # A time step takes the place of a layer in the names of hook points.
        kinds = ("rnn_pre_activation", "rnn_hidden", "rnn_final_state", "rnn_output")
        return points_of(kinds, sequence)

    def axis_sizes(self, sequence: int) -> dict[str, int]:
        """Sizes of the axes of hook points."""
        return {"neuron": self.hidden, "output": self.outputs}


@dataclass(frozen=True)
class TransformerShape:
    """An attention-only transformer over integers."""

    kind: ClassVar[str] = "transformer"
    """Network type, in digests and attributes."""
    version: ClassVar[str] = "algzoo-transformer/1"
    """Version of the forward pass; changes when numbers change."""
    hidden: int
    """Width of the residual stream."""
    outputs: int
    """Number of classes."""
    layers: int
    """Attention layers."""
    sequence: int
    """Positions."""
    inputs: int
    """Vocabulary size."""
    heads: int = 1
    """Attention heads, which no file contains."""

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name in a checkpoint -> shape."""
        layers: dict[str, tuple[int, ...]] = {}
        for i in range(self.layers):
            layers[f"attns.{i}.in_proj_weight"] = (3 * self.hidden, self.hidden)
            layers[f"attns.{i}.out_proj.weight"] = (self.hidden, self.hidden)
        return {
            "embed.weight": (self.inputs, self.hidden),
            "pos_embed.weight": (self.sequence, self.hidden),
            **layers,
            "unembed.weight": (self.outputs, self.hidden),
        }

    @property
    def dims(self) -> dict[str, tuple[str, tuple[str, ...]]]:
        """Name in a checkpoint -> name and dims of the labelled array."""
        # Rows of in_proj are queries, keys and values, as torch's MultiheadAttention stores them.
        layers = {}
        for i in range(self.layers):
            layers[f"attns.{i}.in_proj_weight"] = (f"in_proj_{i}", ("qkv", "hidden_"))
            layers[f"attns.{i}.out_proj.weight"] = (f"out_proj_{i}", ("hidden", "hidden_"))
        return {
            "embed.weight": ("embed", ("vocab", "hidden")),
            "pos_embed.weight": ("pos_embed", ("position", "hidden")),
            **layers,
            "unembed.weight": ("unembed", ("output", "hidden")),
        }

    def hook_points(self, sequence: int) -> tuple[HookPoint, ...]:
        """Hook points, in execution order."""
        kinds = ("embed", "resid_pre", "scores", "pattern", "attn_out", "resid_post")
        return points_of(kinds, self.layers)

    def axis_sizes(self, sequence: int) -> dict[str, int]:
        """Sizes of the axes of hook points."""
        positions = dict.fromkeys(("position", "query_position", "key_position"), self.sequence)
        return {"hidden": self.hidden, "head": self.heads, **positions}


Shape = RnnShape | TransformerShape
"""Network type with its layer sizes."""


def parameters(shape: Shape) -> int:
    """Number of parameters: H (1 + H + O) of an RNN, range H + n H + 4 L H^2 + O H of a transformer."""
    return sum(int(np.prod(size)) for size in shape.tensors.values())


def digest_of(shape: Shape) -> str:
    """Digest of network type and layer sizes."""
    # `kind` is a class variable, which asdict leaves out.
    return digest("algzoo", shape.kind, asdict(shape))


def tensors_digest(tensors: Mapping[str, Array]) -> str:
    """`sha256:…` of tensors by name: equal for both file formats and for handcrafted tensors."""
    return (
        f"sha256:{digest('algzoo-weights', {name: array_digest(tensor) for name, tensor in tensors.items()})}"
    )


def shape_of(tensors: Mapping[str, Array], where: str, heads: int = 1) -> Shape:
    """Network type and layer sizes, recognised from the tensors of a checkpoint.

    Arguments:
        tensors: named as in a checkpoint.
        where: file or name, for messages.
        heads: attention heads of a transformer.

    Raises:
        WeightsError: for tensors of another network, contradicting sizes, biases, or numbers that are not
            finite.
    """
    # Sizes come from a few tensors; all tensors are then compared with the shapes that these sizes imply.
    shape = _guessed(tensors, where, heads)
    expected = shape.tensors
    for name, size in expected.items():
        if name not in tensors:
            raise WeightsError(
                f"{where}: expected a tensor {name} {list(size)}, found none; is the file whole?"
            )
        if tensors[name].shape != size:
            raise WeightsError(
                f"{where}: expected {name} of shape {list(size)} beside the other tensors, found "
                f"{list(tensors[name].shape)}; its tensors are of several networks"
            )
        if not np.isfinite(tensors[name]).all():
            raise WeightsError(
                f"{where}: expected finite numbers, found NaN or infinity in {name}; train it again"
            )
    if unexpected := [name for name in tensors if name not in expected]:
        biases = " (networks of AlgZoo have no biases)" if any("bias" in name for name in unexpected) else ""
        raise WeightsError(
            f"{where}: expected {', '.join(expected)}, found {unexpected[0]} besides{biases}; another "
            "network computes with it"
        )
    return shape


def labelled(tensors: Mapping[str, Array], shape: Shape) -> xr.Dataset:
    """Weights as labelled arrays, the input of stages, with the network type as attribute.

    Arguments:
        tensors: named as in a checkpoint.
        shape: network type and layer sizes.
    """
    import xarray as xr

    arrays = {name: (dims, np.asarray(tensors[tensor])) for tensor, (name, dims) in shape.dims.items()}
    return xr.Dataset(arrays, attrs={"network": shape.kind, "heads": getattr(shape, "heads", 1)})


def tensors_of(weights: xr.Dataset) -> tuple[dict[str, Array], Shape]:
    """Tensors named as in a checkpoint, and the shape, of labelled weights.

    Raises:
        WeightsError: for a dataset that `labelled` did not make.
    """
    if weights.attrs.get("network") == RnnShape.kind and "weight_oh" in weights:
        shape: Shape = RnnShape(weights.sizes["neuron"], weights.sizes["output"])
    elif weights.attrs.get("network") == TransformerShape.kind and "embed" in weights:
        # The number of layers is in no attribute; it is counted from the arrays.
        layers = sum(str(name).startswith("in_proj_") for name in weights.data_vars)
        sizes = weights.sizes
        shape = TransformerShape(
            sizes["hidden"],
            sizes["output"],
            layers,
            sizes["position"],
            sizes["vocab"],
            int(weights.attrs.get("heads", 1)),
        )
    else:
        raise WeightsError(
            "expected labelled weights of AlgZoo, found "
            f"{', '.join(map(str, weights.data_vars)) or 'nothing'}; take AlgZooModel.weights"
        )
    return {
        tensor: weights[name].transpose(*dims).values for tensor, (name, dims) in shape.dims.items()
    }, shape


def _guessed(tensors: Mapping[str, Array], where: str, heads: int) -> Shape:
    """Kind and sizes that the characteristic tensors imply; `shape_of` checks the others against them."""
    for name, tensor in tensors.items():
        # Biases pass here, so that `shape_of` can name them in its message.
        if tensor.ndim != 2 and "bias" not in name:
            raise WeightsError(
                f"{where}: expected matrices, found {name} of shape {list(tensor.shape)}; is it of AlgZoo?"
            )
        if max(tensor.shape, default=0) > LARGEST or 0 in tensor.shape:
            raise WeightsError(
                f"{where}: expected sizes from 1 to {LARGEST}, found {name} of shape {list(tensor.shape)}; "
                "is it of AlgZoo?"
            )
    if "linear.weight" in tensors:
        outputs, hidden = tensors["linear.weight"].shape
        return RnnShape(hidden, outputs)
    if all(name in tensors for name in ("embed.weight", "pos_embed.weight", "unembed.weight")):
        inputs, hidden = tensors["embed.weight"].shape
        if heads < 1 or hidden % heads:
            raise WeightsError(f"{where}: expected heads that divide the width {hidden}, found {heads}")
        layers = {match[1] for name in tensors if (match := re.match(r"attns\.(\d+)\.", name))}
        return TransformerShape(
            hidden,
            tensors["unembed.weight"].shape[0],
            len(layers),
            tensors["pos_embed.weight"].shape[0],
            inputs,
            heads,
        )
    raise WeightsError(
        f"{where}: expected linear.weight (an RNN) or embed.weight, pos_embed.weight and unembed.weight (a "
        f"transformer), found {', '.join(sorted(tensors)[:4]) or 'no tensors'}; is it of AlgZoo?"
    )
