"""What a layer is made of: mixers and channel mixers, each a value of sizes and switches.

A mixer says here which hook points it has, at which of them a change reaches later positions, how large its
axes are and what a token costs; layer_tensors.py says which tensors it is made of, and networks/mixers/ has
the class that computes it, by `kind`. Another mixer is a class here, a function there, and a file there.

Torch-free. Axes: as in points.py.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from ....store.errors import ConfigError
from .architecture import AttentionMixer, ConvolutionMixer, Heads, RecurrentMixer
from .transformer import ActivationName, RopeConfig

__all__ = [
    "AttentionSpec",
    "ChannelMixerSpec",
    "DifferentialSpec",
    "ExpertsSpec",
    "GatedAttentionSpec",
    "LatentAttentionSpec",
    "Mamba2Spec",
    "MambaSpec",
    "MixerSpec",
    "MlpAndExpertsSpec",
    "MlpSpec",
    "QkNorm",
    "RelativeSpec",
    "RoutedAttentionSpec",
    "SharedBlockSpec",
    "TemperatureTuning",
]

_ATTENTION = ("q", "k", "v", "rot_q", "rot_k", "scores", "attn_scores", "pattern", "z", "result")
Routing = Literal[
    "softmax of chosen",
    "chosen of softmax",
    "chosen of corrected softmax",
    "sigmoid",
    "sigmoid of chosen",
    "sigmoid of inputs",
    "sparse mixing",
]
"""How experts are chosen and weighed, see networks/mixers/experts.py."""
_STATE_SPACE = (
    *("ssm_gate", "ssm_conv", "ssm_x", "ssm_dt", "ssm_B", "ssm_C", "ssm_log_decay", "ssm_decay"),
    *("ssm_write", "ssm_state_seq", "ssm_state", "ssm_alpha_raw", "ssm_effective_attn", "ssm_out"),
)
_WRITTEN = frozenset(
    ("ssm_conv", "ssm_x", "ssm_dt", "ssm_B", "ssm_log_decay", "ssm_decay", "ssm_write", "ssm_state_seq")
)


class MixerSpec(ABC):
    """A mixer without its weights."""

    kind: ClassVar[str]
    """Which class computes it, and which tensors it has."""
    points: ClassVar[tuple[str, ...]]
    """Kinds of hook points inside it."""
    reaches_later: ClassVar[frozenset[str]]
    """Those at which a change reaches later positions."""

    @property
    def held_points(self) -> tuple[str, ...]:
        """`points`, but for those of parts that it does not have."""
        return self.points

    @property
    @abstractmethod
    def summary(self) -> AttentionMixer | RecurrentMixer | ConvolutionMixer:
        """Torch-free summary of this mixer, as `Architecture.layers` shows it."""

    @property
    @abstractmethod
    def axis_sizes(self) -> dict[str, int]:
        """Sizes of the axes of its hook points."""

    @abstractmethod
    def bytes_per_token(self, itemsize: int) -> int:
        """Bytes of one token while it computes."""

    @property
    def rope(self) -> RopeConfig | None:
        """How it knows positions; None where it does not, or needs none."""
        return None


class ChannelMixerSpec(ABC):
    """A channel mixer without its weights."""

    kind: ClassVar[str]
    """Which class computes it, and which tensors it has."""

    @property
    @abstractmethod
    def summary(self) -> Literal["MLP", "gated MLP", "experts"]:
        """Torch-free summary of this mixer, as `Architecture.layers` shows it."""

    @property
    @abstractmethod
    def points(self) -> tuple[str, ...]:
        """Kinds of hook points inside it."""

    @property
    @abstractmethod
    def axis_sizes(self) -> dict[str, int]:
        """Sizes of the axes of its hook points."""

    def idle_weights(self, width: int) -> int:
        """Weights of the experts that a token does not choose. width: of the residual stream."""
        return 0

    @abstractmethod
    def bytes_per_token(self, itemsize: int) -> int:
        """Bytes of one token while it computes."""


@dataclass(frozen=True)
class RelativeSpec:
    """What scores have besides products of queries and keys, by how far a key is from its query.

    rows: of a table by distance, of which the first half are keys behind the query; distances from `near` on
    share rows up to `farthest`, and beyond it one. terms: "bias", a number of each head (Raffel et al., T5,
    2020, section 2.1); "content to position", queries on what a table makes keys of; "position to content",
    keys on what it makes queries of (He et al., DeBERTa, 2021, equation 4). shares_maps: whether that is made
    by the maps of queries and keys; has_key_bias: whether a map of its own to keys has one. norm_eps: of the
    layer norm of the table; None for none. looks_back: whether all rows are of keys behind.
    """

    rows: int
    near: int
    farthest: int
    terms: tuple[Literal["bias", "content to position", "position to content"], ...]
    shares_maps: bool = False
    norm_eps: float | None = None
    has_key_bias: bool = True
    looks_back: bool = False


@dataclass(frozen=True)
class QkNorm:
    """Norms of queries and keys."""

    per: Literal["head", "all"]
    """Entries that one norm covers: those of one head, or of all heads together."""
    eps: float
    """Added to the mean square, or the variance."""
    kind: Literal["rms", "gemma_rms", "layer"] = "rms"
    """RMS norm, RMS norm with 1 + weight, or layer norm."""
    has_weights: bool = True
    """Whether the norms have learned weights."""
    has_bias: bool = True
    """Whether layer norms have a bias; RMS norms never have one."""
    after_rope: bool = False
    """Whether they run after rope instead of before it."""


@dataclass(frozen=True)
class TemperatureTuning:
    """Queries times 1 + scale log(1 + floor((position + offset) / floor)), which keeps attention as sharp as
    in short texts (Llama 4, Ministral 3)."""

    scale: float
    floor: int
    """Positions."""
    offset: int = 0
    """Positions; 1 where the reference counts them from 1."""


@dataclass(frozen=True)
class AttentionSpec(MixerSpec):
    """Attention with grouped queries."""

    kind: ClassVar[str] = "attention"
    points: ClassVar[tuple[str, ...]] = _ATTENTION
    reaches_later: ClassVar[frozenset[str]] = frozenset(("k_input", "v_input", "k", "v", "rot_k"))

    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig | None = None
    """Rotary position embedding of queries and keys; None for no rope."""
    scale: float | None = None
    """Factor of the scores q k^T; None for 1 / sqrt(head_dim)."""
    window: int | None = None
    """Keys that a query sees, itself included; None for all."""
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: QkNorm | None = None
    factors: tuple[float, float, float] = (1.0, 1.0, 1.0)
    """Factors of the layer input, of the keys and of the attention output."""
    layout: Literal["separate", "by part", "by head", "by fourths"] = "separate"
    """Tensors of the projections: one each, or one of all. "by part": all queries before all keys; "by head":
    queries that share a key head before its key and value; "by fourths" of heads, values before keys."""
    clip_qkv: float | None = None
    """Largest absolute entry of queries, keys and values; None for no clip."""
    logit_softcap: float | None = None
    """Cap c of the scores before the mask, c tanh(score / c) (Gemma 2); None for no cap."""
    alibi_slopes: tuple[float, ...] = ()
    """ALiBi slopes, one per head: added to the scores per position of the key (Press et al., 2022); () for no
    ALiBi."""
    attention_sinks: bool = False
    """Whether each head has a learned logit of a sink (gpt-oss)."""
    temperature_tuning: TemperatureTuning | None = None
    is_bidirectional: bool = False
    """Whether queries see later keys, too."""
    has_stored_frequencies: bool = False
    """Whether a checkpoint holds the frequencies of rope."""
    relative: RelativeSpec | None = None
    """Relative position terms of the scores (T5, DeBERTa); None for no such terms."""
    inner_norm_eps: float | None = None
    """Epsilon of the RMS norm of the heads' outputs together, before they are projected; None for no norm."""
    groups: tuple[int, ...] | None = None
    """Number of groups of the width-1 convolutions that project queries, keys, values and output
    (SqueezeBERT); None for linear projections."""
    is_chunked: bool = False
    """Whether a window is a chunk that begins at a multiple of its size."""
    has_value_scores: bool = False
    """Whether scores have a term by the value of a key (Doge's dynamic mask)."""
    source: int | None = None
    """Number of the earlier layer whose keys and values this layer reads; None if it has its own."""
    values_from_keys: bool = False
    """Whether values are the key projection before the key norm, instead of a projection of their own."""
    has_v_norm: bool = False
    """Whether values are normed over each head, without weights."""

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_kv_heads:
            raise ConfigError(
                f"expected num_attention_heads ({self.num_attention_heads}) to be a multiple of "
                f"num_key_value_heads, found {self.num_kv_heads}; correct config.json, or fetch it again"
            )
        if self.rope is not None and self.rope.dim > self.head_dim:
            raise ConfigError(
                f"expected at most head_dim={self.head_dim} rotary dimensions, found {self.rope.dim}; "
                "check head_dim, rotary_dim and partial_rotary_factor in config.json"
            )
        if self.alibi_slopes and self.num_kv_heads != self.num_attention_heads:
            raise ConfigError(
                f"expected a key head for each of {self.num_attention_heads} heads whose scores rise with "
                f"positions, found {self.num_kv_heads}; such a model cannot run here"
            )
        if self.relative is not None and self.is_bidirectional == self.relative.looks_back:
            raise ConfigError(
                "expected scores by distance of a model whose positions see later ones, found one that looks "
                "back alone; such a model cannot run here"
            )

    @property
    def summary(self) -> AttentionMixer:
        """See `MixerSpec`."""
        scale = 1 / math.sqrt(self.head_dim) if self.scale is None else self.scale
        return AttentionMixer(
            scale,
            self.window,
            self.logit_softcap,
            is_bidirectional=self.is_bidirectional,
            is_chunked=self.is_chunked,
            source=self.source,
        )

    @property
    def held_points(self) -> tuple[str, ...]:
        """See `MixerSpec`; keys and values are met where they are made."""
        made = () if self.source is None else ("k", "v", "rot_k")
        return tuple(kind for kind in self.points if kind not in made)

    @property
    def heads(self) -> Heads:
        """Its heads, as those who read their matrices are told of them."""
        return Heads(
            self.num_attention_heads,
            self.num_kv_heads,
            self.head_dim,
            self.summary,
            self.layout,
            rope=self.rope,
            are_normed=self.qk_norm is not None,
            clip=self.clip_qkv,
            slopes=self.alibi_slopes,
            has_sinks=self.attention_sinks,
            grows=self.temperature_tuning is not None,
            are_normed_together=self.inner_norm_eps is not None,
        )

    @property
    def axis_sizes(self) -> dict[str, int]:
        """See `MixerSpec`."""
        return {"head": self.num_attention_heads, "kv_head": self.num_kv_heads, "d_head": self.head_dim}

    def bytes_per_token(self, itemsize: int) -> int:
        """Projections, turned and as they were."""
        return itemsize * 2 * (2 * self.num_attention_heads + 3 * self.num_kv_heads) * self.head_dim


