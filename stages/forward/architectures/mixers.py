"""Specs of mixers and channel mixers: the parts of a layer, as immutable values of sizes and switches.

A spec knows its hook points, at which of them a change affects later positions, the sizes of its axes, and
its memory per token. Its tensors are in layer_tensors.py, and the class that computes it is in
networks/mixers/, both found by `kind`. A new mixer needs one entry in each of the three places.

Torch-free. Axes: as in points.py.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

from ....store.errors import ConfigError
from .layer_summaries import AttentionMixer, ConvolutionMixer, RecurrentMixer
from .transformer import TRY_TRANSFORMERS, ActivationName, RopeConfig

__all__ = [
    "AttentionSpec",
    "ChannelMixerSpec",
    "CrossAttentionSpec",
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
"""Kinds of hook points of attention; the last two are replaced in other kinds of attention."""
Routing = Literal[
    "softmax of chosen",
    "chosen of softmax",
    "chosen of corrected softmax",
    "sigmoid",
    "sigmoid of chosen",
    "sigmoid of inputs",
    "sparse mixing",
]
"""How a router chooses the experts of a token and weights their outputs; each rule is defined in
networks/mixers/experts.py."""
_STATE_SPACE = (
    *("ssm_gate", "ssm_conv", "ssm_x", "ssm_dt", "ssm_B", "ssm_C", "ssm_log_decay", "ssm_decay"),
    *("ssm_write", "ssm_state_seq", "ssm_state", "ssm_alpha_raw", "ssm_effective_attn", "ssm_out"),
)
_WRITTEN = frozenset(
    ("ssm_conv", "ssm_x", "ssm_dt", "ssm_B", "ssm_log_decay", "ssm_decay", "ssm_write", "ssm_state_seq")
)
"""Kinds of hook points of a state space at which a change enters the state, and so affects later tokens."""


class MixerSpec(ABC):
    """Sizes and switches of a mixer, the part of a layer that mixes positions (attention, recurrence or
    convolution), without its weights."""

    kind: ClassVar[str]
    """Name of the kind of mixer: key of the tables of networks (networks/composed.py) and of tensors
    (layer_tensors.py)."""
    points: ClassVar[tuple[str, ...]]
    """Kinds of hook points of this class of mixers, including those of optional parts."""
    reaches_later: ClassVar[frozenset[str]]
    """Kinds of hook points at which a change at a token also affects later tokens."""

    @property
    def held_points(self) -> tuple[str, ...]:
        """Kinds of hook points that this mixer has: `points` without those of optional parts that are
        absent."""
        return self.points

    @property
    @abstractmethod
    def summary(self) -> AttentionMixer | RecurrentMixer | ConvolutionMixer:
        """Torch-free summary of this mixer, as `Architecture.layers` shows it."""

    @property
    @abstractmethod
    def axis_sizes(self) -> dict[str, int]:
        """Axis name -> size, for the axes of its hook points."""

    @abstractmethod
    def bytes_per_token(self, itemsize: int) -> int:
        """Estimated bytes of activations per token. itemsize: bytes per number."""

    @property
    def rope(self) -> RopeConfig | None:
        """Rotary position embedding of queries and keys; None for a mixer without rope."""
        return None


class ChannelMixerSpec(ABC):
    """Sizes and switches of a channel mixer, the part of a layer that does not mix positions (MLP, experts,
    RWKV's channel mix), without its weights."""

    kind: ClassVar[str]
    """Name of the kind of channel mixer: key of the tables of networks (networks/composed.py) and of tensors
    (layer_tensors.py)."""
    has_token_shift: ClassVar[bool] = False
    """Whether the channel mixer also reads the previous token's input (token shift of RWKV)."""

    @property
    @abstractmethod
    def summary(self) -> Literal["MLP", "gated MLP", "token-shifted MLP", "experts"]:
        """Name of this kind of channel mixer, as `Architecture.layers` shows it."""

    @property
    @abstractmethod
    def points(self) -> tuple[str, ...]:
        """Kinds of the hook points of this channel mixer."""

    @property
    @abstractmethod
    def axis_sizes(self) -> dict[str, int]:
        """Axis name -> size, for the axes of its hook points."""

    def idle_weights(self, width: int) -> int:
        """Number of weights of the experts that a token does not use. width: hidden size of the model."""
        return 0

    @abstractmethod
    def bytes_per_token(self, itemsize: int) -> int:
        """Estimated bytes of activations per token. itemsize: bytes per number."""


@dataclass(frozen=True)
class RelativeSpec:
    """Relative position terms of attention scores, from a table with one row per bucket of distances."""

    rows: int
    """Number of rows of the table. The first half is for keys before the query, the second half for keys
    after it."""
    near: int
    """Each distance below this number of positions has a row of its own; larger distances share rows in
    logarithmic buckets."""
    farthest: int
    """Distance, in positions, from which all keys share the last row."""
    terms: tuple[Literal["bias", "content to position", "position to content"], ...]
    """Terms that are added to the scores. "bias": one number per head and row (Raffel et al., T5, 2020,
    section 2.1). "content to position": query times a key projected from the table; "position to content":
    key times a query projected from the table (He et al., DeBERTa, 2021, equation 4)."""
    shares_maps: bool = False
    """Whether the table is projected by the layer's query and key projections, instead of projections of its
    own."""
    norm_eps: float | None = None
    """Epsilon of the layer norm of the table; None for no norm."""
    has_key_bias: bool = True
    """Whether the table's own key projection has a bias."""
    looks_back: bool = False
    """Whether all rows are for keys before the query, as in causal models."""
    source: int | None = None
    """Number of the layer among whose tensors the table is stored; None for a table outside of the layers."""


@dataclass(frozen=True)
class QkNorm:
    """Norms of queries and keys (QK-norm)."""

    per: Literal["head", "all"]
    """What one norm covers: the entries of one head, or of all heads together."""
    eps: float
    """Epsilon added to the mean square, or to the variance of a layer norm."""
    kind: Literal["rms", "gemma_rms", "layer"] = "rms"
    """Kind of norm: RMS norm, RMS norm with 1 + weight, or layer norm."""
    has_weights: bool = True
    """Whether the norms have learned weights."""
    has_bias: bool = True
    """Whether layer norms have a bias; RMS norms never have one."""
    after_rope: bool = False
    """Whether queries and keys are normalised after rope instead of before it."""


@dataclass(frozen=True)
class TemperatureTuning:
    """Attention temperature tuning: queries are multiplied by 1 + scale log(1 + floor((position + offset) /
    floor)), so that attention stays sharp in long contexts (Llama 4, Ministral 3)."""

    scale: float
    """Factor of the logarithm."""
    floor: int
    """Number of consecutive positions with equal query factor, before the factor grows by a step."""
    offset: int = 0
    """Number added to positions that count from 0: 1 where transformers counts positions from 1."""


@dataclass(frozen=True)
class AttentionSpec(MixerSpec):
    """Grouped-query attention: sizes and switches of one layer's self-attention."""

    kind: ClassVar[str] = "attention"
    points: ClassVar[tuple[str, ...]] = _ATTENTION
    reaches_later: ClassVar[frozenset[str]] = frozenset(("k_input", "v_input", "k", "v", "rot_k"))
    is_gated: ClassVar[bool] = False
    """Whether each head's output is multiplied by a gate."""

    num_attention_heads: int
    """Number of query heads."""
    num_kv_heads: int
    """Number of key and value heads."""
    head_dim: int
    """Number of entries of one head's query, key or value."""
    rope: RopeConfig | None = None
    """Rotary position embedding of queries and keys; None for no rope."""
    scale: float | None = None
    """Factor of the scores q k^T; None for 1 / sqrt(head_dim)."""
    window: int | None = None
    """Number of keys that a query sees, itself included; None for all keys."""
    qkv_bias: bool = False
    """Whether the projections to queries, keys and values have biases, and the projection to
    `has_value_scores` (Doge)."""
    o_bias: bool = False
    """Whether the output projection has a bias."""
    qk_norm: QkNorm | None = None
    """Norms of queries and keys; None for no such norms."""
    factors: tuple[float, float, float] = (1.0, 1.0, 1.0)
    """Factors of the attention's input, of the keys and of the attention output."""
    layout: Literal["separate", "by part", "by head", "by fourths"] = "separate"
    """How a checkpoint stores the query, key and value projections. "separate": a tensor for each. Else one
    tensor, whose rows are: "by part", all queries, all keys, all values; "by head", for each key head its
    queries, its key and its value; "by fourths", for each quarter of the heads queries, values, keys
    (CodeGen)."""
    clip_qkv: float | None = None
    """Largest absolute entry of queries, keys and values; None for no clip."""
    logit_softcap: float | None = None
    """Cap c of the scores before the mask, c tanh(score / c) (Gemma 2); None for no cap."""
    alibi_slopes: tuple[float, ...] = ()
    """ALiBi slopes, one per head: slope times key position is added to the scores (Press et al., 2022); ()
    for no ALiBi."""
    attention_sinks: bool = False
    """Whether each head has a learned logit of an attention sink (gpt-oss)."""
    temperature_tuning: TemperatureTuning | None = None
    """Factor of the queries that grows with log(position); None for no such factor."""
    is_bidirectional: bool = False
    """Whether queries also see later keys."""
    has_stored_frequencies: bool = False
    """Whether the frequencies of rope are read from the checkpoint instead of computed."""
    relative: RelativeSpec | None = None
    """Relative position terms of the scores (T5, DeBERTa); None for no such terms."""
    inner_norm_eps: float | None = None
    """Epsilon of an RMS norm over the outputs of all heads, before the output projection; None for no
    norm."""
    groups: tuple[int, ...] | None = None
    """Numbers of groups of the width-1 convolutions that compute queries, keys, values and the output
    projection, in this order (SqueezeBERT); None for linear projections."""
    is_chunked: bool = False
    """Whether `window` is the length of fixed chunks, and queries only see keys of their own chunk."""
    has_value_scores: bool = False
    """Whether scores have a term computed from the value at the key's position (Doge's dynamic mask)."""
    source: int | None = None
    """Number of the earlier layer with the keys and values to read; None for a layer that computes them."""
    part: Literal["source", "target", "cross"] | None = None
    """In encoder-decoders: attention within the source, within the target, or from target to source; None
    for models of single sequences."""
    values_from_keys: bool = False
    """Whether values are the key projection before the key norm, instead of a projection of their own."""
    has_v_norm: bool = False
    """Whether values are normalised over each head, without learned weights."""

    def __post_init__(self) -> None:
        # Checked here, not in the readers of config.json, as models/autoconfig.py also builds specs.
        if min(self.num_attention_heads, self.num_kv_heads, self.head_dim) < 1:
            raise ConfigError(
                "expected num_attention_heads, num_key_value_heads and head_dim in config.json to be at "
                f"least 1, found {self.num_attention_heads}, {self.num_kv_heads} and {self.head_dim}; "
                "correct config.json, or fetch it again"
            )
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
        # ALiBi is computed as one more entry of queries and keys: slope times position, which differs by
        # head.
        if self.alibi_slopes and self.num_kv_heads != self.num_attention_heads:
            raise ConfigError(
                f"expected as many key heads as query heads in a model with ALiBi, found {self.num_kv_heads} "
                f"key heads and {self.num_attention_heads} query heads; {TRY_TRANSFORMERS}"
            )
        # Tiled attention and cached keys do not know positions, so causal self-attention has no such terms.
        if self.relative is not None and self.is_bidirectional == self.relative.looks_back:
            directions = "earlier keys only" if self.relative.looks_back else "both directions"
            attention = "bidirectional" if self.is_bidirectional else "causal"
            raise ConfigError(
                "expected a table of relative positions for both directions in bidirectional attention, and "
                f"for earlier keys only in causal attention, found one for {directions} in {attention} "
                f"attention; {TRY_TRANSFORMERS}"
            )

    @property
    def summary(self) -> AttentionMixer:
        """Torch-free summary of this mixer, as `Architecture.layers` shows it."""
        # None in the spec means the standard scale; summaries always state it.
        scale = 1 / math.sqrt(self.head_dim) if self.scale is None else self.scale
        return AttentionMixer(
            scale,
            self.window,
            self.logit_softcap,
            is_bidirectional=self.is_bidirectional,
            is_chunked=self.is_chunked,
            part=self.part,
            source=self.source,
        )

    @property
    def held_points(self) -> tuple[str, ...]:
        """Kinds of hook points that this attention has; a layer that reuses the keys and values of an earlier
        layer (`source`) has none for keys and values."""
        reused = () if self.source is None else ("k", "v", "rot_k")
        return tuple(kind for kind in self.points if kind not in reused)

    @property
    def gates_in_queries(self) -> bool:
        """Whether the query projection also holds gates: each head's gate rows follow its query rows."""
        return False

    @property
    def queries_per_key(self) -> int:
        """Number of query heads that share one key and value head."""
        return self.num_attention_heads // self.num_kv_heads

    @property
    def axis_sizes(self) -> dict[str, int]:
        """Axis name -> size, for the axes of this mixer's hook points."""
        return {"head": self.num_attention_heads, "kv_head": self.num_kv_heads, "d_head": self.head_dim}

    def bytes_per_token(self, itemsize: int) -> int:
        """Estimated bytes of activations per token, with itemsize bytes per number: queries, keys and values,
        before and after rope."""
        return itemsize * 2 * (2 * self.num_attention_heads + 3 * self.num_kv_heads) * self.head_dim


@dataclass(frozen=True)
class GatedAttentionSpec(AttentionSpec):
    """Attention whose head outputs are multiplied by sigmoid gates, projected from the layer's input, before
    the output projection (Qiu et al., Gated Attention, 2025)."""

    kind: ClassVar[str] = "gated_attention"
    points: ClassVar[tuple[str, ...]] = ("attn_gate", *_ATTENTION)
    is_gated: ClassVar[bool] = True

    has_gate_projection: bool = False
    """Whether gates have a projection of their own; otherwise the query projection gives queries and gates,
    head by head."""

    @property
    def gates_in_queries(self) -> bool:
        """Whether the query projection also holds gates: each head's gate rows follow its query rows."""
        return not self.has_gate_projection


@dataclass(frozen=True)
class CrossAttentionSpec(MixerSpec):
    """Cross-attention of a decoder layer: queries of target tokens, keys and values from the encoder's
    normalised output ("memory")."""

    kind: ClassVar[str] = "cross_attention"
    points: ClassVar[tuple[str, ...]] = (
        *("cross_memory", "cross_q", "cross_k", "cross_v", "cross_scores", "cross_attn_scores"),
        *("cross_pattern", "cross_z"),
    )
    reaches_later: ClassVar[frozenset[str]] = frozenset(("cross_memory", "cross_k", "cross_v"))

    attention: AttentionSpec
    """Sizes and switches of its projections; `AttentionSpec.part` is "cross"."""

    @property
    def summary(self) -> AttentionMixer:
        """Torch-free summary of this mixer, as `Architecture.layers` shows it."""
        return self.attention.summary

    @property
    def axis_sizes(self) -> dict[str, int]:
        """Axis name -> size, for the axes of this mixer's hook points."""
        return self.attention.axis_sizes

    def bytes_per_token(self, itemsize: int) -> int:
        """Estimated bytes of activations per token, with itemsize bytes per number: 0, as the tensors of
        self-attention, which are as large, are free by then."""
        return 0


@dataclass(frozen=True)
class DifferentialSpec(MixerSpec):
    """Differential attention: in each pair of heads, lambda times one pattern is subtracted from the other
    (Ye et al., Differential Transformer, 2024, section 2.1)."""

    kind: ClassVar[str] = "differential_attention"
    points: ClassVar[tuple[str, ...]] = (*_ATTENTION[:-2], "diff_read", "diff_z")
    reaches_later: ClassVar[frozenset[str]] = AttentionSpec.reaches_later

    attention: AttentionSpec
    """Sizes and switches of the query, key, value and output projections, and rope."""
    start: float
    """Initial value of lambda, the factor of the subtracted pattern; its learned part is added to this."""
    norm_eps: float
    """Epsilon of the norm of each pair's output."""

    def __post_init__(self) -> None:
        if self.attention.num_kv_heads % 2:
            raise ConfigError(
                "expected num_key_value_heads in config.json to be even, as differential attention pairs key "
                f"heads, found {self.attention.num_kv_heads}; correct config.json, or fetch it again"
            )

    @property
    def summary(self) -> AttentionMixer:
        """Torch-free summary of this mixer, as `Architecture.layers` shows it."""
        return self.attention.summary

    @property
    def rope(self) -> RopeConfig | None:
        """Rotary position embedding of queries and keys; None for no rope."""
        return self.attention.rope

    @property
    def axis_sizes(self) -> dict[str, int]:
        """Axis name -> size, for the axes of this mixer's hook points."""
        pairs = self.attention.num_attention_heads // 2
        return self.attention.axis_sizes | {"diff_head": pairs, "diff_value": 2 * self.attention.head_dim}

    def bytes_per_token(self, itemsize: int) -> int:
        """Estimated bytes of activations per token, with itemsize bytes per number: as for attention, with
        values and outputs of twice the width."""
        heads = self.attention.num_attention_heads + self.attention.num_kv_heads
        return self.attention.bytes_per_token(itemsize) + itemsize * 4 * heads * self.attention.head_dim


@dataclass(frozen=True)
class RoutedAttentionSpec(MixerSpec):
    """Mixture of attention heads (Zhang et al., 2022, section 3): each token is routed to the top-k experts,
    each with query and output projections of its own; all experts share keys and values."""

    kind: ClassVar[str] = "routed_attention"
    points: ClassVar[tuple[str, ...]] = ("moa_router_logits", "moa_weights", *_ATTENTION[:-2], "moa_z")
    reaches_later: ClassVar[frozenset[str]] = AttentionSpec.reaches_later

    experts: int
    """Number of experts."""
    chosen: int
    """Number of experts per token (top k)."""
    kv_heads: int
    """Number of key and value heads, and of query heads of each expert."""
    head_dim: int
    """Entries of a head."""
    rope: RopeConfig | None = None
    """Rotary position embedding of queries and keys; None for no rope."""

    def __post_init__(self) -> None:
        if self.chosen > self.experts:
            raise ConfigError(
                f"expected at most {self.experts} attention experts per token, as many as there are, found "
                f"{self.chosen}; correct config.json, or fetch it again"
            )

    @property
    def summary(self) -> AttentionMixer:
        """Torch-free summary of this mixer, as `Architecture.layers` shows it."""
        return AttentionMixer(1 / math.sqrt(self.head_dim))

    @property
    def axis_sizes(self) -> dict[str, int]:
        """Axis name -> size, for the axes of this mixer's hook points."""
        heads = {"head": self.chosen * self.kv_heads, "kv_head": self.kv_heads, "d_head": self.head_dim}
        return heads | {"expert": self.experts, "slot": self.chosen}

    def bytes_per_token(self, itemsize: int) -> int:
        """Estimated bytes of activations per token, with itemsize bytes per number: queries, and keys and
        values repeated for each of them, before and after rope."""
        return itemsize * 2 * 5 * self.chosen * self.kv_heads * self.head_dim


@dataclass(frozen=True)
class LatentAttentionSpec(MixerSpec):
    """Multi-head latent attention: keys and values of all heads are projected from one low-rank latent per
    token (DeepSeek-V2, 2024, section 2.1)."""

    kind: ClassVar[str] = "latent_attention"
    points: ClassVar[tuple[str, ...]] = (
        *("latent_q", "latent_c", "latent_k", "latent_v", "scores", "attn_scores", "pattern", "latent_z"),
    )
    reaches_later: ClassVar[frozenset[str]] = frozenset(("latent_c", "latent_k", "latent_v"))

    heads: int
    """Number of heads."""
    own_size: int
    """Number of first key entries of a head, which differ between heads and get no rope."""
    shared_size: int
    """Number of last key entries of a head, which are the same in all heads and get rope."""
    value_size: int
    """Number of value entries of a head."""
    rank: int
    """Width of the latent from which keys and values are computed."""
    query_rank: int | None = None
    """Width of the latent from which queries are computed; None if queries are projected directly."""
    has_bias: bool = False
    """Whether the projections to the latents and the output projection have biases."""
    norm_eps: float = 1e-6
    """Epsilon of the RMS norms of the latents of queries and of keys and values."""
    rope: RopeConfig | None = None
    """Rotary position embedding of the last `shared_size` entries of queries and keys; None for no rope."""
    scale: float | None = None
    """Factor of the scores q k^T; None for 1 / sqrt(key_size)."""
    factor: float = 1.0
    """Factor of the attention output."""

    @property
    def key_size(self) -> int:
        """Number of entries of one head's key (and query): `own_size` + `shared_size`."""
        return self.own_size + self.shared_size

    @property
    def summary(self) -> AttentionMixer:
        """Torch-free summary of this mixer, as `Architecture.layers` shows it."""
        return AttentionMixer(1 / math.sqrt(self.key_size) if self.scale is None else self.scale)

    @property
    def axis_sizes(self) -> dict[str, int]:
        """Axis name -> size, for the axes of this mixer's hook points."""
        return {
            "head": self.heads,
            "latent": self.rank + self.shared_size,
            "latent_key": self.key_size,
            "latent_value": self.value_size,
        }

    def bytes_per_token(self, itemsize: int) -> int:
        """Estimated bytes of activations per token, with itemsize bytes per number: queries, keys and values
        of all heads, and the latent."""
        return itemsize * (self.heads * (3 * self.key_size + 3 * self.value_size) + 2 * self.rank)


@dataclass(frozen=True)
class MambaSpec(MixerSpec):
    """Mamba-1 (Gu and Dao, Mamba, 2023, algorithm 2): every channel has a state of its own."""

    kind: ClassVar[str] = "mamba"
    points: ClassVar[tuple[str, ...]] = _STATE_SPACE
    reaches_later: ClassVar[frozenset[str]] = _WRITTEN

    channels: int
    """Inner width: number of channels."""
    state_size: int
    """Number of entries of the state of one channel."""
    conv_size: int
    """Kernel size of the short convolution, in tokens."""
    rank: int
    """Rank of the low-rank projection to the step sizes dt."""
    has_bias: bool = False
    """Whether input and output projection have biases."""
    has_conv_bias: bool = True
    """Whether the short convolution has a bias, one number per channel."""
    norms: Literal["plain", "weighted"] | None = None
    """RMS norms of step sizes, B and C: without weights ("plain", Falcon-Mamba) or with learned weights
    ("weighted", Jamba); None for no norms."""
    norm_eps: float = 1e-6
    """Epsilon of the RMS norms of step sizes, B and C; unused if `norms` is None."""
    groups: int = 1
    """Number of groups of channels, each with projections of its own to step sizes, B and C (Zamba)."""
    layout: Literal["by part", "by group"] = "by part"
    """Layout of a checkpoint's tensors: one group, with rows of x before those of the gate ("by part"), or
    with a leading axis of groups, and rows of x and gate alternating ("by group", Zamba)."""

    @property
    def summary(self) -> RecurrentMixer:
        """Torch-free summary of this mixer, as `Architecture.layers` shows it."""
        return RecurrentMixer("mamba")

    @property
    def axis_sizes(self) -> dict[str, int]:
        """Axis name -> size, for the axes of this mixer's hook points."""
        return {
            "ssm_head": self.channels,
            "ssm_group": self.groups,
            "ssm_key": self.state_size,
            "ssm_value": 1,
            "ssm_decay": self.state_size,
            "ssm_channel": self.channels,
        }

    def bytes_per_token(self, itemsize: int) -> int:
        """Estimated bytes of activations per token, with itemsize bytes per number: projections; B, C, decays
        and their products for every channel, in float32."""
        return itemsize * 8 * self.channels + 4 * 6 * self.channels * self.state_size


@dataclass(frozen=True)
class Mamba2Spec(MixerSpec):
    """Mamba-2 (Dao and Gu, Transformers are SSMs, 2024, section 7): each head has a matrix as state and one
    decay."""

    kind: ClassVar[str] = "mamba2"
    points: ClassVar[tuple[str, ...]] = _STATE_SPACE
    reaches_later: ClassVar[frozenset[str]] = _WRITTEN

    heads: int
    """Number of heads."""
    head_dim: int
    """Number of channels of a head."""
    groups: int
    """Number of groups of heads; the heads of a group share B and C."""
    state_size: int
    """Number of entries of B and C, which is the number of rows of a head's state."""
    conv_size: int
    """Kernel size of the short convolution, in tokens."""
    limits: tuple[float, float | None] = (0.0, None)
    """Smallest and largest step size; None for no upper limit."""
    norm: Literal["gated", "before gate"] | None = "gated"
    """RMS norm of the output, over each group: after the output is multiplied by the gate ("gated") or before
    ("before gate"); None for no norm."""
    norm_eps: float = 1e-5
    """Epsilon of the RMS norm of the output; unused if `norm` is None."""
    has_bias: bool = False
    """Whether the input projection has a bias."""
    has_out_bias: bool = False
    """Whether the output projection has a bias."""
    has_conv_bias: bool = True
    """Whether the short convolution has a bias, one number per channel of x, B and C."""
    into_factor: float = 1.0
    """Factor of the mixer's input."""
    in_factors: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0, 1.0)
    """Factors of the five results of the input projection: gate, x, B, C and step sizes."""
    out_factor: float = 1.0
    """Factor of the mixer's output."""

    @property
    def channels(self) -> int:
        """Number of channels of all heads together."""
        return self.heads * self.head_dim

    @property
    def convolved(self) -> int:
        """Number of channels of the short convolution: those of x, B and C."""
        return self.channels + 2 * self.groups * self.state_size

    @property
    def summary(self) -> RecurrentMixer:
        """Torch-free summary of this mixer, as `Architecture.layers` shows it."""
        return RecurrentMixer("mamba2")

    @property
    def axis_sizes(self) -> dict[str, int]:
        """Axis name -> size, for the axes of this mixer's hook points."""
        return {
            "ssm_head": self.heads,
            "ssm_group": self.groups,
            "ssm_key": self.state_size,
            "ssm_value": self.head_dim,
            "ssm_decay": 1,
            "ssm_channel": self.convolved,
        }

    def bytes_per_token(self, itemsize: int) -> int:
        """Estimated bytes of activations per token, with itemsize bytes per number: projections; B and C for
        every head, in float32."""
        return itemsize * 6 * (self.channels + self.convolved) + 4 * 4 * self.heads * self.state_size


