"""Self-attention of one layer: grouped queries, RoPE, soft cap, sliding window, and the hook points inside.

The history decides which keys a query sees; `attend` is the code that all histories share.

torch's fused kernel computes the output unless scores or patterns are changed by an intervention, or the
family soft-caps its scores (the fused kernel cannot). If scores or patterns are only captured, they are
computed in addition, and the output keeps every bit.

Whole prompts are computed in tiles (`tiled_attention`), so that the output at a token depends, bit for bit,
neither on later tokens nor on other prompts of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ....store.errors import InterventionError
from ..architectures.layer_summaries import AttentionMixer
from ..architectures.mixers import AttentionSpec, TemperatureTuning
from ..architectures.points import SPLIT_INPUTS
from ..architectures.transformer import RopeConfig
from ..hooks.taps import AttentionTaps, Taps
from .gradients import is_recorded
from .history import Carried, History
from .kernels.company import is_beside_others
from .kernels.functions import evenly
from .kernels.products import batched_product, product
from .norms import apply_norm
from .rope import rotate
from .transfer import to_device
from .weights import AttentionWeights, Linear, NormWeights

Weigh = Callable[[Tensor, Tensor, Tensor, Tensor | None, AttentionMixer], Tensor]
"""Signature of `weighted_values`: (q, k, v, mask, mixer) -> z."""
_QUERIES = 16
"""The queries of a causal call of the kernel are padded to a multiple of this number: matrix products of
fewer rows sum in another order."""
_PADDED_QUERIES = 4
"""The queries of a non-causal call of the kernel are padded to a multiple of this number, the row block of a
matrix product."""
_FEW_QUERIES = 2
"""Largest number of unpadded queries: the kernel has a path for one or two queries, and four queries take
more than twice the time of one."""
_NARROW = (torch.bfloat16, torch.float16)
_BLOCK = 32
"""Smallest number of queries that the fused kernel processes as one block."""
_TILES = ((64, 32), (512, 64))
"""(position, size): tiles that start before the position have `size` queries."""
_LARGEST_TILE = 256
"""Queries per tile at all later positions. Measured time relative to the fused kernel on whole prompts, with
8 heads of 64: 1.0 to 1.08 for 100 to 1,024 tokens, 1.75 for 20 tokens, where attention is 1/30 of a pass."""


def linear(x: Tensor, projection: Linear | None) -> Tensor:
    """x weight^T + bias, [..., in] -> [..., out], plus the projection's low-rank adapter if it has one."""
    assert projection is not None  # None only for projections that the family's layout does not have
    out = product(x, projection.weight, projection.bias)
    if projection.low is None:
        return out
    down, up = projection.low
    return out + product(product(x, down), up)


def causal(
    length: int,
    window: int | None,
    device: torch.device,
    *,
    newest: int | None = None,
    is_chunked: bool = False,
) -> Tensor:
    """Causal attention mask, bool [query, key], True where key <= query.

    Arguments:
        length: number of keys.
        window: size of the sliding window (query - key < window), or of chunks; None for no limit.
        device: device of the mask.
        newest: number of queries, which are the last positions; None for all.
        is_chunked: whether queries see only keys of their own chunk instead of a sliding window (Llama 4).
    """
    positions = torch.arange(length, device=device)
    queries = positions[(0 if newest is None else length - newest) :, None]
    return limit_to_window(queries, positions, queries >= positions, window, is_chunked=is_chunked)