@dataclass(frozen=True)
class GatedAttentionSpec(AttentionSpec):
    """Attention whose heads are multiplied by a sigmoid of what entered before they are projected (Qiu et
    al., Gated Attention, 2025): the query projection gives queries and gates, head by head, unless gates have
    one of their own (has_gate_projection)."""

    kind: ClassVar[str] = "gated_attention"
    points: ClassVar[tuple[str, ...]] = ("attn_gate", *_ATTENTION)

    has_gate_projection: bool = False

    @property
    def heads(self) -> Heads:
        """See `AttentionSpec`."""
        return replace(super().heads, is_gated=True, gates_beside=not self.has_gate_projection)


@dataclass(frozen=True)
class DifferentialSpec(MixerSpec):
    """Attention of pairs of heads, of which one pattern is taken from the other (Ye et al., Differential
    Transformer, 2024, section 2.1).

    attention: its queries, keys, values and output. start: what lambda is without what it learns. norm_eps:
    of the norm of what a pair has read.
    """

    kind: ClassVar[str] = "differential_attention"
    points: ClassVar[tuple[str, ...]] = (*_ATTENTION[:-2], "diff_read", "diff_z")
    reaches_later: ClassVar[frozenset[str]] = AttentionSpec.reaches_later

    attention: AttentionSpec
    start: float
    norm_eps: float

    def __post_init__(self) -> None:
        if self.attention.num_kv_heads % 2:
            raise ConfigError(
                f"expected an even num_key_value_heads, whose halves differential attention reads, found "
                f"{self.attention.num_kv_heads}; correct config.json, or fetch it again"
            )

    @property
    def summary(self) -> AttentionMixer:
        """See `MixerSpec`."""
        return self.attention.summary

    @property
    def rope(self) -> RopeConfig | None:
        """See `MixerSpec`."""
        return self.attention.rope

    @property
    def axis_sizes(self) -> dict[str, int]:
        """See `MixerSpec`."""
        pairs = self.attention.num_attention_heads // 2
        own = {"diff_head": pairs, "diff_value": 2 * self.attention.head_dim}
        return self.attention.axis_sizes | own

    def bytes_per_token(self, itemsize: int) -> int:
        """As attention's, with values and what is read twice as wide."""
        heads = self.attention.num_attention_heads + self.attention.num_kv_heads
        return self.attention.bytes_per_token(itemsize) + itemsize * 4 * heads * self.attention.head_dim


