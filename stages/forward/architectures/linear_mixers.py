"""Specs of linear attention, gated recurrences, xLSTM and short convolutions.

As in mixers.py, a spec has hook points, reach of changes, sizes of axes and memory per token. All mixers
whose state is written under keys and read with queries share the hook points with the prefix "linear": gated
delta nets, gated linear attention, retention, lightning attention, and the RG-LRU, whose heads are single
numbers.

Torch-free. Axes: as in points.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from .layer_summaries import ConvolutionMixer, RecurrentMixer
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


class _LinearSpec(MixerSpec):
    """Base class of mixers whose hook points have names that begin with "linear_"."""

    reaches_later: ClassVar[frozenset[str]] = _WRITTEN

    @property
    def summary(self) -> RecurrentMixer:
        """Torch-free summary of this mixer, as `Architecture.layers` shows it."""
        return RecurrentMixer(self.kind)


@dataclass(frozen=True)
class GatedDeltaSpec(_LinearSpec):
    """A gated delta net (Yang et al., Gated Delta Networks, 2024, equation 10): each token first removes what
    the state holds under its key, and then writes its value there."""

    kind: ClassVar[str] = "gated_delta"
    points: ClassVar[tuple[str, ...]] = (
        *("linear_gate", "linear_conv", "linear_q", "linear_k", "linear_beta"),
        *_STATE,
    )

    heads: int
    """Number of value heads."""
    groups: int
    """Number of groups of heads; the heads of a group share queries and keys."""
    key_size: int
    """Number of entries of one head's query or key."""
    value_size: int
    """Number of entries of one head's value."""
    conv_size: int
    """Kernel size of the short convolution, in tokens; 0 for no convolution."""
    layout: Literal["by group", "by part", "separate"]
    """How a checkpoint stores the projections: one tensor whose rows are ordered by group of heads ("by
    group"), one tensor of all queries, keys and values ("by part"), or a tensor for each ("separate")."""
    decays: Literal["head", "key"] | None = "head"
    """Decays of the state: one per head, or one per key channel ("key", Kimi Delta Attention, 2025); None for
    no decay (DeltaNet)."""
    beta_factor: float = 1.0
    """Factor of the write strength beta, a sigmoid; 2 allows negative eigenvalues of the state transition."""
    gate: Literal["silu", "sigmoid"] | None = "silu"
    """Activation of the output gate; None for no gate."""
    norm_eps: float = 1e-6
    """Epsilon of the norm of each head's output."""

    @property
    def held_points(self) -> tuple[str, ...]:
        """Kinds of hook points that this mixer has; optional parts that are absent have none."""
        absent = {"linear_gate"} if self.gate is None else set()
        # DeltaNet has no decays, so it has no hook points for them.
        absent |= {"linear_log_decay", "linear_decay"} if self.decays is None else set()
        absent |= set() if self.conv_size else {"linear_conv"}
        return tuple(point for point in self.points if point not in absent)

    @property
    def parts(self) -> tuple[int, int, int]:
        """Numbers of channels of queries, keys and values, each over all heads."""
        keys = self.groups * self.key_size
        return (keys, keys, self.heads * self.value_size)

    @property
    def axis_sizes(self) -> dict[str, int]:
        """Axis name -> size, for the axes of this mixer's hook points."""
        return {
            "linear_head": self.heads,
            "linear_group": self.groups,
            "linear_key": self.key_size,
            "linear_value": self.value_size,
            "linear_decay": self.key_size if self.decays == "key" else 1,
            "linear_channel": sum(self.parts),
        }

    def bytes_per_token(self, itemsize: int) -> int:
        """Estimated bytes of activations per token, with itemsize bytes per number: projections; queries,
        keys and both factors of the removal per head, in float32."""
        return itemsize * 6 * sum(self.parts) + 4 * 8 * self.heads * self.key_size


