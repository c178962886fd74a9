"""Norms: RMSNorm, Gemma's RMSNorm with weight 1 + w, and LayerNorm, with their hook points.

Statistics are float32 in any dtype. The fused kernel gives the output unless someone *changes* a scale or a
normalised value; reading them computes them on the side, so that a capture never changes a bit of the
result.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ..hooks.taps import Taps
from .gradients import is_recorded
from .kernels.company import is_beside_others
from .weights import NormWeights


def normalise(
    x: Tensor, norm: NormWeights, kind: str, eps: float, taps: Taps, name: str, layer: int | None
) -> Tensor:
    """x [B, S, D] normalised over D; taps see ``{name}_scale`` [B, S, 1] and ``{name}_normalized`` [B, S,
    D]."""
    scale_point, value_point = f"{name}_scale", f"{name}_normalized"

    def tapped(kind: str, value: Tensor) -> Tensor:
        return taps(f"{name}_{kind}", layer, value)

    if taps.changes(layer, scale_point, value_point):
        made = _by_parts(x, norm, kind, eps, tapped)
        if not is_beside_others():
            return made
        # What was left alone is what it is where nobody changes anything.
        is_left = (made == _by_parts(x, norm, kind, eps, lambda _, value: value)).all(-1, keepdim=True)
        return torch.where(is_left, apply_norm(x, norm, kind, eps), made)
    if taps.captures(layer, scale_point, value_point):
        _by_parts(x, norm, kind, eps, tapped)
    return apply_norm(x, norm, kind, eps)


def apply_norm(x: Tensor, norm: NormWeights, kind: str, eps: float) -> Tensor:
    """The norm itself, over the last axis (of any size: QK-norm uses it on heads)."""
    size = (x.shape[-1],)
    if kind == "layer":
        return F.layer_norm(x, size, norm.weight, norm.bias, eps)
    if kind == "gemma_rms":
        wide = x.float()
        unit = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return (unit * (1 + norm.weight.float())).to(x.dtype)
    made = _rms_of(x, norm.weight, eps)
    return made if norm.bias is None else made + norm.bias


def _rms_of(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if x.dtype == torch.float32:
        by_hand = x.device.type == "cpu" and not is_recorded(x, weight)
        return _rms(x, weight, eps) if by_hand else F.rms_norm(x, (x.shape[-1],), weight, eps)
    # Rounded to the model's dtype before the weight, as the reference implementations do.
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """What F.rms_norm gives, in half its time: on a CPU it is no kernel of its own, and passes over memory
    more often. Not for tensors that need gradients: it writes over what it has made."""
    norms = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    scale = norms.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    made: Tensor = (x * scale).mul_(weight)
    return made


def _by_parts(
    x: Tensor, norm: NormWeights, kind: str, eps: float, tapped: Callable[[str, Tensor], Tensor]
) -> Tensor:
    """tapped: of "scale" or "normalized" and what it is, what to go on with."""
    # torch's own layer norm keeps float64; the reference's RMS norms compute in float32 whatever comes.
    wide = x if kind == "layer" and x.dtype == torch.float64 else x.float()
    if kind == "layer":
        wide = wide - wide.mean(-1, keepdim=True)
    scale = tapped("scale", (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt().to(x.dtype))
    unit = tapped("normalized", (wide / scale.to(wide.dtype)).to(x.dtype))
    weighted = unit * (1 + norm.weight if kind == "gemma_rms" else norm.weight)
    return weighted if norm.bias is None else weighted + norm.bias