@dataclass(frozen=True)
class RoutedAttentionSpec(MixerSpec):
    """A mixture of attention (Zhang et al., Mixture of Attention Heads, 2022, section 3): experts make
    queries and write what these read; all share keys and values.

    experts, chosen: how many there are, and how many a token is sent to. kv_heads: of keys and values; each
    expert has as many heads.
    """

    kind: ClassVar[str] = "routed_attention"
    points: ClassVar[tuple[str, ...]] = ("moa_router_logits", "moa_weights", *_ATTENTION[:-2], "moa_z")
    reaches_later: ClassVar[frozenset[str]] = AttentionSpec.reaches_later

    experts: int
    chosen: int
    kv_heads: int
    head_dim: int
    rope: RopeConfig | None = None

    def __post_init__(self) -> None:
        if self.chosen > self.experts:
            raise ConfigError(
                f"expected at most {self.experts} experts of attention to be chosen, as there are, found "
                f"{self.chosen}; correct config.json, or fetch it again"
            )

    @property
    def summary(self) -> AttentionMixer:
        """See `MixerSpec`."""
        return AttentionMixer(1 / math.sqrt(self.head_dim))

    @property
    def axis_sizes(self) -> dict[str, int]:
        """See `MixerSpec`."""
        heads = {"head": self.chosen * self.kv_heads, "kv_head": self.kv_heads, "d_head": self.head_dim}
        return heads | {"expert": self.experts, "slot": self.chosen}

    def bytes_per_token(self, itemsize: int) -> int:
        """Queries, with keys and values for each of them, turned and as they were."""
        return itemsize * 2 * 5 * self.chosen * self.kv_heads * self.head_dim