def limit_to_window(
    queries: Tensor, keys: Tensor, mask: Tensor, window: int | None, *, is_chunked: bool = False
) -> Tensor:
    """Copy of an attention mask that is False outside of a sliding window, or between different chunks.

    Arguments:
        queries: positions of queries, int, broadcastable to the mask.
        keys: positions of keys, int, broadcastable to the mask.
        mask: bool [query, key], True where attention may look.
        window: size of the window (distance < window, in both directions) or of chunks; None for no limit.
        is_chunked: whether to restrict to chunks.
    """
    if window is None:
        return mask
    if is_chunked:
        return mask & (queries // window == keys // window)
    return mask & ((queries - keys).abs() < window)


def window_mask(length: int, mixer: AttentionMixer, device: torch.device) -> Tensor | None:
    """Attention mask of a whole prompt with a sliding window or chunks.

    Arguments:
        length: Tokens of the prompt.
        mixer: Parameters of the layer's attention.
        device: Device of the mask.

    Returns:
        Bool [query, key], True where attention may look; None if no window limits the prompt, so that
        `default_mask` applies.
    """
    if mixer.window is None or mixer.window >= length:
        return None
    mask = causal(length, mixer.window, device, is_chunked=mixer.is_chunked)
    return mask | mask.T if mixer.is_bidirectional else mask


def default_mask(length: int, mixer: AttentionMixer, device: torch.device) -> Tensor:
    """Attention mask of a whole prompt without a window.

    Arguments:
        length: Tokens of the prompt.
        mixer: Parameters of the layer's attention.
        device: Device of the mask.

    Returns:
        Bool [query, key], True where attention may look: causal, or all True if the layer is bidirectional.
    """
    if mixer.is_bidirectional:
        return torch.ones(length, length, dtype=torch.bool, device=device)
    return causal(length, None, device)


def attention(
    x: Tensor,
    weights: AttentionWeights,
    sizes: AttentionSpec,
    mixer: AttentionMixer,
    layer: int,
    history: History,
    taps: Taps,
    gate: Tensor | None = None,
    source: StreamRead | None = None,
    beside: Carried | None = None,
) -> Tensor:
    """Self-attention of one layer, from the normalised stream to the output projection.

    Arguments:
        x: normalised stream [B, token, D].
        weights: projections and norms.
        sizes: sizes and switches of the layer's attention.
        mixer: parameters that `History.attend` needs, such as window, scale and soft cap.
        layer: number of the layer.
        history: finds the earlier tokens and mixes the positions.
        taps: captures and interventions of the pass, called at its hook points.
        gate: factors of the heads' outputs, [B, H, kept, dh]; None for no gate.
        source: the stream before the norm, if the layer has hook points for inputs of single heads.
        beside: tensors that layers pass on besides the stream, in families whose layers share keys and
            values: a layer with `AttentionSpec.source` reads the keys (after RoPE) and values of that layer;
            other layers add theirs.

    Returns:
        Output of the output projection [B, kept, D], before any post-norm; kept: the tokens whose output
        later layers need.
    """
    if sizes.source is not None:
        assert beside is not None  # callers pass it to layers that share keys
        q = history.needed(taps("q", layer, _split_and_norm(linear(x, weights.q), weights.q_norm, sizes)))
        if sizes.rope is not None:
            cos, sin = map(history.needed, history.rotation(sizes.rope, q.dtype))
            q = rotate(q, cos, sin, interleaved=sizes.rope.interleaved)
        k, v = (_split_and_norm(beside[name], None, sizes) for name in _carried_names(sizes.source))
    else:
        q, k, v = project(x, weights, sizes, layer, taps, source)
        q, k = apply_rope(history.needed(q), k, sizes.rope, history)
        if sizes.qk_norm is not None and sizes.qk_norm.after_rope:
            q, k = _normed(q, weights.q_norm, sizes), _normed(k, weights.k_norm, sizes)
        k = taps("rot_k", layer, k)
        if beside is not None:
            keys_name, values_name = _carried_names(layer)
            beside[keys_name], beside[values_name] = (heads.transpose(1, 2).flatten(2) for heads in (k, v))
    if sizes.temperature_tuning is not None:
        # After rope, with which a factor per query commutes.
        q = _temperature_tuned(q, sizes.temperature_tuning, history)
    q = taps("rot_q", layer, q)
    if sizes.alibi_slopes:
        q, k = _with_alibi(q, k, sizes, mixer.scale, history)
    if weights.rise is not None:
        q, k = _with_value_bias(q, k, v, weights, mixer.scale)
    z = history.attend(layer, q, k, v, mixer)
    if weights.z_norm is not None and sizes.inner_norm_eps is not None:
        z = _normed_jointly(z, weights.z_norm, sizes.inner_norm_eps)
    z = taps("z", layer, z if gate is None else z * gate)
    return output(z, weights.o, layer, taps)


def _carried_names(layer: int) -> tuple[str, str]:
    """Names of a layer's keys and values among the tensors that layers pass on (`Carried`), each [B, token,
    head * dh]."""
    return f"keys.{layer}", f"values.{layer}"


@dataclass(frozen=True)
class StreamRead:
    """The residual stream before the pre-attention norm, and that norm, to compute attention inputs of single
    heads."""

    stream: Tensor
    """Residual stream before the norm, [B, token, D]."""
    norm: Callable[[Tensor], Tensor]
    """Function that normalises copies of the stream, one per head, [B, head, token, D] -> the same shape."""


def project(
    x: Tensor,
    weights: AttentionWeights,
    sizes: AttentionSpec,
    layer: int,
    taps: Taps,
    source: StreamRead | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of the normalised stream.

    Arguments:
        x: normalised stream [B, S, D].
        weights: projections and QK norms.
        sizes: sizes and switches of the layer's attention.
        layer: number of the layer.
        taps: hook points q, k, v, and those of inputs of single heads.
        source: the stream before the norm, to recompute projections of changed head inputs; None for a layer
            without such hook points.

    Returns:
        q [B, H, S, dh], k and v [B, Hk, S, dh], before RoPE.
    """
    queries, keys = linear(x, weights.q), linear(x, weights.k)
    projected: tuple[Tensor, ...]
    # Values that are keys are taken before the keys' norm and rope.
    projected = (queries, keys, keys if sizes.values_from_keys else linear(x, weights.v))
    if source is not None and taps.touches(layer, *SPLIT_INPUTS):
        projected = _project_head_inputs(projected, source, weights, sizes, layer, taps)
    if (limit := sizes.clip_qkv) is not None:
        projected = tuple(part.clamp(-limit, limit) for part in projected)
    is_normed_later = sizes.qk_norm is not None and sizes.qk_norm.after_rope
    norms = (None,) * 3 if is_normed_later else (weights.q_norm, weights.k_norm, weights.v_norm)
    q, k, v = (_split_and_norm(part, norm, sizes) for part, norm in zip(projected, norms, strict=True))
    return taps("q", layer, q), taps("k", layer, k), taps("v", layer, v)


def _project_head_inputs(
    flat: Sequence[Tensor],
    source: StreamRead,
    weights: AttentionWeights,
    sizes: AttentionSpec,
    layer: int,
    taps: Taps,
) -> tuple[Tensor, ...]:
    """Queries, keys and values, each [B, S, heads * dh], recomputed for heads whose input an intervention
    changes.

    In grouped-query attention, taps may return one key or value input per query head; each query head then
    gets keys and values computed from its own input.

    Arguments:
        flat: queries, keys and values of unchanged inputs, each [B, S, heads * dh].
        source: the stream before the norm, of which every head's input is a copy.
        weights: projections.
        sizes: sizes and switches of the layer's attention.
        layer: number of the layer.
        taps: hook points of the inputs of single heads (`SPLIT_INPUTS`).
    """
    head_counts = (sizes.num_attention_heads, sizes.num_kv_heads, sizes.num_kv_heads)
    projections = []
    parts = (weights.q, weights.k, weights.v)
    for kind, count, projected, part in zip(SPLIT_INPUTS, head_counts, flat, parts, strict=True):
        assert part is not None  # layers with such hook points have separate q, k and v
        if not taps.touches(layer, kind):
            projections.append(projected)
            continue
        copies = source.stream.unsqueeze(1).expand(-1, count, -1, -1)
        if not taps.changes(layer, kind):
            taps(kind, layer, copies)
            projections.append(projected)
            continue
        # A real copy: taps may write into it, and an expanded view would share memory with the stream.
        inputs = taps(kind, layer, copies.clone(memory_format=torch.contiguous_format))
        repeats = inputs.shape[1] // count
        rows = part.weight.unflatten(0, (count, -1)).repeat_interleave(repeats, 0)
        recomputed = _per_head_product(source.norm(inputs), rows.transpose(1, 2))
        if part.bias is not None:
            recomputed = recomputed + part.bias.view(count, 1, -1).repeat_interleave(repeats, 0)
        if repeats == 1:
            # Unchanged heads keep their projection, including any intervention on the norm it was read
            # through.
            original = projected.unflatten(-1, (count, -1)).transpose(1, 2)
            if is_recorded(inputs):
                # The value of the original, with the gradient of the head's input.
                original = original.detach() + (recomputed - recomputed.detach())
            recomputed = torch.where((inputs != copies).any(-1, keepdim=True), recomputed, original)
        projections.append(recomputed.transpose(1, 2).flatten(2))
    return tuple(projections)


def _split_and_norm(x: Tensor, norm: NormWeights | None, sizes: AttentionSpec) -> Tensor:
    """Projected queries, keys or values x [B, S, heads * dh] -> [B, heads, S, dh], normalised per head, or
    over all heads if the norm has the full width (OLMo 2)."""
    if norm is not None and norm.weight.shape[0] != sizes.head_dim:
        x, norm = _normed(x, norm, sizes), None
    return _normed(x.unflatten(-1, (-1, sizes.head_dim)).transpose(1, 2), norm, sizes)


def _normed(x: Tensor, norm: NormWeights | None, sizes: AttentionSpec) -> Tensor:
    """Queries or keys x [..., width] after the family's QK-norm; unchanged if there is no norm."""
    if norm is None or sizes.qk_norm is None:
        return x
    return apply_norm(x, norm, sizes.qk_norm.kind, sizes.qk_norm.eps)


def _normed_jointly(z: Tensor, norm: NormWeights, eps: float) -> Tensor:
    """Heads' outputs z [B, H, S, dh], RMS-normalised over all heads of a token together: same shape."""
    flat = apply_norm(z.transpose(1, 2).flatten(2), norm, "rms", eps)
    heads: Tensor = flat.unflatten(-1, (z.shape[1], -1)).transpose(1, 2)
    return heads


def _temperature_tuned(q: Tensor, tuning: TemperatureTuning, history: History) -> Tensor:
    """Queries [B, H, kept, dh] times a factor that grows with log(position) (`TemperatureTuning`)."""
    positions = history.needed(history.positions[:, None].float()) + tuning.offset
    return q * (1 + tuning.scale * torch.log(1 + torch.floor(positions / tuning.floor))).to(q.dtype)


def _with_alibi(
    q: Tensor, k: Tensor, sizes: AttentionSpec, scale: float, history: History
) -> tuple[Tensor, Tensor]:
    """Add the ALiBi bias to scores by one more entry of queries and keys (Press et al., Train Short, Test
    Long, 2021).

    The product of the entries, times the scale, is slope * key position. The paper's bias is slope * (key
    position - query position); the difference is constant per query, and softmax ignores it.
    """
    slopes = to_device(torch.tensor(sizes.alibi_slopes), k.device)
    biases = (slopes[:, None] * history.positions).to(k.dtype)[:, :, None]
    wider_k = torch.cat([k, biases.expand(k.shape[0], -1, -1, -1)], dim=-1)
    # Scores are multiplied by `scale` later, so the entry of queries divides by it.
    wider_q = torch.cat([q, torch.full_like(q[..., :1], 1 / scale)], dim=-1)
    return wider_q, wider_k


def _with_value_bias(
    q: Tensor, k: Tensor, v: Tensor, weights: AttentionWeights, scale: float
) -> tuple[Tensor, Tensor]:
    """Add a bias per key to scores, computed from values v [B, Hk, token, dh] as exp(a softplus(w v)) for
    each key head, by one more entry of queries and keys (Shi et al., Trainable Dynamic Mask Sparse Attention,
    2025, section 3)."""
    assert weights.rise_gain is not None  # models that have the map `rise` have its gain as well
    activated = evenly(F.softplus, linear(v.transpose(1, 2).flatten(2), weights.rise))
    biases = torch.exp(weights.rise_gain * activated).transpose(1, 2)[..., None]
    # Scores are multiplied by `scale` later, so the entry of queries divides by it.
    wider_q = torch.cat([q, torch.full_like(q[..., :1], 1 / scale)], dim=-1)
    return wider_q, torch.cat([k, biases], dim=-1)


def apply_rope(q: Tensor, k: Tensor, rope: RopeConfig | None, history: History) -> tuple[Tensor, Tensor]:
    """Queries and keys rotated by their positions (RoPE), in the same shapes.

    Arguments:
        q: queries of the tokens whose output is needed, [B, H, kept, dh].
        k: keys of all tokens that enter the layer, [B, Hk, token, dh].
        rope: rotary embedding of the layer; None returns both unchanged.
        history: gives the angles at the tokens' positions.
    """
    if rope is None:
        return q, k
    (cos, sin), interleaved = history.rotation(rope, q.dtype), rope.interleaved
    q = rotate(q, history.needed(cos), history.needed(sin), interleaved=interleaved)
    return q, rotate(k, cos, sin, interleaved=interleaved)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    allowed: Tensor | None,
    mixer: AttentionMixer,
    layer: int,
    taps: AttentionTaps,
    weigh: Weigh | None = None,
    places: Tensor | None = None,
) -> Tensor:
    """Pattern-weighted values from queries and keys after RoPE, with the hook points of scores and pattern.

    Arguments:
        q: queries [B, H, query, dh].
        k: keys [B, Hk, key, dh].
        v: values [B, Hk, key, dh].
        allowed: bool, broadcastable to [B, H, query, key], True where attention may look; None for a plain
            causal mask, or for no mask if the layer is bidirectional.
        mixer: parameters of the layer's attention.
        layer: number of the layer.
        taps: hook points, cut edges included.
        weigh: computes the output if no intervention changes scores or patterns; None for `weighted_values`.
        places: positions of queries in their prompts, [query] or [B, query], for relative position biases;
            keys are at positions 0, 1, ….

    Returns:
        z [B, H, query, dh].

    Raises:
        InterventionError: cut edges leave a query without a key.
    """
    if mixer.relative is not None:
        assert places is not None  # no layer with relative positions runs under a history without positions
        mixer = replace(mixer, relative=partial(mixer.relative, places=places))
    mask, compute_z = allowed, weigh or weighted_values
    cut_edges = taps.cut(layer, q.shape[1], q.shape[2], k.shape[2], q.device)
    if cut_edges is not None:
        uncut = default_mask(k.shape[2], mixer, q.device) if mask is None else mask
        mask = _without_cut(uncut, cut_edges, layer, mixer)
    is_changed = taps.changes_attention(layer)
    if is_changed or taps.captures(layer, "scores", "attn_scores", "pattern"):
        full_mask = default_mask(k.shape[2], mixer, q.device) if mask is None else mask
        masked = _masked(taps("scores", layer, _scores(q, k, mixer)), full_mask, mixer)
        pattern = _pattern(taps("attn_scores", layer, masked), full_mask, mixer).to(q.dtype)
        pattern = taps("pattern", layer, pattern, full_mask)
        if is_changed or (weigh is None and needs_unfused(q, mixer)):
            z = _weighted_sum(pattern, v)
            if not is_changed or not is_beside_others() or needs_unfused(q, mixer):
                return z
            # Queries whose pattern was not changed keep the bits of a run without interventions.
            original = _unchanged_pattern(q, k, full_mask, mixer)
            is_unchanged = (pattern == original).all(-1, keepdim=True)
            return torch.where(is_unchanged, compute_z(q, k, v, mask, mixer), z)
    return compute_z(q, k, v, mask, mixer)


def weighted_values(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, mixer: AttentionMixer) -> Tensor:
    """Pattern-weighted values z [B, H, query, dh] without hook points, by the fused kernel where possible.

    Arguments:
        q: queries [B, H, query, dh].
        k: keys [B, Hk, key, dh].
        v: values [B, Hk, key, dh].
        mask: bool, broadcastable to [B, H, query, key], True where attention may look; None for a plain
            causal mask, or for no mask if the layer is bidirectional.
        mixer: parameters of the layer's attention.
    """
    compute_z = unfused_attention if needs_unfused(q, mixer) else _fused
    return compute_z(q, k, v, mask, mixer)


def unfused_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, mixer: AttentionMixer) -> Tensor:
    """Pattern-weighted values by separate matrix products and a softmax, for families that torch's fused
    kernel does not support (`needs_unfused`).

    Arguments:
        q: Queries [B, H, query, dh].
        k: Keys [B, Hk, key, dh].
        v: Values [B, Hk, key, dv]; dv may differ from dh.
        mask: Bool, broadcastable to [B, H, query, key], True where attention may look; None for a plain
            causal mask, or for no mask if the layer is bidirectional.
        mixer: Parameters of the layer's attention.

    Returns:
        z [B, H, query, dv].
    """
    full_mask = default_mask(k.shape[2], mixer, q.device) if mask is None else mask
    return _weighted_sum(_unchanged_pattern(q, k, full_mask, mixer), v)


