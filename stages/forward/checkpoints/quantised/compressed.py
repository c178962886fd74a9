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
    """Scheme of a checkpoint whose weights are all quantised alike.

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
                f"quantization_config: expected no {key} of {method}, found {setting!r}; {ADVICE}"
            )
    groups = config.get("config_groups")
    kinds = [
        {
            key: (group.get("weights") or {}).get(key)
            for key in ("num_bits", "type", "strategy", "block_structure")
        }
        for group in (groups or {}).values()
        if isinstance(group, dict)
    ]
    if not kinds or any(kind != kinds[0] for kind in kinds):
        raise ConfigError(
            f"quantization_config: expected one kind of weights in config_groups of {method}, found "
            f"{len(kinds)}; {ADVICE}"
        )
    kind = kinds[0]
    packs = form == "pack-quantized"
    bits = require(method, kind, "num_bits", (4, 8), None)
    require(method, kind, "type", ("int",) if packs or form == "int-quantized" else ("int", "float"), None)
    strategy = require(method, kind, "strategy", ("tensor", "channel", "group", "block"), None)
    block = block_size(method, kind["block_structure"]) if strategy == "block" else ()

    def find(source: TensorSource) -> dict[str, Packed]:
        return _packed(source, bits) if packs else _whole(source)

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

    return Scheme(method, 1, {"format": form, **kind}, find, plain)


def _packed(source: TensorSource, bits: int) -> dict[str, Packed]:
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


def _whole(source: TensorSource) -> dict[str, Packed]:
    modules = grouped(source, "weight_scale", ("weight",), _REST)
    return {
        f"{module}.weight": Packed(source.entries[parts["weight"]].shape, parts)
        for module, parts in modules.items()
    }


def _scaled(values: Tensor, scales: Tensor, zeros: Tensor | None, group: Tensor | None) -> Tensor:
    """Dequantise values [out, in] with scales and zeros [1], [out, 1] or [out, group]."""
    import torch

    numbers = values.float()
    if scales.ndim < 2 or scales.shape[1] == 1:
        return (numbers if zeros is None else numbers - zeros.float()) * scales.float()
    width = numbers.shape[1]
    # compressed-tensors initialises weight_g_idx with -1 and leaves it so without activation ordering.
    plain = group is None or bool((group < 0).any())
    index = torch.arange(width) // -(-width // scales.shape[1]) if plain or group is None else group.long()
    numbers = numbers if zeros is None else numbers - zeros.float()[:, index]
    return numbers * scales.float()[:, index]
