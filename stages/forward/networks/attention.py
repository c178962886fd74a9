"""Self-attention of one layer: grouped queries, rope, soft cap, sliding window, and the hook points inside.

Who sees whom is the history's; `attend` is what histories have in common.

The fused kernel computes the output unless someone changes scores or patterns, or the family soft-caps its
scores (no fused kernel does). Someone who only reads them gets them computed on the side; the output keeps
every bit.

Whole prompts are read in tiles (`in_tiles`), so that what a token attends to does not depend on what comes
after it, nor on who shares the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ....store.errors import InterventionError
from ..architectures.architecture import AttentionMixer
from ..architectures.mixers import AttentionSpec, TemperatureTuning
from ..architectures.points import SPLIT_INPUTS
from ..architectures.transformer import RopeConfig
from ..hooks.taps import AttentionTaps, Taps
from .gradients import is_recorded
from .history import History
from .kernels.company import is_beside_others
from .kernels.functions import evenly
from .kernels.products import each_product, product
from .norms import apply_norm
from .rope import rotate
from .transfer import to_device
from .weights import AttentionWeights, Linear, NormWeights

Weigh = Callable[[Tensor, Tensor, Tensor, Tensor | None, AttentionMixer], Tensor]
"""What `weighed` is."""
_QUERIES = 16
"""Queries that go through a product together; fewer make products of other shapes, with other orders."""
_TOGETHER, _OF_THEIR_OWN = 4, 2
"""Queries that a product takes at a time, and up to how many have a kernel of their own: four take more than
twice the time of one."""
_NARROW = (torch.bfloat16, torch.float16)
_BLOCK = 32
"""Queries that the fused kernel takes at once, at least."""
_TILES = ((64, 32), (512, 64))
"""Tiles that begin before so many positions have so many."""
_LARGEST_TILE = 256
"""Of all later ones. Over the kernel that is given prompts whole, with 8 heads of 64: 1.0 to 1.08 for 100 to
1,024 tokens, 1.75 for 20, where attention is a thirtieth of a pass."""


def linear(x: Tensor, part: Linear | None) -> Tensor:
    """x weight^T + bias. A part the layout of this family does not have is never asked for."""
    assert part is not None
    made = product(x, part.weight, part.bias)
    return made if part.low is None else made + product(product(x, part.low[0]), part.low[1])


def causal(
    length: int,
    window: int | None,
    device: torch.device,
    *,
    newest: int | None = None,
    is_chunked: bool = False,
) -> Tensor:
    """Bool [query, key]: key <= query, and query - key < window where there is one, or both in one chunk of
    that size; queries of the newest positions only, or all."""
    place = torch.arange(length, device=device)
    queries = place[(0 if newest is None else length - newest) :, None]
    return within(queries, place, queries >= place, window, is_chunked=is_chunked)


def within(
    queries: Tensor, keys: Tensor, seen: Tensor, window: int | None, *, is_chunked: bool = False
) -> Tensor:
    """What is seen of keys at some places from queries at others, within a window, or a chunk of that size;
    on both sides where more than what comes before is seen."""
    if window is None:
        return seen
    if is_chunked:
        return seen & (queries // window == keys // window)
    return seen & ((queries - keys).abs() < window)


def visible(length: int, how: AttentionMixer, device: torch.device) -> Tensor | None:
    """Bool [query, key], where a whole prompt may look; None where that is all that is plain (`plainly`)."""
    if how.window is None or how.window >= length:
        return None
    seen = causal(length, how.window, device, is_chunked=how.is_chunked)
    return seen | seen.T if how.is_bidirectional else seen


def plainly(length: int, how: AttentionMixer, device: torch.device) -> Tensor:
    """Bool [query, key], where a whole prompt looks that no window limits: at what comes before, or all."""
    if how.is_bidirectional:
        return torch.ones(length, length, dtype=torch.bool, device=device)
    return causal(length, None, device)


def attention(
    x: Tensor,
    weights: AttentionWeights,
    sizes: AttentionSpec,
    how: AttentionMixer,
    layer: int,
    history: History,
    taps: Taps,
    gate: Tensor | None = None,
    source: StreamRead | None = None,
) -> Tensor:
    """Normalised x [B, token, D] -> what the output projection gives [B, kept, D], before any post-norm.

    gate: of each head [B, H, kept, dh]. source: what x is the norm of, where heads can be shown another one.
    """
    q, k, v = project(x, weights, sizes, layer, taps, source)
    q, k = turned(history.kept(q), k, sizes.rope, history)
    if sizes.qk_norm is not None and sizes.qk_norm.after_rope:
        q, k = (_normed(x, norm, sizes) for x, norm in ((q, weights.q_norm), (k, weights.k_norm)))
    if sizes.temperature_tuning is not None:
        q = _tempered(q, sizes.temperature_tuning, history)
    q, k = taps("rot_q", layer, q), taps("rot_k", layer, k)
    if sizes.alibi_slopes:
        q, k = _sloped(q, k, sizes, how.scale, history)
    if weights.rise is not None:
        q, k = _risen(q, k, v, weights, how.scale)
    z = history.attend(layer, q, k, v, how)
    if weights.z_norm is not None and sizes.inner_norm_eps is not None:
        z = _normed_together(z, weights.z_norm, sizes.inner_norm_eps)
    z = taps("z", layer, z if gate is None else z * gate)
    return output(z, weights.o, layer, taps)


@dataclass(frozen=True)
class StreamRead:
    """The stream [B, token, D] that attention reads, and the norm it is read through."""

    stream: Tensor
    norm: Callable[[Tensor], Tensor]


def project(
    x: Tensor,
    weights: AttentionWeights,
    sizes: AttentionSpec,
    layer: int,
    taps: Taps,
    source: StreamRead | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """q [B, H, S, dh], k and v [B, Hk, S, dh], before rope."""
    flat = tuple(linear(x, part) for part in (weights.q, weights.k, weights.v))
    if source is not None and taps.touches(layer, *SPLIT_INPUTS):
        flat = _from_inputs(flat, source, weights, sizes, layer, taps)
    if (limit := sizes.clip_qkv) is not None:
        flat = tuple(part.clamp(-limit, limit) for part in flat)
    is_later = sizes.qk_norm is not None and sizes.qk_norm.after_rope
    norms = (None,) * 3 if is_later else (weights.q_norm, weights.k_norm, None)
    q, k, v = (_by_heads(part, norm, sizes) for part, norm in zip(flat, norms, strict=True))
    return taps("q", layer, q), taps("k", layer, k), taps("v", layer, v)


def _from_inputs(
    flat: Sequence[Tensor],
    source: StreamRead,
    weights: AttentionWeights,
    sizes: AttentionSpec,
    layer: int,
    taps: Taps,
) -> tuple[Tensor, ...]:
    """Projections [B, S, heads * dh], anew where the stream that a head reads for one of them is changed.

    Taps may give back a stream for each query head where fewer make keys and values: each then reads those
    that its own stream makes.
    """
    heads = (sizes.num_attention_heads, sizes.num_kv_heads, sizes.num_kv_heads)
    found = []
    parts = (weights.q, weights.k, weights.v)
    for kind, count, made, part in zip(SPLIT_INPUTS, heads, flat, parts, strict=True):
        assert part is not None  # of layers with such hook points
        if not taps.touches(layer, kind):
            found.append(made)
            continue
        copies = source.stream.unsqueeze(1).expand(-1, count, -1, -1)
        if not taps.changes(layer, kind):
            taps(kind, layer, copies)
            found.append(made)
            continue
        # Taps may write into it, and one head's copy would be the stream itself.
        given = taps(kind, layer, copies.clone(memory_format=torch.contiguous_format))
        rows, bias, each = part.weight.unflatten(0, (count, -1)), part.bias, given.shape[1] // count
        rows = rows.repeat_interleave(each, 0)
        anew = _of_heads(source.norm(given), rows.transpose(1, 2))
        if bias is not None:
            anew = anew + bias.view(count, 1, -1).repeat_interleave(each, 0)
        if each == 1:
            # What was left alone keeps its projection, with whatever was done to the norm that it is made of.
            kept = made.unflatten(-1, (count, -1)).transpose(1, 2)
            if is_recorded(given):
                kept = kept.detach() + (anew - anew.detach())  # its value, and the way back by the input
            anew = torch.where((given != copies).any(-1, keepdim=True), anew, kept)
        found.append(anew.transpose(1, 2).flatten(2))
    return tuple(found)


def _by_heads(x: Tensor, norm: NormWeights | None, sizes: AttentionSpec) -> Tensor:
    """x [B, S, heads * dh] as [B, heads, S, dh]; normed over each head, or all of them at once if the norm is
    as wide."""
    if norm is not None and norm.weight.shape[0] != sizes.head_dim:
        x, norm = _normed(x, norm, sizes), None
    return _normed(x.unflatten(-1, (-1, sizes.head_dim)).transpose(1, 2), norm, sizes)


def _normed(x: Tensor, norm: NormWeights | None, sizes: AttentionSpec) -> Tensor:
    """x [..., dh], or of all heads, normed, where there is a norm."""
    if norm is None or sizes.qk_norm is None:
        return x
    return apply_norm(x, norm, sizes.qk_norm.kind, sizes.qk_norm.eps)


def _normed_together(z: Tensor, norm: NormWeights, eps: float) -> Tensor:
    """What all heads have read [B, H, S, dh], normed as one row of each token."""
    flat = apply_norm(z.transpose(1, 2).flatten(2), norm, "rms", eps)
    heads: Tensor = flat.unflatten(-1, (z.shape[1], -1)).transpose(1, 2)
    return heads


def _tempered(q: Tensor, tuning: TemperatureTuning, history: History) -> Tensor:
    """Queries [B, H, kept, dh] scaled by their positions, as `TemperatureTuning` says."""
    places = history.kept(history.positions[:, None].float()) + tuning.offset
    return q * (1 + tuning.scale * torch.log(1 + torch.floor(places / tuning.floor))).to(q.dtype)


def _sloped(
    q: Tensor, k: Tensor, sizes: AttentionSpec, scale: float, history: History
) -> tuple[Tensor, Tensor]:
    """Queries and keys with one entry more, whose product times the scale is what a score rises by with the
    position of its key (Press et al., Train Short, Test Long, 2021). Relative to each query's own position it
    is the penalty of distance in that paper; a softmax does not see the difference."""
    slopes = to_device(torch.tensor(sizes.alibi_slopes), k.device)
    rises = (slopes[:, None] * history.positions).to(k.dtype)[:, :, None]
    wider = torch.cat([k, rises.expand(k.shape[0], -1, -1, -1)], dim=-1)
    return torch.cat([q, torch.full_like(q[..., :1], 1 / scale)], dim=-1), wider


def _risen(q: Tensor, k: Tensor, v: Tensor, weights: AttentionWeights, scale: float) -> tuple[Tensor, Tensor]:
    """The same, of what the values [B, Hk, token, dh] of a key say: e^(a softplus(w v)) for each key head
    (Shi et al., Trainable Dynamic Mask Sparse Attention, 2025, section 3)."""
    assert weights.rise_gain is not None  # whoever has the map has both
    told = evenly(F.softplus, linear(v.transpose(1, 2).flatten(2), weights.rise))
    rises = torch.exp(weights.rise_gain * told).transpose(1, 2)[..., None]
    return torch.cat([q, torch.full_like(q[..., :1], 1 / scale)], dim=-1), torch.cat([k, rises], dim=-1)


def turned(q: Tensor, k: Tensor, rope: RopeConfig | None, history: History) -> tuple[Tensor, Tensor]:
    """q [B, H, kept, dh] and k [B, Hk, token, dh] rotated by position; as they are where nothing turns."""
    if rope is None:
        return q, k
    (cos, sin), paired = history.rotation(rope, q.dtype), rope.interleaved
    q = rotate(q, history.kept(cos), history.kept(sin), interleaved=paired)
    return q, rotate(k, cos, sin, interleaved=paired)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    allowed: Tensor | None,
    how: AttentionMixer,
    layer: int,
    taps: AttentionTaps,
    weigh: Weigh | None = None,
    places: Tensor | None = None,
) -> Tensor:
    """Pattern-weighted values z [B, H, query, dh] from rotated q, k and v.

    allowed: bool, broadcastable to [B, H, query, key], True where attention may look; None where that is
    plainly causal, or everywhere, which the fused kernel knows by itself. weigh: what computes them where
    nobody changes scores or patterns, `weighed` by default. places: of queries in their prompts, [query] or
    [B, query], where scores go by distance; keys are those of a prompt from its first.
    """
    if how.relative is not None:
        assert places is not None  # histories that cannot tell have no such layers
        how = replace(how, relative=partial(how.relative, places=places))
    seen = allowed
    cut = taps.cut(layer, q.shape[1], q.shape[2], k.shape[2], q.device)
    if cut is not None:
        seen = _spared(plainly(k.shape[2], how, q.device) if seen is None else seen, cut, layer, how)
    changed = taps.changes_attention(layer)
    if changed or taps.captures(layer, "scores", "attn_scores", "pattern"):
        whole = plainly(k.shape[2], how, q.device) if seen is None else seen
        masked = _masked(taps("scores", layer, _scores(q, k, how)), whole, how)
        pattern = _pattern(taps("attn_scores", layer, masked), whole, how).to(q.dtype)
        pattern = taps("pattern", layer, pattern, whole)
        if changed or (weigh is None and is_by_hand(q, how)):
            z = _mixed(pattern, v)
            if not changed or not is_beside_others() or is_by_hand(q, how):
                return z
            # Queries that were left alone read as they do where nobody changes anything.
            alone = _unchanged_pattern(q, k, whole, how)
            is_left = (pattern == alone).all(-1, keepdim=True)
            return torch.where(is_left, (weigh or weighed)(q, k, v, seen, how), z)
    return (weigh or weighed)(q, k, v, seen, how)


def weighed(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, how: AttentionMixer) -> Tensor:
    """z [B, H, query, dh] where nobody looks at scores. seen: as `attend`'s allowed."""
    return by_hand(q, k, v, seen, how) if is_by_hand(q, how) else _fused(q, k, v, seen, how)


