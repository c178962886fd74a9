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
Routing = Literal[
    "softmax of chosen",
    "chosen of softmax",
    "chosen of corrected softmax",
    "sigmoid",
    "sigmoid of chosen",
    "sigmoid of inputs",
    "sparse mixing",
]
"""Choice and weights of the experts of a token; defined in networks/mixers/experts.py."""
_STATE_SPACE = (
    *("ssm_gate", "ssm_conv", "ssm_x", "ssm_dt", "ssm_B", "ssm_C", "ssm_log_decay", "ssm_decay"),
    *("ssm_write", "ssm_state_seq", "ssm_state", "ssm_alpha_raw", "ssm_effective_attn", "ssm_out"),
)
_WRITTEN = frozenset(
    ("ssm_conv", "ssm_x", "ssm_dt", "ssm_B", "ssm_log_decay", "ssm_decay", "ssm_write", "ssm_state_seq")
)


class MixerSpec(ABC):
    """Description of a mixer without its weights."""

    kind: ClassVar[str]
    """Key of the tables of networks (networks/mixers/) and tensors (layer_tensors.py)."""
    points: ClassVar[tuple[str, ...]]
    """Hook point kinds of this class of mixers, optional ones included."""
    reaches_later: ClassVar[frozenset[str]]
    """Kinds of hook points at which a change also affects later positions."""

    @property
    def held_points(self) -> tuple[str, ...]:
        """Hook point kinds of this mixer: `points` minus the kinds of absent optional parts."""
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
        """Rotary position embedding; None for a mixer without."""
        return None


class ChannelMixerSpec(ABC):
    """Description of a channel mixer (MLP, experts, RWKV's channel mix) without its weights."""

    kind: ClassVar[str]
    """Key of the tables of networks (networks/mixers/) and tensors (layer_tensors.py)."""
    has_token_shift: ClassVar[bool] = False
    """Whether it also reads the previous token (RWKV)."""

    @property
    @abstractmethod
    def summary(self) -> Literal["MLP", "gated MLP", "token-shifted MLP", "experts"]:
        """Torch-free summary of this mixer, as `Architecture.layers` shows it."""

    @property
    @abstractmethod
    def points(self) -> tuple[str, ...]:
        """Kinds of its hook points."""

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
    """Rows of the table. The first half is for keys before the query, the second half for keys after it."""
    near: int
    """Distances below this have a row each; larger ones share rows in logarithmic buckets."""
    farthest: int
    """Distance from which all keys share the last row."""
    terms: tuple[Literal["bias", "content to position", "position to content"], ...]
    """"bias": one number per head (Raffel et al., T5, 2020, section 2.1). "content to position": query times
    a key projected from the table; "position to content": key times a query projected from the table (He et
    al., DeBERTa, 2021, equation 4)."""
    shares_maps: bool = False
    """Whether the table is projected by the layer's query and key projections, instead of its own ones."""
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
    """Whether queries and keys are normalised after rope instead of before it."""


@dataclass(frozen=True)
class TemperatureTuning:
    """Attention temperature tuning: queries are multiplied by 1 + scale log(1 + floor((position + offset) /
    floor)), so that attention stays sharp in long contexts (Llama 4, Ministral 3)."""

    scale: float
    """Factor of the logarithm."""
    floor: int
    """Number of positions after which the factor grows by a step."""
    offset: int = 0
    """1 if transformers counts positions from 1 in this formula."""


