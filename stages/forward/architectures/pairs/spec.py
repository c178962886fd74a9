"""Specs of encoder-decoders: what belongs to the pair of source and target, and cross-attention.

A prompt is a pair of source and target on one axis of positions: source tokens, then target tokens. The id of
the first target token is raised by the vocabulary size, which marks where the target begins, so that the
token ids alone identify the pair in keys, stores and plans. Layers are numbered consecutively: encoder layers
act on source positions; decoder layers act on target positions and read the encoder's normalised output by
cross-attention. At all other positions a layer adds nothing to the stream.

Torch-free; the computation is in networks/pairs.py and networks/mixers/cross_attention.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..architecture import AttentionMixer
from ..mixers import AttentionSpec, MixerSpec

__all__ = ["CrossAttentionSpec", "PairSpec"]


@dataclass(frozen=True)
class PairSpec:
    """Properties of an encoder-decoder that belong to no single layer."""

    encoder_layers: int
    """Number of encoder layers, which come before the decoder layers."""
    start_token: int
    """Token id with which a target begins if the caller gives none."""
    side_length: int | None = None
    """Largest length of a source and of a target, in tokens; None for no bound."""
    norms_target_tokens: bool = False
    """Whether the embedding norm of a target is applied to its unscaled token embeddings before positions are
    added (Blenderbot 90M); in a source it is always applied to the sum."""


@dataclass(frozen=True)
class CrossAttentionSpec(MixerSpec):
    """Cross-attention of a decoder layer: targets read the encoder's normalised output ("memory")."""

    kind: ClassVar[str] = "cross_attention"
    points: ClassVar[tuple[str, ...]] = (
        *("cross_memory", "cross_q", "cross_k", "cross_v", "cross_scores", "cross_attn_scores"),
        *("cross_pattern", "cross_z"),
    )
    reaches_later: ClassVar[frozenset[str]] = frozenset(("cross_memory", "cross_k", "cross_v"))

    attention: AttentionSpec
    """Its projections; part is "cross"."""

    @property
    def summary(self) -> AttentionMixer:
        """See `MixerSpec`."""
        return self.attention.summary

    @property
    def axis_sizes(self) -> dict[str, int]:
        """See `MixerSpec`."""
        return self.attention.axis_sizes

    def bytes_per_token(self, itemsize: int) -> int:
        """See `MixerSpec`: 0, as the tensors of self-attention, which are as large, are free by then."""
        return 0
