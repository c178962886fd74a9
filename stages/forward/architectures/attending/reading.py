"""How the config.json of a family whose layers all attend becomes a ComposedArchitecture: one reader for all.

Semantics and defaults are those of the reference implementation (transformers). What a family says is told in
family.py, how it turns queries and keys in ropes.py.

Border: one config; never imports torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

from .....store.errors import ConfigError
from ..composed import ComposedArchitecture, LayerSpec
from ..families import (
    asks_to_look_ahead,
    both_ways,
    has_bias,
    kv_heads_of,
    listed_windows,
    read_windows,
    refuse_unfollowed,
)
from ..layer_tensors import Spelling
from ..mamba_families import checked
from ..mixers import AttentionSpec, GatedAttentionSpec
from ..transformer import ConfigReader, RopeConfig
from .family import (
    Attends,
    TensorShapes,
    Windows,
    eps_of,
    factors_of,
    groups_of,
    is_behind_padding,
    residual_factor,
)
from .ropes import ropes_of

__all__ = ["AttentionContext", "grouped", "read_attending"]


def read_attending(reader: ConfigReader, family: Attends, shapes: TensorShapes) -> ComposedArchitecture:
    """The architecture of such a family. shapes: of tensors by name, where their names begin in two ways.

    Raises ConfigError for a key that is missing, of the wrong type, or asks for what is not followed.
    """
    reader = _renamed(reader, family)
    if family.position_key is not None and not reader.flag(*family.position_key):
        family = replace(family, first_position=None)
    refuse_unfollowed(reader, looks_ahead=family.mixer is None, both_ways=family.may_look_both_ways)
    _refuse(reader, family)
    hidden, layers = reader.integer("hidden_size"), reader.integer("num_hidden_layers")
    heads = family.heads_from(reader) if family.heads_from else reader.integer("num_attention_heads")
    eps = eps_of(reader, family)
    windows = (family.windows_of or partial(_windows, family=family))(reader, layers=layers)
    if asks_to_look_ahead(reader):
        windows = both_ways(windows)
    if is_split := reader.flag("use_bidirectional_attention", False):
        windows = [window and window // 2 + 1 for window in windows]
    head_dim = _head_dim(reader, family, hidden // heads)
    ropes = ropes_of(reader, family, head_dim, windows)
    looks_ahead = is_split or family.looks_ahead(reader)
    context = AttentionContext(
        reader, family, heads, head_dim, eps, looks_ahead, bool(_frequencies(family, shapes))
    )
    factors = factors_of(reader, family)
    is_parallel = has_bias(reader, family.parallel)
    sources = family.sources and family.sources(reader, layers)

    def block(layer: int) -> LayerSpec:
        return LayerSpec(
            ((family.mixer or grouped)(context, ropes[layer], windows[layer], layer),),
            family.channel_mixer(reader, family, layer),
            family.places,
            is_parallel=is_parallel,
            has_two_norms=_has_two_norms(reader, family) or not is_parallel,
            post_factor=factors.residual if family.places == "around" else 1.0,
            source=None if sources is None else sources[layer],
            reads_normed=layer > 0 or not family.skips_first_norm,
            has_gains=family.has_gains,
        )

    blocks = tuple(map(block, range(layers)))
    context_length, rows, first = _positions(reader, family)
    key, usual = family.embedding_width or ("", 0)
    width = reader.integer(key, usual or hidden) if key else None
    return ComposedArchitecture(
        model_type=reader.raw["model_type"],
        hidden_size=hidden,
        vocab_size=reader.integer("vocab_size"),
        blocks=tuple(checked(reader, block) for block in blocks),
        spelling=_rooted(reader, family, shapes),
        norm_eps=eps,
        norm_type=family.norm,
        norm_biases="of layer norms" if has_bias(reader, family.has_norm_bias) else "none",
        max_position_embeddings=context_length,
        position_rows=rows,
        first_position=first,
        unknown_token=first - 1 if is_behind_padding(reader, family) else None,
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
class AttentionContext:
    """Config reader, family row and head sizes, shared by the attention of all layers."""

    reader: ConfigReader
    family: Attends
    heads: int
    """Number of query heads."""
    head_dim: int
    eps: float
    """Epsilon of the norms of queries and keys."""
    looks_ahead: bool
    """Whether queries see later keys."""
    has_frequencies: bool
    """Whether the checkpoint holds the frequencies of rope."""


def grouped(
    context: AttentionContext, rope: RopeConfig | None, window: int | None, layer: int
) -> AttentionSpec:
    """Attention of one layer, its queries grouped over keys and values. rope, window: None for none."""
    reader, family, heads = context.reader, context.family, context.heads
    has_norms = family.qk_norm_key is None or reader.flag(*family.qk_norm_key)
    scale = _scale(reader, family)
    if family.scale_of is not None:
        scale = family.scale_of(reader, layer, context.head_dim)
    gated = partial(GatedAttentionSpec, has_gate_projection=True)
    return (gated if family.has_gated_heads else AttentionSpec)(
        num_attention_heads=heads,
        num_kv_heads=_kv_heads(reader, family, heads),
        head_dim=context.head_dim,
        turning=rope,
        scale=scale,
        window=window,
        qkv_bias=has_bias(reader, family.qkv_bias),
        o_bias=has_bias(reader, family.o_bias),
        norms=family.qk_norms if has_norms else None,
        norm_type=family.qk_norm_type or ("gemma_rms" if family.norm == "gemma_rms" else "rms"),
        qk_norm_eps=context.eps,
        factors=(1.0, 1.0, residual_factor(reader, family)),
        layout=family.layout(reader) if callable(family.layout) else family.layout,
        has_norm_weights=family.has_norm_weights,
        has_norm_bias=family.has_qk_norm_bias,
        norms_behind_rope=family.norms_behind_rope,
        clip=family.clip and family.clip(reader),
        soft_cap=_soft_cap(reader, family),
        slopes=family.slopes(reader, heads) if family.slopes else (),
        groups=None if family.groups is None else groups_of(reader, family)[:4],
        rises_by_values=family.rises_by_values,
        inner_norm_eps=context.eps if family.has_inner_norms else None,
        relative=family.relative and family.relative(reader),
        has_sinks=family.has_sinks,
        growth=_growth(reader, family) if family.has_growth else None,
        is_bidirectional=context.looks_ahead,
        has_frequencies=context.has_frequencies and rope is not None,
    )


def _frequencies(family: Attends, shapes: TensorShapes) -> str:
    """The tensor that tells what rope turns by; "" for none."""
    if not family.frequencies:
        return ""
    return next((name for name in sorted(shapes) if name.endswith(family.frequencies)), "")


def _positions(reader: ConfigReader, family: Attends) -> tuple[int | None, int, int]:
    """How many positions there are, None where nothing bounds them; rows of a table of them, and the first's.
    What stands behind the padding counts its rows, not positions."""
    told = family.max_positions and reader.integer("max_position_embeddings", family.max_positions)
    if told and family.longest is not None:
        told = min(told, reader.integer(*family.longest))
    if is_behind_padding(reader, family):
        first = reader.integer("pad_token_id", 1, least=0) + 1
        return (told or 0) - first, told or 0, first
    if family.first_position is None:
        return told, 0, 0
    if family.rows_hold_padding:
        return (told or 0) - family.first_position, told or 0, family.first_position
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
    """The config under the usual names of its keys; what the reference knows by one name has no other.

    Raises ConfigError for a key that stands there by both names with two values: which of them the reference
    takes depends on their order.
    """
    usual = {name: reader.raw[own] for name, own in family.aliases.items() if own in reader.raw}
    one_name = {"hidden_act", "intermediate_size"} & set(family.aliases)
    kept = {key: value for key, value in reader.raw.items() if key not in one_name}
    for name, value in usual.items():
        if name in kept and kept[name] != value:
            raise ConfigError(
                f"{reader.source}: expected one value of {family.aliases[name]} and {name}, two names of one "
                f"key, found {value!r} and {kept[name]!r}; leave one out"
            )
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
    spelling = family.spelling if isinstance(family.spelling, Spelling) else family.spelling(reader, shapes)
    if family.may_have_old_norms and any(name.endswith("LayerNorm.gamma") for name in shapes):
        spelling = replace(spelling, has_old_norms=True)
    if family.frequencies and not is_behind_padding(reader, family):
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
        return 1 / math.sqrt(reader.positive("query_pre_attn_scalar", family.query_scalar))
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
        reader.read |= {"sliding_window", "max_window_layers"}
        return listed_windows(
            reader, reader.strings("layer_types") or ["full_attention"] * layers, None, layers
        )
    if family.types is None:
        return read_windows(reader, family, layers)
    size = reader.optional_integer("sliding_window", family.window)
    types = reader.strings("layer_types")
    return listed_windows(reader, types or family.types(reader, layers), size, layers)
