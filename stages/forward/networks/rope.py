"""Rotary position embeddings: tables of cosines and sines for each scaling scheme.

Knows one RopeConfig and a sequence length; knows no layers. The first ``rope.dim`` entries of a head turn (Su
et al. 2021, RoFormer, eq. 15): halves with each other, or neighbours where it is interleaved. Frequencies are
computed in float64 and tables in float32 whatever the model's dtype, because a bfloat16 cannot tell position
257 from 256. In float64, which is there to be compared, frequencies are rounded as the reference rounds them:
to float32, step by step.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from ..architectures.transformer import RopeConfig
from .gradients import is_recorded
from .transfer import to_device


def rope_tables(
    rope: RopeConfig, length: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """cos, sin, each float32 [length, rope.dim / 2], for positions 0 … length-1. dtype: of what is turned.

    Schemes "dynamic" (NTK: the base grows with the sequence) and "longrope" (Phi-3: short or long factors)
    depend on the length of the whole sequence, so tables of a longer one cannot be cut down to a shorter
    one.
    """
    computed_in = torch.float32 if dtype == torch.float64 else torch.float64
    # Frequencies that come from a checkpoint are not compared when two configurations are, so their tables
    # are not cached.
    compute = _tables if rope.frequencies is not None else _cached_tables
    cos, sin = compute(rope, length, computed_in)
    return to_device(cos, device), to_device(sin, device)


def _tables(rope: RopeConfig, length: int, computed_in: torch.dtype) -> tuple[Tensor, Tensor]:
    """`rope_tables` on the CPU, with angles computed in a dtype."""
    positions = torch.arange(length, dtype=computed_in)
    angles = torch.outer(positions, inverse_frequencies(rope, length, computed_in)).float()
    magnitude = rope.magnitude
    turning = -magnitude if rope.is_backwards else magnitude
    return angles.cos() * magnitude, angles.sin() * turning


# A batch follows another of the same length. Measured beside a GPU: sines and cosines of 512 positions wake
# all threads of the CPU and take 3 ms, a fifteenth of the batch they are for.
_cached_tables = lru_cache(maxsize=4)(_tables)


def inverse_frequencies(rope: RopeConfig, length: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Radians per position [rope.dim / 2], computed in `dtype`, each step as the reference takes it; those of
    the checkpoint where it tells."""
    if rope.frequencies is not None:
        told: Tensor = rope.frequencies.to("cpu", dtype)
        return told
    exponent = torch.arange(0, rope.dim, 2, dtype=dtype) / rope.dim
    plain: Tensor = 1 / rope.theta**exponent
    if rope.scheme == "linear":
        return plain / rope.factor
    if rope.scheme == "proportional":
        plain[rope.rotated_pairs :] = 0
        return plain / rope.factor
    if rope.scheme == "dynamic":
        return 1 / _ntk_base(rope, length) ** exponent
    if rope.scheme == "llama3":
        return _llama3(rope, plain)
    if rope.scheme == "yarn":
        return _yarn(rope, plain)
    if rope.scheme == "longrope":
        factors = rope.long_factor if length > _original(rope) else rope.short_factor
        return 1 / (torch.tensor(factors, dtype=dtype) * rope.theta**exponent)
    return plain


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """x [..., S, dh] with its first 2 * cos.shape[-1] entries rotated by position; which of them turn
    together, see RopeConfig."""
    turning = 2 * cos.shape[-1]
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    left, right = _pairs(x[..., :turning], interleaved)
    if is_recorded(x):
        sides = [left * cos - right * sin, right * cos + left * sin]
        joined = torch.stack(sides, dim=-1).flatten(-2) if interleaved else torch.cat(sides, dim=-1)
        return torch.cat([joined, x[..., turning:]], dim=-1)
    # Into one new tensor: parts that are made first and joined then take two to three times as long.
    turned = x.new_empty(x.shape)
    into_left, into_right = _pairs(turned[..., :turning], interleaved)
    _mix(left, cos, right, -sin, into_left)
    _mix(right, cos, left, sin, into_right)
    turned[..., turning:] = x[..., turning:]
    return turned


def _pairs(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Views of the two sides of x [..., dim] that turn together, each [..., dim / 2]."""
    half = x.shape[-1] // 2
    return (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])


def _mix(x: Tensor, cos: Tensor, y: Tensor, sin: Tensor, out: Tensor) -> None:
    """x cos + y sin. Narrow dtypes round every product, as the reference implementations do."""
    torch.mul(x, cos, out=out)
    if x.dtype == torch.float32:
        out.addcmul_(y, sin)
    else:
        out.add_(y * sin)


def _original(rope: RopeConfig) -> int:
    if rope.original_max_position_embeddings is None:
        raise AssertionError(f"config.py admits scheme {rope.scheme!r} only with its original context length")
    return rope.original_max_position_embeddings


def _ntk_base(rope: RopeConfig, length: int) -> float:
    """The base that stretches the slowest frequency over the sequence (dynamic NTK scaling)."""
    original = _original(rope)
    stretched = rope.factor * max(length, original) / original - (rope.factor - 1)
    return float(rope.theta * stretched ** (rope.dim / (rope.dim - 2)))


def _yarn(rope: RopeConfig, plain: Tensor) -> Tensor:
    """Entries that turn often within the original context as they did, those that hardly turn slower by the
    factor, a linear blend between (YaRN, section 3.2)."""
    fast, slow = (_entry_of(rope, rotations) for rotations in rope.bounds)
    if rope.is_truncated:
        fast, slow = math.floor(fast), math.ceil(slow)
    fast, slow = max(fast, 0), min(slow, rope.dim - 1)
    width = slow - fast or 0.001
    places = torch.arange(rope.dim // 2, dtype=plain.dtype)
    slowed = ((places - fast) / width).clamp(0, 1)
    return plain / rope.factor * slowed + plain * (1 - slowed)


def _entry_of(rope: RopeConfig, rotations: float) -> float:
    """Which entry turns so often within the original context."""
    wavelengths = _original(rope) / (rotations * 2 * math.pi)
    return rope.dim * math.log(wavelengths) / (2 * math.log(rope.theta))


def _llama3(rope: RopeConfig, plain: Tensor) -> Tensor:
    """Slow frequencies divided by the factor, fast ones kept, a linear blend between (Llama 3.1 reference
    code)."""
    original = _original(rope)
    wavelength = 2 * math.pi / plain
    blend = (original / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    between = (1 - blend) * plain / rope.factor + blend * plain
    return torch.where(blend <= 0, plain / rope.factor, torch.where(blend >= 1, plain, between))
