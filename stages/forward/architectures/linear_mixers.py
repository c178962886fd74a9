"""Mixers between attention and state spaces: linear attention, gated recurrences, short convolutions.

As in mixers.py: hook points, how far a change at them reaches, sizes of axes and what a token costs. What
reads a state with queries and writes to it under keys has hook points of one room, "linear", whatever it is
called: a gated delta net, gated linear attention, retention, lightning attention, or the RG-LRU, whose heads
are single numbers.

Torch-free. Axes: as in points.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from .architecture import ConvolutionMixer, RecurrentMixer
from .mixers import MixerSpec
from .transformer import ActivationName, RopeConfig

__all__ = [
    "GatedDeltaSpec",
    "LightningSpec",
    "LinearAttentionSpec",
    "LinearUnitSpec",
    "MlstmSpec",
    "ShortConvolutionSpec",
]

_STATE = (
    *("linear_v", "linear_log_decay", "linear_decay", "linear_write", "linear_state_seq", "linear_state"),
    *("linear_alpha_raw", "linear_effective_attn", "linear_out"),
)
_WRITTEN = frozenset(
    (
        *("linear_conv", "linear_k", "linear_v", "linear_beta", "linear_log_decay", "linear_decay"),
        *("linear_write", "linear_state_seq"),
    )
)


class _LinearShape(MixerSpec):
    """A mixer with hook points of the room "linear"."""

    reaches_later: ClassVar[frozenset[str]] = _WRITTEN

    @property
    def summary(self) -> RecurrentMixer:
        """See `MixerSpec`."""
        return RecurrentMixer(self.kind)


@dataclass(frozen=True)
class GatedDeltaSpec(_LinearShape):
    """A gated delta net (Yang et al., Gated Delta Networks, 2024, equation 10): a token takes from the state
    what it holds under its key before it writes there.

    groups: of heads that share queries and keys. conv_size: 0 for no convolution. decays: one a "head", or
    one a "key" channel (Kimi Delta Attention, 2025); None where nothing is forgotten (DeltaNet). beta_factor:
    of how much is replaced, which is a sigmoid; 2 lets the state change sign. gate: activation of the gate,
    None without one. layout: how projections lie in a checkpoint, see layer_tensors.py.
    """

    kind: ClassVar[str] = "gated_delta"
    points: ClassVar[tuple[str, ...]] = (
        *("linear_gate", "linear_conv", "linear_q", "linear_k", "linear_beta"),
        *_STATE,
    )

    heads: int
    groups: int
    key_size: int
    value_size: int
    conv_size: int
    layout: Literal["by group", "by part", "separate"]
    decays: Literal["head", "key"] | None = "head"
    beta_factor: float = 1.0
    gate: Literal["silu", "sigmoid"] | None = "silu"
    norm_eps: float = 1e-6

    @property
    def held_points(self) -> tuple[str, ...]:
        """See `MixerSpec`."""
        absent = {"linear_gate"} if self.gate is None else set()
        absent |= {"linear_log_decay", "linear_decay"} if self.decays is None else set()
        absent |= set() if self.conv_size else {"linear_conv"}
        return tuple(point for point in self.points if point not in absent)

    @property
    def parts(self) -> tuple[int, int, int]:
        """Channels of queries, keys and values."""
        shared = self.groups * self.key_size
        return (shared, shared, self.heads * self.value_size)

    @property
    def axis_sizes(self) -> dict[str, int]:
        """See `MixerSpec`."""
        return {
            "linear_head": self.heads,
            "linear_group": self.groups,
            "linear_key": self.key_size,
            "linear_value": self.value_size,
            "linear_decay": self.key_size if self.decays == "key" else 1,
            "linear_channel": sum(self.parts),
        }

    def bytes_per_token(self, itemsize: int) -> int:
        """Projections; queries, keys and both sides of what is replaced of every head, in float32."""
        return itemsize * 6 * sum(self.parts) + 4 * 8 * self.heads * self.key_size


@dataclass(frozen=True)
class LinearAttentionSpec(_LinearShape):
    """Linear attention whose state fades: gated linear attention (Yang et al., Gated Linear Attention, 2023,
    section 4), whose tokens say how much of each key is left; and retention (Sun et al., Retentive Network,
    2023, section 2.1), where it is "fixed", one number a head, and queries and keys turn.

    groups: of heads that share keys, values and decays. conv_size: 0 for no convolution. activation: of
    queries and keys, None for none. decay_rank: of the map to decays; decay_divisor: of their logarithms;
    least_log_decay: no less, None for no bound. has_norm_weight: of the norm of what is read.
    """

    kind: ClassVar[str] = "linear_attention"
    points: ClassVar[tuple[str, ...]] = ("linear_gate", "linear_conv", "linear_q", "linear_k", *_STATE)

    heads: int
    groups: int
    key_size: int
    value_size: int
    decays: Literal["key", "fixed"]
    conv_size: int = 0
    rope: RopeConfig | None = None
    activation: ActivationName | None = None
    decay_rank: int = 16
    decay_divisor: float = 16.0
    least_log_decay: float | None = None
    has_gate: bool = True
    has_norm_weight: bool = True
    norm_eps: float = 1e-6

    @property
    def held_points(self) -> tuple[str, ...]:
        """See `MixerSpec`."""
        absent = set() if self.has_gate else {"linear_gate"}
        absent |= set() if self.conv_size else {"linear_conv"}
        return tuple(point for point in self.points if point not in absent)

    @property
    def parts(self) -> tuple[int, int, int]:
        """Channels of queries, keys and values."""
        return (self.heads * self.key_size, self.groups * self.key_size, self.groups * self.value_size)

    @property
    def axis_sizes(self) -> dict[str, int]:
        """See `MixerSpec`; keys are shown as heads have them."""
        found = {
            "linear_head": self.heads,
            "linear_group": self.heads,
            "linear_key": self.key_size,
            "linear_value": self.value_size,
            "linear_decay": self.key_size if self.decays == "key" else 1,
        }
        return found | ({"linear_channel": sum(self.parts)} if self.conv_size else {})

    def bytes_per_token(self, itemsize: int) -> int:
        """Projections; queries, keys, decays and what is read of every head, in float32."""
        return (itemsize * 4 + 4 * 4) * self.heads * (self.key_size + self.value_size)


@dataclass(frozen=True)
class LightningSpec(_LinearShape):
    """Lightning attention (Qin et al., Various Lengths, Constant Speed, 2024; MiniMax-01, 2025, section 2.2):
    linear attention whose decays are fixed, one a head.

    slope: of the first head's decay, before the heads' own share of it; see networks/mixers/lightning.py.
    """

    kind: ClassVar[str] = "lightning"
    points: ClassVar[tuple[str, ...]] = ("linear_gate", "linear_q", "linear_k", *_STATE)

    heads: int
    head_dim: int
    slope: float
    activation: ActivationName = "silu"
    norm_eps: float = 1e-6
    out_factor: float = 1.0

    @property
    def axis_sizes(self) -> dict[str, int]:
        """See `MixerSpec`."""
        return {
            "linear_head": self.heads,
            "linear_group": self.heads,
            "linear_key": self.head_dim,
            "linear_value": self.head_dim,
            "linear_decay": 1,
        }

    def bytes_per_token(self, itemsize: int) -> int:
        """Projections, activated and as they were; what is read, in float32."""
        return (itemsize * 10 + 4 * 4) * self.heads * self.head_dim


@dataclass(frozen=True)
class LinearUnitSpec(_LinearShape):
    """A real-gated linear recurrent unit behind a short convolution (De et al., Griffin, 2024, section 2.4):
    every channel is a head with a state of one number.

    gates: how many blocks the maps to gates have.
    """

    kind: ClassVar[str] = "linear_unit"
    points: ClassVar[tuple[str, ...]] = ("linear_gate", "linear_conv", "linear_k", *_STATE)

    channels: int
    gates: int
    conv_size: int
    activation: ActivationName = "gelu_tanh"

    @property
    def axis_sizes(self) -> dict[str, int]:
        """See `MixerSpec`."""
        return {
            "linear_head": self.channels,
            "linear_group": self.channels,
            "linear_key": 1,
            "linear_value": 1,
            "linear_decay": 1,
            "linear_channel": self.channels,
        }

    def bytes_per_token(self, itemsize: int) -> int:
        """Both branches, and gates, decays and what is read, in float32."""
        return (itemsize * 6 + 4 * 8) * self.channels


@dataclass(frozen=True)
class MlstmSpec(MixerSpec):
    """An mLSTM, the matrix memory of xLSTM (Beck et al., xLSTM, 2024, section 2.3; xLSTM 7B, 2025, section
    3).

    gate_cap: of both gates, c tanh(x / c). eps: added to what is divided by; norm_eps: of the norm of heads.
    is_fused: whether queries, keys, values and output gates are one projection, and both gates another.
    """

    kind: ClassVar[str] = "mlstm"
    points: ClassVar[tuple[str, ...]] = (
        *("mlstm_gate", "mlstm_q", "mlstm_k", "mlstm_v", "mlstm_input", "mlstm_log_decay", "mlstm_decay"),
        *("mlstm_write", "mlstm_state_seq", "mlstm_state", "mlstm_alpha_raw", "mlstm_effective_attn"),
        "mlstm_out",
    )
    reaches_later: ClassVar[frozenset[str]] = frozenset(
        (
            *("mlstm_k", "mlstm_v", "mlstm_input", "mlstm_log_decay", "mlstm_decay", "mlstm_write"),
            "mlstm_state_seq",
        )
    )

    heads: int
    key_size: int
    value_size: int
    gate_cap: float
    eps: float
    norm_eps: float
    has_bias: bool = False
    is_fused: bool = False

    @property
    def summary(self) -> RecurrentMixer:
        """See `MixerSpec`."""
        return RecurrentMixer("mlstm")

    @property
    def parts(self) -> tuple[int, int, int, int]:
        """Channels of queries, keys, values and output gates."""
        keys, values = self.heads * self.key_size, self.heads * self.value_size
        return (keys, keys, values, values)

    @property
    def axis_sizes(self) -> dict[str, int]:
        """See `MixerSpec`."""
        return {
            "mlstm_head": self.heads,
            "mlstm_key": self.key_size,
            "mlstm_value": self.value_size,
            "mlstm_cell": self.value_size + 2,
        }

    def bytes_per_token(self, itemsize: int) -> int:
        """Projections; keys, values and what is read, in float32."""
        return (2 * itemsize + 4 * 3) * sum(self.parts)


@dataclass(frozen=True)
class ShortConvolutionSpec(MixerSpec):
    """A short convolution between two gates (LFM2, Liquid AI, 2025): a token sees the few before it, and no
    state is kept of others."""

    kind: ClassVar[str] = "short_convolution"
    points: ClassVar[tuple[str, ...]] = ("conv_in_gate", "conv_out_gate", "conv_x", "conv_out")
    reaches_later: ClassVar[frozenset[str]] = frozenset(("conv_in_gate", "conv_x"))

    channels: int
    conv_size: int
    has_bias: bool = False

    @property
    def summary(self) -> ConvolutionMixer:
        """See `MixerSpec`."""
        return ConvolutionMixer(self.conv_size)

    @property
    def axis_sizes(self) -> dict[str, int]:
        """See `MixerSpec`; it is as wide as the stream."""
        return {"hidden": self.channels}

    def bytes_per_token(self, itemsize: int) -> int:
        """See `MixerSpec`: the projections and their products, as wide as the stream each."""
        return itemsize * 7 * self.channels
