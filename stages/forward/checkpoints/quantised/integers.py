"""GPTQ and AWQ: integers of few bits in int32 words, with a scale and a zero point per group of inputs.

w[o, i] = scale[g, o] (q[i, o] - zero[g, o]), where g is the group of input i: g_idx[i], or i // group_size
(Frantar et al., GPTQ, 2022; Lin et al., AWQ, 2023). GPTQ packs inputs into words; AWQ packs outputs, in an
order of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .....store.errors import ConfigError
from ..source import TensorSource
from .scheme import Packed, Scheme, grouped, unpacked
from .settings import ADVICE, require

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["awq", "gptq"]

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Index within an AWQ word of outputs 0 to 7."""


def gptq(config: Mapping[str, Any]) -> Scheme:
    """Quantisation scheme of GPTQ weights: 2, 4 or 8 bits, format "gptq" or "gptq_v2".

    Arguments:
        config: quantization_config of config.json.

    Raises:
        ConfigError: for other settings.
    """
    bits = require("gptq", config, "bits", (2, 4, 8), None)
    form = require("gptq", config, "checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    if config.get("dynamic"):
        raise ConfigError(
            "quantization_config: expected gptq with the same settings for all modules, found settings per "
            f"module (dynamic); {ADVICE}"
        )
    # The first format stores zero points minus one, modulo 2^bits.
    zero_offset = 1 if form == "gptq" else 0

    def find(source: TensorSource) -> dict[str, Packed]:
        modules = grouped(source, "qweight", ("qzeros", "scales"), ("g_idx",))
        shapes = {module: source.entries[parts["qweight"]].shape for module, parts in modules.items()}
        return {
            f"{module}.weight": Packed((shapes[module][1], shapes[module][0] * 32 // bits), parts)
            for module, parts in modules.items()
        }

    def plain(packed: Packed, parts: Mapping[str, Tensor]) -> Tensor:
        # The stored zero point of the first format wraps around, hence the mask.
        zeros = (unpacked(parts["qzeros"], bits, 1) + zero_offset) & ((1 << bits) - 1)
        values = unpacked(parts["qweight"], bits, 0)
        return _dequantise_groups(values, zeros, parts["scales"], parts.get("g_idx"))

    return Scheme("gptq", 1, {"bits": bits, "format": form}, find, plain)


def awq(config: Mapping[str, Any]) -> Scheme:
    """Quantisation scheme of AWQ weights of 4 bits, as packed for the "gemm" kernel.

    Arguments:
        config: quantization_config of config.json.

    Raises:
        ConfigError: for other settings.
    """
    bits = require("awq", config, "bits" if "bits" in config else "w_bit", (4,), None)
    # Other versions pack words in another order.
    require("awq", {"version": str(config.get("version") or "gemm").lower()}, "version", ("gemm",), "gemm")
    require("awq", config, "zero_point", (True,), True)

    def find(source: TensorSource) -> dict[str, Packed]:
        modules = grouped(source, "qweight", ("qzeros", "scales"))
        shapes = {module: source.entries[parts["qweight"]].shape for module, parts in modules.items()}
        return {
            f"{module}.weight": Packed((shapes[module][1] * 8, shapes[module][0]), parts)
            for module, parts in modules.items()
        }

    def plain(packed: Packed, parts: Mapping[str, Tensor]) -> Tensor:
        values, zeros = (_in_output_order(unpacked(parts[role], bits, 1)) for role in ("qweight", "qzeros"))
        return _dequantise_groups(values, zeros, parts["scales"], None)

    return Scheme("awq", 1, {"bits": bits}, find, plain)


def _in_output_order(values: Tensor) -> Tensor:
    """Reorder the columns that were unpacked from AWQ words, so that column o is output o."""
    words: Tensor = values.unflatten(1, (-1, 8))
    return words[..., list(AWQ_ORDER)].flatten(1)


def _dequantise_groups(values: Tensor, zeros: Tensor, scales: Tensor, group: Tensor | None) -> Tensor:
    """Dequantise to a weight [out, in].

    Arguments:
        values: quantised integers [in, out].
        zeros: zero points [group, out].
        scales: scales [group, out].
        group: group of each input, [in]; None for consecutive groups of equal size.
    """
    import torch

    if group is None:
        # Without g_idx, groups are consecutive inputs of equal number.
        group = torch.arange(values.shape[0]) // (values.shape[0] // scales.shape[0])
    index = group.long()
    return ((values - zeros[index]).float() * scales.float()[index]).T
