"""How the config.json of a family whose layers all attend becomes a HybridConfig: one reader for all.

A family is a row of families.py (`Attends`): the axes of `Family`, and those along which these families
differ besides - where norms stand, which layers turn queries and keys, by which rope, and what is multiplied.
Semantics and defaults are those of the reference implementation (transformers).

Border: one config; never imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from .....store.errors import ConfigError
from ..families import (
    Family,
    described,
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

__all__ = ["Attends", "Bias", "Windows", "dense", "described_attending", "read_attending", "residual_factor"]

Bias = bool | str | tuple[str, bool]
"""Whether there is one; or the key that says, with its default where it is not false."""
Windows = Sequence[int | None]


def dense(reader: ConfigReader, family: Attends, layer: int) -> ChannelShape:
    """The MLP of every layer."""
    return MlpShape(
        reader.integer("intermediate_size"),
        read_activation(reader, family),
        is_gated=family.mlp != "plain",
        is_fused=family.mlp == "gated_fused",
        has_bias=told(reader, family.mlp_biases),
        factors=(1.0, residual_factor(reader, family)),
    )


def turning_everywhere(reader: ConfigReader, windows: Windows) -> Sequence[bool]:
    """Every layer turns queries and keys."""
    return (True,) * len(windows)


@dataclass(frozen=True)
class Attends(Family):
    """A family as in the table of decoders, along more axes.

    places: where norms stand, "before" mixers, "after" them, or "around". is_parallel: whether attention and
    MLP read one norm of the stream that enters. has_norm_bias: of layer norms. qk_norms: of queries and keys,
    over each "head" or "all" of them. share: of each head that rope turns, where the config does not say.
    types: of layers, where the config does not list them; needs a window. has_window_flag: whether
    use_sliding_window must be true for any. turns: which layers turn queries and keys. local_rope: key and
    wavelength of a rope of their own for layers with a window; the key may be "". has_multipliers: of
    embedding, attention, residuals and logits, as Granite names them. logit_scale: what logits are multiplied
    by where the config does not say. never: keys that must be absent, null or false, as they change numbers.
    channel_mixer: of a layer.
    """

    places: Literal["before", "after", "around"] = "before"
    is_parallel: bool = False
    has_norm_bias: bool = True
    qk_norms: Literal["head", "all"] | None = None
    qk_norm_key: str = ""
    """The key that says whether there are any; "" for always."""
    share: float = 1.0
    qkv_biases: Bias = False
    o_biases: Bias = False
    mlp_biases: Bias = False
    types: Callable[[ConfigReader, int], list[str]] | None = None
    has_window_flag: bool = False
    turns: Callable[[ConfigReader, Windows], Sequence[bool]] = turning_everywhere
    local_rope: tuple[str, float] | None = None
    has_multipliers: bool = False
    logit_scale: float | None = None
    never: tuple[str, ...] = ()
    spelling: Spelling = LLAMA
    channel_mixer: Callable[[ConfigReader, Attends, int], ChannelShape] = dense


def described_attending(model_type: str, family: Attends) -> dict[str, str]:
    """A family in words, as `described` in families.py."""
    row = described(model_type, family)
    places = {"before": "", "after": "behind what is added", "around": "four per block"}[family.places]
    attention = (
        "norms on q and k" if family.qk_norms else "",
        "biases" if family.qkv_biases else "",
        "rope turns neighbours" if family.interleaved_rope else "",
        f"rope turns {family.share:g} of a head" if family.share != 1 else "",
        "a rope of their own in windows" if family.local_rope else "",
        "no rope in some layers" if family.turns is not turning_everywhere else "",
        "sliding window" if family.types or family.has_window_flag or family.windows != "none" else "",
        "beside the MLP" if family.is_parallel else "",
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


def told(reader: ConfigReader, rule: Bias) -> bool:
    """Whether there is a bias."""
    if isinstance(rule, bool):
        return rule
    return reader.flag(*rule) if isinstance(rule, tuple) else reader.flag(rule, False)


def residual_factor(reader: ConfigReader, family: Attends) -> float:
    """What everything that is added to the stream is multiplied by."""
    return reader.number("residual_multiplier", 1.0) if family.has_multipliers else 1.0


def read_attending(reader: ConfigReader, family: Attends) -> HybridConfig:
    """The architecture of such a family.

    Raises ConfigError for a key that is missing, of the wrong type, or asks for what is not followed.
    """
    refuse_unfollowed(reader)
    for key in family.never:
        reader.read.add(key)
        if reader.raw.get(key) not in (None, False):
            raise ConfigError(
                f"{reader.source}: expected no {key}, found {reader.raw[key]!r}, which is not followed for "
                f"{reader.raw['model_type']}; this model cannot run here"
            )
    hidden, heads, layers = (
        reader.integer(key) for key in ("hidden_size", "num_attention_heads", "num_hidden_layers")
    )
    eps = reader.number(family.eps_key, family.eps)
    windows = _windows(reader, family, layers)
    head_dim = reader.integer("head_dim", family.head_dim or hidden // heads)
    ropes = _ropes(reader, family, head_dim, windows)
    has_qk_norms = not family.qk_norm_key or reader.flag(family.qk_norm_key, False)
    attention = AttentionShape(
        num_attention_heads=heads,
        num_kv_heads=_kv_heads(reader, family, heads),
        head_dim=head_dim,
        scale=_scale(reader, family),
        qkv_bias=told(reader, family.qkv_biases),
        o_bias=told(reader, family.o_biases),
        norms=family.qk_norms if has_qk_norms else None,
        norm_type="gemma_rms" if family.norm == "gemma_rms" else "rms",
        qk_norm_eps=eps,
        factors=(1.0, 1.0, residual_factor(reader, family)),
    )
    blocks = tuple(
        Block(
            (replace(attention, turning=rope, window=window),),
            family.channel_mixer(reader, family, layer),
            family.places,
            is_parallel=family.is_parallel,
        )
        for layer, (rope, window) in enumerate(zip(ropes, windows, strict=True))
    )
    return HybridConfig(
        model_type=reader.raw["model_type"],
        hidden_size=hidden,
        vocab_size=reader.integer("vocab_size"),
        blocks=tuple(checked(reader, block) for block in blocks),
        spelling=family.spelling,
        norm_eps=eps,
        norm_type=family.norm,
        has_norm_bias=family.has_norm_bias,
        max_position_embeddings=reader.integer("max_position_embeddings", family.max_positions),
        embedding_scale=_embedding_scale(reader, family, hidden),
        rounds_embedding_scale=family.scaled_embedding,
        logit_factor=_logit_factor(reader, family),
        final_logit_softcapping=family.soft_caps
        and reader.optional_number("final_logit_softcapping", family.soft_caps[1]),
        tie_word_embeddings=reader.flag("tie_word_embeddings", family.tied),
    )


def _kv_heads(reader: ConfigReader, family: Attends, heads: int) -> int:
    """As the config says; where the key is absent the family's, if that divides the heads; where it is null,
    one per head."""
    absent = family.kv_heads if "num_key_value_heads" not in reader.raw else None
    return reader.integer("num_key_value_heads", absent if absent and heads % absent == 0 else heads)


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


def _windows(reader: ConfigReader, family: Attends, layers: int) -> Windows:
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