def _unchanged_pattern(q: Tensor, k: Tensor, mask: Tensor, mixer: AttentionMixer) -> Tensor:
    """Attention pattern [B, H, query, key] without hook points; mask: bool, True where attention may look."""
    return _pattern(_masked(_scores(q, k, mixer), mask, mixer), mask, mixer).to(q.dtype)


def fused_over_padded(keys: Tensor, values: Tensor) -> Weigh:
    """Function that computes pattern-weighted values by the fused kernel from buffers of keys and values that
    already contain the padding, so that each call needs no copy of them.

    Arguments:
        keys: [B, Hk, key, dh], the keys of the call followed by padding that the mask hides, to the length
            `padded_keys`.
        values: [B, Hk, key, dh], the values, padded to the same length.
    """

    def weigh(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, mixer: AttentionMixer) -> Tensor:
        size, padded_size = k.shape[2], keys.shape[2]
        if mask is not None:
            mask = F.pad(mask, (0, padded_size - size))
        elif padded_size > size and (q.shape[2] == 1 or mixer.is_bidirectional):
            mask = _first_keys_bias(padded_size, size).to(q.dtype)
        return _fused(q, keys, values, mask, mixer, is_filled=True)

    return weigh


def padded_keys(q: Tensor, keys: int) -> int:
    """Number of keys after padding for queries q [B, H, query, dh], so that the fused CPU kernel sums in one
    order in every batch.

    The kernel computes exponentials 16 at a time, and the remainder by another function. Each thread has a
    buffer for scores; the padding also aligns these to 16 bytes, as MKL uses other kernels for unaligned
    ones.
    """
    if not _depends_on_sizes(q):
        return keys
    return keys + -keys % 16 + (-(2 + q.shape[3]) % 4 if q.shape[2] <= _most_unpadded_queries() else 0)


