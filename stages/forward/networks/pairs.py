"""Encoder-decoders: embeddings of source and target, the encoder's output ("memory"), cross-attention, and
masks.

    source: embed -> [self-attention -> MLP] * E -> norm -> memory
    target: embed -> [self-attention -> cross-attention to memory -> MLP] * D -> norm -> logits

Source and target are positions of one row. A mask of target positions is carried with the stream, and from
the decoder's first layer on also the memory; the history decides which positions see each other. A layer
computes all positions and adds its outputs at positions of its side only. An intervention at the hook point
of such an output is added at any position.

Axes: [B, token, D]; masks [B, H, query, key].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ....store.errors import ConfigError, PromptError
from ..architectures.mixers import CrossAttentionSpec
from ..hooks.taps import Taps
from .attention import attend, linear
from .history import STREAM, Carried, History
from .mixers.mixer import LayerTensors, merge_heads, split_heads, strip_prefix
from .norms import apply_norm
from .weights import Weights, parts_of

if TYPE_CHECKING:
    from ..architectures.architecture import Architecture
    from ..architectures.composed import ComposedArchitecture
    from ..architectures.layer_summaries import AttentionMixer
    from ..hooks.taps import PassTaps

__all__ = [
    "MEMORY",
    "TARGET",
    "CrossAttention",
    "attend_sides",
    "embed_sides",
    "enter_side",
    "no_pairs",
    "seen_of",
    "starts_of",
]

TARGET = "target"
"""Name in `Carried` of the mask of target positions, 1 or 0, [B, token, 1]."""
MEMORY = "memory"
"""Name in `Carried` of the encoder's normalised output, [B, token, D]."""


def starts_of(ids: Tensor, config: Architecture) -> Tensor | None:
    """Position of each prompt's first target token, int [B, 1]; None unless the model is an encoder-decoder.

    Arguments:
        ids: Token ids [B, S]; the id of the first target token is raised by the vocabulary size.
        config: The architecture.
    """
    if config.target_start is None:
        return None
    return (ids >= config.vocab_size).int().argmax(1, keepdim=True)


def seen_of(part: str, queries: Tensor, keys: Tensor, starts: Tensor | None) -> Tensor:
    """Attention mask of one kind of attention in an encoder-decoder: bool, True where a query may look; all
    False for queries on which this attention does not act.

    Arguments:
        part: self-attention of "source" or "target", or "cross" for attention from target to source.
        queries: positions of queries, int.
        keys: positions of keys, int, broadcastable with queries.
        starts: positions at which targets begin, int, broadcastable with both.

    Raises:
        ConfigError: `starts` is None, because this kind of pass does not support encoder-decoders.
    """
    if starts is None:
        raise no_pairs()
    if part == "source":
        return (queries < starts) & (keys < starts)
    if part == "cross":
        return (queries >= starts) & (keys < starts)
    return (queries >= starts) & (keys >= starts) & (keys <= queries)


def attend_sides(
    layer: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mixer: AttentionMixer,
    history: History,
    taps: PassTaps,
    masks: dict[str, Tensor],
) -> Tensor:
    """Attention of one layer of an encoder-decoder over prompts of one length: weighted values z [B, H,
    query, dh].

    Arguments:
        layer: number of the layer.
        q: queries [B, H, query, dh].
        k: keys [B, H, key, dh] at the positions of the history.
        v: values [B, H, key, dh] at the same positions.
        mixer: parameters of the layer's attention.
        history: gives the positions of the tokens, and where targets begin.
        taps: captures and interventions of the pass, called at its hook points.
        masks: attention masks by kind ("source", "target" or "cross"), to which a mask is added at its first
            use.
    """
    part, positions = mixer.part, history.positions
    assert part is not None  # callers check
    if part not in masks:
        starts = None if history.starts is None else history.starts[:, :, None, None]
        masks[part] = seen_of(part, positions[:, None], positions, starts)
    pair_taps = CrossTaps(taps) if part == "cross" else taps
    return attend(q, k, v, masks[part], mixer, layer, pair_taps, None, positions)


def no_pairs() -> ConfigError:
    """Error for an encoder-decoder in a kind of pass that supports only models of single sequences."""
    return ConfigError(
        "expected a model of single sequences for this analysis, found a model with an encoder and a "
        "decoder; such a model supports forward, run, capture and generate"
    )


def embed_sides(
    config: ComposedArchitecture,
    weights: Weights[Any],
    ids: Tensor,
    positions: Tensor | None,
    starts: Tensor | None,
) -> Carried:
    """Tensors that enter the first layer of an encoder-decoder: embeddings [B, S, D] of source and target
    tokens with their positions, normalised if the family does that, and the mask of target positions.

    Arguments:
        config: the architecture.
        weights: weights of the network.
        ids: token ids, int [B, S].
        positions: positions in the prompts, int [S].
        starts: positions at which targets begin, broadcastable to [B, S].

    Raises:
        ConfigError: the pass does not know where targets begin.
        PromptError: a side is too long, or contains padding.
    """
    if positions is None or starts is None:
        raise no_pairs()
    is_target = (positions >= starts).expand_as(ids)
    ids = ids % config.vocab_size
    if config.unknown_token is not None and bool((ids == config.unknown_token).any()):
        raise PromptError(
            f"expected no padding token in a source or a target, found token {config.unknown_token}, to "
            f"which {config.model_type} gives no position; remove it from the prompt"
        )
    positions = torch.where(is_target, positions - starts, positions)
    if config.side_length is not None and int(positions.max()) >= config.side_length:
        raise PromptError(
            f"expected a source and a target of at most {config.side_length} tokens each, found one of "
            f"{int(positions.max()) + 1} tokens; shorten it, or generate fewer tokens"
        )
    x, is_target = weights.embedded(ids), is_target[..., None]
    source, target = (_side_embeddings(config, weights, x, positions, side) for side in ("source", "target"))
    return {STREAM: torch.where(is_target, target, source), TARGET: is_target.to(x.dtype)}


