"""Self-attention of one layer: grouped queries, rope, soft cap, sliding window, and the hook points inside.

The fused kernel computes the output unless someone changes scores or patterns, or the family soft-caps its
scores (no fused kernel does). Someone who only reads them gets them computed on the side; the output keeps
every bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ....store.errors import InterventionError
from ..config import TransformerConfig
from ..interventions import Knockout
from ..taps import Taps
from ..weights import LayerWeights, Linear
from .norms import apply_norm
from .rope import rotate


@dataclass(frozen=True)
class Positions:
    """What depends on the positions of a batch alone, made once per pass and shared by its layers."""

    cos: Tensor
    sin: Tensor
    windows: dict[int | None, Tensor]
    """Bool [query, key], True where attention may look, for each window size of the model."""

    def allowed(self, window: int | None) -> Tensor | None:
        """None where the mask is plainly causal, which fused kernels know by themselves."""
        return self.windows.get(window)


def linear(x: Tensor, part: Linear | None) -> Tensor:
    """x weight^T + bias. A part the layout of this family does not have is never asked for."""
    assert part is not None
    return F.linear(x, part.weight, part.bias)


def causal(length: int, window: int | None, device: torch.device) -> Tensor:
    """Bool [query, key]: key <= query, and query - key < window where there is one."""
    place = torch.arange(length, device=device)
    distance = place[:, None] - place[None, :]
    seen = distance >= 0
    return seen if window is None else seen & (distance < window)


def attention(
    x: Tensor, weights: LayerWeights, config: TransformerConfig, layer: int, positions: Positions, taps: Taps
) -> Tensor:
    """Normalised x [B, S, D] -> what the output projection gives [B, S, D], before any post-norm."""
    q, k, v = project(x, weights, config, layer, taps)
    q = taps("rot_q", layer, rotate(q, positions.cos, positions.sin))
    k = taps("rot_k", layer, rotate(k, positions.cos, positions.sin))
    z = taps("z", layer, mix(q, k, v, config, layer, positions, taps))
    return output(z, weights.o, layer, taps)


def project(
    x: Tensor, weights: LayerWeights, config: TransformerConfig, layer: int, taps: Taps
) -> tuple[Tensor, Tensor, Tensor]:
    """q [B, H, S, dh], k and v [B, Hk, S, dh], before rope."""
    if weights.qkv is not None:
        sizes = [config.num_attention_heads * config.head_dim, *[config.num_kv_heads * config.head_dim] * 2]
        flat = linear(x, weights.qkv).split(sizes, dim=-1)
    else:
        flat = tuple(linear(x, part) for part in (weights.q, weights.k, weights.v) if part is not None)
    q, k, v = (part.unflatten(-1, (-1, config.head_dim)).transpose(1, 2) for part in flat)
    if weights.q_norm is not None and weights.k_norm is not None:
        q = apply_norm(q, weights.q_norm, config.norm_type, config.qk_norm_eps)
        k = apply_norm(k, weights.k_norm, config.norm_type, config.qk_norm_eps)
    return taps("q", layer, q), taps("k", layer, k), taps("v", layer, v)


def mix(
    q: Tensor, k: Tensor, v: Tensor, config: TransformerConfig, layer: int, positions: Positions, taps: Taps
) -> Tensor:
    """Pattern-weighted values z [B, H, S, dh] from rotated q, k and v."""
    window = config.layer_windows[layer]
    knockouts = taps.knockouts(layer)
    cap = config.attn_logit_softcapping
    by_hand = cap is not None or taps.changes(layer, "pattern") or _changes_scores(taps, layer, knockouts)
    if by_hand:
        return _weigh(
            _pattern(q, k, config, layer, _seen(q, k, positions, window, knockouts, layer), taps), v
        )
    seen = positions.allowed(window) if not knockouts else _seen(q, k, positions, window, knockouts, layer)
    if taps.captures(layer, "scores", "attn_scores", "pattern"):
        _pattern(
            q,
            k,
            config,
            layer,
            _seen(q, k, positions, window, knockouts, layer) if seen is None else seen,
            taps,
        )
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=seen,
        is_causal=seen is None and q.shape[-2] > 1,
        scale=config.attention_scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )


def output(z: Tensor, projection: Linear, layer: int, taps: Taps) -> Tensor:
    """Heads z [B, H, S, dh] -> [B, S, D]; per head only where someone asks for ``hook_result``."""
    if taps.touches(layer, "result"):
        heads, width = z.shape[1], z.shape[-1]
        per_head = projection.weight.unflatten(1, (heads, width)).permute(1, 2, 0)
        result = taps("result", layer, torch.matmul(z, per_head))
        if taps.changes(layer, "result"):
            mixed = result.sum(1)
            return mixed if projection.bias is None else mixed + projection.bias
    return linear(z.transpose(1, 2).flatten(2), projection)


def _changes_scores(taps: Taps, layer: int, knockouts: list[Knockout]) -> bool:
    """Knockouts are a mask, which the fused kernel takes; any other change of the scores needs them
    materialised."""
    return taps.count_changes(layer, "scores", "attn_scores") > len(knockouts)


def _seen(
    q: Tensor, k: Tensor, positions: Positions, window: int | None, knockouts: list[Knockout], layer: int
) -> Tensor:
    """Bool, broadcastable to [B, H, query, key]: where attention may look."""
    queries, keys = q.shape[-2], k.shape[-2]
    seen = positions.allowed(window)
    if seen is None:
        seen = causal(keys, None, q.device)
    if not knockouts:
        return seen
    for knockout in knockouts:
        seen = seen & ~knockout.cut(q.shape[1], queries, keys, q.device)
    blind = (~seen.any(-1)).nonzero()
    if len(blind):
        head, row = blind[0].tolist()
        raise InterventionError(
            f"Knockout at 'blocks.{layer}.attn.hook_scores' leaves query {row} of head {head} no key to "
            "attend to; "
            "expected at least one uncut key per row, so spare one, or zero the head at "
            f"'blocks.{layer}.attn.hook_z'"
        )
    return seen


def _pattern(q: Tensor, k: Tensor, config: TransformerConfig, layer: int, seen: Tensor, taps: Taps) -> Tensor:
    """Attention weights [B, H, query, key], by way of every hook point on scores and pattern."""
    batch, heads, queries, _ = q.shape
    kv_heads, keys = k.shape[1], k.shape[2]
    # Queries that share a key head are stacked into one matrix, so that keys are never repeated in memory.
    stacked = q.reshape(batch * kv_heads, -1, q.shape[-1])
    raw = torch.bmm(stacked * config.attention_scale, k.reshape(batch * kv_heads, keys, -1).transpose(1, 2))
    scores = taps("scores", layer, raw.view(batch, heads, queries, keys))
    if config.attn_logit_softcapping is not None:
        scores = config.attn_logit_softcapping * torch.tanh(scores / config.attn_logit_softcapping)
    masked = taps("attn_scores", layer, scores.masked_fill(~seen, float("-inf")))
    return taps("pattern", layer, torch.softmax(masked, dim=-1, dtype=torch.float32).to(q.dtype), seen)


def _weigh(pattern: Tensor, v: Tensor) -> Tensor:
    batch, heads, queries, keys = pattern.shape
    kv_heads = v.shape[1]
    stacked = pattern.reshape(batch * kv_heads, -1, keys)
    mixed: Tensor = torch.bmm(stacked, v.reshape(batch * kv_heads, keys, -1))
    return mixed.view(batch, heads, queries, -1)