def padded_keys_unfused(q: Tensor, keys: int, mixer: AttentionMixer) -> int:
    """Number of keys after padding for `unfused_attention`: a softmax on CPU sums 16 numbers at a time, and
    then the remainder, so keys are padded to a multiple of 16.

    Arguments:
        q: Queries [B, H, query, dh]; their device and dtype decide whether the order of summation depends on
            the number of keys.
        keys: Number of keys before padding.
        mixer: Parameters of the layer's attention; keys with relative position biases are not padded.

    Returns:
        Number of keys after padding.
    """
    return keys if mixer.relative is not None or not _depends_on_sizes(q) else keys + -keys % 16


def _fused(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, mixer: AttentionMixer, *, is_filled: bool = False
) -> Tensor:
    """Pattern-weighted values z [B, H, query, dh] by torch's fused kernel, with keys and queries padded so
    that sums have one order in every batch.

    Arguments:
        q: queries [B, H, query, dh].
        k: keys [B, Hk, key, dh].
        v: values [B, Hk, key, dh].
        mask: as in `weighted_values`.
        mixer: parameters of the layer's attention.
        is_filled: whether keys and values are already padded to the length `padded_keys`.
    """
    n_queries, n_keys = q.shape[2], k.shape[2]
    is_causal = mask is None and n_queries > 1 and not mixer.is_bidirectional
    more_keys = 0 if is_filled else padded_keys(q, n_keys) - n_keys
    if more_keys:
        k, v = (F.pad(x, (0, 0, 0, more_keys)) for x in (k, v))
        if mask is not None:
            mask = F.pad(mask, (0, more_keys))
        elif not is_causal:
            mask = _first_keys_bias(n_keys + more_keys, n_keys).to(q.dtype)
    if _depends_on_sizes(q) and (is_causal or n_queries > _most_unpadded_queries()):
        # Up to one block of queries, an explicit mask needs fewer padded rows than the causal flag.
        if is_causal and n_queries <= _BLOCK:
            mask, is_causal = _causal_bias(n_queries, k.shape[2]).to(q.dtype), False
        more_queries = -n_queries % (_QUERIES if is_causal else _PADDED_QUERIES)
        q = F.pad(q, (0, 0, 0, more_queries)) if more_queries else q
        if more_queries and mask is not None and mask.shape[-2] > 1:
            mask = F.pad(mask, (0, 0, 0, more_queries))
    z = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=is_causal,
        scale=mixer.scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return z[:, :, :n_queries]