def _side_embeddings(
    config: ComposedArchitecture, weights: Weights[Any], x: Tensor, positions: Tensor, side: str
) -> Tensor:
    """Token embeddings x [B, S, D] with the position embeddings and the norm of source or target, same shape.

    Arguments:
        config: the architecture.
        weights: weights of the network.
        x: token embeddings.
        positions: positions within their sides, int [B, S].
        side: "source" or "target".
    """
    assert config.pair is not None  # callers check
    norm = parts_of(weights.beside).get(f"{side}.embed_norm")
    norm_is_first = config.pair.norms_target_tokens and side == "target"
    if norm is not None and norm_is_first:
        x = apply_norm(x, norm, config.norm_type, config.norm_eps)
    elif config.embedding_scale is not None:
        x = x * config.embedding_scale
    table = weights.beside.get(f"{side}.positions", weights.positions)
    if table is not None:
        # Clamped for positions of the other side, whose results are discarded.
        x = x + table[(positions + config.first_position).clamp(max=len(table) - 1)]
    return x if norm is None or norm_is_first else apply_norm(x, norm, config.norm_type, config.norm_eps)


def enter_side(
    config: ComposedArchitecture,
    beside: Mapping[str, Tensor],
    layer: int,
    x: Tensor,
    carried: Carried,
    history: History,
) -> tuple[Carried, Tensor]:
    """Tensors that a layer of an encoder-decoder reads besides the stream, and the positions that it acts on.

    Arguments:
        config: the architecture.
        beside: weights outside of the layers (`Weights.beside`).
        layer: number of the layer; the decoder's first layer makes the memory from the stream.
        x: residual stream [B, token, D].
        carried: tensors that enter the layer besides the stream, by name.
        history: selects the tokens whose output is needed.

    Returns:
        The tensors by name: the mask of target positions and, in the decoder, the memory. And bool [B, kept,
        1], True at positions that the layer acts on: of the source in encoder layers, else of the target.
    """
    assert config.pair is not None  # callers check
    others = dict(carried)
    if layer == config.pair.encoder_layers:
        norm = parts_of(beside).get("memory_norm")
        # A copy, because interventions may write into the stream.
        others[MEMORY] = x.clone() if norm is None else apply_norm(x, norm, config.norm_type, config.norm_eps)
    is_target = history.needed(others[TARGET]) > 0.5
    return others, is_target if config.blocks[layer].side == "target" else ~is_target


class CrossAttention:
    """Cross-attention of a decoder layer: queries from the stream, keys and values from the memory."""

    def __init__(self, spec: CrossAttentionSpec, tensors: LayerTensors) -> None:
        self._maps = parts_of(strip_prefix(tensors, "cross."))
        self._head_dim, self._mixer = spec.attention.head_dim, spec.summary

    def __call__(self, x: Tensor, memory: Tensor, layer: int, history: History, taps: Taps) -> Tensor:
        """Output of cross-attention that is added to the stream, [B, kept, D].

        Arguments:
            x: normalised stream [B, kept, D].
            memory: the encoder's normalised output [B, token, D].
            layer: number of the layer.
            history: mixes the positions.
            taps: captures and interventions of the pass, called at its hook points.
        """
        memory = memory.clone() if taps.changes(layer, "cross_memory") else memory
        memory = taps("cross_memory", layer, memory)
        q, k, v = (
            taps(f"cross_{part}", layer, split_heads(linear(read, self._maps[part]), self._head_dim))
            for part, read in (("q", x), ("k", memory), ("v", memory))
        )
        z = taps("cross_z", layer, history.attend(layer, q, k, v, self._mixer))
        return linear(merge_heads(z), self._maps["o"])


class CrossTaps:
    """Taps of cross-attention (`AttentionTaps`): they translate kinds of hook points of attention, such as
    "pattern", to those of cross-attention, "cross_pattern"."""

    def __init__(self, taps: PassTaps) -> None:
        self._taps = taps

    def __call__(self, kind: str, layer: int | None, x: Tensor, allowed: Tensor | None = None) -> Tensor:
        """The value to continue with at the hook point "cross_<kind>" of a layer; x: the value there;
        allowed: attention mask, bool [query, key], for interventions on patterns."""
        return self._taps(f"cross_{kind}", layer, x, allowed)

    def captures(self, layer: int | None, *kinds: str) -> bool:
        """Whether one of the hook points "cross_<kind>" of a layer is captured."""
        return self._taps.captures(layer, *(f"cross_{kind}" for kind in kinds))

    def changes_attention(self, layer: int) -> bool:
        """Whether an intervention changes scores or pattern of the layer's cross-attention."""
        return self._taps.changes(layer, "cross_scores", "cross_attn_scores", "cross_pattern")

    def cut(self, layer: int, heads: int, queries: int, keys: int, device: torch.device) -> Tensor | None:
        """Mask of cut attention edges: always None, as edges can be cut in self-attention only.

        Arguments:
            layer: layer of the attention.
            heads: number of query heads.
            queries: number of queries.
            keys: number of keys.
            device: device of the mask.
        """
        return None
