"""What a family whose layers all attend says of itself, and itself in words.

A family is a row (`Attends`): the axes of `Family`, and those along which these families differ besides -
where norms stand, which layers turn queries and keys, by which rope, and what is multiplied.

Border: one row; how a config.json is read by it is told in reading.py. Never imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from .....store.errors import ConfigError
from ..architecture import HeadTransform
from ..families import Bias, Family, asks_to_look_ahead, described, has_bias, read_activation
from ..layer_tensors import LLAMA, Spelling
from ..mixers import ChannelMixerSpec, MixerSpec, MlpSpec, RelativeSpec
from ..transformer import ConfigReader, RopeConfig

__all__ = [
    "Attends",
    "Factors",
    "Layout",
    "TensorShapes",
    "Windows",
    "dense",
    "described_attending",
    "eps_of",
    "factors_of",
    "groups_of",
    "has_positions",
    "is_behind_padding",
    "residual_factor",
]

TensorShapes = Mapping[str, tuple[int, ...]]
Windows = Sequence[int | None]
Layout = Literal["separate", "by part", "by head", "by fourths"]


def dense(reader: ConfigReader, family: Attends, layer: int) -> ChannelMixerSpec:
    """The MLP of every layer."""
    groups = groups_of(reader, family)
    usual = family.inner_factor and family.inner_factor * reader.integer("hidden_size")
    inner = usual if family.has_fixed_inner and usual else reader.integer("intermediate_size", usual)
    if inner % family.inner_parts:
        raise ConfigError(
            f"{reader.source}: expected an intermediate_size of {family.inner_parts} projections together, "
            f"found {inner}; correct the file, or fetch it again"
        )
    return MlpSpec(
        inner // family.inner_parts,
        read_activation(reader, family),
        is_gated=family.mlp != "plain",
        is_fused=family.mlp == "gated_fused",
        has_bias=has_bias(reader, family.mlp_bias),
        factors=(1.0, residual_factor(reader, family)),
        inner_norm_eps=eps_of(reader, family) if family.has_inner_norms else None,
        groups=None if family.groups is None else (groups[4], groups[5]),
    )


def turning_everywhere(reader: ConfigReader, windows: Windows) -> Sequence[bool]:
    """Every layer turns queries and keys."""
    return (True,) * len(windows)


@dataclass(frozen=True)
class Factors:
    """What a model multiplies by: embeddings, all that is added to the stream, logits; and q k^T, None for
    what the width of heads says."""

    embedding: float = 1.0
    residual: float = 1.0
    logits: float = 1.0
    scores: float | None = None


@dataclass(frozen=True)
class Attends(Family):
    """A family as in the table of decoders, along more axes."""

    places: Literal["before", "after", "around", "of sums"] = "before"
    """Where norms stand: before mixers, behind them, or both; or on the sum of the stream and what is added
    to it."""
    looks_ahead: Callable[[ConfigReader], bool] = asks_to_look_ahead
    """Whether queries see later keys."""
    may_look_both_ways: bool = False
    """Whether use_bidirectional_attention is followed: queries then see half of a window on each side."""
    skips_first_norm: bool = False
    """Whether attention of the first layer reads the embeddings as they are."""
    sources: Callable[[ConfigReader, int], Sequence[int]] | None = None
    """Under which number the tensors of each layer lie, where layers share them."""
    token_types: tuple[str, int] | None = None
    """The key of the rows of a table of token types, and its default."""
    embedding_width: tuple[str, int] | None = None
    """The key of the width of embeddings, and its default; 0 for that of the stream."""
    always_maps_embeddings: bool = False
    """Whether embeddings are mapped to the stream even where they are as wide."""
    positions_behind_padding: bool | Callable[[ConfigReader], bool] = False
    """Whether the first of positions in a table is in the row behind the padding token's id."""
    dropped_token: Callable[[ConfigReader], int | None] | None = None
    """The token that embeddings leave out as dropout did in training."""
    transform: Callable[[ConfigReader, Attends, int], HeadTransform] | None = None
    """What stands before the LM head, of eps of all norms and the width of embeddings."""
    is_never_tied: bool = False
    """Whether the head is its own, whatever the config says."""
    has_final_norm: bool = True
    """Whether the last stream is normed."""
    has_final_norm_bias: bool = True
    """Of a layer norm."""
    parallel: Bias = False
    """Whether attention and MLP both read the stream that enters; or the key that says, with its default."""
    has_two_norms: bool | Callable[[ConfigReader], bool] = False
    """Whether each of them then reads it through a norm of its own."""
    has_norm_bias: Bias = True
    """Of layer norms."""
    qk_norms: Literal["head", "all"] | None = None
    """Of queries and keys: over each head, or all of them together."""
    qk_norm_key: tuple[str, bool] | None = None
    """The key that says whether there are any, and its default; None for always."""
    qk_norm_type: Literal["rms", "layer"] | None = None
    """Of these norms, where it is not that of all others."""
    has_qk_norm_bias: bool = True
    """Of these, where they are layer norms."""
    norms_behind_rope: bool = False
    """Whether they norm what has turned."""
    has_norm_weights: bool = True
    """Whether norms multiply by weights."""
    has_unit_norms: bool = False
    """Whether norms multiply by 1 more than their weights."""
    has_embedding_norm: Bias = False
    """Whether embeddings are normed before they become the stream."""
    fixed_eps: float | None = None
    """Of norms, whatever the config says."""
    layout: Layout | Callable[[ConfigReader], Layout] = "separate"
    """Of queries, keys and values in tensors (`AttentionSpec`)."""
    clip: Callable[[ConfigReader], float | None] | None = None
    """The largest entry of queries, keys and values."""
    rises_by_values: bool = False
    """Whether scores rise by what the values of a key say."""
    has_gains: bool = False
    """Whether the stream is multiplied by weights where something is added to it."""
    longest: tuple[str, int] | None = None
    """The key, and its default, of a length beyond which what the reference does is not followed."""
    slopes: Callable[[ConfigReader, int], tuple[float, ...]] | None = None
    """What scores rise by with positions, of so many heads."""
    relative: Callable[[ConfigReader], RelativeSpec | None] | None = None
    """What scores have besides, by how far a key is from its query."""
    has_sinks: bool = False
    """Whether each head has a score of nothing."""
    groups: tuple[str, str, str, str, str, str] | None = None
    """Keys of how many groups the convolutions have that stand for maps: of queries, keys, values, what comes
    out of attention, and of MLPs. None for plain maps."""
    has_inner_norms: bool = False
    """Whether what heads have read, and what MLPs have inside, is normed before it is projected."""
    has_gated_heads: bool = False
    """Whether heads are multiplied by gates with a projection of their own."""
    has_growth: bool = False
    """Whether queries grow with positions, as rope_parameters say."""
    words: tuple[str, ...] = ()
    """About its attention, besides what fields say."""
    caps_scores: bool = False
    """Whether the first of soft_caps is followed."""
    types: Callable[[ConfigReader, int], list[str]] | None = None
    """Of layers, where a config does not list them: which have a window."""
    has_window_flag: bool = False
    """Whether use_sliding_window must be true for any window."""
    windows_of: Callable[..., Windows] | None = None
    """Windows by layer, of families that tell them in another way."""
    mixer: Callable[..., MixerSpec] | None = None
    """What attends, where that is no attention with grouped queries: of a config, a family, a rope and a
    window."""
    turned_key: str = "head_dim"
    """The key of the width of what turns."""
    rope_of: Callable[[ConfigReader, Attends, int], RopeConfig | None] | None = None
    """A rope told in another way, of heads of some width."""
    usual_rope: Mapping[str, Any] | None = None
    """What rope_parameters are where the config has none."""
    heads_from: Callable[[ConfigReader], int] | None = None
    """Heads told in another way."""
    kv_heads_from: Callable[[ConfigReader, int], int] | None = None
    """Key heads told in another way, of so many heads."""
    share: float = 1.0
    """Of each head that rope turns, where the config does not say."""
    turns: Callable[[ConfigReader, Windows], Sequence[bool]] = turning_everywhere
    """Which layers turn queries and keys."""
    local_rope: tuple[str, float] | None = None
    """Key (or "") and wavelength of a rope of their own for layers with a window."""
    first_position: int | None = None
    """Row of the first of positions in a table; None for rope, or slopes."""
    position_key: tuple[str, bool] | None = None
    """The key that says whether there is such a table, and its default; None for always."""
    rows_hold_padding: bool = False
    """Whether the rows before the first position count as positions of the config."""
    has_position_waves: bool = False
    """Whether that table is one of sines and cosines."""
    scale_of: Callable[[ConfigReader, int, int], float] | None = None
    """What q k^T is multiplied by, of a layer and a width of heads."""
    has_multipliers: bool = False
    """Of embedding, attention, residuals and logits, as Granite names them."""
    factors: Callable[[ConfigReader], Factors] | None = None
    """These told in another way."""
    head_bias: Bias = False
    """Of the LM head."""
    logit_scale: float | None = None
    """What logits are multiplied by where the config does not say; None for families without."""
    channel_mixer: Callable[[ConfigReader, Attends, int], ChannelMixerSpec] = dense
    inner_factor: int | None = None
    """How much wider an MLP is than the stream, where the config does not say."""
    inner_parts: int = 1
    """How many projections intermediate_size counts together."""
    has_fixed_inner: bool = False
    """Whether it is so whatever the config says."""
    never: tuple[str, ...] = ()
    """Keys that must be absent, null or false, as they change numbers in a way that is not followed."""
    always: Mapping[str, Any] = field(default_factory=dict)
    """Values that keys must have, for the same reason."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """What keys are called here, by their usual names."""
    spelling: Spelling | Callable[[ConfigReader, TensorShapes], Spelling] = LLAMA
    frequencies: str = ""
    """How the names of tensors end that tell what rope turns by; the first of a checkpoint counts."""
    root: str = ""
    """What names of tensors begin with, but not in all files."""
    may_have_old_norms: bool = False
    """Whether files may name weights and biases of norms as TensorFlow did."""

    @property
    def reads_tensors(self) -> bool:
        """Whether names of tensors decide how the others are spelled."""
        return bool(self.root) or self.may_have_old_norms


def described_attending(model_type: str, family: Attends) -> dict[str, str]:
    """A family in words, as `described` in families.py."""
    row = described(model_type, family)
    places = _PLACES[family.places]
    attention = (
        "norms on q and k" if family.qk_norms else "",
        "biases" if family.qkv_bias else "",
        "of a latent" if family.turned_key != "head_dim" else "",
        "gated heads" if family.has_gated_heads else "",
        "maps in groups" if family.groups else "",
        "norms on what is projected out" if family.has_inner_norms else "",
        "rope turns neighbours" if family.interleaved_rope else "",
        f"rope turns {family.share:g} of a head" if family.share != 1 else "",
        "a rope of their own in windows" if family.local_rope else "",
        "no rope in some layers" if family.turns is not turning_everywhere else "",
        "sliding window" if family.types or family.has_window_flag or family.windows != "none" else "",
        "beside the MLP" if family.parallel else "",
        _POSITIONS[family.has_position_waves] if has_positions(family) else "",
        "ALiBi" if family.slopes else "",
        "scores rise by values" if family.rises_by_values else "",
        "scores by distance" if family.relative else "",
        "sinks" if family.has_sinks else "",
        "queries grow with positions" if family.has_growth else "",
        *family.words,
        "layers share weights" if family.sources else "",
        "" if family.looks_ahead is asks_to_look_ahead else "looks both ways",
    )
    head = (
        "scaled embedding" if family.scaled_embedding or family.has_multipliers or family.factors else "",
        "normed embedding" if family.has_embedding_norm else "",
        "embeddings narrower than the stream" if family.embedding_width else "",
        "token types" if family.token_types else "",
        "tied" if family.tied else "",
        "a transform before it" if family.transform else "",
        "scaled" if family.has_multipliers or family.logit_scale is not None else "",
        "bias" if family.head_bias else "",
        "soft cap" if family.soft_caps else "",
    )
    return row | {
        "norm": ", ".join(filter(None, (row["norm"], places))),
        "mlp": row["mlp"] if family.channel_mixer is dense else f"experts, {row['mlp']}",
        "attention": ", ".join(filter(None, attention)) or "plain",
        "head": ", ".join(filter(None, head)) or "untied",
    }


_PLACES = {
    "before": "",
    "after": "behind what is added",
    "around": "four per block",
    "of sums": "on the sums",
}
_POSITIONS = {False: "learned positions", True: "positions of sines and cosines"}


def residual_factor(reader: ConfigReader, family: Attends) -> float:
    """What everything that is added to the stream is multiplied by, unless a norm stands behind it."""
    return 1.0 if family.places == "around" else factors_of(reader, family).residual


def groups_of(reader: ConfigReader, family: Attends) -> tuple[int, ...]:
    """How many groups each convolution has, by `Attends.groups`."""
    usual = (4, 4, 4, 1, 4, 4)
    return tuple(map(reader.integer, family.groups or (), usual))


def eps_of(reader: ConfigReader, family: Attends) -> float:
    """What every norm adds to the mean square."""
    return family.fixed_eps or reader.number(family.eps_key, family.eps)


def factors_of(reader: ConfigReader, family: Attends) -> Factors:
    """What a family multiplies by."""
    if family.factors is not None:
        return family.factors(reader)
    if not family.has_multipliers:
        return Factors()
    return Factors(
        reader.number("embedding_multiplier", 1.0),
        reader.number("residual_multiplier", 1.0),
        1 / reader.number("logits_scaling", 1.0),
        reader.number("attention_multiplier", 1.0),
    )


def has_positions(family: Attends) -> bool:
    """Whether there is a table of positions."""
    return bool(family.positions_behind_padding) or family.first_position is not None


def is_behind_padding(reader: ConfigReader, family: Attends) -> bool:
    """Whether the first of positions in a table is in the row behind the padding token's id."""
    told = family.positions_behind_padding
    return told(reader) if callable(told) else told
