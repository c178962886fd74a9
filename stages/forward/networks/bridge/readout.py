"""Find the readout of a model: final norm and LM head, if logits = head(norm(last stream)), scaled or
soft-capped.

Candidates are modules that take the last stream in a traced pass. The readout is recomputed with mizarr's own
norm and product, and must give the model's logits.

Border: modules, states and names of tensors in safetensors files.
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
from .examined import agree
from .parts import is_close
from .trace import Call, same

__all__ = ["find_readout"]

KINDS: tuple[Literal["rms", "gemma_rms", "layer"], ...] = ("layer", "rms", "gemma_rms")


def find_readout(
    module: nn.Module, calls: Sequence[Call], last: Tensor, logits: Tensor, files: Sequence[Path]
) -> FoundReadout | None:
    """Final norm and LM head of a model, if they give its logits from the output of the last layer; None if
    the logits are computed in another way.

    Arguments:
        module: the model.
        calls: traced calls of a pass.
        last: output of the last layer in that pass, [B, S, D].
        logits: logits of that pass, [B, S, V].
        files: safetensors files of the checkpoint.
    """
    untyped: Any = module
    head = untyped.get_output_embeddings() if hasattr(module, "get_output_embeddings") else None
    if not isinstance(head, nn.Linear) or head.weight.shape != (logits.shape[-1], last.shape[-1]):
        return None
    for path, kind, eps, weights in _norms(module, calls, last):
        products = F.linear(apply_norm(last, weights, kind, eps), head.weight, head.bias)
        cap_and_scale = _cap_and_scale(products, logits, module)
        if cap_and_scale is None:
            continue
        cap, scale = cap_and_scale
        names = {id(value): name for name, value in module.named_parameters(remove_duplicate=False)}
        tensor_names = [
            "" if value is None else _name_in_files(names[id(value)], value, files)
            for value in (weights.weight, head.weight, weights.bias, head.bias)
        ]
        if None in tensor_names:
            return None
        norm, unembed, norm_bias, head_bias = map(str, tensor_names)
        return FoundReadout(path, kind, eps, norm, unembed, norm_bias, head_bias, cap, scale)
    return None


def _norms(
    module: nn.Module, calls: Sequence[Call], last: Tensor
) -> Iterator[tuple[str, Literal["rms", "gemma_rms", "layer"], float, NormWeights]]:
    """(path, kind, epsilon, weights) of each module that takes the output of the last layer and computes a
    norm of a known kind; arguments as in `find_readout`."""
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
            normed = apply_norm(last, weights, kind, eps)
            if any(is_close(normed, result) for result in call.made.values()):
                yield call.path, kind, eps, weights
                break


def _cap_and_scale(products: Tensor, logits: Tensor, module: nn.Module) -> tuple[float | None, float] | None:
    """(soft cap or None, scale) that turn the head's products into the model's logits, both [B, S, V]; None
    if no cap and no scale do."""
    config: Any = module.config
    cap = getattr(config.get_text_config(), "final_logit_softcapping", None)
    if cap and agree(cap * torch.tanh(products / cap), logits):
        return float(cap), 1.0
    if agree(products, logits):
        return None, 1.0
    # Least-squares fit of one factor.
    scale = float((products * logits).double().sum() / products.double().square().sum())
    return (None, scale) if agree(products * scale, logits) else None


def _name_in_files(name: str, value: Tensor, files: Sequence[Path]) -> str | None:
    """Name of the checkpoint tensor that holds a parameter's numbers; None if no tensor does.

    Names can differ: a base model's tensors lack a prefix or have one more, and a tied head is stored as the
    embedding.

    Arguments:
        name: Name of the parameter in the model.
        value: The parameter.
        files: Safetensors files of the checkpoint.
    """
    candidates = []
    for path in files:
        header, start = read_header(path)
        for tensor_name, entry in header.items():
            if tuple(entry["shape"]) == tuple(value.shape) and entry["dtype"] in FLOATS:
                candidates.append((_shared_end(tensor_name, name), tensor_name, path, entry, start))
    # Best matching names first. Only matrices may have unrelated names: norms of several layers may be equal.
    by_match = sorted(candidates, key=lambda candidate: (-candidate[0], candidate[1]))
    for n_shared_parts, tensor_name, path, entry, start in by_match:
        if n_shared_parts < 2 and value.ndim < 2:
            return None
        numbers = torch.from_numpy(mapped_tensor(path, entry, start, tensor_name).astype("float32"))
        if torch.equal(numbers, value.float().cpu()):
            return tensor_name
    return None


def _shared_end(a: str, b: str) -> int:
    """Number of equal parts at the ends of two dotted names: 2 for "a.norm.weight" and "b.norm.weight"."""
    count = 0
    for part_a, part_b in zip(reversed(a.split(".")), reversed(b.split(".")), strict=False):
        if part_a != part_b:
            break
        count += 1
    return count
