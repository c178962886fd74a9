"""What heads and neurons write with, as data: output projections, biases and norm weights of every layer.

Border: the tensors of a checkpoint that attribution needs beside the readout (stages/readout.py), read
straight from its safetensors files without torch and stored once per model; nothing that runs one. Two
datasets, as who asks about heads need not store the neurons' weights, which are several times larger:

"attention":
  W_O float32 [layer, head, d_head, hidden]   z of a head, through it, is the head's part of the attention
  output b_O [layer, hidden]                         only where the model has it
  ln1_weight [layer, hidden]                  of the norm before attention
  ln1_post_weight [layer, hidden]             of the norm after it, in families that have one
"mlp":
  W_out float32 [layer, mlp, hidden]          what one unit of each neuron's activation adds
  b_out, ln2_weight, ln2_post_weight          as above

Norm weights are as they multiply (Gemma's 1 + w is added up here); a norm with a bias (LayerNorm) has it
under the same name ending in _bias.  attrs: part, norm "rms" | "layer".  Layers are read one at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ..store.errors import ConfigError
from .readout import read_tensor, require_weights, rounded

if TYPE_CHECKING:
    import numpy.typing as npt
    import xarray as xr

    from ..pipeline import SourceNode
    from .forward.config import TransformerConfig
    from .forward.files import ModelFiles

__all__ = ["component_weights", "component_weights_node"]

Component = Literal["attention", "mlp"]

VERSION = 1
"""Moves when the datasets described above change."""

# Variable -> field of a layer's weights (forward/weights.py `layer_tensors`).
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
    weight_files: Sequence[Path], config: TransformerConfig, part: Component, *, dtype: str = "float32"
) -> xr.Dataset:
    """One of the datasets described above, lazy: a layer is read when it is asked for.

    dtype: what the model computes in; the weights are rounded to it, as the model's own are.
    Raises ConfigError for a part there is not, WeightsError when a tensor is missing or a file is not whole.
    """
    import xarray as xr

    from .forward.weights import layer_tensors

    if part not in FIELDS:
        raise ConfigError(f"expected part 'attention' or 'mlp', found {part!r}")
    names = layer_tensors(config)
    found: dict[str, Any] = {}
    for variable, field in FIELDS[part].items():
        if field in names:
            dims = _MATRIX_DIMS.get(variable, ("layer", "hidden"))
            read = _reader(weight_files, names[field][0], variable, config, dtype)
            found[variable] = (dims, _by_layer(read, config.num_layers))
    coords = {"layer": np.arange(config.num_layers)}
    norm = "layer" if config.norm_type == "layer" else "rms"
    return xr.Dataset(found, coords=coords, attrs={"part": part, "norm": norm})


def component_weights_node(files: ModelFiles, part: Component, *, dtype: str = "float32") -> SourceNode:
    """One of the datasets in a workflow's graph; stored once per model and dtype."""
    from ..pipeline import Estimate, SourceNode

    config, identity = files.transformer_config(), files.identity(dtype=dtype)
    units = config.num_attention_heads * config.head_dim if part == "attention" else config.intermediate_size
    layer = 4 * units * config.hidden_size
    size = layer * config.num_layers
    params = {"weights": identity.weights, "config": identity.config, "part": part, "dtype": dtype}

    def whole(layers: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        require_weights(files, identity)
        return layers

    def make() -> xr.Dataset:
        found = component_weights(files.weight_files, config, part, dtype=dtype)
        return found.map(
            lambda array: array.copy(data=array.data.map_blocks(whole, meta=array.data._meta)),
            keep_attrs=True,
        )

    return SourceNode(f"{part}_weights", VERSION, params, make, Estimate(size, size, 4 * layer))


def _reader(
    files: Sequence[Path], name: str, variable: str, config: TransformerConfig, dtype: str
) -> Callable[[int], npt.NDArray[np.float32]]:
    """What gives the tensor of a layer in the shape described above."""
    from .forward.weights import LAYER

    def read(layer: int) -> npt.NDArray[np.float32]:
        values = rounded(read_tensor(files, LAYER.format(layer) + name), dtype)
        if variable == "W_O":
            heads = config.num_attention_heads
            return np.ascontiguousarray(values.T).reshape(heads, config.head_dim, config.hidden_size)
        if variable == "W_out":
            return np.ascontiguousarray(values.T)
        if config.norm_type == "gemma_rms" and variable.endswith("_weight"):
            return values + np.float32(1)
        return values

    return read


def _by_layer(read: Callable[[int], npt.NDArray[np.float32]], layers: int) -> Any:
    """A dask array [layer, …] of what `read` gives; the first layer is read to know the shape."""
    import dask.array as da
    from dask.delayed import delayed

    first = read(0)
    later = delayed(read)
    return da.stack([da.from_delayed(later(layer), first.shape, first.dtype) for layer in range(layers)])
