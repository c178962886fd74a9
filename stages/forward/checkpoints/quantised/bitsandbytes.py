"""bitsandbytes: blocks of 4-bit codes with one absolute maximum each, and rows of int8.

4 bits (Dettmers et al., QLoRA, 2023, section 3): w = code[q] absmax[block], two q per byte, the first in the
high half; with double quantisation absmax = code2[q2] absmax2[block2] + offset. 8 bits (Dettmers et al.,
LLM.int8(), 2022): w[o, i] = q[o, i] SCB[o] / 127. The library's own int8 product also rounds activations,
which is not done here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .....store.errors import ConfigError, WeightsError
from .....store.exchange.outside import json_value
from ..source import TensorSource
from .scheme import Packed, Scheme, grouped
from .settings import ADVICE, require

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["bitsandbytes"]

STATES = ("nf4", "fp4")
_NESTED = ("weight.nested_absmax", "weight.nested_quant_map")


def bitsandbytes(config: Mapping[str, Any]) -> Scheme:
    """Quantisation scheme of bitsandbytes weights: nf4, fp4 or int8.

    Arguments:
        config: quantization_config of config.json.

    Raises:
        ConfigError: for settings that select neither or both of 4 and 8 bits, or another storage.
    """
    four, eight = (bool(config.get(f"load_in_{bits}bit")) for bits in (4, 8))
    if four == eight:
        raise ConfigError(
            "quantization_config: expected either load_in_4bit or load_in_8bit of bitsandbytes, found "
            f"{'both' if four else 'neither'}; {ADVICE}"
        )
    if eight:
        return Scheme("bitsandbytes int8", 1, {}, _find_int8, _dequantise_int8)
    # "fp4" is the library's default where the key is missing.
    kind = require("bitsandbytes", config, "bnb_4bit_quant_type", STATES, "fp4")
    storage = config.get("bnb_4bit_quant_storage") or "uint8"
    require(
        "bitsandbytes", {"bnb_4bit_quant_storage": storage}, "bnb_4bit_quant_storage", ("uint8",), "uint8"
    )
    return Scheme(
        "bitsandbytes 4 bit", 1, {"type": kind}, lambda source: _find_4bit(source, kind), _dequantise_4bit
    )


def _find_int8(source: TensorSource) -> dict[str, Packed]:
    modules = grouped(source, "SCB", ("weight",), ("weight_format",))
    return {
        f"{module}.weight": Packed(source.entries[parts["weight"]].shape, parts)
        for module, parts in modules.items()
    }


def _dequantise_int8(packed: Packed, parts: Mapping[str, Tensor]) -> Tensor:
    layout = parts.get("weight_format")
    if layout is not None and int(layout) != 0:
        # Other layouts are interleaved for tensor cores; rows would be read in the wrong order.
        raise ValueError(f"expected weight_format 0 (rows), found {int(layout)}")
    return parts["weight"].float() * (parts["SCB"].float() / 127)[:, None]


def _find_4bit(source: TensorSource, kind: str) -> dict[str, Packed]:
    state = f"weight.quant_state.bitsandbytes__{kind}"
    modules = grouped(source, state, ("weight", "weight.absmax", "weight.quant_map"), _NESTED)
    weights = {}
    for module, parts in modules.items():
        facts = _quantisation_state(source, parts[state])
        weights[f"{module}.weight"] = Packed(tuple(facts["shape"]), parts, facts)
    return weights


def _quantisation_state(source: TensorSource, name: str) -> dict[str, Any]:
    """Shape and block size of a 4-bit weight, from JSON that is stored as the bytes of a tensor."""
    stored = source.mapped(name)
    if stored is None:
        with source.opened() as take:
            stored = take(name).numpy()
    try:
        state = json_value(bytes(stored))
        # Only checks: these are the numbers that dequantising reads later.
        for key in ("blocksize", *(("nested_blocksize",) if "nested_offset" in state else ())):
            int(state[key])
        for size in state["shape"]:
            int(size)
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise WeightsError(
            f"expected the quantisation state of bitsandbytes as JSON in tensor {name!r}, found other bytes "
            f"({error!r}); fetch the checkpoint again"
        ) from error
    return dict(state)


def _dequantise_4bit(packed: Packed, parts: Mapping[str, Tensor]) -> Tensor:
    import torch

    facts, absmax = packed.facts, parts["weight.absmax"]
    if "nested_offset" in facts:
        # Double quantisation (QLoRA, section 3): absolute maxima are 8-bit codes with scales of their own.
        outer_scales = parts["weight.nested_absmax"].float().repeat_interleave(facts["nested_blocksize"])
        inner_values = parts["weight.nested_quant_map"].float()[absmax.long()]
        absmax = inner_values * outer_scales[: len(inner_values)] + facts["nested_offset"]
    pairs = parts["weight"].reshape(-1).long()
    count = torch.Size(packed.shape).numel()
    # The first number of a byte is in its high half.
    codes = torch.stack([pairs >> 4, pairs & 15], 1).reshape(-1)
    values = parts["weight.quant_map"].float()[codes][:count]
    # The last block may be incomplete, hence the cut to `count`.
    scales = absmax.float().repeat_interleave(facts["blocksize"])[:count]
    return (values * scales).reshape(packed.shape)
