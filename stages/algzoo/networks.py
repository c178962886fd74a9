"""The two kinds of network, without their computation: sizes, hook points, which tensors they are made of.

    RNN          p_t = W_ih x_t + W_hh h_{t-1},  h_t = relu(p_t),  h_{-1} = 0,  y = W_oh h_{T-1}
    transformer  z = embed[x] + pos_embed;  per layer z += softmax(Q K' / sqrt(d)) V O', every position seeing
                 all;  y = unembed z[last]

Neither has biases or norms. A file says what it is by the names and shapes of its tensors alone (`shape_of`).

Border: numpy and labels; never imports torch. What computes is forward.py.

Axes: neuron of the RNN; output; hidden of the transformer's stream; layer, head, position. `neuron_` and
`hidden_` are what a matrix reads: rows are targets, columns sources.
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
"""Width, classes or time steps of the largest network taken for one of AlgZoo: its own end at 32."""


@dataclass(frozen=True)
class RnnShape:
    """A ReLU RNN of one layer over numbers."""

    kind: ClassVar[str] = "rnn"
    version: ClassVar[str] = "algzoo-rnn/1"
    hidden: int
    outputs: int

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
        """Every hook point for sequences of this length, in execution order."""
        kinds = ("rnn_pre_activation", "rnn_hidden", "rnn_final_state", "rnn_output")
        return points_of(kinds, sequence)

    def axis_sizes(self, sequence: int) -> dict[str, int]:
        """Sizes of the axes of hook points."""
        return {"neuron": self.hidden, "output": self.outputs}


@dataclass(frozen=True)
class TransformerShape:
    """A transformer of attention alone over integers; heads are not in a file, and are 1 unless told."""

    kind: ClassVar[str] = "transformer"
    version: ClassVar[str] = "algzoo-transformer/1"
    hidden: int
    outputs: int
    layers: int
    sequence: int
    inputs: int
    heads: int = 1

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
        """Name in a checkpoint -> name and dims of the labelled array; rows of in_proj: queries, keys,
        values."""
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
        """Every hook point, in execution order."""
        kinds = ("embed", "resid_pre", "scores", "pattern", "attn_out", "resid_post")
        return points_of(kinds, self.layers)

    def axis_sizes(self, sequence: int) -> dict[str, int]:
        """Sizes of the axes of hook points."""
        positions = dict.fromkeys(("position", "query_position", "key_position"), self.sequence)
        return {"hidden": self.hidden, "head": self.heads, **positions}


Shape = RnnShape | TransformerShape


def parameters(shape: Shape) -> int:
    """Numbers a network is made of: H (1 + H + O), or range H + n H + 4 L H^2 + O H."""
    return sum(int(np.prod(size)) for size in shape.tensors.values())


def digest_of(shape: Shape) -> str:
    """Digest of the sizes; two that could give different numbers have different ones."""
    return digest("algzoo", shape.kind, asdict(shape))


def tensors_digest(tensors: Mapping[str, Array]) -> str:
    """`sha256:…` of tensors by name: the same from either format, and of one that no file holds."""
    return f"sha256:{digest('algzoo-weights', {name: array_digest(held) for name, held in tensors.items()})}"


def shape_of(tensors: Mapping[str, Array], where: str, heads: int = 1) -> Shape:
    """What the tensors of a checkpoint are the weights of; where: the file, for messages.

    Raises WeightsError for names, dims or sizes of another network, biases, numbers that are none.
    """
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
    if strange := [name for name in tensors if name not in expected]:
        biases = " (networks of AlgZoo have no biases)" if any("bias" in name for name in strange) else ""
        raise WeightsError(
            f"{where}: expected {', '.join(expected)}, found {strange[0]} besides{biases}; another network "
            "computes with it"
        )
    return shape


def labelled(tensors: Mapping[str, Array], shape: Shape) -> xr.Dataset:
    """Weights as labelled arrays: what stages read. Attributes say which network it is."""
    import xarray as xr

    arrays = {name: (dims, np.asarray(tensors[tensor])) for tensor, (name, dims) in shape.dims.items()}
    return xr.Dataset(arrays, attrs={"network": shape.kind, "heads": getattr(shape, "heads", 1)})


def tensors_of(weights: xr.Dataset) -> tuple[dict[str, Array], Shape]:
    """Tensors by their names in a checkpoint, and the shape, of labelled weights. Raises WeightsError for
    arrays that are not `labelled`'s."""
    if weights.attrs.get("network") == RnnShape.kind and "weight_oh" in weights:
        shape: Shape = RnnShape(weights.sizes["neuron"], weights.sizes["output"])
    elif weights.attrs.get("network") == TransformerShape.kind and "embed" in weights:
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
    """The network whose sizes the first tensors have."""
    for name, held in tensors.items():
        if held.ndim != 2 and "bias" not in name:
            raise WeightsError(
                f"{where}: expected matrices, found {name} of shape {list(held.shape)}; is it of AlgZoo?"
            )
        if max(held.shape, default=0) > LARGEST or 0 in held.shape:
            raise WeightsError(
                f"{where}: expected sizes from 1 to {LARGEST}, found {name} of shape {list(held.shape)}; is "
                "it of AlgZoo?"
            )
    if "linear.weight" in tensors:
        outputs, hidden = tensors["linear.weight"].shape
        return RnnShape(hidden, outputs)
    if all(name in tensors for name in ("embed.weight", "pos_embed.weight", "unembed.weight")):
        inputs, hidden = tensors["embed.weight"].shape
        if heads < 1 or hidden % heads:
            raise WeightsError(f"{where}: expected heads that divide the width {hidden}, found {heads}")
        layers = {found[1] for name in tensors if (found := re.match(r"attns\.(\d+)\.", name))}
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