def by_hand(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, how: AttentionMixer) -> Tensor:
    """`weighed`, step by step."""
    whole = plainly(k.shape[2], how, q.device) if seen is None else seen
    return _mixed(_unchanged_pattern(q, k, whole, how), v)


def _unchanged_pattern(q: Tensor, k: Tensor, whole: Tensor, how: AttentionMixer) -> Tensor:
    """Attention weights [B, H, query, key] where nobody changes anything; whole: where attention may look."""
    return _pattern(_masked(_scores(q, k, how), whole, how), whole, how).to(q.dtype)


def over(keys: Tensor, values: Tensor) -> Weigh:
    """`weighed` by the fused kernel, over keys and values [B, Hk, key, dh] that begin with those it is given
    and go on with as many that nobody sees as `keys_filled` says."""

    def weigh(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, how: AttentionMixer) -> Tensor:
        size, every = k.shape[2], keys.shape[2]
        if seen is not None:
            seen = F.pad(seen, (0, every - size))
        elif every > size and (q.shape[2] == 1 or how.is_bidirectional):
            seen = _first_of(every, size).to(q.dtype)
        return _fused(q, keys, values, seen, how, is_filled=True)

    return weigh


def keys_filled(q: Tensor, keys: int) -> int:
    """How many keys these queries [B, H, query, dh] take for bits that are nobody else's business.

    Of the fused kernel of CPUs. It takes exponentials 16 at a time, and those left over by another function;
    and each thread has its own place for scores, which begins at a multiple of 16 bytes only where this says
    so: elsewhere MKL has other kernels.
    """
    if not _is_told_by_counts(q):
        return keys
    return keys + -keys % 16 + (-(2 + q.shape[3]) % 4 if q.shape[2] <= _of_their_own() else 0)