@lru_cache(maxsize=64)
def _causal_bias(queries: int, keys: int) -> Tensor:
    """Additive causal mask [1, 1, query, key], float32: 0 where key <= query, -inf elsewhere. Cached, as all
    layers use the same."""
    hidden = torch.ones(queries, keys, dtype=torch.bool).triu(1)
    return torch.zeros(1, 1, queries, keys).masked_fill(hidden, float("-inf"))


@lru_cache(maxsize=64)
def _first_keys_bias(keys: int, n_visible: int) -> Tensor:
    """Additive mask [1, 1, 1, key]: 0 for the first `n_visible` keys, -inf for the others. Cached, as all
    layers use the same."""
    # float32, because torch converts a bool mask in every call, at each generated token.
    return torch.zeros(1, 1, 1, keys).masked_fill(torch.arange(keys) >= n_visible, float("-inf"))


def _most_unpadded_queries() -> int:
    """Largest number of queries that a call of the kernel leaves unpadded: 0 inside `beside_others`, where
    all calls must be padded alike."""
    return 0 if is_beside_others() else _FEW_QUERIES


def _depends_on_sizes(q: Tensor) -> bool:
    """Whether the fused kernel sums in an order that depends on the numbers of queries, keys and threads,
    for queries q on this device and in this dtype: float32 on the CPU, and 16-bit dtypes inside
    `beside_others`."""
    return q.device.type == "cpu" and (
        q.dtype == torch.float32 or (is_beside_others() and q.dtype in _NARROW)
    )


