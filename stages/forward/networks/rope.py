"""Rotary position embeddings (RoPE): tables of cosines and sines for each scaling scheme.

The first ``rope.dim`` entries of a head are rotated in pairs (Su et al. 2021, RoFormer, eq. 15): entry i of
the first half with entry i of the second, or adjacent entries if interleaved. Frequencies are computed in
float64 and tables in float32 whatever the model's dtype, because bfloat16 cannot distinguish position 257
from 256. For models in float64, which exist for comparison, frequencies are computed in float32 as in the
reference.

Border: one RopeConfig and a sequence length; knows no layers.
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
    """Tables of cos and sin for positions 0 to length - 1.

    Arguments:
        rope: the rotary embedding.
        length: length of the sequence. With schemes "dynamic" (NTK: the base grows with the sequence) and
            "longrope" (Phi-3: short or long factors) all rows depend on it, so a longer table must not be
            cut to a shorter one.
        device: device of the tables.
        dtype: dtype of queries and keys.

    Returns:
        cos and sin, each float32 [length, rope.dim / 2].
    """
    computed_in = torch.float32 if dtype == torch.float64 else torch.float64
    # Frequencies from a checkpoint do not take part in the equality of configurations, so their tables must
    # not be cached by configuration.
    compute = _tables if rope.frequencies is not None else _cached_tables
    cos, sin = compute(rope, length, computed_in)
    return to_device(cos, device), to_device(sin, device)


def _tables(rope: RopeConfig, length: int, computed_in: torch.dtype) -> tuple[Tensor, Tensor]:
    """Tables of cos and sin for positions 0 to length - 1, each float32 [length, rope.dim / 2], on the CPU.

    Arguments:
        rope: the rotary embedding.
        length: length of the sequence.
        computed_in: dtype in which angles are computed.
    """
    positions = torch.arange(length, dtype=computed_in)
    angles = torch.outer(positions, inverse_frequencies(rope, length, computed_in)).float()
    # In the tables, the factor of yarn and longrope scales queries and keys, hence scores by its square.
    magnitude = rope.magnitude
    sign = -magnitude if rope.is_backwards else magnitude
    return angles.cos() * magnitude, angles.sin() * sign


# Consecutive batches often have the same length. Measured with a GPU: sines and cosines of 512 positions wake
# all threads of the CPU and take 3 ms, 1/15 of the time of the batch.
_cached_tables = lru_cache(maxsize=4)(_tables)


def inverse_frequencies(rope: RopeConfig, length: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Frequencies of rope: rotation in radians per position of each pair of entries, [rope.dim / 2], on the
    CPU.

    Arguments:
        rope: the rotary embedding; frequencies stored in the checkpoint are returned as they are.
        length: length of the sequence, for schemes that depend on it.
        dtype: dtype of the computation, in the same steps as transformers.
    """
    if rope.frequencies is not None:
        stored: Tensor = rope.frequencies.to("cpu", dtype)
        return stored
    exponent = torch.arange(0, rope.dim, 2, dtype=dtype) / rope.dim
    unscaled: Tensor = 1 / rope.theta**exponent
    if rope.scheme == "linear":
        return unscaled / rope.factor
    if rope.scheme == "proportional":
        # Frequency 0 leaves a pair unrotated: its cosine is 1 and its sine 0 at every position.
        unscaled[rope.rotated_pairs :] = 0
        return unscaled / rope.factor
    if rope.scheme == "dynamic":
        return 1 / _ntk_base(rope, length) ** exponent
    if rope.scheme == "llama3":
        return _llama3(rope, unscaled)
    if rope.scheme == "yarn":
        return _yarn(rope, unscaled)
    if rope.scheme == "longrope":
        # The length of the whole sequence decides: beyond the original context, early positions change too.
        divisors = rope.long_factor if length > _original_context(rope) else rope.short_factor
        return 1 / (torch.tensor(divisors, dtype=dtype) * rope.theta**exponent)
    return unscaled


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """Queries or keys with their first rope.dim entries rotated in pairs, by angles that depend on position;
    same shape.

    Arguments:
        x: queries or keys [..., S, dh].
        cos: cosines [S, rope.dim / 2].
        sin: sines [S, rope.dim / 2].
        interleaved: whether entries 2i and 2i + 1 form a pair, instead of i and i + rope.dim / 2.
    """
    n_rotated = 2 * cos.shape[-1]
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    a, b = _pairs(x[..., :n_rotated], interleaved)
    if is_recorded(x):
        sides = [a * cos - b * sin, b * cos + a * sin]
        joined = torch.stack(sides, dim=-1).flatten(-2) if interleaved else torch.cat(sides, dim=-1)
        return torch.cat([joined, x[..., n_rotated:]], dim=-1)
    # Written into one new tensor: separate parts that are concatenated take two to three times as long.
    rotated = x.new_empty(x.shape)
    out_a, out_b = _pairs(rotated[..., :n_rotated], interleaved)
    _mix(a, cos, b, -sin, out_a)
    _mix(b, cos, a, sin, out_b)
    rotated[..., n_rotated:] = x[..., n_rotated:]
    return rotated