def keys_by_hand(q: Tensor, keys: int, how: AttentionMixer) -> int:
    """The same step by step: a softmax adds up 16 numbers at a time, and those left over by themselves."""
    return keys if how.relative is not None or not _is_told_by_counts(q) else keys + -keys % 16


def _fused(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, how: AttentionMixer, *, is_filled: bool = False
) -> Tensor:
    """`weighed`, by the fused kernel. is_filled: whether keys are as many as `keys_filled` says."""
    queries, keys = q.shape[2], k.shape[2]
    is_causal = seen is None and queries > 1 and not how.is_bidirectional
    more = 0 if is_filled else keys_filled(q, keys) - keys
    if more:
        k, v = (F.pad(x, (0, 0, 0, more)) for x in (k, v))
        if seen is not None:
            seen = F.pad(seen, (0, more))
        elif not is_causal:
            seen = _first_of(keys + more, keys).to(q.dtype)
    if _is_told_by_counts(q) and (is_causal or queries > _of_their_own()):
        if is_causal and queries <= _BLOCK:  # the kernel takes them at once, and the mask spares it some
            seen, is_causal = _up_to_each(queries, k.shape[2]).to(q.dtype), False
        rows = -queries % (_QUERIES if is_causal else _TOGETHER)
        q = F.pad(q, (0, 0, 0, rows)) if rows else q
        if rows and seen is not None and seen.shape[-2] > 1:
            seen = F.pad(seen, (0, 0, 0, rows))
    z = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=seen,
        is_causal=is_causal,
        scale=how.scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return z[:, :, :queries]


