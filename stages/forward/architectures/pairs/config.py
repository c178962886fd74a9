"""PairConfig: architecture of an encoder-decoder model.

A prompt is a pair of source and target on one axis of positions: source tokens, then target tokens. The id of
the first target token is raised by the vocabulary size, which marks where the target begins, so that the
token ids alone identify the pair in keys, stores and plans. Layers are numbered consecutively: encoder layers
act on source positions; decoder layers act on target positions and read the encoder's normalised output by
cross-attention. At all other positions a layer adds nothing to the stream.

Border: never imports torch; the network is networks/pairs/network.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

from .....store.digest import digest
from ..architecture import (
    UNLIMITED,
    Architecture,
    AttentionMixer,
    AxisSizes,
    Heads,
    Layer,
    Reach,
    Tensors,
    plain,
)
from ..mixers import AttentionSpec, RelativeSpec
from ..points import HookPoint
from ..transformer import ActivationName
from .tensors import pair_tensors

__all__ = ["PairConfig"]

_ATTENTION = ("q", "k", "v", "rot_q", "rot_k", "scores", "attn_scores", "pattern", "z", "result")
CROSS = (
    *("ln_cross_scale", "ln_cross_normalized", "cross_memory", "cross_q", "cross_k", "cross_v"),
    *("cross_scores", "cross_attn_scores", "cross_pattern", "cross_z", "cross_attn_out", "resid_mid_cross"),
)
"""Kinds of hook points that only decoder layers have."""
_HERE = frozenset(("q", "rot_q", "cross_q", "scores", "attn_scores", "pattern", "z", "result", "attn_out"))
_BEHIND = frozenset(
    (
        *("resid_mid", "ln_cross_scale", "ln_cross_normalized", "cross_scores", "cross_attn_scores"),
        *("cross_pattern", "cross_z", "cross_attn_out", "resid_mid_cross", "ln2_scale", "ln2_normalized"),
        *("mlp_pre", "mlp_pre_act", "mlp_pre_linear", "mlp_post_act", "mlp_post", "mlp_out"),
    )
)
"""Together with `_HERE`: kinds at which a change affects only its own position until the end of the layer."""


@dataclass(frozen=True)
class PairConfig(Architecture):
    """An encoder-decoder model: everything except the weights that decides its results."""

    kind: ClassVar[str] = "pair"
    version: ClassVar[str] = "pair/1"

    model_type: str
    spelling: Literal["t5", "bart"]
    """Naming scheme of the checkpoint's tensors."""
    hidden_size: int
    vocab_size: int
    encoder_layers: int
    decoder_layers: int
    heads: int
    """Number of attention heads."""
    head_dim: int
    """Entries of a head."""
    mlp_size: int
    """Hidden width of the MLPs."""
    activation: ActivationName
    start_token: int
    """Token id with which a target begins if the caller gives none."""
    is_gated: bool = False
    """Whether MLPs are gated."""
    norm_type: Literal["rms", "gemma_rms", "layer"] = "rms"
    norm_eps: float = 1e-6
    norms: Literal["before", "of sums"] = "before"
    """Pre-norm ("before"), or post-norm, where the sum of stream and output is normalised ("of sums")."""
    scale: float | None = None
    """Factor of the scores q k^T; None for 1 / sqrt(head_dim)."""
    has_biases: bool = False
    """Whether all linear projections have biases."""
    buckets: int | None = None
    """Buckets of T5's relative position bias; None for models with a table of positions."""
    farthest: int = 128
    """Distance from which all keys share the last bucket."""
    bias_in_each: bool = False
    """Whether each layer has its own table of biases, instead of one for the encoder and one for the
    decoder."""
    max_positions: int | None = None
    """Largest length of a source and of a target, in tokens; None for no bound."""
    position_offset: int = 0
    """Row of the first position in the table of positions."""
    embedding_scale: float | None = None
    has_embedding_norm: bool = False
    has_final_norm: bool = True
    logit_factor: float = 1.0
    """Factor of the logits."""
    has_head_bias: bool = False
    tie_word_embeddings: bool = True
    final_logit_softcapping: float | None = None
    has_position_waves: bool = False
    ends_with_slowest_wave: bool = True
    norms_target_tokens: bool = False
    """Whether the embedding norm of a target is applied to its unscaled token embeddings before positions are
    added (Blenderbot 90M); in a source it is always applied to the sum."""
    unknown_token: int | None = None

    @property
    def num_layers(self) -> int:  # type: ignore[override]
        """Total number of encoder and decoder layers."""
        return self.encoder_layers + self.decoder_layers

    @property
    def target_start(self) -> int:  # type: ignore[override]
        """See `Architecture`."""
        return self.vocab_size + self.start_token

    @property
    def digest(self) -> str:
        """Digest of every field except the naming scheme of the tensors."""
        return digest("pair-config", plain(self) | {"spelling": None})

    @property
    def context_length(self) -> int:
        """Largest length of source and target together, in tokens; each of them may have half of it."""
        return 2 * self.max_positions if self.max_positions else UNLIMITED

    @property
    def side_length(self) -> int | None:
        """Largest length of a source and of a target, in tokens; None for no bound."""
        return self.max_positions

    @property
    def position_rows(self) -> int:  # type: ignore[override]
        """See `Architecture`; encoder and decoder have a table each."""
        return self.max_positions + self.position_offset if self.max_positions else 0

    @cached_property
    def axis_sizes(self) -> AxisSizes:
        """See `Architecture`."""
        sizes = {"head": self.heads, "kv_head": self.heads, "d_head": self.head_dim, "mlp": self.mlp_size}
        return AxisSizes(hidden=self.hidden_size, one=1, **sizes)

    def is_decoder(self, layer: int) -> bool:
        """Whether a layer belongs to the decoder and acts on the target."""
        return layer >= self.encoder_layers

    def shape(self, layer: int) -> AttentionSpec:
        """Spec of a layer's self-attention: bidirectional in the encoder, causal in the decoder."""
        relative = None
        if self.buckets is not None:
            is_causal = self.is_decoder(layer)
            # Half of the buckets of each direction hold one distance each.
            near = self.buckets // (2 if is_causal else 4)
            relative = RelativeSpec(self.buckets, near, self.farthest, ("bias",), looks_back=is_causal)
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
        points = [HookPoint(kind) for kind in ("embed", *outside)]
        gated = ("mlp_pre_linear",) * self.is_gated
        in_layer = (
            *("resid_pre", "ln1_scale", "ln1_normalized", *_ATTENTION, "attn_out", "resid_mid"),
            *("ln2_scale", "ln2_normalized", "mlp_pre", "mlp_pre_act", *gated, "mlp_post_act", "mlp_post"),
            *("mlp_out", "resid_post"),
        )
        for layer in range(self.num_layers):
            kinds = (*in_layer, *CROSS) if self.is_decoder(layer) else in_layer
            points += [HookPoint(kind, layer) for kind in kinds]
        return tuple(sorted(points, key=lambda point: point.order))

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """See `Architecture`; summaries do not contain cross-attention, only hook points do."""
        norms: Literal["before", "of stream"] = "before" if self.norms == "before" else "of stream"
        channel: Literal["MLP", "gated MLP"] = "gated MLP" if self.is_gated else "MLP"
        return tuple(Layer(self.mixer(layer), channel, norms) for layer in range(self.num_layers))

    def mixer(self, layer: int) -> AttentionMixer:
        """Summary of a layer's self-attention, with the part of the pair that it acts on."""
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
        """See `Architecture`: "all" before keys or values are computed; `reaches_from` gives the first
        position that is affected."""
        return "here" if point.kind in _HERE | _BEHIND or self._is_behind(point) else "all"

    def _is_behind(self, point: HookPoint) -> bool:
        """Whether a hook point comes after all layers."""
        # After the last layer no keys or values are computed any more.
        outside = point.layer is None and point.kind != "embed"
        return outside or (point.kind == "resid_post" and point.layer == self.num_layers - 1)

    def reaches_from(self, tokens: Sequence[int], position: int) -> int:
        """See `Architecture`: a source position affects all positions, a target position those from itself
        on."""
        # The first target id is raised by the vocabulary size.
        start = next((place for place, token in enumerate(tokens) if token >= self.vocab_size), len(tokens))
        return position if position >= start else 0

    @property
    def lengths_must_match(self) -> bool:
        """See `Architecture`; encoder attention is bidirectional."""
        return True

    def keeps_keys(self, before: int, length: int) -> bool:
        """See `Architecture`; only for an empty prefix, as nothing is cached: each pass recomputes the
        encoder."""
        return before == 0

    def bytes_per_token(self, itemsize: int) -> int:
        """See `Architecture`: stream, norms and encoder output; self- and cross-attention; the MLP."""
        heads = 10 * self.heads * self.head_dim
        return itemsize * (9 * self.hidden_size + heads + 4 * self.mlp_size)