@dataclass(frozen=True)
class LinearAttentionSpec(_LinearSpec):
    """Linear attention with a decaying state: gated linear attention (Yang et al., 2023, section 4), with a
    decay per key channel computed from each token; and retention (Sun et al., Retentive Network, 2023,
    section 2.1), with one fixed decay per head and rope."""

    kind: ClassVar[str] = "linear_attention"
    points: ClassVar[tuple[str, ...]] = ("linear_gate", "linear_conv", "linear_q", "linear_k", *_STATE)

    heads: int
    """Number of query heads."""
    groups: int
    """Number of key and value heads, each shared by several query heads."""
    key_size: int
    """Number of entries of one head's query or key."""
    value_size: int
    """Number of entries of one head's value."""
    decays: Literal["key", "fixed"]
    """Decays of the state: one per key channel, computed from each token ("key"), or one fixed decay per head
    ("fixed")."""
    conv_size: int = 0
    """Kernel size of the short convolution, in tokens; 0 for no convolution."""
    rope: RopeConfig | None = None
    """Rotary position embedding of queries and keys; None for no rope."""
    activation: ActivationName | None = None
    """Activation function of queries and keys; None for no activation."""
    decay_rank: int = 16
    """Rank of the low-rank projection to computed decays; unused for fixed decays."""
    decay_divisor: float = 16.0
    """Divisor of the logarithm of computed decays; unused for fixed decays."""
    least_log_decay: float | None = None
    """Lower bound of the logarithm of computed decays; None for no bound."""
    has_gate: bool = True
    """Whether the output has a gate."""
    has_norm_weight: bool = True
    """Whether the norm of each head's output has learned weights."""
    norm_eps: float = 1e-6
    """Epsilon of the RMS norm of each head's output."""

    @property
    def held_points(self) -> tuple[str, ...]:
        """Kinds of hook points that this mixer has; optional parts that are absent have none."""
        absent = set() if self.has_gate else {"linear_gate"}
        absent |= set() if self.conv_size else {"linear_conv"}
        return tuple(point for point in self.points if point not in absent)

    @property
    def parts(self) -> tuple[int, int, int]:
        """Numbers of channels of queries, keys and values, each over all heads."""
        return (self.heads * self.key_size, self.groups * self.key_size, self.groups * self.value_size)

    @property
    def axis_sizes(self) -> dict[str, int]:
        """Axis name -> size, for the axes of this mixer's hook points, at which keys and values are repeated
        for all heads, so that "linear_group" counts heads."""
        sizes = {
            "linear_head": self.heads,
            "linear_group": self.heads,
            "linear_key": self.key_size,
            "linear_value": self.value_size,
            "linear_decay": self.key_size if self.decays == "key" else 1,
        }
        return sizes | ({"linear_channel": sum(self.parts)} if self.conv_size else {})

    def bytes_per_token(self, itemsize: int) -> int:
        """Estimated bytes of activations per token, with itemsize bytes per number: projections; queries,
        keys, decays and outputs per head, in float32."""
        return (itemsize * 4 + 4 * 4) * self.heads * (self.key_size + self.value_size)


@dataclass(frozen=True)
class LightningSpec(_LinearSpec):
    """Lightning attention (Qin et al., Various Lengths, Constant Speed, 2024; MiniMax-01, 2025, section 2.2):
    linear attention with one fixed decay per head."""

    kind: ClassVar[str] = "lightning"
    points: ClassVar[tuple[str, ...]] = ("linear_gate", "linear_q", "linear_k", *_STATE)

    heads: int
    """Number of heads."""
    head_dim: int
    """Number of entries of one head's query, key or value."""
    slope: float
    """Factor of this layer's log decays, which multiplies the slope of each head
    (networks/mixers/lightning.py)."""
    activation: ActivationName = "silu"
    """Activation function of queries, keys and values."""
    norm_eps: float = 1e-6
    """Epsilon of the RMS norm over the outputs of all heads together."""
    out_factor: float = 1.0
    """Factor of the mixer's output."""

    @property
    def axis_sizes(self) -> dict[str, int]:
        """Axis name -> size, for the axes of this mixer's hook points."""
        return {
            "linear_head": self.heads,
            "linear_group": self.heads,
            "linear_key": self.head_dim,
            "linear_value": self.head_dim,
            "linear_decay": 1,
        }

    def bytes_per_token(self, itemsize: int) -> int:
        """Estimated bytes of activations per token, with itemsize bytes per number: projections before and
        after their activation; outputs in float32."""
        return (itemsize * 10 + 4 * 4) * self.heads * self.head_dim


