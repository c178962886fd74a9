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
from ..families import (
    Family,
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
from ..mixers import AttentionShape, ChannelShape, MlpShape
from ..transformer import ConfigReader, RopeConfig

__all__ = ["Attends", "Windows", "dense", "described_attending", "read_attending", "residual_factor"]

Windows = Sequence[int | None]
TensorShapes = Mapping[str, tuple[int, ...]]


def dense(reader: ConfigReader, family: Attends, layer: int) -> ChannelShape:
    """The MLP of every layer."""
    usual = family.inner_factor and family.inner_factor * reader.integer("hidden_size")
    return MlpShape(
        reader.integer("intermediate_size", usual),
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
class Attends(Family):
    """A family as in the table of decoders, along more axes."""

    places: Literal["before", "after", "around"] = "before"
    """Where norms stand: before mixers, behind them, or both."""
    parallel: bool | tuple[str, bool] = False
    """Whether attention and MLP both read the stream that enters; or the key that says, with its default."""
    has_two_norms: bool = False
    """Whether each of them then reads it through a norm of its own."""
    has_norm_bias: bool = True
    """Of layer norms."""
    qk_norms: Literal["head", "all"] | None = None
    """Of queries and keys: over each head, or all of them together."""
    qk_norm_key: str = ""
    """The key that says whether there are any; "" for always."""
    layout: Literal["separate", "by part", "by head"] = "separate"
    """Of queries, keys and values in tensors (`AttentionShape`)."""
    types: Callable[[ConfigReader, int], list[str]] | None = None
    """Of layers, where a config does not list them: which have a window."""
    has_window_flag: bool = False
    """Whether use_sliding_window must be true for any window."""
    windows_of: Callable[..., Windows] | None = None
    """Windows by layer, of families that tell them in another way."""
    share: float = 1.0
    """Of each head that rope turns, where the config does not say."""
    turns: Callable[[ConfigReader, Windows], Sequence[bool]] = turning_everywhere
    """Which layers turn queries and keys."""
    local_rope: tuple[str, float] | None = None
    """Key (or "") and wavelength of a rope of their own for layers with a window."""
    first_position: int | None = None
    """Row of the first of learned positions; None for rope."""
    scale_of: Callable[[ConfigReader, int, int], float] | None = None
    """What q k^T is multiplied by, of a layer and a width of heads."""
    has_multipliers: bool = False
    """Of embedding, attention, residuals and logits, as Granite names them."""
    logit_scale: float | None = None
    """What logits are multiplied by where the config does not say; None for families without."""
    channel_mixer: Callable[[ConfigReader, Attends, int], ChannelShape] = dense
    inner_factor: int | None = None
    """How much wider an MLP is than the stream, where the config does not say."""
    never: tuple[str, ...] = ()
    """Keys that must be absent, null or false, as they change numbers in a way that is not followed."""
    always: Mapping[str, Any] = field(default_factory=dict)
    """Values that keys must have, for the same reason."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """What keys are called here, by their usual names."""
    spelling: Spelling = LLAMA
    root: str = ""
    """What names of tensors begin with, but not in all files."""


def described_attending(model_type: str, family: Attends) -> dict[str, str]:
    """A family in words, as `described` in families.py."""
    row = described(model_type, family)
    places = {"before": "", "after": "behind what is added", "around": "four per block"}[family.places]
    attention = (
        "norms on q and k" if family.qk_norms else "",
        "biases" if family.qkv_bias else "",
        "rope turns neighbours" if family.interleaved_rope else "",
        f"rope turns {family.share:g} of a head" if family.share != 1 else "",
        "a rope of their own in windows" if family.local_rope else "",
        "no rope in some layers" if family.turns is not turning_everywhere else "",
        "sliding window" if family.types or family.has_window_flag or family.windows != "none" else "",
        "beside the MLP" if family.parallel else "",
        "learned positions" if family.first_position is not None else "",
    )
    head = (
        "scaled embedding" if family.scaled_embedding or family.has_multipliers else "",
        "tied" if family.tied else "",
        "scaled" if family.has_multipliers or family.logit_scale is not None else "",
        "soft cap" if family.soft_caps else "",
    )
    return row | {
        "norm": ", ".join(filter(None, (row["norm"], places))),
        "mlp": row["mlp"] if family.channel_mixer is dense else f"experts, {row['mlp']}",
        "attention": ", ".join(filter(None, attention)) or "plain",
        "head": ", ".join(filter(None, head)) or "untied",
    }


def residual_factor(reader: ConfigReader, family: Attends) -> float:
    """What everything that is added to the stream is multiplied by."""
    return reader.number("residual_multiplier", 1.0) if family.has_multipliers else 1.0


def read_attending(reader: ConfigReader, family: Attends, shapes: TensorShapes) -> HybridConfig:
    """The architecture of such a family. shapes: of tensors by name, where their names begin in two ways.

    Raises ConfigError for a key that is missing, of the wrong type, or asks for what is not followed.
    """
    reader = _renamed(reader, family)
    refuse_unfollowed(reader)
    _refuse(reader, family)
    hidden, heads, layers = (
        reader.integer(key) for key in ("hidden_size", "num_attention_heads", "num_hidden_layers")
    )
    eps = reader.number(family.eps_key, family.eps)
    windows = (family.windows_of or partial(_windows, family=family))(reader, layers=layers)
    head_dim = reader.integer("head_dim", family.head_dim or hidden // heads)
    ropes = _ropes(reader, family, head_dim, windows)
    has_qk_norms = not family.qk_norm_key or reader.flag(family.qk_norm_key, False)
    attention = AttentionShape(
        num_attention_heads=heads,
        num_kv_heads=kv_heads_of(reader, family, heads),
        head_dim=head_dim,
        scale=_scale(reader, family),
        qkv_bias=has_bias(reader, family.qkv_bias),
        o_bias=has_bias(reader, family.o_bias),
        norms=family.qk_norms if has_qk_norms else None,
        norm_type="gemma_rms" if family.norm == "gemma_rms" else "rms",
        qk_norm_eps=eps,
        factors=(1.0, 1.0, residual_factor(reader, family)),
        layout=family.layout,
    )
    is_parallel = reader.flag(*family.parallel) if isinstance(family.parallel, tuple) else family.parallel

    def block(layer: int) -> Block:
        own = replace(attention, turning=ropes[layer], window=windows[layer])
        if family.scale_of is not None:
            own = replace(own, scale=family.scale_of(reader, layer, head_dim))
        return Block(
            (own,),
            family.channel_mixer(reader, family, layer),
            family.places,
            is_parallel=is_parallel,
            has_two_norms=family.has_two_norms or not is_parallel,
        )

    blocks = tuple(map(block, range(layers)))
    context = reader.integer("max_position_embeddings", family.max_positions)
    is_learned = family.first_position is not None
    return HybridConfig(
        model_type=reader.raw["model_type"],
        hidden_size=hidden,
        vocab_size=reader.integer("vocab_size"),
        blocks=tuple(checked(reader, block) for block in blocks),
        spelling=_rooted(family, shapes),
        norm_eps=eps,
        norm_type=family.norm,
        norm_biases="of layer norms" if family.has_norm_bias else "none",
        max_position_embeddings=context,
        position_rows=context + (family.first_position or 0) if is_learned else 0,
        first_position=family.first_position or 0,
        embedding_scale=_embedding_scale(reader, family, hidden),
        rounds_embedding_scale=family.scaled_embedding,
        logit_factor=_logit_factor(reader, family),
        final_logit_softcapping=family.soft_caps
        and reader.optional_number("final_logit_softcapping", family.soft_caps[1]),
        tie_word_embeddings=reader.flag("tie_word_embeddings", family.tied),
    )


def _renamed(reader: ConfigReader, family: Attends) -> ConfigReader:
    """The config under the usual names of its keys."""
    usual = {name: reader.raw[own] for name, own in family.aliases.items() if own in reader.raw}
    return ConfigReader(usual | reader.raw, reader.source)


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


def _rooted(family: Attends, shapes: TensorShapes) -> Spelling:
    """The names of tensors, with or without what the reference writes before them."""
    root, spelling = family.root, family.spelling
    if not root or not shapes or any(name.startswith(root) for name in shapes):
        return spelling
    names = ("embed", "final_norm", "layer", "positions")
    return replace(spelling, **{name: getattr(spelling, name).removeprefix(root) for name in names})


def _scale(reader: ConfigReader, family: Attends) -> float | None:
    """What q k^T is multiplied by; None for what the width of heads says."""
    if family.has_multipliers:
        return reader.number("attention_multiplier", 1.0)
    if family.query_scalar is not None:
        return 1 / math.sqrt(reader.number("query_pre_attn_scalar", family.query_scalar))
    return None


def _embedding_scale(reader: ConfigReader, family: Attends, hidden: int) -> float | None:
    if family.scaled_embedding:
        return math.sqrt(hidden)
    factor = reader.number("embedding_multiplier", 1.0) if family.has_multipliers else 1.0
    return None if factor == 1 else factor


def _logit_factor(reader: ConfigReader, family: Attends) -> float:
    if family.has_multipliers:
        return 1 / reader.number("logits_scaling", 1.0)
    return 1.0 if family.logit_scale is None else reader.number("logit_scale", family.logit_scale)


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
    context = reader.integer("max_position_embeddings", family.max_positions)
    fixed = replace(family, partial_rotary=family.share != 1)

    def rope(raw: Mapping[str, Any], theta: float) -> RopeConfig:
        held = {"partial_rotary_factor": family.share} | dict(raw) if fixed.partial_rotary else dict(raw)
        found = read_rope(ConfigReader(held, reader.source), replace(fixed, theta=theta), head_dim, context)
        return replace(found, interleaved=family.interleaved_rope)

    if family.first_position is not None:
        return (None,) * len(windows)
    turns = family.turns(reader, windows)
    reader.read |= {"rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor"}
    if family.local_rope is None:
        everywhere = rope(reader.raw, family.theta)
        return tuple(everywhere if does else None for does in turns)
    wide, local = (rope(raw, theta) for raw, theta in _of_two_ropes(reader, family))
    return tuple(wide if window is None else local for window in windows)


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
