"""Output weights of attention heads and of neurons as datasets: projections, biases, norm weights.

They are read from checkpoint files, without torch if these hold plain numbers, and stored once per model. Two
datasets, because the weights of neurons are several times larger, and questions about heads do not need them:

"attention":
  W_O float32 [layer, head, d_head, hidden]   maps z of a head to its part of the attention output
  b_O [layer, hidden]                         if the model has it
  ln1_weight [layer, hidden]                  norm before attention
  ln1_post_weight [layer, hidden]             norm after attention, in families that have one
"mlp":
  W_out float32 [layer, mlp, hidden]          what one unit of a neuron's activation adds to the stream
  b_out, ln2_weight, ln2_post_weight          as above

Norm weights are the effective factors (Gemma's 1 + w is added here); a LayerNorm has its bias under the same
name with _bias. attrs: part, norm "rms" | "layer". Layers are read lazily.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ...store.errors import ConfigError
from ..forward.checkpoints.checkpoint import Checkpoint, Files, checkpoint_of
from .readout import effective_gain, read_weight

if TYPE_CHECKING:
    import numpy.typing as npt
    import xarray as xr

    from ...pipeline import SourceNode
    from ..forward.architectures.architecture import Architecture
    from ..forward.models.files import ModelFiles

__all__ = ["component_weights", "component_weights_node"]

Component = Literal["attention", "mlp"]
"""Name of one of the two datasets."""
VERSION = 1
"""Version of these datasets in their keys."""

# Variable -> name of the weight in `Architecture.tensors`.
FIELDS: dict[str, dict[str, str]] = {
    "attention": {
        "W_O": "o",
        "b_O": "o.bias",
        "ln1_weight": "ln1",
        "ln1_bias": "ln1.bias",
        "ln1_post_weight": "ln1_post",
        "ln1_post_bias": "ln1_post.bias",
    },
    "mlp": {
        "W_out": "down",
        "b_out": "down.bias",
        "ln2_weight": "ln2",
        "ln2_bias": "ln2.bias",
        "ln2_post_weight": "ln2_post",
        "ln2_post_bias": "ln2_post.bias",
    },
}
_MATRIX_DIMS = {"W_O": ("layer", "head", "d_head", "hidden"), "W_out": ("layer", "mlp", "hidden")}


def component_weights(
    weight_files: Files, config: Architecture, part: Component, *, dtype: str = "float32"
) -> xr.Dataset:
    """The output weights of a model's attention heads or neurons, as described in the module docstring.

    Arguments:
        weight_files: Checkpoint files; each layer is read when it is accessed.
        config: The architecture.
        part: "attention" or "mlp".
        dtype: Dtype in which the model computes; weights are rounded to it, as in the model.

    Raises:
        ConfigError: Unknown part, or a layer without attention or without an MLP.
        WeightsError: A tensor is missing or a file is incomplete.
    """
    import xarray as xr

    if part not in FIELDS:
        raise ConfigError(f"expected 'attention' or 'mlp' as the part of a model, found {part!r}")
    _require_in_every_layer(config, part)
    names = config.tensors.layers[0]
    variables: dict[str, Any] = {}
    for variable, field in FIELDS[part].items():
        if field in names:
            dims = _MATRIX_DIMS.get(variable, ("layer", "hidden"))
            read = _reader(checkpoint_of(weight_files).standing_in(config), field, variable, config, dtype)
            variables[variable] = (dims, _stacked_layers(read, config.num_layers))
    coords = {"layer": np.arange(config.num_layers)}
    norm = "layer" if config.norm_type == "layer" else "rms"
    return xr.Dataset(variables, coords=coords, attrs={"part": part, "norm": norm})


def component_weights_node(files: ModelFiles, part: Component, *, dtype: str = "float32") -> SourceNode:
    """Node of a computation graph that provides `component_weights`, stored once per model and dtype.

    Arguments:
        files: The model's files.
        part: "attention" or "mlp".
        dtype: Dtype in which the model computes; weights are rounded to it.
    """
    from ...pipeline import Estimate, SourceNode

    config, identity = files.architecture(), files.identity(dtype=dtype)
    units = config.width("z" if part == "attention" else "mlp_post_act")
    # A float32 number has 4 bytes.
    layer_bytes = 4 * units * config.hidden_size
    total_bytes = layer_bytes * config.num_layers
    params = {"weights": identity.weights, "config": identity.config, "part": part, "dtype": dtype}

    def make() -> xr.Dataset:
        return component_weights(files.checkpoint, config, part, dtype=dtype)

    # Bytes read, bytes written, peak memory.
    estimate = Estimate(total_bytes, total_bytes, 4 * layer_bytes)
    return SourceNode(f"{part}_weights", VERSION, params, make, estimate, (files.pinned,))


def _reader(
    checkpoint: Checkpoint, field: str, variable: str, config: Architecture, dtype: str
) -> Callable[[int], npt.NDArray[np.float32]]:
    """Function from a layer number to one of the layer's weights, float32, in the shape of the dataset.

    Arguments:
        checkpoint: The checkpoint.
        field: Name of the weight in `Architecture.tensors`.
        variable: Name of its variable in the dataset.
        config: The architecture.
        dtype: Dtype to which weights are rounded.
    """

    def read(layer: int) -> npt.NDArray[np.float32]:
        name, stored = config.tensors.in_layer(layer, field), config.tensors.layers[layer][field]
        values = read_weight(checkpoint, name, stored, dtype)
        if variable == "W_O":
            shape = [config.axis_sizes[axis] for axis in ("head", "d_head", "hidden")]
            # Checkpoints have [out, in]; columns are ordered by head, then d_head.
            return np.ascontiguousarray(values.T).reshape(shape)
        if variable == "W_out":
            return np.ascontiguousarray(values.T)
        return effective_gain(values, config.norm_type) if variable.endswith("_weight") else values

    return read


def _require_in_every_layer(config: Architecture, part: Component) -> None:
    """Raise ConfigError unless every layer has the part, because the arrays are stacked over layers."""
    matrix = "o" if part == "attention" else "down"
    layers_with_part = [weights for weights in config.tensors.layers if matrix in weights]
    if len(layers_with_part) < config.num_layers:
        raise ConfigError(
            "the output weights of heads or neurons can only be read from models with "
            f"{'attention' if part == 'attention' else 'an MLP'} in every layer; this {config.model_type!r} "
            f"model has it in {len(layers_with_part)} of {config.num_layers} layers"
        )


def _stacked_layers(read: Callable[[int], npt.NDArray[np.float32]], layers: int) -> Any:
    """Dask array [layer, …] whose layers `read` reads on access; the first is read now for shape and
    dtype."""
    import dask.array as da
    from dask.delayed import delayed

    # dask needs the shape before anything is computed.
    first_layer = read(0)
    delayed_read = delayed(read)
    return da.stack(
        [
            da.from_delayed(delayed_read(layer), first_layer.shape, first_layer.dtype)
            for layer in range(layers)
        ]
    )