@dataclass(frozen=True)
class AttentionSpec(MixerSpec):
    """Grouped-query attention."""

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
    """Entries of a head."""
    rope: RopeConfig | None = None
    """Rotary position embedding of queries and keys; None for no rope."""
    scale: float | None = None
    """Factor of the scores q k^T; None for 1 / sqrt(head_dim)."""
    window: int | None = None
    """Keys that a query sees, itself included; None for all."""
    qkv_bias: bool = False
    """Whether the query, key and value projections have biases, and the one to value scores (Doge)."""
    o_bias: bool = False
    """Whether the output projection has a bias."""
    qk_norm: QkNorm | None = None
    """Norms of queries and keys; None for no such norms."""
    factors: tuple[float, float, float] = (1.0, 1.0, 1.0)
    """Factors of the layer input, of the keys and of the attention output."""
    layout: Literal["separate", "by part", "by head", "by fourths"] = "separate"
    """Tensors of the query, key and value projections. "separate": one each. Otherwise one tensor: "by part"
    with all queries, then all keys, then all values; "by head" with the queries of a key head, its key, its
    value; "by fourths" of the heads, each with queries, values, keys (CodeGen)."""
    clip_qkv: float | None = None
    """Largest absolute entry of queries, keys and values; None for no clip."""
    logit_softcap: float | None = None
    """Cap c of the scores before the mask, c tanh(score / c) (Gemma 2); None for no cap."""
    alibi_slopes: tuple[float, ...] = ()
    """ALiBi slopes, one per head: added to the scores per position of the key (Press et al., 2022); () for no
    ALiBi."""
    attention_sinks: bool = False
    """Whether each head has a learned logit of an attention sink (gpt-oss)."""
    temperature_tuning: TemperatureTuning | None = None
    """Position-dependent factor of the queries; None for no such factor."""
    is_bidirectional: bool = False
    """Whether queries also see later keys."""
    has_stored_frequencies: bool = False
    """Whether the checkpoint stores the frequencies of rope."""
    relative: RelativeSpec | None = None
    """Relative position terms of the scores (T5, DeBERTa); None for no such terms."""
    inner_norm_eps: float | None = None
    """Epsilon of an RMS norm over the outputs of all heads, before the output projection; None for no
    norm."""
    groups: tuple[int, ...] | None = None
    """Number of groups of the width-1 convolutions that project queries, keys, values and output
    (SqueezeBERT); None for linear projections."""
    is_chunked: bool = False
    """Whether `window` is the length of fixed chunks, and queries only see keys of their own chunk."""
    has_value_scores: bool = False
    """Whether scores have a term computed from the value at the key's position (Doge's dynamic mask)."""
    source: int | None = None
    """Number of the earlier layer whose keys and values this layer reads; None if it has its own."""
    part: Literal["source", "target", "cross"] | None = None
    """In encoder-decoders: attention within the source, within the target, or from target to source; None
    for models of single sequences."""
    values_from_keys: bool = False
    """Whether values are the key projection before the key norm, instead of a projection of their own."""
    has_v_norm: bool = False
    """Whether values are normalised over each head, without learned weights."""

    def __post_init__(self) -> None:
        # Checked here, not in the readers, as autoconfig.py also builds specs.
        if min(self.num_attention_heads, self.num_kv_heads, self.head_dim) < 1:
            raise ConfigError(
                "expected at least 1 query head, 1 key head and 1 entry per head, found num_attention_heads="
                f"{self.num_attention_heads}, num_key_value_heads={self.num_kv_heads} and head_dim="
                f"{self.head_dim}; correct config.json, or fetch it again"
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
                f"expected one key head for each of {self.num_attention_heads} heads with ALiBi, found "
                f"{self.num_kv_heads} key heads; {TRY_TRANSFORMERS}"
            )
        # Tiled attention and cached keys do not know positions, so causal self-attention has no such terms.
        if self.relative is not None and self.is_bidirectional == self.relative.looks_back:
            raise ConfigError(
                "expected relative position terms for both directions exactly where attention is "
                f"bidirectional, found is_bidirectional={self.is_bidirectional} and "
                f"looks_back={self.relative.looks_back}; {TRY_TRANSFORMERS}"
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
        """See `MixerSpec`; a layer that reuses keys and values has no hook points for them."""
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
        """Estimated bytes of activations per token, with itemsize bytes per number: projections before and
        after rope."""
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
    """Query, key, value and output projections, and rope."""
    start: float
    """Initial value of lambda, to which its learned part is added."""
    norm_eps: float
    """Epsilon of the norm of each pair's output."""

    def __post_init__(self) -> None:
        if self.attention.num_kv_heads % 2:
            raise ConfigError(
                f"expected an even num_key_value_heads, whose halves differential attention reads, found "
                f"{self.attention.num_kv_heads}; correct config.json, or fetch it again"
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
    """Mixture of attention heads (Zhang et al., 2022, section 3): each expert has query and output
    projections; all experts share keys and values."""

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
                f"expected a number of attention experts per token of at most {self.experts}, found "
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
    """Key entries that differ between heads, without rope."""
    shared_size: int
    """Key entries with rope, which all heads share and which follow the former."""
    value_size: int
    """Value entries of a head."""
    rank: int
    """Rank of the latent of keys and values."""
    query_rank: int | None = None
    """Rank of the query projection; None for a full-rank one."""
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
        """All key entries of a head."""
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
    """Entries of the state of a channel."""
    conv_size: int
    """Kernel size of the short convolution, in tokens."""
    rank: int
    """Rank of the projection to step sizes."""
    has_bias: bool = False
    """Whether input and output projection have biases."""
    has_conv_bias: bool = True
    """Whether the short convolution has a bias, one number per channel."""
    norms: Literal["plain", "weighted"] | None = None
    """RMS norms of step sizes, B and C: without weights ("plain", Falcon-Mamba), with weights (Jamba), or
    none."""
    norm_eps: float = 1e-6
    """Epsilon of the RMS norms of step sizes, B and C; unused if `norms` is None."""
    groups: int = 1
    """Groups of channels with projections of their own to step sizes, B and C (Zamba)."""
    layout: Literal["by part", "by group"] = "by part"
    """Layout of these projections in a checkpoint (layer_tensors.py)."""

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
    """Mamba-2 (Dao and Gu, Transformers are SSMs, 2024, section 7): heads with one decay each."""

    kind: ClassVar[str] = "mamba2"
    points: ClassVar[tuple[str, ...]] = _STATE_SPACE
    reaches_later: ClassVar[frozenset[str]] = _WRITTEN

    heads: int
    """Number of heads."""
    head_dim: int
    """Channels of a head."""
    groups: int
    """Groups of heads that share B and C."""
    state_size: int
    """Entries of B and C: rows of a head's state."""
    conv_size: int
    """Kernel size of the short convolution, in tokens."""
    limits: tuple[float, float | None] = (0.0, None)
    """Smallest and largest step size; None for no upper limit."""
    norm: Literal["gated", "before gate"] | None = "gated"
    """RMS norm of the output, group by group: after the gate ("gated") or before it; None for no norm."""
    norm_eps: float = 1e-5
    """Epsilon of the RMS norm of the output; unused if `norm` is None."""
    has_bias: bool = False
    """Whether the input projection has a bias."""
    has_out_bias: bool = False
    """Whether the output projection has a bias."""
    has_conv_bias: bool = True
    """Whether the short convolution has a bias, one number per channel of x, B and C."""
    into_factor: float = 1.0
    """Factor of the layer's input."""
    in_factors: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0, 1.0)
    """Factors of the projected gate, x, B, C and step sizes."""
    out_factor: float = 1.0
    """Factor of the output."""

    @property
    def channels(self) -> int:
        """Channels of all heads together."""
        return self.heads * self.head_dim

    @property
    def convolved(self) -> int:
        """Channels of the short convolution: x, B and C."""
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
    """An MLP, gated or plain."""

    kind: ClassVar[str] = "mlp"

    intermediate_size: int
    """Hidden width."""
    activation: ActivationName
    """Activation function of the gate, or of the up projection in a plain MLP."""
    is_gated: bool = True
    """Whether the up projection is multiplied by an activated gate; False for a plain MLP."""
    is_fused: bool = False
    """Whether gate and up projection are one tensor."""
    has_bias: bool = False
    """Whether all projections have biases."""
    factors: tuple[float, float] = (1.0, 1.0)
    """Factors of the gate and of the MLP output."""
    inner_norm_eps: float | None = None
    """Epsilon of an RMS norm before the down projection; None for no norm."""
    groups: tuple[int, ...] | None = None
    """Number of groups of the width-1 convolutions that replace up and down projection (SqueezeBERT); None
    for linear projections."""
    sparsity: float = 0.0
    """Intended share of zero hidden activations: gates below the normal quantile of this share are cut to 0
    (Gemma 3n)."""

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
    """Activation function of each expert's gate, or of its up projection without a gate; routed experts with
    `limits` do not use it."""
    routing: Routing
    """How the top-k experts of a token are chosen and weighted (networks/mixers/experts.py)."""
    shared_size: int = 0
    """Hidden width of the shared expert; 0 for no shared expert."""
    has_shared_gate: bool = False
    """Whether the shared expert's output is multiplied by a sigmoid gate."""
    is_gated: bool = True
    """Whether experts are gated MLPs instead of plain ones."""
    is_listed: bool = True
    """Whether the checkpoint has one tensor per expert, instead of one tensor of all experts."""
    groups: int = 1
    """Number of groups of experts."""
    chosen_groups: int = 1
    """Number of groups, those with the largest scores, from which a token's experts are chosen."""
    has_correction: bool = True
    """Whether a correction bias is added to the router scores for the choice of experts."""
    sums_to_one: bool = False
    """Whether the weights of the top-k experts are normalised to sum to 1."""
    sum_eps: float = 1e-20
    """Epsilon added to the sum by which these weights are divided."""
    routed_factor: float = 1.0
    """Factor of the routed experts' weights."""
    latent_size: int | None = None
    """Width of the routed experts' input and output, between two linear projections; None for the hidden size
    of the model."""
    has_bias: bool = False
    """Whether the shared expert and the projections around a latent have biases."""
    factor: float = 1.0
    """Factor of the experts' output, applied to their last weights on loading."""
    has_routed_bias: bool = False
    """Whether the router and the routed experts have biases."""
    limits: tuple[float, float] | None = None
    """(a, limit) of experts with gate x sigmoid(a x), whose gate and up projections are clamped to the limit
    (gpt-oss); their columns alternate in tensors stored as [in, out]. None for other experts."""
    jitter: float = 0.0
    """Sparse mixing: half the largest relative distance to the best score at which another score still enters
    the softmax."""
    is_transposed: bool = False
    """Whether the checkpoint stores expert weights as [in, out] instead of [out, in]."""
    has_output_bias: bool = False
    """Whether a bias [hidden] is added to the summed output of all experts."""

    def __post_init__(self) -> None:
        if self.chosen > self.count:
            raise ConfigError(
                f"expected a number of experts per token of at most {self.count}, found {self.chosen}; "
                "correct config.json, or fetch it again"
            )
        if self.count % self.groups or self.chosen_groups > self.groups:
            raise ConfigError(
                f"expected {self.groups} groups to divide {self.count} experts, and at most as many chosen, "
                f"found {self.chosen_groups}; correct config.json, or fetch it again"
            )
        # DeepSeek-V3 scores a group by the sum of its two largest experts.
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
        """Estimated bytes of activations per token, with itemsize bytes per number: router, weights and
        outputs of experts. Hidden activations have no hook points, as each token has those of its own experts
        only."""
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
    """Epsilon of all these norms."""

    @property
    def summary(self) -> Literal["experts"]:
        """Name of this kind of channel mixer, as `Architecture.layers` shows it."""
        return "experts"

    @property
    def points(self) -> tuple[str, ...]:
        """See `ChannelMixerSpec`; the MLP's output is at the hook point of a shared expert."""
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
    """Index of this layer among all layers with a shared block."""
    listed: tuple[int, ...] = (0,)
    """These indices of all layers that share this block; low-rank adapters are numbered by them."""
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