def _pairs(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Views of the two entries of each rotated pair of x [..., dim], each [..., dim / 2]."""
    half = x.shape[-1] // 2
    return (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])


def _mix(x: Tensor, cos: Tensor, y: Tensor, sin: Tensor, out: Tensor) -> None:
    """Write x cos + y sin into `out`. In 16-bit dtypes every product is rounded, as in transformers."""
    torch.mul(x, cos, out=out)
    if x.dtype == torch.float32:
        out.addcmul_(y, sin)
    else:
        out.add_(y * sin)


def _original_context(rope: RopeConfig) -> int:
    """Context length in positions before the extension by the rope scheme."""
    if rope.original_max_position_embeddings is None:
        raise AssertionError(
            f"expected original_max_position_embeddings in a RopeConfig with scheme {rope.scheme!r}, found "
            "None"
        )
    return rope.original_max_position_embeddings


def _ntk_base(rope: RopeConfig, length: int) -> float:
    """Base of the frequencies in dynamic NTK scaling, which grows with the sequence; length: in positions."""
    original = _original_context(rope)
    # With exponent d / (d - 2) the lowest frequency, theta^(-(d - 2) / d), is divided by exactly the stretch.
    stretched = rope.factor * max(length, original) / original - (rope.factor - 1)
    return float(rope.theta * stretched ** (rope.dim / (rope.dim - 2)))


def _yarn(rope: RopeConfig, unscaled: Tensor) -> Tensor:
    """Frequencies of the scheme YaRN, [rope.dim / 2]: high ones unchanged, low ones divided by the factor, a
    linear blend between (Peng et al., YaRN, 2023, section 3.2). unscaled: frequencies of plain rope."""
    fast, slow = (_pair_with_rotations(rope, rotations) for rotations in rope.bounds)
    # gpt-oss (`truncate` false) blends between the fractional indices.
    if rope.is_truncated:
        fast, slow = math.floor(fast), math.ceil(slow)
    fast, slow = max(fast, 0), min(slow, rope.dim - 1)
    # If both bounds are the same index, 0.001 avoids a division by zero, as in transformers.
    width = slow - fast or 0.001
    pairs = torch.arange(rope.dim // 2, dtype=unscaled.dtype)
    slowed_share = ((pairs - fast) / width).clamp(0, 1)
    return unscaled / rope.factor * slowed_share + unscaled * (1 - slowed_share)


def _pair_with_rotations(rope: RopeConfig, rotations: float) -> float:
    """Index (fractional) of the pair of entries that makes a given number of rotations within the original
    context."""
    inverse_frequency = _original_context(rope) / (rotations * 2 * math.pi)
    return rope.dim * math.log(inverse_frequency) / (2 * math.log(rope.theta))


def _llama3(rope: RopeConfig, unscaled: Tensor) -> Tensor:
    """Frequencies of the scheme llama3 (Llama 3.1), [rope.dim / 2]: low ones divided by the factor, high ones
    unchanged, a linear blend between. unscaled: frequencies of plain rope."""
    original, low, high = _original_context(rope), rope.low_freq_factor, rope.high_freq_factor
    wavelength = 2 * math.pi / unscaled
    blend = (original / wavelength - low) / (high - low)
    scaled = unscaled / rope.factor
    between = (1 - blend) * unscaled / rope.factor + blend * unscaled
    return torch.where(blend <= 0, scaled, torch.where(blend >= 1, unscaled, between))