@dataclass(frozen=True)
class LinearUnitSpec(_LinearSpec):
    """RG-LRU, a real-gated linear recurrent unit after a short convolution (De et al., Griffin, 2024, section
    2.4): every channel is a head whose state is one number."""

    kind: ClassVar[str] = "linear_unit"
    points: ClassVar[tuple[str, ...]] = ("linear_gate", "linear_conv", "linear_k", *_STATE)

    channels: int
    """Number of channels of the recurrence, each of which has a state of one number."""
    gates: int
    """Number of blocks of the block-diagonal projections to input gate and recurrence gate."""
    conv_size: int
    """Kernel size of the short convolution, in tokens."""
    activation: ActivationName = "gelu_tanh"
    """Activation function of the output gate, by which the recurrence's output is multiplied."""

    @property
    def axis_sizes(self) -> dict[str, int]:
        """Axis name -> size, for the axes of this mixer's hook points."""
        return {
            "linear_head": self.channels,
            "linear_group": self.channels,
            "linear_key": 1,
            "linear_value": 1,
            "linear_decay": 1,
            "linear_channel": self.channels,
        }

    def bytes_per_token(self, itemsize: int) -> int:
        """Estimated bytes of activations per token, with itemsize bytes per number: both branches; gates,
        decays and outputs in float32."""
        return (itemsize * 6 + 4 * 8) * self.channels


@dataclass(frozen=True)
class MlstmSpec(MixerSpec):
    """mLSTM, the matrix memory of xLSTM (Beck et al., xLSTM, 2024, section 2.3; xLSTM 7B, 2025, section
    3)."""

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
    """Number of heads."""
    key_size: int
    """Number of entries of one head's query or key."""
    value_size: int
    """Number of entries of one head's value."""
    gate_cap: float
    """Soft cap c of input and forget gate, c tanh(x / c)."""
    eps: float
    """Epsilon added to the normaliser by which outputs are divided."""
    norm_eps: float
    """Epsilon of the norm of each head's output."""
    has_bias: bool = False
    """Whether projections and norms have biases."""
    is_fused: bool = False
    """Whether a checkpoint stores the projections to queries, keys, values and output gate as one tensor, and
    those to input and forget gate as another."""

    @property
    def summary(self) -> RecurrentMixer:
        """Torch-free summary of this mixer, as `Architecture.layers` shows it."""
        return RecurrentMixer("mlstm")

    @property
    def parts(self) -> tuple[int, int, int, int]:
        """Numbers of channels of queries, keys, values and output gates, each over all heads."""
        keys, values = self.heads * self.key_size, self.heads * self.value_size
        return (keys, keys, values, values)

    @property
    def axis_sizes(self) -> dict[str, int]:
        """Axis name -> size, for the axes of this mixer's hook points."""
        return {
            "mlstm_head": self.heads,
            "mlstm_key": self.key_size,
            "mlstm_value": self.value_size,
            # Two more columns: the normaliser and the log scale of the state.
            "mlstm_cell": self.value_size + 2,
        }

    def bytes_per_token(self, itemsize: int) -> int:
        """Estimated bytes of activations per token, with itemsize bytes per number: projections; keys, values
        and outputs in float32."""
        return (2 * itemsize + 4 * 3) * sum(self.parts)


@dataclass(frozen=True)
class ShortConvolutionSpec(MixerSpec):
    """A short convolution between two multiplicative gates (LFM2, Liquid AI, 2025), without any longer
    memory."""

    kind: ClassVar[str] = "short_convolution"
    points: ClassVar[tuple[str, ...]] = ("conv_in_gate", "conv_out_gate", "conv_x", "conv_out")
    reaches_later: ClassVar[frozenset[str]] = frozenset(("conv_in_gate", "conv_x"))

    channels: int
    """Width of the convolution, the hidden size of the model."""
    conv_size: int
    """Kernel size in tokens, the current one included."""
    has_bias: bool = False
    """Whether the input projection, the convolution and the output projection have biases."""

    @property
    def summary(self) -> ConvolutionMixer:
        """Torch-free summary of this mixer, as `Architecture.layers` shows it."""
        return ConvolutionMixer(self.conv_size)

    @property
    def axis_sizes(self) -> dict[str, int]:
        """Axis name -> size, for the axes of this mixer's hook points, which have the width of the stream."""
        return {"hidden": self.channels}

    def bytes_per_token(self, itemsize: int) -> int:
        """Estimated bytes of activations per token, with itemsize bytes per number: projections and their
        products, each of hidden size."""
        return itemsize * 7 * self.channels