def tiled_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, mixer: AttentionMixer) -> Tensor:
    """Pattern-weighted values of whole prompts, computed in tiles of queries, with the same bits for any
    batch and any later tokens.

    The keys of a tile end where the tile ends; the last tile is padded with hidden keys. A masked key adds
    exactly 0, but the number of keys decides the order of the sum, and here it depends on the position alone.

    Arguments:
        q: Queries [B, H, token, dh].
        k: Keys [B, Hk, token, dh].
        v: Values [B, Hk, token, dv]; dv may differ from dh.
        mask: Bool [..., query, key], True where attention may look; None for a plain causal mask.
        mixer: Parameters of the layer's attention.

    Returns:
        z [B, H, token, dv].
    """
    length = q.shape[2]
    ends = _tile_ends(length)
    k, v = (F.pad(x, (0, 0, 0, ends[-1] - length)) for x in (k, v))
    outputs, start = [], 0
    for end in ends:
        n_queries = min(end, length) - start
        more_queries = -n_queries % _QUERIES
        if mask is None:
            tile_mask = causal(end, None, q.device, newest=end - start)[: n_queries + more_queries]
        else:
            tile_mask = mask[..., start : start + n_queries, :end]
            tile_mask = F.pad(tile_mask, (0, end - tile_mask.shape[-1], 0, more_queries))
        queries = F.pad(q[:, :, start : start + n_queries], (0, 0, 0, more_queries))
        z = weighted_values(queries, k[:, :, :end], v[:, :, :end], tile_mask, mixer)
        outputs.append(z[:, :, :n_queries])
        start = end
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)


