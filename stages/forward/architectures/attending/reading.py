"""How the config.json of a family whose layers all attend becomes a HybridConfig: one reader for all.

A family is a row of families.py (`Attends`): the axes of `Family`, and those along which these families
differ besides - where norms stand, which layers turn queries and keys, by which rope, and what is multiplied.
Semantics and defaults are those of the reference implementation (transformers).

Border: one config; never imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from .....store.errors import ConfigError
from ..architecture import HeadTransform
from ..families import (
    Bias,
    Family,
    asks_to_look_ahead,
    both_ways,
    described,
    has_bias,
    kv_heads_of,
    listed_windows,
    read_activation,
    read_rope,
    read_windows,
    refuse_unfollowed,
)
from ..hybrid import Block, HybridConfig
from ..hybrid_families import checked
from ..hybrid_tensors import Spelling
from ..linear_families import LLAMA
from ..mixers import AttentionShape, ChannelShape, GatedAttentionShape, MixerShape, MlpShape
from ..transformer import ConfigReader, RopeConfig

__all__ = [
    "Attends",
    "Factors",
    "Layout",
    "Told",
    "Windows",
    "dense",
    "described_attending",
    "factors_of",
    "read_attending",
    "residual_factor",
    "rope_of_family",
]

Windows = Sequence[int | None]
Layout = Literal["separate", "by part", "by head", "by fourths"]
TensorShapes = Mapping[str, tuple[int, ...]]


def dense(reader: ConfigReader, family: Attends, layer: int) -> ChannelShape:
    """The MLP of every layer."""
    usual = family.inner_factor and family.inner_factor * reader.integer("hidden_size")
    return MlpShape(
        usual if family.has_fixed_inner and usual else reader.integer("intermediate_size", usual),
        read_activation(reader, family),
        is_gated=family.mlp != "plain",
        is_fused=family.mlp == "gated_fused",
        has_bias=has_bias(reader, family.mlp_bias),
        factors=(1.0, residual_factor(reader, family)),
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
    """Of all norms."""
    has_unit_norms: bool = False
    """Whether norms multiply by 1 more than their weights."""
    has_embedding_norm: Bias = False
    """Whether embeddings are normed before they become the stream."""
    fixed_eps: float | None = None
    """Of norms, whatever the config says."""
    layout: Layout | Callable[[ConfigReader], Layout] = "separate"
    """Of queries, keys and values in tensors (`AttentionShape`)."""
    clip: Callable[[ConfigReader], float | None] | None = None
    """The largest entry of queries, keys and values."""
    slopes: Callable[[ConfigReader, int], tuple[float, ...]] | None = None
    """What scores rise by with positions, of so many heads."""
    has_sinks: bool = False
    """Whether each head has a score of nothing."""
    has_gated_heads: bool = False
    """Whether heads are multiplied by gates with a projection of their own."""
    has_growth: bool = False
    """Whether queries grow with positions, as rope_parameters say."""
    caps_scores: bool = False
    """Whether the first of soft_caps is followed."""
    types: Callable[[ConfigReader, int], list[str]] | None = None
    """Of layers, where a config does not list them: which have a window."""
    has_window_flag: bool = False
    """Whether use_sliding_window must be true for any window."""
    windows_of: Callable[..., Windows] | None = None
    """Windows by layer, of families that tell them in another way."""
    mixer: Callable[..., MixerShape] | None = None
    """What attends, where that is no attention with grouped queries: of a config, a family, a rope and a
    window."""
    turned_key: str = "head_dim"
    """The key of the width of what turns."""
    rope_of: Callable[[ConfigReader, Attends, int], RopeConfig | None] | None = None
    """A rope told in another way, of heads of some width."""
    usual_rope: Mapping[str, Any] | None = None
    """What rope_parameters are where the config has none."""
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
    channel_mixer: Callable[[ConfigReader, Attends, int], ChannelShape] = dense
    inner_factor: int | None = None
    """How much wider an MLP is than the stream, where the config does not say."""
    has_fixed_inner: bool = False
    """Whether it is so whatever the config says."""
    never: tuple[str, ...] = ()
    """Keys that must be absent, null or false, as they change numbers in a way that is not followed."""
    always: Mapping[str, Any] = field(default_factory=dict)
    """Values that keys must have, for the same reason."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """What keys are called here, by their usual names."""
    spelling: Spelling | Callable[[ConfigReader], Spelling] = LLAMA
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
        "rope turns neighbours" if family.interleaved_rope else "",
        f"rope turns {family.share:g} of a head" if family.share != 1 else "",
        "a rope of their own in windows" if family.local_rope else "",
        "no rope in some layers" if family.turns is not turning_everywhere else "",
        "sliding window" if family.types or family.has_window_flag or family.windows != "none" else "",
        "beside the MLP" if family.parallel else "",
        _POSITIONS[family.has_position_waves] if _has_positions(family) else "",
        "ALiBi" if family.slopes else "",
        "sinks" if family.has_sinks else "",
        "queries grow with positions" if family.has_growth else "",
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


def read_attending(reader: ConfigReader, family: Attends, shapes: TensorShapes) -> HybridConfig:
    """The architecture of such a family. shapes: of tensors by name, where their names begin in two ways.

    Raises ConfigError for a key that is missing, of the wrong type, or asks for what is not followed.
    """
    reader = _renamed(reader, family)
    refuse_unfollowed(reader, looks_ahead=family.mixer is None, both_ways=family.may_look_both_ways)
    _refuse(reader, family)
    hidden, heads, layers = (
        reader.integer(key) for key in ("hidden_size", "num_attention_heads", "num_hidden_layers")
    )
    eps = family.fixed_eps or reader.number(family.eps_key, family.eps)
    windows = (family.windows_of or partial(_windows, family=family))(reader, layers=layers)
    if asks_to_look_ahead(reader):
        windows = both_ways(windows)
    if is_split := reader.flag("use_bidirectional_attention", False):
        windows = [window and window // 2 + 1 for window in windows]
    head_dim = _head_dim(reader, family, hidden // heads)
    ropes = _ropes(reader, family, head_dim, windows)
    looks_ahead = is_split or family.looks_ahead(reader)
    told = Told(reader, family, heads, head_dim, eps, looks_ahead, bool(_frequencies(family, shapes)))
    factors = factors_of(reader, family)
    is_parallel = has_bias(reader, family.parallel)
    sources = family.sources and family.sources(reader, layers)

    def block(layer: int) -> Block:
        return Block(
            ((family.mixer or _grouped)(told, ropes[layer], windows[layer], layer),),
            family.channel_mixer(reader, family, layer),
            family.places,
            is_parallel=is_parallel,
            has_two_norms=_has_two_norms(reader, family) or not is_parallel,
            post_factor=factors.residual if family.places == "around" else 1.0,
            source=None if sources is None else sources[layer],
            reads_normed=layer > 0 or not family.skips_first_norm,
        )

    blocks = tuple(map(block, range(layers)))
    context, rows, first = _positions(reader, family)
    key, usual = family.embedding_width or ("", 0)
    width = reader.integer(key, usual or hidden) if key else None
    return HybridConfig(
        model_type=reader.raw["model_type"],
        hidden_size=hidden,
        vocab_size=reader.integer("vocab_size"),
        blocks=tuple(checked(reader, block) for block in blocks),
        spelling=_rooted(reader, family, shapes),
        norm_eps=eps,
        norm_type=family.norm,
        norm_biases="of layer norms" if has_bias(reader, family.has_norm_bias) else "none",
        max_position_embeddings=context,
        position_rows=rows,
        first_position=first,
        unknown_token=first - 1 if _is_behind_padding(reader, family) else None,
        dropped_token=family.dropped_token and family.dropped_token(reader),
        has_position_waves=family.has_position_waves,
        embedding_scale=_embedding_scale(reader, family, hidden),
        rounds_embedding_scale=family.scaled_embedding,
        logit_factor=_logit_factor(reader, family),
        final_logit_softcapping=family.soft_caps
        and reader.optional_number("final_logit_softcapping", family.soft_caps[1]),
        tie_word_embeddings=reader.flag("tie_word_embeddings", family.tied) and not family.is_never_tied,
        has_embedding_norm=has_bias(reader, family.has_embedding_norm),
        has_norm_weights=family.has_norm_weights,
        has_unit_norms=family.has_unit_norms,
        has_head_bias=has_bias(reader, family.head_bias),
        embedding_width=None if width == hidden and not family.always_maps_embeddings else width,
        token_types=0 if family.token_types is None else reader.integer(*family.token_types, least=0),
        has_final_norm=family.has_final_norm,
        has_final_norm_bias=family.has_final_norm_bias,
        transform=family.transform and family.transform(reader, family, width or hidden),
    )


@dataclass(frozen=True)
class Told:
    """What the attention of every layer is made of: a config, its family, heads, their width, eps of norms;
    whether queries see later keys, and whether the checkpoint tells what rope turns by."""

    reader: ConfigReader
    family: Attends
    heads: int
    head_dim: int
    eps: float
    looks_ahead: bool
    has_frequencies: bool


def _grouped(told: Told, rope: RopeConfig | None, window: int | None, layer: int) -> AttentionShape:
    """Attention with grouped queries."""
    reader, family, heads = told.reader, told.family, told.heads
    has_norms = family.qk_norm_key is None or reader.flag(*family.qk_norm_key)
    scale = _scale(reader, family)
    if family.scale_of is not None:
        scale = family.scale_of(reader, layer, told.head_dim)
    gated = partial(GatedAttentionShape, has_gate_projection=True)
    return (gated if family.has_gated_heads else AttentionShape)(
        num_attention_heads=heads,
        num_kv_heads=_kv_heads(reader, family, heads),
        head_dim=told.head_dim,
        turning=rope,
        scale=scale,
        window=window,
        qkv_bias=has_bias(reader, family.qkv_bias),
        o_bias=has_bias(reader, family.o_bias),
        norms=family.qk_norms if has_norms else None,
        norm_type=family.qk_norm_type or ("gemma_rms" if family.norm == "gemma_rms" else "rms"),
        qk_norm_eps=told.eps,
        factors=(1.0, 1.0, residual_factor(reader, family)),
        layout=family.layout(reader) if callable(family.layout) else family.layout,
        has_norm_weights=family.has_norm_weights,
        has_norm_bias=family.has_qk_norm_bias,
        norms_behind_rope=family.norms_behind_rope,
        clip=family.clip and family.clip(reader),
        soft_cap=_soft_cap(reader, family),
        slopes=family.slopes(reader, heads) if family.slopes else (),
        has_sinks=family.has_sinks,
        growth=_growth(reader, family) if family.has_growth else None,
        is_bidirectional=told.looks_ahead,
        has_frequencies=told.has_frequencies and rope is not None,
    )


def _frequencies(family: Attends, shapes: TensorShapes) -> str:
    """The tensor that tells what rope turns by; "" for none."""
    if not family.frequencies:
        return ""
    return next((name for name in sorted(shapes) if name.endswith(family.frequencies)), "")


def _has_positions(family: Attends) -> bool:
    """Whether there is a table of positions."""
    return bool(family.positions_behind_padding) or family.first_position is not None


def _is_behind_padding(reader: ConfigReader, family: Attends) -> bool:
    told = family.positions_behind_padding
    return told(reader) if callable(told) else told


def _positions(reader: ConfigReader, family: Attends) -> tuple[int | None, int, int]:
    """How many positions there are, None where nothing bounds them; rows of a table of them, and the first's.
    What stands behind the padding counts its rows, not positions."""
    told = family.max_positions and reader.integer("max_position_embeddings", family.max_positions)
    if _is_behind_padding(reader, family):
        first = reader.integer("pad_token_id", 1, least=0) + 1
        return (told or 0) - first, told or 0, first
    if family.first_position is None:
        return told, 0, 0
    return told, (told or 0) + family.first_position, family.first_position


def _head_dim(reader: ConfigReader, family: Attends, usual: int) -> int:
    """The width of heads, or of what turns of them; a null is no default of the family."""
    is_null = "head_dim" in reader.raw and reader.raw["head_dim"] is None
    return reader.integer(family.turned_key, usual if is_null else family.head_dim or usual)


def _kv_heads(reader: ConfigReader, family: Attends, heads: int) -> int:
    if family.kv_heads_from is None:
        return kv_heads_of(reader, family, heads)
    return family.kv_heads_from(reader, heads)


def _has_two_norms(reader: ConfigReader, family: Attends) -> bool:
    return family.has_two_norms(reader) if callable(family.has_two_norms) else family.has_two_norms


def _soft_cap(reader: ConfigReader, family: Attends) -> float | None:
    if not family.caps_scores or family.soft_caps is None:
        return None
    return reader.optional_number("attn_logit_softcapping", family.soft_caps[0])


def _growth(reader: ConfigReader, family: Attends) -> tuple[float, int]:
    told = (
        reader.mapping("rope_scaling") or reader.mapping("rope_parameters") or dict(family.usual_rope or {})
    )
    rope = ConfigReader(told, f"{reader.source}: rope_parameters")
    return rope.number("llama_4_scaling_beta"), rope.integer("original_max_position_embeddings")


def _renamed(reader: ConfigReader, family: Attends) -> ConfigReader:
    """The config under the usual names of its keys; what the reference knows by one name has no other."""
    usual = {name: reader.raw[own] for name, own in family.aliases.items() if own in reader.raw}
    one_name = {"hidden_act", "intermediate_size"} & set(family.aliases)
    kept = {key: value for key, value in reader.raw.items() if key not in one_name}
    return ConfigReader(kept | usual, reader.source)


def _refuse(reader: ConfigReader, family: Attends) -> None:
    """Raise ConfigError for keys that change numbers in a way that is not followed."""
    for key, followed in {**dict.fromkeys(family.never, None), **family.always}.items():
        found = reader.raw.get(key, followed)
        if found != followed and not (followed is None and found is False):
            expected = f"no {key}" if followed is None else f"{key} to be {followed!r}"
            raise ConfigError(
                f"{reader.source}: expected {expected}, found {found!r}, which is not followed for "
                f"{reader.raw['model_type']}; this model cannot run here"
            )


def _rooted(reader: ConfigReader, family: Attends, shapes: TensorShapes) -> Spelling:
    """The names of tensors, with or without what the reference writes before them; of norms, old or new."""
    root = family.root
    spelling = family.spelling if isinstance(family.spelling, Spelling) else family.spelling(reader)
    if family.may_have_old_norms and any(name.endswith("LayerNorm.gamma") for name in shapes):
        spelling = replace(spelling, has_old_norms=True)
    if family.frequencies and not _is_behind_padding(reader, family):
        spelling = replace(spelling, frequencies=_frequencies(family, shapes))
    if not root or not shapes or any(name.startswith(root) for name in shapes):
        return spelling
    names = ("embed", "final_norm", "layer", "positions", "embed_norm", "token_types", "embed_in")
    return replace(spelling, **{name: getattr(spelling, name).removeprefix(root) for name in names})


def _scale(reader: ConfigReader, family: Attends) -> float | None:
    """What q k^T is multiplied by; None for what the width of heads says."""
    if (scores := factors_of(reader, family).scores) is not None:
        return scores
    if family.query_scalar is not None:
        return 1 / math.sqrt(reader.number("query_pre_attn_scalar", family.query_scalar))
    return None


def _embedding_scale(reader: ConfigReader, family: Attends, hidden: int) -> float | None:
    if family.scaled_embedding:
        return math.sqrt(hidden)
    factor = factors_of(reader, family).embedding
    return None if factor == 1 else factor


def _logit_factor(reader: ConfigReader, family: Attends) -> float:
    if family.logit_scale is not None:
        return reader.number("logit_scale", family.logit_scale)
    return factors_of(reader, family).logits


def _windows(reader: ConfigReader, *, family: Attends, layers: int) -> Windows:
    """How many keys back a query sees, by layer."""
    if family.has_window_flag and not reader.flag("use_sliding_window", False):
        reader.read |= {"sliding_window", "layer_types", "max_window_layers"}
        return (None,) * layers
    if family.types is None:
        return read_windows(reader, family, layers)
    size = reader.optional_integer("sliding_window", family.window)
    types = reader.strings("layer_types")
    return listed_windows(reader, types or family.types(reader, layers), size, layers)


def _ropes(
    reader: ConfigReader, family: Attends, head_dim: int, windows: Windows
) -> Sequence[RopeConfig | None]:
    """How each layer turns queries and keys; None where it does not."""

    def rope(raw: Mapping[str, Any], theta: float) -> RopeConfig:
        return rope_of_family(raw, reader, replace(family, theta=theta), head_dim)

    if family.first_position is not None or _is_behind_padding(reader, family):
        return (None,) * len(windows)
    if family.rope_of is not None:
        return (family.rope_of(reader, family, head_dim),) * len(windows)
    if family.slopes is not None:
        return (None,) * len(windows)
    turns = family.turns(reader, windows)
    reader.read |= {"rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor"}
    if (thetas := reader.raw.get("layer_rope_theta")) is not None and family.has_sinks:
        return _by_theta(reader, rope, thetas, len(windows))
    if family.local_rope is None:
        raw = reader.raw
        if family.usual_rope and not (raw.get("rope_parameters") or raw.get("rope_scaling")):
            raw = {**raw, "rope_parameters": family.usual_rope}
        everywhere = rope(raw, family.theta)
        return tuple(everywhere if does else None for does in turns)
    wide, local = (rope(raw, theta) for raw, theta in _of_two_ropes(reader, family))
    return tuple(wide if window is None else local for window in windows)


def rope_of_family(
    raw: Mapping[str, Any], reader: ConfigReader, family: Attends, head_dim: int
) -> RopeConfig:
    """A rope as a config tells it at some place, of heads of this width."""
    context = reader.integer("max_position_embeddings", family.max_positions)
    fixed = replace(family, partial_rotary=family.share != 1)
    held = {"partial_rotary_factor": family.share} | dict(raw) if fixed.partial_rotary else dict(raw)
    found = read_rope(ConfigReader(held, reader.source), fixed, head_dim, context)
    return replace(found, interleaved=family.interleaved_rope)


def _by_theta(
    reader: ConfigReader, rope: Callable[[Mapping[str, Any], float], RopeConfig], thetas: Any, layers: int
) -> Sequence[RopeConfig | None]:
    """A wavelength for each layer, 0 for none."""
    is_list = isinstance(thetas, list) and len(thetas) == layers
    if not is_list or any(isinstance(each, bool) or not isinstance(each, int | float) for each in thetas):
        raise ConfigError(
            f"{reader.source}: expected layer_rope_theta to list a number for each of {layers} layers, found "
            f"{thetas!r}; correct the file, or fetch it again"
        )
    told = reader.mapping("rope_scaling") or reader.mapping("rope_parameters")
    by_theta = {
        theta: rope({**reader.raw, "rope_scaling": {**told, "rope_theta": theta}}, theta)
        for theta in set(thetas)
        if theta
    }
    return [by_theta.get(theta) for theta in thetas]


def _of_two_ropes(reader: ConfigReader, family: Attends) -> tuple[tuple[dict[str, Any], float], ...]:
    """What a config says of the rope of whole layers, and of that of layers with a window; and wavelengths
    where it says nothing. Older configs scale the rope of whole layers alone."""
    assert family.local_rope is not None
    raw, (key, local_theta) = reader.raw, family.local_rope
    reader.read.add(key)
    parameters, older = reader.mapping("rope_parameters"), {"rope_theta": raw.get("rope_theta")}
    kinds = ("full_attention", "sliding_attention")
    if parameters and not set(parameters) <= set(kinds):
        raise ConfigError(
            f"{reader.source}: expected rope_parameters of {' and '.join(kinds)}, found "
            f"{', '.join(parameters)}; this model cannot run here"
        )
    local = {"rope_theta": raw.get(key)} if key else {}
    found = [
        {**told, "rope_parameters": parameters.get(kind)}
        for told, kind in zip((older, local), kinds, strict=True)
    ]
    if raw.get("rope_scaling"):
        found[0] |= {"rope_parameters": {**(found[0]["rope_parameters"] or {}), **raw["rope_scaling"]}}
    return (found[0], family.theta), (found[1], local_theta)
