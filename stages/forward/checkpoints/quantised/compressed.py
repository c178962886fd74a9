"""compressed-tensors, written by llm-compressor and vLLM: integers, packed or not, and float8, with scales.

w = scale (q - zero), with a scale for the whole tensor, for each row, for each group of a row's inputs, or
for each block of rows and columns. Packed integers run along the inputs, with 2^(bits - 1) added; packed zero
points along the outputs. A server of such a model may also quantise activations; here they are not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .....store.errors import ConfigError
from ..source import TensorSource
from .floats import block_size, blocks_of
from .scheme import Packed, Scheme, grouped, unpacked
from .settings import ADVICE, require

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["compressed"]

FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
_SCALES = ("weight_scale",)
_REST = ("weight_zero_point", "weight_g_idx")


def compressed(config: Mapping[str, Any]) -> Scheme:
    """Quantisation scheme of a compressed-tensors checkpoint whose weights are all quantised alike.

    Arguments:
        config: quantization_config of config.json.

    Raises:
        ConfigError: for several kinds of weights, sparse weights, or a format that is not in FORMATS.
    """
    method = "compressed-tensors"
    form = require(method, config, "format", FORMATS, None)
    for key in ("sparsity_config", "transform_config"):
        setting = config.get(key) or {}
        # llm-compressor writes a sparsity_config of format "dense" for weights that are not sparse.
        if setting and setting.get("format") != "dense":
            raise ConfigError(
                f"quantization_config: expected {key} of {method} to be absent, found {setting!r}; {ADVICE}"
            )
    groups = config.get("config_groups")
    weight_settings = [
        {
            key: (group.get("weights") or {}).get(key)
            for key in ("num_bits", "type", "strategy", "block_structure")
        }
        for group in (groups or {}).values()
        if isinstance(group, dict)
    ]
    if not weight_settings or any(settings != weight_settings[0] for settings in weight_settings):
        raise ConfigError(
            f"quantization_config: expected config_groups of {method} to have one setting for all weights, "
            f"found {len(weight_settings)} settings; {ADVICE}"
        )
    settings = weight_settings[0]
    packs = form == "pack-quantized"
    bits = require(method, settings, "num_bits", (4, 8), None)
    number_types = ("int",) if packs or form == "int-quantized" else ("int", "float")
    require(method, settings, "type", number_types, None)
    strategy = require(method, settings, "strategy", ("tensor", "channel", "group", "block"), None)
    block = block_size(method, settings["block_structure"]) if strategy == "block" else ()

    def find(source: TensorSource) -> dict[str, Packed]:
        return _find_packed(source, bits) if packs else _find_unpacked(source)

    def plain(packed: Packed, parts: Mapping[str, Tensor]) -> Tensor:
        values, zeros = parts.get("weight"), parts.get("weight_zero_point")
        if packs:
            offset = 1 << (bits - 1)
            # Rows are padded to whole int32 words; the padding is cut off.
            values = (unpacked(parts["weight_packed"], bits, 1) - offset)[:, : packed.shape[1]]
            zeros = None if zeros is None else (unpacked(zeros, bits, 0) - offset)[: packed.shape[0]]
        assert values is not None  # one of the two is needed
        if strategy == "block":
            return blocks_of(values.float(), parts["weight_scale"].float(), block)
        return _scaled(values, parts["weight_scale"], zeros, parts.get("weight_g_idx"))

    return Scheme(method, 1, {"format": form, **settings}, find, plain)


def _find_packed(source: TensorSource, bits: int) -> dict[str, Packed]:
    weights = {}
    for module, parts in grouped(source, "weight_packed", _SCALES, ("weight_shape", *_REST)).items():
        rows, words = source.entries[parts["weight_packed"]].shape
        columns = words * 32 // bits
        if "weight_shape" in parts:
            with source.opened() as take:
                # Stored, because rows of packed words may be padded.
                rows, columns = (int(size) for size in take(parts["weight_shape"]))
        weights[f"{module}.weight"] = Packed((rows, columns), parts)
    return weights


def _find_unpacked(source: TensorSource) -> dict[str, Packed]:
    modules = grouped(source, "weight_scale", ("weight",), _REST)
    return {
        f"{module}.weight": Packed(source.entries[parts["weight"]].shape, parts)
        for module, parts in modules.items()
    }


def _scaled(values: Tensor, scales: Tensor, zeros: Tensor | None, group: Tensor | None) -> Tensor:
    """Dequantise to a weight [out, in].

    Arguments:
        values: quantised numbers [out, in].
        scales: [1] for the whole tensor, [out, 1] per row, or [out, group].
        zeros: zero points in the shape of `scales`; None for zero.
        group: group of each input, [in]; None for consecutive groups of equal size.
    """
    import torch

    numbers = values.float()
    if scales.ndim < 2 or scales.shape[1] == 1:
        return (numbers if zeros is None else numbers - zeros.float()) * scales.float()
    n_inputs, n_groups = numbers.shape[1], scales.shape[1]
    # compressed-tensors initialises weight_g_idx with -1 and leaves it so without activation ordering.
    if group is None or bool((group < 0).any()):
        group_size = -(-n_inputs // n_groups)
        index = torch.arange(n_inputs) // group_size
    else:
        index = group.long()
    numbers = numbers if zeros is None else numbers - zeros.float()[:, index]
    return numbers * scales.float()[:, index]