def _tile_ends(length: int) -> list[int]:
    """Positions at which the tiles of a prompt of this length end, exclusive; the last tile may end after the
    prompt."""
    ends = [0]
    while (start := ends[-1]) < length:
        ends.append(start + next((size for before, size in _TILES if start < before), _LARGEST_TILE))
    return ends[1:]


def needs_unfused(q: Tensor, mixer: AttentionMixer) -> bool:
    """Whether attention needs `unfused_attention`: the fused kernel supports no soft cap, no relative
    position bias and no attention sinks, and in float64 it computes the softmax in float64, where the
    reference uses float32."""
    is_plain = mixer.sinks is None and mixer.relative is None and mixer.part is None
    if q.dtype == torch.bfloat16 and q.device.type == "cpu" and not _has_fused_bfloat16():
        return True
    return mixer.is_capped or not is_plain or q.dtype == torch.float64


@cache
def _has_fused_bfloat16() -> bool:
    """Whether torch's fused kernel runs in bfloat16 on this CPU. It fails if `ATEN_CPU_CAPABILITY` limits
    torch to fewer instructions than the processor has, because the kernel packs keys for the processor (torch
    2.13)."""
    x = torch.zeros(1, 4, 64, 16, dtype=torch.bfloat16)
    try:
        with torch.no_grad():
            F.scaled_dot_product_attention(x, x, x, is_causal=True)
    except RuntimeError:
        return False
    return True


def output(z: Tensor, projection: Linear, layer: int, taps: Taps) -> Tensor:
    """Output of attention [B, S, D] from the heads' outputs, by the output projection; computed head by head
    only if the hook point "result" is captured or changed.

    Arguments:
        z: outputs of the heads, [B, H, S, dh].
        projection: the output projection.
        layer: number of the layer.
        taps: hook points of the pass, of which "result" is [B, H, S, D].
    """
    if taps.touches(layer, "result"):
        heads, width = z.shape[1], z.shape[-1]
        per_head = projection.weight.unflatten(1, (heads, width)).permute(1, 2, 0)
        original = _per_head_product(z, per_head)
        # A copy where it is compared below, because taps may write into it.
        result = taps("result", layer, original.clone() if is_beside_others() else original)
        if taps.changes(layer, "result"):
            # `sum` over heads, as the order of torch's reduction depends on the number of queries.
            summed = sum(result.unbind(1), torch.zeros_like(result[:, 0]))
            summed = summed if projection.bias is None else summed + projection.bias
            if not is_beside_others():
                return summed
            # Tokens without a change keep the bits of the plain projection.
            is_unchanged = (result == original).all(-1).all(1)[..., None]
            return torch.where(is_unchanged, linear(z.transpose(1, 2).flatten(2), projection), summed)
    return linear(z.transpose(1, 2).flatten(2), projection)


