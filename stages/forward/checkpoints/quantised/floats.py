"""Small floats with scales: fp8 in square blocks (DeepSeek-V3), and mxfp4 of experts (gpt-oss).

fp8: w = float8 scale[row block, column block] (DeepSeek-V3 technical report, 2024, section 3.3). mxfp4: 32
values in a row have one power of two, w = fp4 2^(scale - 127), two values in a byte, the first in the low
half (OCP Microscaling Formats specification 1.0, 2023, section 5.3).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .....store.errors import ConfigError, WeightsError
from ..source import TensorSource
from .scheme import Packed, Scheme, grouped
from .settings import ADVICE

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["block_size", "blocks_of", "fp8", "mxfp4"]

FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of e2m1 by its low three bits; the fourth is the sign."""


def fp8(config: Mapping[str, Any]) -> Scheme:
    """Quantisation scheme of float8 weights with a scale per block of rows and columns.

    Arguments:
        config: quantization_config of config.json.

    Raises:
        ConfigError: for settings without a block size.
    """
    block = block_size("fp8", config.get("weight_block_size"))

    def find(source: TensorSource) -> dict[str, Packed]:
        # DeepSeek's name; despite "inv" the scale multiplies.
        modules = grouped(source, "weight_scale_inv", ("weight",))
        return {
            f"{module}.weight": Packed(source.entries[parts["weight"]].shape, parts)
            for module, parts in modules.items()
        }

    def plain(packed: Packed, parts: Mapping[str, Tensor]) -> Tensor:
        return blocks_of(parts["weight"].float(), parts["weight_scale_inv"].float(), block)

    return Scheme("fp8", 1, {"block": list(block)}, find, plain)


def block_size(method: str, value: Any) -> tuple[int, ...]:
    """Check the block size of a quantisation method, and return it as (rows, columns).

    Arguments:
        method: name of the method, for the message.
        value: the configured value.

    Raises:
        ConfigError: unless it is a list of two positive integers.
    """
    if not isinstance(value, list) or len(value) != 2 or not all(isinstance(n, int) and n > 0 for n in value):
        raise ConfigError(
            f"quantization_config: expected the block size of {method} as [rows, columns], found "
            f"{value!r}; {ADVICE}"
        )
    return tuple(value)


def blocks_of(weight: Tensor, scales: Tensor, block: tuple[int, ...]) -> Tensor:
    """Multiply each block of a matrix by its scale; blocks at the edges may be incomplete.

    Arguments:
        weight: matrix [..., out, in] in float32.
        scales: [..., row block, column block].
        block: (rows, columns) of a block.
    """
    rows, columns = weight.shape[-2:]
    # Rounded up: the last block of rows or columns may be incomplete.
    n_blocks = (-(-rows // block[0]), -(-columns // block[1]))
    if tuple(scales.shape[-2:]) != n_blocks:
        raise ValueError(f"expected scales of shape {list(n_blocks)} for blocks of {list(block)}")
    scale_of_entry = scales.repeat_interleave(block[0], -2).repeat_interleave(block[1], -1)
    return weight * scale_of_entry[..., :rows, :columns]


def mxfp4(config: Mapping[str, Any]) -> Scheme:
    """Quantisation scheme of mxfp4 expert matrices [expert, in, out]; the format has no settings."""
    return Scheme("mxfp4", 1, {}, _find_mxfp4, _dequantise_mxfp4)


def _find_mxfp4(source: TensorSource) -> dict[str, Packed]:
    weights = {}
    for name, entry in source.entries.items():
        weight = name.removesuffix("_blocks")
        if weight == name:
            continue
        scales = f"{weight}_scales"
        if scales not in source.entries or len(entry.shape) != 4 or entry.shape[3] != 16:
            raise WeightsError(
                f"expected {name!r} of shape [expert, out, group, 16] and a tensor {scales!r}, found shape "
                f"{list(entry.shape)}{'' if scales in source.entries else f' and no {scales!r}'}; fetch the "
                "checkpoint again"
            )
        # Stored [expert, out, in / 32, 16 bytes of 2 values]; the model reads [expert, in, out].
        shape = (entry.shape[0], entry.shape[2] * 32, entry.shape[1])
        weights[weight] = Packed(shape, {"blocks": name, "scales": scales})
    return weights


def _dequantise_mxfp4(packed: Packed, parts: Mapping[str, Tensor]) -> Tensor:
    import torch

    pairs = parts["blocks"].long()
    codes = torch.stack([pairs & 15, pairs >> 4], -1).flatten(-2)
    values = torch.tensor([*FP4, *(-value for value in FP4)])[codes]
    # e8m0 scales: an exponent with bias 127 and no mantissa, so `ldexp` is exact.
    powers = parts["scales"].to(torch.int32) - 127
    return torch.ldexp(values, powers.unsqueeze(-1)).flatten(-2).transpose(1, 2)