@dataclass(frozen=True)
class MlpSpec(ChannelMixerSpec):
    """Sizes and switches of an MLP, gated (act(gate) * up) or plain (act(up))."""

    kind: ClassVar[str] = "mlp"

    intermediate_size: int
    """Hidden width."""
    activation: ActivationName
    """Activation function of the gate, or of the up projection in a plain MLP."""
    is_gated: bool = True
    """Whether the up projection is multiplied by an activated gate; False for a plain MLP."""
    is_fused: bool = False
    """Whether the checkpoint stores gate and up projection as one tensor."""
    has_bias: bool = False
    """Whether all projections have biases."""
    factors: tuple[float, float] = (1.0, 1.0)
    """Factors of the gate and of the MLP output."""
    inner_norm_eps: float | None = None
    """RMS norm epsilon at the input of the down projection; None without norm."""
    groups: tuple[int, ...] | None = None
    """Numbers of groups of the width-1 convolutions that replace up and down projection, in this order
    (SqueezeBERT); None for linear projections."""
    sparsity: float = 0.0
    """Intended share of zero hidden activations, in [0, 1): gates below the quantile of this share in a
    normal distribution are cut to 0 (Gemma 3n); 0 for none."""

    @property
    def summary(self) -> Literal["MLP", "gated MLP"]:
        """Name of this kind of channel mixer, as `Architecture.layers` shows it."""
        return "gated MLP" if self.is_gated else "MLP"

    @property
    def points(self) -> tuple[str, ...]:
        """Kinds of hook points inside this channel mixer."""
        return ("mlp_pre_act", *(("mlp_pre_linear",) if self.is_gated else ()), "mlp_post_act")

    @property
    def axis_sizes(self) -> dict[str, int]:
        """Axis name -> size, for the axes of this channel mixer's hook points."""
        return {"mlp": self.intermediate_size}

    def bytes_per_token(self, itemsize: int) -> int:
        """Estimated bytes of activations per token, with itemsize bytes per number: four tensors of the
        hidden width."""
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
    """Hidden width of a routed expert."""
    activation: ActivationName
    """Activation function of each expert's gate, or of its up projection without a gate; unused by routed
    experts with `limits`."""
    routing: Routing
    """Rule by which the router chooses and weights the top-k experts of a token
    (networks/mixers/experts.py)."""
    shared_size: int = 0
    """Hidden width of the shared expert; 0 for no shared expert."""
    has_shared_gate: bool = False
    """Whether the shared expert's output is multiplied by a sigmoid gate."""
    is_gated: bool = True
    """Whether experts are gated MLPs instead of plain ones."""
    is_listed: bool = True
    """Whether the checkpoint has one tensor per expert, instead of one tensor of all experts."""
    groups: int = 1
    """Number of groups into which the experts are divided (group-limited routing of DeepSeek)."""
    chosen_groups: int = 1
    """Number of groups per token, those with the largest scores, from which its experts are chosen."""
    has_correction: bool = True
    """Whether a learned correction is added to the router's scores when experts are chosen, but not in their
    weights."""
    sums_to_one: bool = False
    """Whether the weights of the top-k experts are divided by their sum."""
    sum_eps: float = 1e-20
    """Epsilon added to the sum by which the weights are divided; unused if `sums_to_one` is False."""
    routed_factor: float = 1.0
    """Factor of the routed experts' weights."""
    latent_size: int | None = None
    """Width of the routed experts' input and output, if linear projections map the stream to that width and
    back; None if experts have the hidden size of the model."""
    has_bias: bool = False
    """Whether the shared expert and the projections around a latent have biases."""
    factor: float = 1.0
    """Factor of the experts' output; loading multiplies it into their down projections."""
    has_routed_bias: bool = False
    """Whether the router and the routed experts have biases."""
    limits: tuple[float, float] | None = None
    """(a, limit) of experts whose activation is x sigmoid(a x), and whose gate and up projections are clamped
    to the limit (gpt-oss); a checkpoint stores them as [in, out] with alternating columns. None for other
    experts."""
    jitter: float = 0.0
    """Routing "sparse mixing": half the largest relative distance to the best score at which another score
    still enters the softmax; unused by other routings."""
    is_transposed: bool = False
    """Whether the checkpoint stores expert weights as [in, out] instead of [out, in]."""
    has_output_bias: bool = False
    """Whether a bias [hidden] is added to the summed output of all experts."""

    def __post_init__(self) -> None:
        if self.chosen > self.count:
            raise ConfigError(
                f"expected at most {self.count} experts per token, as many as there are, found "
                f"{self.chosen}; correct config.json, or fetch it again"
            )
        if self.count % self.groups:
            raise ConfigError(
                f"expected the number of experts to be a multiple of the number of expert groups, found "
                f"{self.count} experts and {self.groups} groups; correct config.json, or fetch it again"
            )
        if self.chosen_groups > self.groups:
            raise ConfigError(
                f"expected at most {self.groups} expert groups per token, as many as there are, found "
                f"{self.chosen_groups}; correct config.json, or fetch it again"
            )
        # DeepSeek-V3 scores a group by the sum of its two largest experts.
        if self.routing == "sigmoid" and self.count // self.groups < 2:
            raise ConfigError(
                "expected at least 2 experts in each expert group, as groups are ranked by their two largest "
                f"scores, found {self.count} experts in {self.groups} groups; correct config.json, or fetch "
                "it again"
            )
        in_chosen_groups = self.chosen_groups * (self.count // self.groups)
        if self.chosen > in_chosen_groups:
            raise ConfigError(
                f"expected at most {in_chosen_groups} experts per token, as many as its {self.chosen_groups} "
                f"expert groups contain, found {self.chosen}; correct config.json, or fetch it again"
            )

    def idle_weights(self, width: int) -> int:
        """Number of weights of the routed experts that one token does not use. width: hidden size of the
        model."""
        per_expert = (3 if self.is_gated else 2) * (self.latent_size or width) * self.intermediate_size
        # The shared expert is used by every token, so it is never idle.
        return (self.count - self.chosen) * per_expert

    @property
    def summary(self) -> Literal["experts"]:
        """Name of this kind of channel mixer, as `Architecture.layers` shows it."""
        return "experts"

    @property
    def points(self) -> tuple[str, ...]:
        """Kinds of hook points of the experts: router, weights and outputs. Hidden activations have none,
        because a token has them only for its own experts."""
        routed = ("router_logits", "router_probs", "expert_weights")
        # Outputs of experts with a latent have another width than the stream, and no hook point.
        outputs = () if self.latent_size else ("expert_out",)
        return (*routed, *outputs, *(("shared_expert_out",) if self.shared_size else ()))

    @property
    def axis_sizes(self) -> dict[str, int]:
        """Axis name -> size, for the axes of this channel mixer's hook points."""
        return {"expert": self.count}

    def bytes_per_token(self, itemsize: int) -> int:
        """Estimated bytes of activations per token, with itemsize bytes per number: hidden activations of the
        top-k routed experts and of the shared expert."""
        return itemsize * 4 * (self.chosen * self.intermediate_size + self.shared_size)


@dataclass(frozen=True)
class MlpAndExpertsSpec(ChannelMixerSpec):
    """An MLP and parallel experts, each with a norm after its output; experts and router also have norms of
    their own before their input (Gemma 4)."""

    kind: ClassVar[str] = "mlp_and_experts"

    mlp: MlpSpec
    """The MLP, which every token uses."""
    experts: ExpertsSpec
    """The routed experts, which run in parallel with the MLP."""
    norm_eps: float
    """Epsilon of the norms of MLP, experts and router."""

    @property
    def summary(self) -> Literal["experts"]:
        """Name of this kind of channel mixer, as `Architecture.layers` shows it."""
        return "experts"

    @property
    def points(self) -> tuple[str, ...]:
        """Kinds of hook points of MLP and experts; the MLP's output has the hook point of a shared expert,
        "shared_expert_out"."""
        return (*self.mlp.points, *self.experts.points, "shared_expert_out")

    @property
    def axis_sizes(self) -> dict[str, int]:
        """Axis name -> size, for the axes of this channel mixer's hook points."""
        return self.mlp.axis_sizes | self.experts.axis_sizes

    def bytes_per_token(self, itemsize: int) -> int:
        """Estimated bytes of activations per token, with itemsize bytes per number: MLP and experts
        together."""
        return self.mlp.bytes_per_token(itemsize) + self.experts.bytes_per_token(itemsize)


@dataclass(frozen=True)
class SharedBlockSpec(MixerSpec):
    """A block of attention and MLP whose weights several layers share, before each layer's own mixer
    (Glorioso et al., Zamba, 2024, section 2; Zamba2, 2024, section 2).

    It reads the concatenation of stream and embedding; its output is added to the input of the layer's mixer.
    """

    kind: ClassVar[str] = "shared_block"
    points: ClassVar[tuple[str, ...]] = (
        *("shared_scale", "shared_normalized", *_ATTENTION, "shared_attn_out", "ln2_scale"),
        *("ln2_normalized", "mlp_pre", "mlp_pre_act", "mlp_pre_linear", "mlp_post_act", "mlp_post"),
        "shared_out",
    )
    reaches_later: ClassVar[frozenset[str]] = frozenset(points)

    hidden_size: int
    """Width of the stream; the block reads twice as many numbers per token, stream and embedding."""
    attention: AttentionSpec
    """Attention of the block, with queries, keys and values from the concatenated input."""
    mlp: MlpSpec
    """MLP of the block, which reads the normalised output of its attention."""
    source: int
    """Number of the layer among whose tensors the shared weights are stored."""
    place: int = 0
    """Index of this layer among all layers with a shared block, counted from 0."""
    listed: tuple[int, ...] = (0,)
    """Values of `place` of all layers that share this block; a checkpoint numbers the block's low-rank
    adapters by them."""
    rank: int | None = None
    """Rank of the low-rank adapters that each layer adds to the shared MLP; None for no adapters."""
    adapts_attention: bool = False
    """Whether query, key and value projections have low-rank adapters, too."""
    norm_eps: float = 1e-5
    """Epsilon of the RMS norms before the block's attention and before its MLP."""

    @property
    def summary(self) -> AttentionMixer:
        """Torch-free summary of this mixer, as `Architecture.layers` shows it."""
        return self.attention.summary

    @property
    def rope(self) -> RopeConfig | None:
        """Rotary position embedding of queries and keys; None for no rope."""
        return self.attention.rope

    @property
    def axis_sizes(self) -> dict[str, int]:
        """Axis name -> size, for the axes of this mixer's hook points."""
        return {"shared": 2 * self.hidden_size} | self.attention.axis_sizes | self.mlp.axis_sizes

    def bytes_per_token(self, itemsize: int) -> int:
        """Estimated bytes of activations per token, with itemsize bytes per number: its input of twice the
        hidden size, before and after the norm; attention and MLP."""
        inside = self.attention.bytes_per_token(itemsize) + self.mlp.bytes_per_token(itemsize)
        return itemsize * 8 * self.hidden_size + inside