@lru_cache(maxsize=64)
def _up_to_each(queries: int, keys: int) -> Tensor:
    """What is added to scores [1, 1, query, key] where each of the first positions sees up to itself."""
    hidden = torch.ones(queries, keys, dtype=torch.bool).triu(1)
    return torch.zeros(1, 1, queries, keys).masked_fill(hidden, float("-inf"))


@lru_cache(maxsize=64)
def _first_of(keys: int, seen: int) -> Tensor:
    """What is added to scores [1, 1, 1, key] of keys of which the first so many are seen. In float32, or the
    kernel's caller makes it that, at every token that is generated; kept, as layers ask for the same."""
    return torch.zeros(1, 1, 1, keys).masked_fill(torch.arange(keys) >= seen, float("-inf"))


def _of_their_own() -> int:
    """Up to how many queries go through kernels of their own."""
    return 0 if is_beside_others() else _OF_THEIR_OWN


def _is_told_by_counts(q: Tensor) -> bool:
    """Whether sums of the fused kernel go by the numbers of queries, keys and threads."""
    return q.device.type == "cpu" and (
        q.dtype == torch.float32 or (is_beside_others() and q.dtype in _NARROW)
    )


def in_tiles(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, how: AttentionMixer) -> Tensor:
    """`weighed`, of whole prompts: every query sums over as many keys as its own position says, so that its
    bits are the same in any company and with anything behind it.

    A tile's keys end where it ends, past the end of the prompt with keys nobody sees: a masked key adds
    exactly 0, but how many there are decides the order of a sum.
    """
    length = q.shape[2]
    ends = _tiles(length)
    k, v = (F.pad(x, (0, 0, 0, ends[-1] - length)) for x in (k, v))
    found, start = [], 0
    for end in ends:
        rows = min(end, length) - start
        padding = -rows % _QUERIES
        if seen is None:
            mask = causal(end, None, q.device, newest=end - start)[: rows + padding]
        else:
            mask = seen[..., start : start + rows, :end]
            mask = F.pad(mask, (0, end - mask.shape[-1], 0, padding))
        tile = F.pad(q[:, :, start : start + rows], (0, 0, 0, padding))
        found.append(weighed(tile, k[:, :, :end], v[:, :, :end], mask, how)[:, :, :rows])
        start = end
    return found[0] if len(found) == 1 else torch.cat(found, dim=2)