def _per_head_product(x: Tensor, maps: Tensor) -> Tensor:
    """x [B, H, S, in] times a matrix per head [H, in, out]: [B, H, S, out]."""
    flat: Tensor = batched_product(x.transpose(0, 1).flatten(1, 2), maps).unflatten(1, (x.shape[0], -1))
    return flat.transpose(0, 1)


def _without_cut(mask: Tensor, cut_edges: Tensor, layer: int, mixer: AttentionMixer) -> Tensor:
    """Attention mask without the edges that a knockout cuts; InterventionError if a query is left with no
    key.

    Arguments:
        mask: bool, True where attention may look, broadcastable to the edges.
        cut_edges: bool [H, query, key], or with a batch axis, True at edges that are cut.
        layer: number of the layer, for the message.
        mixer: parameters of the layer's attention.
    """
    uncut = mask & ~cut_edges
    had_keys, has_keys = mask.expand_as(uncut).any(-1), uncut.any(-1)
    without_keys = (had_keys & ~has_keys).nonzero()
    if len(without_keys):
        # Row numbers are not positions, as rows may start anywhere in the prompt; but the last key that a
        # causal query sees is its own position.
        query = int(mask.expand_as(uncut)[tuple(without_keys[0].tolist())].nonzero()[-1])
        head, label = int(without_keys[0][-2]), "a query" if mixer.is_bidirectional else f"query {query}"
        raise InterventionError(
            f"Knockout at 'blocks.{layer}.attn.hook_scores' leaves {label} of head {head} no key to attend "
            "to; expected at least one key per query that is not cut, so cut fewer edges, or zero the head "
            f"at 'blocks.{layer}.attn.hook_z'"
        )
    return uncut


def _scores(q: Tensor, k: Tensor, mixer: AttentionMixer) -> Tensor:
    """Attention scores [B, H, query, key]: scale q k^T, plus the relative position bias if the family has
    one, from queries q [B, H, query, dh] and keys k [B, Hk, key, dh]."""
    batch, heads, queries, _ = q.shape
    kv_heads, keys = k.shape[1], k.shape[2]
    # Queries that share a key head are stacked into one matrix, so that keys are never repeated in memory.
    stacked = q.reshape(batch * kv_heads, -1, q.shape[-1])
    raw = batched_product(stacked * mixer.scale, k.reshape(batch * kv_heads, keys, -1).transpose(1, 2))
    scores = raw.view(batch, heads, queries, keys)
    return scores if mixer.relative is None else scores + mixer.relative(q, k)


def _masked(scores: Tensor, mask: Tensor, mixer: AttentionMixer) -> Tensor:
    """Scores [B, H, query, key] after the family's soft cap, if it has one, and -inf where the mask (bool) is
    False."""
    if mixer.is_capped:
        scores = evenly(lambda values: mixer.capped(values, torch), scores)
    return scores.masked_fill(~mask, float("-inf"))


def _pattern(masked: Tensor, mask: Tensor, mixer: AttentionMixer) -> Tensor:
    """Attention pattern [B, H, query, key]: softmax of masked scores. In an encoder-decoder, a query for
    which the mask allows no key gets a row of zeros."""
    if mixer.part is None:
        return _softmax_with_sinks(masked, mixer.sinks)
    sees_nothing = ~mask.any(-1, keepdim=True)
    # Also finite before the softmax: a row of -inf would make its gradients NaN.
    pattern = _softmax_with_sinks(masked.masked_fill(sees_nothing, 0.0), None)
    return pattern.masked_fill(sees_nothing, 0.0)


def _softmax_with_sinks(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax of masked scores [B, H, query, key], in float32. With attention-sink logits [H], rows sum to
    less than 1, by the weight of the sink (Xiao et al., StreamingLLM, 2023; gpt-oss, 2025)."""
    if sinks is None:
        return torch.softmax(scores, dim=-1, dtype=torch.float32)
    sink = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat([scores, sink], dim=-1), dim=-1, dtype=torch.float32)[..., :-1]


def _weighted_sum(pattern: Tensor, v: Tensor) -> Tensor:
    """Values v [B, Hk, key, dh] weighted by the attention pattern [B, H, query, key]: z [B, H, query, dh]."""
    batch, heads, queries, keys = pattern.shape
    kv_heads = v.shape[1]
    # Query heads that share a value head are stacked into one matrix, so that values are never repeated.
    stacked = pattern.reshape(batch * kv_heads, -1, keys)
    z = batched_product(stacked, v.reshape(batch * kv_heads, keys, -1))
    return z.view(batch, heads, queries, -1)