@dataclass(frozen=True)
class LatentAttentionSpec(MixerSpec):
    """Attention whose keys and values are made of one narrow latent (DeepSeek-V2, 2024, section 2.1)."""

    kind: ClassVar[str] = "latent_attention"
    points: ClassVar[tuple[str, ...]] = (
        *("latent_q", "latent_c", "latent_k", "latent_v", "scores", "attn_scores", "pattern", "latent_z"),
    )
    reaches_later: ClassVar[frozenset[str]] = frozenset(("latent_c", "latent_k", "latent_v"))

    heads: int
    own_size: int
    """Entries of a head's keys that are its own."""
    shared_size: int
    """Entries behind them that all heads share, and that rope rotates."""
    value_size: int
    rank: int
    """Rank of the latent of keys and values."""
    query_rank: int | None = None
    """Rank of the query projection; None for a full-rank one."""
    has_bias: bool = False
    norm_eps: float = 1e-6
    rope: RopeConfig | None = None
    scale: float | None = None
    """What q k^T is multiplied by; None for 1 / sqrt(key_size)."""
    factor: float = 1.0
    """Of the output."""

    @property
    def key_size(self) -> int:
        """Entries of a head's keys."""
        return self.own_size + self.shared_size

    @property
    def summary(self) -> AttentionMixer:
        """See `MixerSpec`."""
        return AttentionMixer(1 / math.sqrt(self.key_size) if self.scale is None else self.scale)

    @property
    def axis_sizes(self) -> dict[str, int]:
        """See `MixerSpec`."""
        return {
            "head": self.heads,
            "latent": self.rank + self.shared_size,
            "latent_key": self.key_size,
            "latent_value": self.value_size,
        }

    def bytes_per_token(self, itemsize: int) -> int:
        """Queries, keys and values of every head, and the latent."""
        return itemsize * (self.heads * (3 * self.key_size + 3 * self.value_size) + 2 * self.rank)