def _tiles(length: int) -> list[int]:
    """Where tiles end, the last one at or behind this length."""
    ends = [0]
    while (start := ends[-1]) < length:
        ends.append(start + next((size for before, size in _TILES if start < before), _LARGEST_TILE))
    return ends[1:]


def is_by_hand(q: Tensor, how: AttentionMixer) -> bool:
    """Whether weights are computed step by step where nobody changes them: no fused kernel caps scores, adds
    to them by distance or has a place for sinks, and none takes the softmax in float32 where all else is
    float64, as the reference does."""
    is_plain = how.sinks is None and how.relative is None and how.part is None
    if q.dtype == torch.bfloat16 and q.device.type == "cpu" and not _has_fused_bfloat16():
        return True
    return how.is_capped or not is_plain or q.dtype == torch.float64


@cache
def _has_fused_bfloat16() -> bool:
    """Whether torch's fused kernel runs in bfloat16 on this CPU: it fails where `ATEN_CPU_CAPABILITY` holds
    torch below what the processor has, because it packs keys by what the processor has (torch 2.13)."""
    x = torch.zeros(1, 4, 64, 16, dtype=torch.bfloat16)
    try:
        with torch.no_grad():
            F.scaled_dot_product_attention(x, x, x, is_causal=True)
    except RuntimeError:
        return False
    return True


