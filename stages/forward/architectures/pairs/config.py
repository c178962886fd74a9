"""An encoder with a decoder: everything that decides its numbers besides its weights.

A prompt is a pair, a source and a target, on one axis of positions: source tokens, then target tokens. The
id of the first target token is raised by the size of the vocabulary, and so says where the target begins:
whoever has the ids (keys, stores, plans) has the pair. Layers are counted through: those of the encoder act
on source positions, those of the decoder on target positions and read the encoder's normed output by
cross-attention; at all other positions a layer adds nothing to the stream.

Border: never imports torch; the network is networks/pairs/network.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

from .....store.digest import digest
from ..architecture import Architecture, AttentionMixer, AxisSizes, Heads, Layer, Reach, Tensors, plain
from ..mixers import AttentionSpec, RelativeSpec
from ..points import HookPoint
from ..rwkv import UNLIMITED
from ..transformer import ActivationName
from .tensors import pair_tensors

__all__ = ["PairConfig"]

_ATTENTION = ("q", "k", "v", "rot_q", "rot_k", "scores", "attn_scores", "pattern", "z", "result")
CROSS = (
    *("ln_cross_scale", "ln_cross_normalized", "cross_memory", "cross_q", "cross_k", "cross_v"),
    *("cross_scores", "cross_attn_scores", "cross_pattern", "cross_z", "cross_attn_out", "resid_mid_cross"),
)
"""Hook points that layers of the decoder have besides."""
_HERE = frozenset(("q", "rot_q", "cross_q", "scores", "attn_scores", "pattern", "z", "result", "attn_out"))
_BEHIND = frozenset(
    (
        *("resid_mid", "ln_cross_scale", "ln_cross_normalized", "cross_scores", "cross_attn_scores"),
        *("cross_pattern", "cross_z", "cross_attn_out", "resid_mid_cross", "ln2_scale", "ln2_normalized"),
        *("mlp_pre", "mlp_pre_act", "mlp_pre_linear", "mlp_post_act", "mlp_post", "mlp_out"),
    )
)
"""Points of a layer at which a change stays at its positions until the layer ends."""


@dataclass(frozen=True)
class PairConfig(Architecture):
    """An encoder with a decoder.

    spelling: whose names the checkpoint's tensors have. norms: "before" what reads the stream, or "of sums"
    of it with what is added, which become the stream. has_biases: of all maps. buckets, farthest: of biases
    by distance; None where positions are learned or waves. bias_in_each: whether each layer has a table of
    its own. start_token: what a target begins with where none is given. norms_target_tokens: whether the norm
    of a target's embeddings is of its tokens, unscaled, and positions are added to that; in a source it is of
    the sum.
    """

    kind: ClassVar[str] = "pair"
    version: ClassVar[str] = "pair/1"

    model_type: str
    spelling: Literal["t5", "bart"]
    hidden_size: int
    vocab_size: int
    encoder_layers: int
    decoder_layers: int
    heads: int
    head_dim: int
    mlp_size: int
    activation: ActivationName
    start_token: int
    is_gated: bool = False
    norm_type: Literal["rms", "gemma_rms", "layer"] = "rms"
    norm_eps: float = 1e-6
    norms: Literal["before", "of sums"] = "before"
    scale: float | None = None
    has_biases: bool = False
    buckets: int | None = None
    farthest: int = 128
    bias_in_each: bool = False
    max_positions: int | None = None
    position_offset: int = 0
    embedding_scale: float | None = None
    has_embedding_norm: bool = False
    has_final_norm: bool = True
    logit_factor: float = 1.0
    has_head_bias: bool = False
    tie_word_embeddings: bool = True
    final_logit_softcapping: float | None = None
    has_position_waves: bool = False
    ends_with_slowest_wave: bool = True
    norms_target_tokens: bool = False
    unknown_token: int | None = None

    @property
    def num_layers(self) -> int:  # type: ignore[override]
        """Of the encoder, then of the decoder."""
        return self.encoder_layers + self.decoder_layers

    @property
    def target_start(self) -> int:  # type: ignore[override]
        """See `Architecture`."""
        return self.vocab_size + self.start_token

    @property
    def digest(self) -> str:
        """Of every field but how the checkpoint spells its tensors."""
        return digest("pair-config", plain(self) | {"spelling": None})

    @property
    def context_length(self) -> int:
        """Of source and target together; each by itself has half of it."""
        return 2 * self.max_positions if self.max_positions else UNLIMITED

    @property
    def side_length(self) -> int | None:
        """Positions that a source or a target may have; None where nothing bounds them."""
        return self.max_positions

    @property
    def position_rows(self) -> int:  # type: ignore[override]
        """See `Architecture`; of each side."""
        return self.max_positions + self.position_offset if self.max_positions else 0

    @cached_property
    def axis_sizes(self) -> AxisSizes:
        """See `Architecture`."""
        sizes = {"head": self.heads, "kv_head": self.heads, "d_head": self.head_dim, "mlp": self.mlp_size}
        return AxisSizes(hidden=self.hidden_size, one=1, **sizes)

    def is_decoder(self, layer: int) -> bool:
        """Whether a layer acts on the target."""
        return layer >= self.encoder_layers

    def shape(self, layer: int) -> AttentionSpec:
        """Self-attention of a layer: an encoder's sees all positions, a decoder's none that are later."""
        relative = None
        if self.buckets is not None:
            one_way = self.is_decoder(layer)
            near = self.buckets // (2 if one_way else 4)
            relative = RelativeSpec(self.buckets, near, self.farthest, ("bias",), looks_back=one_way)
        return AttentionSpec(
            self.heads,
            self.heads,
            self.head_dim,
            scale=self.scale,
            is_bidirectional=not self.is_decoder(layer),
            relative=relative,
        )

    @cached_property
    def hook_points(self) -> tuple[HookPoint, ...]:
        """See `Architecture`."""
        outside = ("ln_final_scale", "ln_final_normalized", "final_norm") * self.has_final_norm
        found = [HookPoint(kind) for kind in ("embed", *outside)]
        gated = ("mlp_pre_linear",) * self.is_gated
        own = (
            *("resid_pre", "ln1_scale", "ln1_normalized", *_ATTENTION, "attn_out", "resid_mid"),
            *("ln2_scale", "ln2_normalized", "mlp_pre", "mlp_pre_act", *gated, "mlp_post_act", "mlp_post"),
            *("mlp_out", "resid_post"),
        )
        for layer in range(self.num_layers):
            kinds = (*own, *CROSS) if self.is_decoder(layer) else own
            found += [HookPoint(kind, layer) for kind in kinds]
        return tuple(sorted(found, key=lambda point: point.order))

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """See `Architecture`; cross-attention is told by hook points alone."""
        norms: Literal["before", "of stream"] = "before" if self.norms == "before" else "of stream"
        channel: Literal["MLP", "gated MLP"] = "gated MLP" if self.is_gated else "MLP"
        return tuple(Layer(self.mixer(layer), channel, norms) for layer in range(self.num_layers))

    def mixer(self, layer: int) -> AttentionMixer:
        """Self-attention of a layer, as histories are told of it."""
        scale = 1 / math.sqrt(self.head_dim) if self.scale is None else self.scale
        is_decoder = self.is_decoder(layer)
        part: Literal["source", "target"] = "target" if is_decoder else "source"
        return AttentionMixer(scale, is_bidirectional=not is_decoder, part=part)

    def heads_of(self, layer: int) -> Heads:
        """See `Architecture`."""
        return Heads(self.heads, self.heads, self.head_dim, self.mixer(layer))

    @cached_property
    def tensors(self) -> Tensors:
        """See `Architecture`."""
        return pair_tensors(self)

    def reach(self, point: HookPoint) -> Reach:
        """All positions, before keys or values are made of what is changed; which of them, `reaches_from`
        says."""
        return "here" if point.kind in _HERE | _BEHIND or self._is_behind(point) else "all"

    def _is_behind(self, point: HookPoint) -> bool:
        outside = point.layer is None and point.kind != "embed"
        return outside or (point.kind == "resid_post" and point.layer == self.num_layers - 1)

    def reaches_from(self, tokens: Sequence[int], position: int) -> int:
        """A source position reaches every other one, a target position those behind it."""
        start = next((place for place, token in enumerate(tokens) if token >= self.vocab_size), len(tokens))
        return position if position >= start else 0

    @property
    def lengths_must_match(self) -> bool:
        """See `Architecture`; a source sees all of itself."""
        return True

    def keeps_keys(self, before: int, length: int) -> bool:
        """A pass that goes on would need the encoder's output: everything is read anew."""
        return before == 0

    def bytes_per_token(self, itemsize: int) -> int:
        """Stream, norms, memory; heads twice; the inside of the MLP."""
        heads = 10 * self.heads * self.head_dim
        return itemsize * (9 * self.hidden_size + heads + 4 * self.mlp_size)