@dataclass(frozen=True)
class MambaSpec(MixerSpec):
    """Mamba-1 (Gu and Dao, Mamba, 2023, algorithm 2): every channel has a state of its own.

    rank: of the map to step sizes. norms: of step sizes, B and C before they are used: None, "plain" without
    weights (Falcon-Mamba), "weighted" (Jamba). groups: of channels, each of which has maps of its own to step
    sizes, B and C (Zamba). layout: how a checkpoint holds them, see layer_tensors.py.
    """

    kind: ClassVar[str] = "mamba"
    points: ClassVar[tuple[str, ...]] = _STATE_SPACE
    reaches_later: ClassVar[frozenset[str]] = _WRITTEN

    channels: int
    state_size: int
    conv_size: int
    rank: int
    has_bias: bool = False
    has_conv_bias: bool = True
    norms: Literal["plain", "weighted"] | None = None
    norm_eps: float = 1e-6
    groups: int = 1
    layout: Literal["by part", "by group"] = "by part"

    @property
    def summary(self) -> RecurrentMixer:
        """See `MixerSpec`."""
        return RecurrentMixer("mamba")

    @property
    def axis_sizes(self) -> dict[str, int]:
        """See `MixerSpec`."""
        return {
            "ssm_head": self.channels,
            "ssm_group": self.groups,
            "ssm_key": self.state_size,
            "ssm_value": 1,
            "ssm_decay": self.state_size,
            "ssm_channel": self.channels,
        }

    def bytes_per_token(self, itemsize: int) -> int:
        """Projections; keys, queries, decays and their products of every channel, in float32."""
        return itemsize * 8 * self.channels + 4 * 6 * self.channels * self.state_size


@dataclass(frozen=True)
class Mamba2Spec(MixerSpec):
    """Mamba-2 (Dao and Gu, Transformers are SSMs, 2024, section 7): heads with one decay each.

    groups: of heads that share B and C. limits: of step sizes; None for no upper one. norm: of what was read,
    group by group: "gated" after the gate, "before gate", None for the gate alone. into_factor: of what goes
    in. in_factors: of gate, x, B, C and step sizes, as they are projected. out_factor: of what comes out.
    """

    kind: ClassVar[str] = "mamba2"
    points: ClassVar[tuple[str, ...]] = _STATE_SPACE
    reaches_later: ClassVar[frozenset[str]] = _WRITTEN

    heads: int
    head_dim: int
    groups: int
    state_size: int
    conv_size: int
    limits: tuple[float, float | None] = (0.0, None)
    norm: Literal["gated", "before gate"] | None = "gated"
    norm_eps: float = 1e-5
    has_bias: bool = False
    has_out_bias: bool = False
    has_conv_bias: bool = True
    into_factor: float = 1.0
    in_factors: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0, 1.0)
    out_factor: float = 1.0

    @property
    def channels(self) -> int:
        """Of all heads together."""
        return self.heads * self.head_dim

    @property
    def convolved(self) -> int:
        """Channels of the short convolution: x, B and C."""
        return self.channels + 2 * self.groups * self.state_size

    @property
    def summary(self) -> RecurrentMixer:
        """See `MixerSpec`."""
        return RecurrentMixer("mamba2")

    @property
    def axis_sizes(self) -> dict[str, int]:
        """See `MixerSpec`."""
        return {
            "ssm_head": self.heads,
            "ssm_group": self.groups,
            "ssm_key": self.state_size,
            "ssm_value": self.head_dim,
            "ssm_decay": 1,
            "ssm_channel": self.convolved,
        }

    def bytes_per_token(self, itemsize: int) -> int:
        """Projections; keys and queries of every head, in float32."""
        return itemsize * 6 * (self.channels + self.convolved) + 4 * 4 * self.heads * self.state_size


