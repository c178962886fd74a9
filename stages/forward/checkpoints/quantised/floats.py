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
    """Blocks of float8. Raises ConfigError without the size of a block."""
    block = block_size("fp8", config.get("weight_block_size"))

    def find(source: TensorSource) -> dict[str, Packed]:
        held = grouped(source, "weight_scale_inv", ("weight",))
        return {
            f"{module}.weight": Packed(source.entries[parts["weight"]].shape, parts)
            for module, parts in held.items()
        }

    def plain(packed: Packed, parts: Mapping[str, Tensor]) -> Tensor:
        return blocks_of(parts["weight"].float(), parts["weight_scale_inv"].float(), block)

    return Scheme("fp8", 1, {"block": list(block)}, find, plain)


def block_size(method: str, found: Any) -> tuple[int, ...]:
    """(rows, columns) of a block, as a configuration lists them. Raises ConfigError for anything else."""
    if not isinstance(found, list) or len(found) != 2 or not all(isinstance(n, int) and n > 0 for n in found):
        raise ConfigError(
            f"quantization_config: expected the block of {method} as [rows, columns], found "
            f"{found!r}; {ADVICE}"
        )
    return tuple(found)


def blocks_of(weight: Tensor, scales: Tensor, block: tuple[int, ...]) -> Tensor:
    """A matrix multiplied by one scale for each block of its rows and columns; the last may be cut short."""
    rows, columns = weight.shape[-2:]
    expected = (-(-rows // block[0]), -(-columns // block[1]))
    if tuple(scales.shape[-2:]) != expected:
        raise ValueError(f"expected scales {list(expected)} for blocks of {list(block)}")
    spread = scales.repeat_interleave(block[0], -2).repeat_interleave(block[1], -1)
    return weight * spread[..., :rows, :columns]


def mxfp4(config: Mapping[str, Any]) -> Scheme:
    """Matrices of experts [expert, in, out] as blocks and scales; there is nothing to set."""
    return Scheme("mxfp4", 1, {}, _experts, _of_experts)


def _experts(source: TensorSource) -> dict[str, Packed]:
    found = {}
    for name, entry in source.entries.items():
        weight = name.removesuffix("_blocks")
        if weight == name:
            continue
        scales = f"{weight}_scales"
        if scales not in source.entries or len(entry.shape) != 4 or entry.shape[3] != 16:
            raise WeightsError(
                f"expected {name!r} as [expert, out, group, 16] beside {scales!r}, found "
                f"{list(entry.shape)}; "
                "fetch the checkpoint again"
            )
        shape = (entry.shape[0], entry.shape[2] * 32, entry.shape[1])
        found[weight] = Packed(shape, {"blocks": name, "scales": scales})
    return found


def _of_experts(packed: Packed, parts: Mapping[str, Tensor]) -> Tensor:
    import torch

    pairs = parts["blocks"].long()
    codes = torch.stack([pairs & 15, pairs >> 4], -1).flatten(-2)
    values = torch.tensor([*FP4, *(-value for value in FP4)])[codes]
    powers = parts["scales"].to(torch.int32) - 127
    return torch.ldexp(values, powers.unsqueeze(-1)).flatten(-2).transpose(1, 2)
