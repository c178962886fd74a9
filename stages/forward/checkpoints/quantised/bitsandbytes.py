"""bitsandbytes: blocks of 4-bit codes with a largest absolute value each, and rows of int8.

4 bits (Dettmers et al., QLoRA, 2023, section 3): w = code[q] absmax[block], two q in a byte, the first in the
high half; with double quantisation absmax = code2[q2] absmax2[block2] + offset. 8 bits (Dettmers et al.,
LLM.int8(), 2022): w[o, i] = q[o, i] SCB[o] / 127; the library's own matrix product rounds activations as
well, which is not done here.
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
    """nf4, fp4 or int8. Raises ConfigError for a configuration that is neither of 4 nor of 8 bits."""
    four, eight = (bool(config.get(f"load_in_{bits}bit")) for bits in (4, 8))
    if four == eight:
        raise ConfigError(
            "quantization_config: expected load_in_4bit or load_in_8bit of bitsandbytes, found "
            f"{'both' if four else 'neither'}; {ADVICE}"
        )
    if eight:
        return Scheme("bitsandbytes int8", 1, {}, _rows, _of_rows)
    kind = require("bitsandbytes", config, "bnb_4bit_quant_type", STATES, "fp4")
    storage = config.get("bnb_4bit_quant_storage") or "uint8"
    require(
        "bitsandbytes", {"bnb_4bit_quant_storage": storage}, "bnb_4bit_quant_storage", ("uint8",), "uint8"
    )
    return Scheme("bitsandbytes 4 bit", 1, {"type": kind}, lambda source: _blocks(source, kind), _of_blocks)


def _rows(source: TensorSource) -> dict[str, Packed]:
    held = grouped(source, "SCB", ("weight",), ("weight_format",))
    return {
        f"{module}.weight": Packed(source.entries[parts["weight"]].shape, parts)
        for module, parts in held.items()
    }


def _of_rows(packed: Packed, parts: Mapping[str, Tensor]) -> Tensor:
    layout = parts.get("weight_format")
    if layout is not None and int(layout) != 0:
        raise ValueError(f"expected weight_format 0 (rows), found {int(layout)}")
    return parts["weight"].float() * (parts["SCB"].float() / 127)[:, None]


def _blocks(source: TensorSource, kind: str) -> dict[str, Packed]:
    state = f"weight.quant_state.bitsandbytes__{kind}"
    held = grouped(source, state, ("weight", "weight.absmax", "weight.quant_map"), _NESTED)
    found = {}
    for module, parts in held.items():
        facts = _facts(source, parts[state])
        found[f"{module}.weight"] = Packed(tuple(facts["shape"]), parts, facts)
    return found


def _facts(source: TensorSource, name: str) -> dict[str, Any]:
    """The plain values of a quantisation state, which is JSON in the bytes of a tensor."""
    held = source.mapped(name)
    if held is None:
        with source.opened() as take:
            held = take(name).numpy()
    try:
        found = json_value(bytes(held))
        {
            key: int(found[key])
            for key in ("blocksize", *(("nested_blocksize",) if "nested_offset" in found else ()))
        }
        [int(size) for size in found["shape"]]
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise WeightsError(
            f"expected a quantisation state as JSON in {name!r}, found {error!r}; fetch the checkpoint again"
        ) from error
    return dict(found)


def _of_blocks(packed: Packed, parts: Mapping[str, Tensor]) -> Tensor:
    import torch

    facts, absmax = packed.facts, parts["weight.absmax"]
    if "nested_offset" in facts:
        outer = parts["weight.nested_absmax"].float().repeat_interleave(facts["nested_blocksize"])
        codes = parts["weight.nested_quant_map"].float()[absmax.long()]
        absmax = codes * outer[: len(codes)] + facts["nested_offset"]
    pairs = parts["weight"].reshape(-1).long()
    count = torch.Size(packed.shape).numel()
    values = parts["weight.quant_map"].float()[torch.stack([pairs >> 4, pairs & 15], 1).reshape(-1)][:count]
    scales = absmax.float().repeat_interleave(facts["blocksize"])[:count]
    return (values * scales).reshape(packed.shape)
