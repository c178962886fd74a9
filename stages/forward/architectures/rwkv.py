"""Specs of RWKV 4 to 7: the time mix, with a recurrent state, and the token-shifted channel mix.

Both mix each token with the previous one (token shift) before their projections, so that the parts of a layer
up to the channel mix also affect later positions.

Papers: RWKV-4 (Peng et al. 2023), RWKV-5 and 6 (Peng et al. 2024, "Eagle and Finch"), RWKV-7 (Peng et al.
2025, "Goose"). Torch-free.

Axes: head, key (rows of the state), value (its columns).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from .layer_summaries import RecurrentMixer
from .mixers import ChannelMixerSpec, MixerSpec

__all__ = ["ChannelMixSpec", "Generation", "TimeMixSpec"]

Generation = Literal[4, 5, 6, 7]
_OF_STATES = (
    *("rwkv_log_decay", "rwkv_decay", "rwkv_write", "rwkv_state_seq", "rwkv_state"),
    *("rwkv_alpha_raw", "rwkv_effective_attn"),
)


@dataclass(frozen=True)
class TimeMixSpec(MixerSpec):
    """The time mix of an RWKV layer: a recurrence whose inputs are token-shifted."""

    kind: ClassVar[str] = "time_mix"
    points: ClassVar[tuple[str, ...]] = (
        *("rwkv_r", "rwkv_kk", "rwkv_a", "rwkv_k", "rwkv_v", "rwkv_g", *_OF_STATES, "rwkv_wkv_out"),
    )
    reaches_later: ClassVar[frozenset[str]] = frozenset(
        (
            *("rwkv_kk", "rwkv_a", "rwkv_k", "rwkv_v", "rwkv_log_decay", "rwkv_decay", "rwkv_write"),
            "rwkv_state_seq",
        )
    )

    generation: Generation
    """Version of RWKV."""
    heads: int
    """Number of heads; in RWKV-4 every channel is a head."""
    head_dim: int
    """Number of channels of a head: rows and columns of its state."""
    norm_eps: float
    """Epsilon of the norm of each head's output, which RWKV-4 does not have."""
    ranks: tuple[tuple[str, int], ...] = ()
    """(name, rank) of each low-rank map of versions 6 and 7, such as ("decay", 64); () in other versions."""
    has_gate: bool = True
    """Whether the output has a gate (version 5.1 and later)."""
    has_decay_per_head: bool = False
    """Whether all channels of a head share one decay and one bonus (RWKV-5.0 and 5.1)."""
    reads_first_values: bool = False
    """Whether the layer mixes its values with the values of layer 0, as in version 7 from layer 1 on."""

    @property
    def width(self) -> int:
        """Number of channels of all heads together."""
        return self.heads * self.head_dim

    @property
    def held_points(self) -> tuple[str, ...]:
        """Kinds of hook points that this mixer has; optional parts that are absent have none."""
        absent = set() if self.has_gate else {"rwkv_g"}
        # RWKV-4 has no matrix state, and only version 7 removes the value under a normalised key.
        absent |= set(_OF_STATES) if self.generation == 4 else set()
        absent |= {"rwkv_kk", "rwkv_a"} if self.generation < 7 else set()
        return tuple(point for point in self.points if point not in absent)

    @property
    def summary(self) -> RecurrentMixer:
        """Torch-free summary of this mixer, as `Architecture.layers` shows it."""
        return RecurrentMixer(f"rwkv{self.generation}")

    @property
    def axis_sizes(self) -> dict[str, int]:
        """Axis name -> size, for the axes of this mixer's hook points."""
        return {"head": self.heads, "key": self.head_dim, "value": self.head_dim}

    def bytes_per_token(self, itemsize: int) -> int:
        """Estimated bytes of activations per token, with itemsize bytes per number: the recurrence, in
        float32."""
        return 4 * 10 * self.width


@dataclass(frozen=True)
class ChannelMixSpec(ChannelMixerSpec):
    """The channel mix of an RWKV layer: a token-shifted MLP with squared ReLU, times a receptance up to
    version 6."""

    kind: ClassVar[str] = "channel_mix"
    has_token_shift: ClassVar[bool] = True

    generation: Generation
    """Version of RWKV."""
    hidden_size: int
    """Width of the stream."""
    intermediate_size: int
    """Hidden width of the MLP."""

    @property
    def summary(self) -> Literal["token-shifted MLP"]:
        """Name of this kind of channel mixer, as `Architecture.layers` shows it."""
        return "token-shifted MLP"

    @property
    def points(self) -> tuple[str, ...]:
        """Kinds of hook points inside this channel mixer."""
        return ("mlp_pre_act", "mlp_post_act")

    @property
    def axis_sizes(self) -> dict[str, int]:
        """Axis name -> size, for the axes of this channel mixer's hook points."""
        return {"mlp": self.intermediate_size}

    def bytes_per_token(self, itemsize: int) -> int:
        """Estimated bytes of activations per token, with itemsize bytes per number: shifted copies of the
        stream in both halves of the layer, and two tensors of the hidden width."""
        return itemsize * (6 * self.hidden_size + 2 * self.intermediate_size)
