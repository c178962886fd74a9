"""Norms: RMSNorm, Gemma's RMSNorm with weight 1 + w, and LayerNorm, with their hook points.

Statistics are float32 in any dtype. The fused kernel computes the output unless an intervention changes the
scale or the normalised value. If these are only captured, they are computed in addition, so that a capture
never changes a bit of the result.
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
    """x [B, S, D] normalised over D, with the norm's hook points.

    Arguments:
        x: residual stream [B, S, D].
        norm: gain and bias.
        kind: "rms", "gemma_rms" or "layer".
        eps: epsilon added to the variance or mean square.
        taps: hook points of the pass; those used are ``{name}_scale`` [B, S, 1] and ``{name}_normalized``
            [B, S, D].
        name: name of the norm in its hook points, such as "ln1".
        layer: number of the layer; None for a norm outside of layers.
    """
    scale_point, value_point = f"{name}_scale", f"{name}_normalized"

    def tapped(part: str, value: Tensor) -> Tensor:
        return taps(f"{name}_{part}", layer, value)

    if taps.changes(layer, scale_point, value_point):
        out = _by_parts(x, norm, kind, eps, tapped)
        if not is_beside_others():
            return out
        # Tokens that were not changed keep the bits of a run without interventions.
        unchanged = _by_parts(x, norm, kind, eps, lambda _, value: value)
        return torch.where((out == unchanged).all(-1, keepdim=True), apply_norm(x, norm, kind, eps), out)
    # For the captures alone: the output stays the fused kernel's, so that a capture changes no bit.
    if taps.captures(layer, scale_point, value_point):
        _by_parts(x, norm, kind, eps, tapped)
    return apply_norm(x, norm, kind, eps)


def apply_norm(x: Tensor, norm: NormWeights, kind: str, eps: float) -> Tensor:
    """x normalised over its last axis, without hook points; same shape.

    Arguments:
        x: values [..., width].
        norm: gain and bias [width].
        kind: "rms", "gemma_rms" or "layer".
        eps: epsilon added to the variance or mean square.
    """
    size = (x.shape[-1],)
    if kind == "layer":
        return F.layer_norm(x, size, norm.weight, norm.bias, eps)
    if kind == "gemma_rms":
        wide = x.float()
        # Gemma rounds once, after the weight; Llama rounds before it (`_rms_norm`).
        unit = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return (unit * (1 + norm.weight.float())).to(x.dtype)
    out = _rms_norm(x, norm.weight, eps)
    return out if norm.bias is None else out + norm.bias


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm of x [..., width] with the gain `weight` [width]."""
    if x.dtype == torch.float32:
        is_unfused = x.device.type == "cpu" and not is_recorded(x, weight)
        return _rms_norm_cpu(x, weight, eps) if is_unfused else F.rms_norm(x, (x.shape[-1],), weight, eps)
    # Rounded to the model's dtype before the weight, as in transformers.
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def _rms_norm_cpu(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm of x [..., width] in half the time of F.rms_norm on a CPU, where torch has no fused kernel for
    it and reads memory more often. Not for tensors that need gradients, as it works in place."""
    norms = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    scale = norms.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    out: Tensor = (x * scale).mul_(weight)
    return out


def _by_parts(
    x: Tensor, norm: NormWeights, kind: str, eps: float, tapped: Callable[[str, Tensor], Tensor]
) -> Tensor:
    """Norm of x [..., width] in separate steps, so that hook points can be between them.

    Arguments:
        x: values to normalise.
        norm: gain and bias [width].
        kind: "rms", "gemma_rms" or "layer".
        eps: epsilon added to the variance or mean square.
        tapped: function ("scale" or "normalized", value there) -> value to continue with.
    """
    # torch's layer norm keeps float64; transformers' RMS norms always compute in float32.
    wide = x if kind == "layer" and x.dtype == torch.float64 else x.float()
    if kind == "layer":
        wide = wide - wide.mean(-1, keepdim=True)
    scale = tapped("scale", (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt().to(x.dtype))
    unit = tapped("normalized", (wide / scale.to(wide.dtype)).to(x.dtype))
    weighted = unit * (1 + norm.weight if kind == "gemma_rms" else norm.weight)
    return weighted if norm.bias is None else weighted + norm.bias
