"""The two types of AlgZoo networks, RNN and transformer: their sizes, hook points and checkpoint tensors.

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
"""Largest accepted width, number of classes or number of time steps; the largest in AlgZoo is 32."""


@dataclass(frozen=True)
class RnnShape:
    """Sizes of a single-layer ReLU RNN that reads one number per time step."""

    kind: ClassVar[str] = "rnn"
    """Name of the network type, in digests and attributes of labelled weights."""
    version: ClassVar[str] = "algzoo-rnn/1"
    """Version of the forward pass, part of keys; changed when its numbers change."""
    hidden: int
    """Number of neurons of the state."""
    outputs: int
    """Number of classes, or 1 for a scalar answer."""

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name of each tensor in a checkpoint -> its shape."""
        return {
            "rnn.weight_ih_l0": (self.hidden, 1),
            "rnn.weight_hh_l0": (self.hidden, self.hidden),
            "linear.weight": (self.outputs, self.hidden),
        }

    @property
    def dims(self) -> dict[str, tuple[str, tuple[str, ...]]]:
        """Name of each tensor in a checkpoint -> (name, dims) of the labelled array."""
        return {
            "rnn.weight_ih_l0": ("weight_ih", ("neuron", "input")),
            "rnn.weight_hh_l0": ("weight_hh", ("neuron", "neuron_")),
            "linear.weight": ("weight_oh", ("output", "neuron")),
        }

    def hook_points(self, sequence: int) -> tuple[HookPoint, ...]:
        """Hook points of the RNN for inputs of `sequence` time steps, in execution order."""
        # A time step takes the place of a layer in the names of hook points.
        kinds = ("rnn_pre_activation", "rnn_hidden", "rnn_final_state", "rnn_output")
        return points_of(kinds, sequence)

    def axis_sizes(self, sequence: int) -> dict[str, int]:
        """Name -> size of the axes that activations have, except sample; `sequence` is not needed here."""
        return {"neuron": self.hidden, "output": self.outputs}


