"""A final norm and a head, where the logits are nothing else: head(norm(last stream)), scaled or soft-capped.

Modules are found by running: a norm is what takes the last stream and gives what the head takes. What is
found is computed anew by our own norm and product, and must give the model's logits.

Border: modules, states and the names of tensors in safetensors files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .....store.exchange.tensors import FLOATS, mapped_tensor, read_header
from ...architectures.bridge.found import FoundReadout
from ..norms import apply_norm
from ..weights import NormWeights
from .parts import is_close
from .trace import Call, same

__all__ = ["find_readout"]

KINDS: tuple[Literal["rms", "gemma_rms", "layer"], ...] = ("layer", "rms", "gemma_rms")
LOGITS = 1e-4
"""Largest difference of logits, relative to the largest; a head's sums are long."""


def find_readout(
    module: nn.Module, calls: Sequence[Call], last: Tensor, logits: Tensor, files: Sequence[Path]
) -> FoundReadout | None:
    """The readout of a model; None where its logits are made in another way.

    last: the stream [B, S, D] the last layer gave. logits: [B, S, V] of the same pass.
    """
    whole: Any = module
    head = whole.get_output_embeddings() if hasattr(module, "get_output_embeddings") else None
    if not isinstance(head, nn.Linear) or head.weight.shape != (logits.shape[-1], last.shape[-1]):
        return None
    for path, kind, eps, weights in _norms(module, calls, last):
        made = _how(F.linear(apply_norm(last, weights, kind, eps), head.weight, head.bias), logits, module)
        if made is None:
            continue
        cap, scale = made
        parameters = {id(value): name for name, value in module.named_parameters(remove_duplicate=False)}
        named = [
            "" if value is None else _in_files(parameters[id(value)], value, files)
            for value in (weights.weight, head.weight, weights.bias, head.bias)
        ]
        if None in named:
            return None
        norm, unembed, norm_bias, head_bias = map(str, named)
        return FoundReadout(path, kind, eps, norm, unembed, norm_bias, head_bias, cap, scale)
    return None


def _norms(
    module: nn.Module, calls: Sequence[Call], last: Tensor
) -> Iterator[tuple[str, Literal["rms", "gemma_rms", "layer"], float, NormWeights]]:
    """(path, kind, eps, weights) of every norm that takes the last stream, and computes as ours of a kind."""
    for call in calls:
        if not any(same(value, last) for value in call.taken.values()):
            continue
        norm = module.get_submodule(call.path)
        eps = next((getattr(norm, name) for name in ("eps", "variance_epsilon") if hasattr(norm, name)), None)
        weight, bias = getattr(norm, "weight", None), getattr(norm, "bias", None)
        if not isinstance(eps, float) or not isinstance(weight, nn.Parameter):
            continue
        weights = NormWeights(weight, bias if isinstance(bias, nn.Parameter) else None)
        for kind in KINDS:
            ours = apply_norm(last, weights, kind, eps)
            if any(is_close(ours, made) for made in call.made.values()):
                yield call.path, kind, eps, weights
                break


def _how(ours: Tensor, theirs: Tensor, module: nn.Module) -> tuple[float | None, float] | None:
    """(soft cap, scale) by which products become logits; None where neither does."""
    config: Any = module.config
    cap = getattr(config.get_text_config(), "final_logit_softcapping", None)
    if cap and _agree(cap * torch.tanh(ours / cap), theirs):
        return float(cap), 1.0
    if _agree(ours, theirs):
        return None, 1.0
    scale = float((ours * theirs).double().sum() / ours.double().square().sum())
    return (None, scale) if _agree(ours * scale, theirs) else None


def _agree(ours: Tensor, theirs: Tensor) -> bool:
    return bool(float((ours - theirs).abs().max()) <= LOGITS * float(theirs.abs().max()))


def _in_files(name: str, value: Tensor, files: Sequence[Path]) -> str | None:
    """What a checkpoint calls a parameter, whose bytes it must hold; None where it does not.

    A base model's tensors may lack a prefix that a parameter has, or have one more; a tied head is stored as
    the embedding.
    """
    found = []
    for path in files:
        header, start = read_header(path)
        for stored, entry in header.items():
            if tuple(entry["shape"]) == tuple(value.shape) and entry["dtype"] in FLOATS:
                found.append((_shared_end(stored, name), stored, path, entry, start))
    # A weight by another name is looked for among large ones alone: norms are many, and may be equal.
    for ending, stored, path, entry, start in sorted(found, key=lambda each: (-each[0], each[1])):
        if ending < 2 and value.ndim < 2:
            return None
        held = torch.from_numpy(mapped_tensor(path, entry, start, stored).astype("float32"))
        if torch.equal(held, value.float().cpu()):
            return stored
    return None


def _shared_end(one: str, other: str) -> int:
    """How many of the last parts of two dotted names agree."""
    count = 0
    for left, right in zip(reversed(one.split(".")), reversed(other.split(".")), strict=False):
        if left != right:
            break
        count += 1
    return count