@dataclass(frozen=True)
class MlpSpec(ChannelMixerSpec):
    """An MLP, gated or plain."""

    kind: ClassVar[str] = "mlp"

    intermediate_size: int
    activation: ActivationName
    is_gated: bool = True
    is_fused: bool = False
    """Whether gate and up projection are one tensor."""
    has_bias: bool = False
    factors: tuple[float, float] = (1.0, 1.0)
    """Factors of the gate and of the MLP output."""
    inner_norm_eps: float | None = None
    """Epsilon of an RMS norm before the down projection; None for no norm."""
    groups: tuple[int, ...] | None = None
    """Number of groups of the width-1 convolutions that replace up and down projection (SqueezeBERT); None
    for linear projections."""
    sparsity: float = 0.0
    """Share of the inside that is to be 0, as if gates were drawn from a normal distribution (Gemma 3n)."""

    @property
    def summary(self) -> Literal["MLP", "gated MLP"]:
        """See `ChannelMixerSpec`."""
        return "gated MLP" if self.is_gated else "MLP"

    @property
    def points(self) -> tuple[str, ...]:
        """See `ChannelMixerSpec`."""
        return ("mlp_pre_act", *(("mlp_pre_linear",) if self.is_gated else ()), "mlp_post_act")

    @property
    def axis_sizes(self) -> dict[str, int]:
        """See `ChannelMixerSpec`."""
        return {"mlp": self.intermediate_size}

    def bytes_per_token(self, itemsize: int) -> int:
        """See `ChannelMixerSpec`: four tensors as wide as its inside."""
        return itemsize * 4 * self.intermediate_size