@dataclass(frozen=True)
class TransformerShape:
    """Sizes of an attention-only transformer that reads integers."""

    kind: ClassVar[str] = "transformer"
    """Name of the network type, in digests and attributes of labelled weights."""
    version: ClassVar[str] = "algzoo-transformer/1"
    """Version of the forward pass, part of keys; changed when its numbers change."""
    hidden: int
    """Width of the residual stream."""
    outputs: int
    """Number of classes."""
    layers: int
    """Number of attention layers."""
    sequence: int
    """Number of positions, each with a position embedding."""
    inputs: int
    """Number of integers that have an embedding."""
    heads: int = 1
    """Number of attention heads per layer, which no file states."""

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name of each tensor in a checkpoint -> its shape."""
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
        """Name of each tensor in a checkpoint -> (name, dims) of the labelled array."""
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
        """Hook points of the transformer, in execution order; `sequence` is not needed here."""
        kinds = ("embed", "resid_pre", "scores", "pattern", "attn_out", "resid_post")
        return points_of(kinds, self.layers)

    def axis_sizes(self, sequence: int) -> dict[str, int]:
        """Name -> size of the axes that activations have, except sample; `sequence` is not needed here."""
        positions = dict.fromkeys(("position", "query_position", "key_position"), self.sequence)
        return {"hidden": self.hidden, "head": self.heads, **positions}


Shape = RnnShape | TransformerShape
"""Network type with its layer sizes."""


def parameters(shape: Shape) -> int:
    """Number of parameters of a network of this type and these sizes."""
    return sum(int(np.prod(size)) for size in shape.tensors.values())


def digest_of(shape: Shape) -> str:
    """Digest of network type and layer sizes."""
    # `kind` is a class variable, which asdict leaves out.
    return digest("algzoo", shape.kind, asdict(shape))


def tensors_digest(tensors: Mapping[str, Array]) -> str:
    """Digest `sha256:…` of tensors and their names: equal whichever file format or builder they come from."""
    return (
        f"sha256:{digest('algzoo-weights', {name: array_digest(tensor) for name, tensor in tensors.items()})}"
    )


def shape_of(tensors: Mapping[str, Array], where: str, heads: int = 1) -> Shape:
    """Recognise network type and layer sizes from the tensors of a checkpoint.

    Arguments:
        tensors: name in the checkpoint -> tensor.
        where: file or name of the network, for messages.
        heads: number of attention heads of a transformer, which the tensors do not determine.

    Raises:
        WeightsError: the tensors are of another network, contradict each other in size, include biases, or
            are not finite.
    """
    # Sizes come from a few tensors; all tensors are then compared with the shapes that these sizes imply.
    shape = _shape_by_main_tensors(tensors, where, heads)
    expected_shapes = shape.tensors
    for name, expected_shape in expected_shapes.items():
        if name not in tensors:
            raise WeightsError(
                f"{where}: the tensor {name} of shape {list(expected_shape)} is missing; check that the file "
                "is complete"
            )
        if tensors[name].shape != expected_shape:
            raise WeightsError(
                f"{where}: the sizes of the other tensors imply shape {list(expected_shape)} for {name}, "
                f"found shape {list(tensors[name].shape)}; check that all tensors are of the same network"
            )
        if not np.isfinite(tensors[name]).all():
            raise WeightsError(
                f"{where}: the tensor {name} holds NaN or infinity; train the network again, or use another "
                "file"
            )
    if unexpected := [name for name in tensors if name not in expected_shapes]:
        biases = ", and no biases" if any("bias" in name for name in unexpected) else ""
        raise WeightsError(
            f"{where}: a {shape.kind} of AlgZoo has the tensors {', '.join(expected_shapes)}{biases}; found "
            f"{unexpected[0]} as well, so this is another network"
        )
    return shape


def labelled(tensors: Mapping[str, Array], shape: Shape) -> xr.Dataset:
    """Convert the tensors of a checkpoint to labelled arrays, the input of analysis stages.

    The attributes state the network type and the number of attention heads.

    Arguments:
        tensors: name in the checkpoint -> tensor.
        shape: network type and layer sizes.
    """
    import xarray as xr

    arrays = {name: (dims, np.asarray(tensors[tensor])) for tensor, (name, dims) in shape.dims.items()}
    return xr.Dataset(arrays, attrs={"network": shape.kind, "heads": getattr(shape, "heads", 1)})


def tensors_of(weights: xr.Dataset) -> tuple[dict[str, Array], Shape]:
    """Convert labelled weights back to the tensors of a checkpoint.

    Returns:
        (name in the checkpoint -> tensor; network type and layer sizes).

    Raises:
        WeightsError: the dataset is not labelled weights of an AlgZoo network.
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
            "expected the labelled weights of an AlgZoo network, as AlgZooModel.weights holds them, found a "
            f"dataset of {', '.join(map(str, weights.data_vars)) or 'nothing'}"
        )
    return {
        tensor: weights[name].transpose(*dims).values for tensor, (name, dims) in shape.dims.items()
    }, shape


def _shape_by_main_tensors(tensors: Mapping[str, Array], where: str, heads: int) -> Shape:
    """Network type and sizes by the tensors that only this type has; arguments and errors as in `shape_of`.

    The other tensors are not compared with these sizes.
    """
    for name, tensor in tensors.items():
        # Biases pass here, so that `shape_of` can name them in its message.
        if tensor.ndim != 2 and "bias" not in name:
            raise WeightsError(
                f"{where}: the weights of an AlgZoo network are matrices, found the tensor {name} of shape "
                f"{list(tensor.shape)}; check that the file holds an AlgZoo network"
            )
        if max(tensor.shape, default=0) > LARGEST or 0 in tensor.shape:
            raise WeightsError(
                f"{where}: the matrices of an AlgZoo network have sizes from 1 to {LARGEST}, found the "
                f"tensor {name} of shape {list(tensor.shape)}; check that the file holds an AlgZoo network"
            )
    if "linear.weight" in tensors:
        outputs, hidden = tensors["linear.weight"].shape
        return RnnShape(hidden, outputs)
    if all(name in tensors for name in ("embed.weight", "pos_embed.weight", "unembed.weight")):
        inputs, hidden = tensors["embed.weight"].shape
        if heads < 1 or hidden % heads:
            raise WeightsError(
                f"{where}: the number of attention heads must divide the width {hidden}, found heads={heads}"
            )
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
        f"{where}: an AlgZoo network has a tensor linear.weight (RNN), or embed.weight, pos_embed.weight and "
        f"unembed.weight (transformer), found {', '.join(sorted(tensors)[:4]) or 'no tensors'}; check that "
        "the file holds an AlgZoo network"
    )