def output(z: Tensor, projection: Linear, layer: int, taps: Taps) -> Tensor:
    """Heads z [B, H, S, dh] -> [B, S, D]; per head only where someone asks for ``hook_result``."""
    if taps.touches(layer, "result"):
        heads, width = z.shape[1], z.shape[-1]
        per_head = projection.weight.unflatten(1, (heads, width)).permute(1, 2, 0)
        made = _of_heads(z, per_head)
        # Taps may write into it.
        result = taps("result", layer, made.clone() if is_beside_others() else made)
        if taps.changes(layer, "result"):
            mixed = sum(
                result.unbind(1), torch.zeros_like(result[:, 0])
            )  # in one order, however many queries
            mixed = mixed if projection.bias is None else mixed + projection.bias
            if not is_beside_others():
                return mixed
            is_left = (result == made).all(-1).all(1)[..., None]
            return torch.where(is_left, linear(z.transpose(1, 2).flatten(2), projection), mixed)
    return linear(z.transpose(1, 2).flatten(2), projection)


def _of_heads(x: Tensor, maps: Tensor) -> Tensor:
    """x [B, H, S, in], each head through its own map [H, in, out]: [B, H, S, out]."""
    flat: Tensor = each_product(x.transpose(0, 1).flatten(1, 2), maps).unflatten(1, (x.shape[0], -1))
    return flat.transpose(0, 1)


def _spared(seen: Tensor, cut: Tensor, layer: int, how: AttentionMixer) -> Tensor:
    """Where attention may look once edges are cut; InterventionError for a query left with no key."""
    spared = seen & ~cut
    blind = (~spared.any(-1) & seen.expand_as(spared).any(-1)).nonzero()
    if len(blind):
        # Rows may start anywhere in the prompt; the last key a causal query sees is its own.
        query = int(seen.expand_as(spared)[tuple(blind[0].tolist())].nonzero()[-1])
        head, which = int(blind[0][-2]), "a query" if how.is_bidirectional else f"query {query}"
        raise InterventionError(
            f"Knockout at 'blocks.{layer}.attn.hook_scores' leaves {which} of head {head} no key to "
            "attend to; expected at least one uncut key per row, so spare one, or zero the head at "
            f"'blocks.{layer}.attn.hook_z'"
        )
    return spared


def _scores(q: Tensor, k: Tensor, how: AttentionMixer) -> Tensor:
    """Scaled products [B, H, query, key] of queries and keys, with what they have besides by distance."""
    batch, heads, queries, _ = q.shape
    kv_heads, keys = k.shape[1], k.shape[2]
    # Queries that share a key head are stacked into one matrix, so that keys are never repeated in memory.
    stacked = q.reshape(batch * kv_heads, -1, q.shape[-1])
    raw = each_product(stacked * how.scale, k.reshape(batch * kv_heads, keys, -1).transpose(1, 2))
    found = raw.view(batch, heads, queries, keys)
    return found if how.relative is None else found + how.relative(q, k)


def _masked(scores: Tensor, seen: Tensor, how: AttentionMixer) -> Tensor:
    """Scores capped, where the family does that, and -inf where attention may not look."""
    if how.is_capped:
        scores = evenly(lambda each: how.capped(each, torch), scores)
    return scores.masked_fill(~seen, float("-inf"))


def _pattern(masked: Tensor, seen: Tensor, how: AttentionMixer) -> Tensor:
    """Weights of masked scores; of a query of the other side of a pair, which sees nothing, 0."""
    if how.part is None:
        return _weights(masked, how.sinks)
    blank = ~seen.any(-1, keepdim=True)
    # Finite before the softmax too, or there is no way back through it.
    return _weights(masked.masked_fill(blank, 0.0), None).masked_fill(blank, 0.0)


def _weights(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax of masked scores [B, H, query, key], in float32; where there are sinks [H], rows sum to less
    than 1, by what went there (Xiao et al., StreamingLLM, 2023; gpt-oss, 2025)."""
    if sinks is None:
        return torch.softmax(scores, dim=-1, dtype=torch.float32)
    sink = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat([scores, sink], dim=-1), dim=-1, dtype=torch.float32)[..., :-1]


def _mixed(pattern: Tensor, v: Tensor) -> Tensor:
    """z [B, H, query, dh]: values by their weights."""
    batch, heads, queries, keys = pattern.shape
    kv_heads = v.shape[1]
    stacked = pattern.reshape(batch * kv_heads, -1, keys)
    mixed = each_product(stacked, v.reshape(batch * kv_heads, keys, -1))
    return mixed.view(batch, heads, queries, -1)