@dataclass(frozen=True)
class ExpertsSpec(ChannelMixerSpec):
    """Routed experts, of which each token uses the top k, and optionally one shared expert."""

    kind: ClassVar[str] = "experts"

    count: int
    """Number of routed experts."""
    chosen: int
    """Number of routed experts per token (top k)."""
    intermediate_size: int
    activation: ActivationName
    routing: Routing
    shared_size: int = 0
    """Hidden width of the shared expert; 0 for no shared expert."""
    has_shared_gate: bool = False
    """Whether the shared expert's output is multiplied by a sigmoid gate."""
    is_gated: bool = True
    is_listed: bool = True
    """Whether the checkpoint has one tensor per expert, instead of one tensor of all experts."""
    groups: int = 1
    chosen_groups: int = 1
    has_correction: bool = True
    """Whether a correction bias is added to the router scores for the choice of experts."""
    sums_to_one: bool = False
    """Whether the weights of the top-k experts are normalised to sum to 1."""
    sum_eps: float = 1e-20
    """Epsilon added to the sum by which they are divided."""
    routed_factor: float = 1.0
    latent_size: int | None = None
    """Width of what routed experts read and write, between two linear maps; None for the stream's."""
    has_bias: bool = False
    factor: float = 1.0
    """Factor of the experts' output, applied to their last weights on loading."""
    has_routed_bias: bool = False
    """Whether the router and the routed experts have biases."""
    limits: tuple[float, float] | None = None
    """Of experts whose gate is x sigmoid(a x): a, and how large gate and up projection may be. Their rows
    take turns in tensors kept as [in, out]."""
    jitter: float = 0.0
    """Of sparse mixing: how near another score may be and count."""
    is_transposed: bool = False
    """Whether the checkpoint stores expert weights as [in, out] instead of [out, in]."""
    has_output_bias: bool = False

    def __post_init__(self) -> None:
        if self.chosen > self.count:
            raise ConfigError(
                f"expected at most {self.count} experts to be chosen, as there are, found {self.chosen}; "
                "correct config.json, or fetch it again"
            )
        if self.count % self.groups or self.chosen_groups > self.groups:
            raise ConfigError(
                f"expected {self.groups} groups to divide {self.count} experts, and at most as many chosen, "
                f"found {self.chosen_groups}; correct config.json, or fetch it again"
            )
        if self.routing == "sigmoid" and self.count // self.groups < 2:
            raise ConfigError(
                "expected groups of at least 2 experts, by whose two largest scores groups are chosen, found "
                f"{self.count} experts in {self.groups} groups; correct config.json, or fetch it again"
            )
        in_chosen_groups = self.chosen_groups * (self.count // self.groups)
        if self.chosen > in_chosen_groups:
            raise ConfigError(
                f"expected at most {in_chosen_groups} experts to be chosen, as the chosen groups have, found "
                f"{self.chosen}; correct config.json, or fetch it again"
            )

    def idle_weights(self, width: int) -> int:
        """See `ChannelMixerSpec`."""
        each = (3 if self.is_gated else 2) * (self.latent_size or width) * self.intermediate_size
        return (self.count - self.chosen) * each

    @property
    def summary(self) -> Literal["experts"]:
        """See `ChannelMixerSpec`."""
        return "experts"

    @property
    def points(self) -> tuple[str, ...]:
        """The router, weights and outputs of experts, that of all tokens; no insides, as a token has those of
        its own experts only."""
        routed = ("router_logits", "router_probs", "expert_weights")
        whole = (
            () if self.latent_size else ("expert_out",)
        )  # else they give what is not as wide as the stream
        return (*routed, *whole, *(("shared_expert_out",) if self.shared_size else ()))

    @property
    def axis_sizes(self) -> dict[str, int]:
        """See `ChannelMixerSpec`."""
        return {"expert": self.count}

    def bytes_per_token(self, itemsize: int) -> int:
        """The insides of the chosen, and of the one of all."""
        return itemsize * 4 * (self.chosen * self.intermediate_size + self.shared_size)


@dataclass(frozen=True)
class MlpAndExpertsSpec(ChannelMixerSpec):
    """An MLP and experts beside it, each with a norm of its own on what it gives; experts and their router
    read the stream through norms of their own (Gemma 4).

    norm_eps: of these norms.
    """

    kind: ClassVar[str] = "mlp_and_experts"

    mlp: MlpSpec
    experts: ExpertsSpec
    norm_eps: float

    @property
    def summary(self) -> Literal["experts"]:
        """See `ChannelMixerSpec`."""
        return "experts"

    @property
    def points(self) -> tuple[str, ...]:
        """See `ChannelMixerSpec`; the MLP is the expert that all tokens go through."""
        return (*self.mlp.points, *self.experts.points, "shared_expert_out")

    @property
    def axis_sizes(self) -> dict[str, int]:
        """See `ChannelMixerSpec`."""
        return self.mlp.axis_sizes | self.experts.axis_sizes

    def bytes_per_token(self, itemsize: int) -> int:
        """See `ChannelMixerSpec`: those of both together."""
        return self.mlp.bytes_per_token(itemsize) + self.experts.bytes_per_token(itemsize)


@dataclass(frozen=True)
class SharedBlockSpec(MixerSpec):
    """A block of attention and MLP that several layers share, ahead of a mixer of their own (Glorioso et al.,
    Zamba, 2024, section 2; Zamba2, 2024, section 2).

    It reads the stream and the embedding side by side, and what it gives is added to what the mixer reads.
    source: the layer among whose tensors the block is. place: which of the layers with such a block it is,
    counted from 0; listed: places of all that are to share this one, by which maps of low rank are listed
    beside it, one for each layer. rank: of these, None where there are none; adapts_attention: whether
    queries, keys and values have them too, beside the MLP's gate.
    """

    kind: ClassVar[str] = "shared_block"
    points: ClassVar[tuple[str, ...]] = (
        *("shared_scale", "shared_normalized", *_ATTENTION, "shared_attn_out", "ln2_scale"),
        *("ln2_normalized", "mlp_pre", "mlp_pre_act", "mlp_pre_linear", "mlp_post_act", "mlp_post"),
        "shared_out",
    )
    reaches_later: ClassVar[frozenset[str]] = frozenset(points)

    hidden_size: int
    attention: AttentionSpec
    mlp: MlpSpec
    source: int
    place: int = 0
    listed: tuple[int, ...] = (0,)
    rank: int | None = None
    adapts_attention: bool = False
    norm_eps: float = 1e-5

    @property
    def summary(self) -> AttentionMixer:
        """See `MixerSpec`."""
        return self.attention.summary

    @property
    def rope(self) -> RopeConfig | None:
        """See `MixerSpec`."""
        return self.attention.rope

    @property
    def axis_sizes(self) -> dict[str, int]:
        """See `MixerSpec`."""
        return {"shared": 2 * self.hidden_size} | self.attention.axis_sizes | self.mlp.axis_sizes

    def bytes_per_token(self, itemsize: int) -> int:
        """What it reads, normed and as it was, and the insides of both."""
        inside = self.attention.bytes_per_token(itemsize) + self.mlp.bytes_per_token(itemsize)
        return itemsize * 8 * self.hidden_size + inside
