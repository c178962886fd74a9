"""The supported transformer families, one row each, and how a row and a config.json make a TransformerConfig.

Semantics are those of the reference implementation (transformers); where candle-mi's table differs, DESIGN.md says so. A new family
that differs along existing axes is a new row here and nothing else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from ...store.errors import ConfigError, nearest
from .config import Activation, ConfigReader, Norm, RopeConfig, RopeScheme, TransformerConfig

Windows = Literal["none", "all", "alternating", "from_max_window_layers"]
ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_python": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh", "relu": "relu",
}  # fmt: skip
ROPE_SCHEMES: dict[str, RopeScheme] = {
    "default": "default", "linear": "linear", "dynamic": "dynamic", "llama3": "llama3", "longrope": "longrope", "su": "longrope",
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """How a family's config.json is read, and what its architecture fixes."""

    norm: Norm = "rms"
    eps_key: str = "rms_norm_eps"
    eps: float = 1e-6
    activation_keys: tuple[str, ...] = ("hidden_act",)
    activation: str = "silu"
    gelu_is_tanh: bool = False
    """Legacy configs write "gelu" and mean the tanh approximation (Gemma)."""
    fused: bool = False
    fused_mlp: bool = False
    plain_mlp: bool = False
    qkv_bias: bool | str = False
    """True, False, or the key that says (and its default False)."""
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    bias_default: bool = False
    scaled_embedding: bool = False
    tied: bool = False
    max_positions: int = 4096
    head_dim: int | None = None
    """Default when the key is absent; None divides hidden_size by heads."""
    windows: Windows = "none"
    soft_caps: tuple[float | None, float | None] | None = None
    """Defaults for attention scores and final logits, in families that have them."""
    query_scalar: float | None = None
    post_norms: bool = False
    qk_norm: bool = False
    original_context: int | None = None
    """Context before rope scaling when the config names none; None takes max_position_embeddings."""


FAMILIES: dict[str, Family] = {
    "llama": Family(max_positions=2048, qkv_bias="attention_bias", o_bias="attention_bias", mlp_bias="mlp_bias"),
    "mistral": Family(max_positions=131072, windows="all"),
    "qwen2": Family(max_positions=32768, qkv_bias=True, windows="from_max_window_layers"),
    "qwen3": Family(max_positions=32768, head_dim=128, qkv_bias="attention_bias", o_bias="attention_bias", qk_norm=True, windows="from_max_window_layers"),
    "gemma": Family(norm="gemma_rms", activation_keys=("hidden_activation", "hidden_act"), activation="gelu_pytorch_tanh", gelu_is_tanh=True, scaled_embedding=True, tied=True, max_positions=8192, head_dim=256, qkv_bias="attention_bias", o_bias="attention_bias"),
    "gemma2": Family(norm="gemma_rms", activation_keys=("hidden_activation", "hidden_act"), activation="gelu_pytorch_tanh", gelu_is_tanh=True, scaled_embedding=True, tied=True, max_positions=8192, head_dim=256, qkv_bias="attention_bias", o_bias="attention_bias", soft_caps=(50.0, 30.0), query_scalar=256.0, post_norms=True, windows="alternating"),
    "phi3": Family(eps=1e-5, fused=True, fused_mlp=True, windows="all", original_context=4096),
    "starcoder2": Family(norm="layer", eps_key="norm_epsilon", eps=1e-5, activation="gelu_pytorch_tanh", plain_mlp=True, qkv_bias="use_bias", o_bias="use_bias", mlp_bias="use_bias", bias_default=True, tied=True, windows="all"),
}  # fmt: skip
SUPPORTED_MODEL_TYPES = tuple(sorted(FAMILIES))


def from_hf_config(raw: dict[str, Any], source: str = "config.json") -> TransformerConfig:
    """The axes of a known family's config.json.

    Raises ConfigError for a missing or unknown model_type, a missing required key, a value of the wrong type, an unknown rope scheme.
    """
    reader = ConfigReader(raw, source)
    model_type = model_type_of(raw, source)
    family = FAMILIES.get(model_type)
    if family is None:
        near = nearest(model_type, FAMILIES)
        raise ConfigError(f"{source}: expected model_type to be one of {', '.join(SUPPORTED_MODEL_TYPES)}, found {model_type!r}" + (f"; nearest is {near!r}" if near else ""))
    return read_family(reader, model_type, family)


def model_type_of(raw: dict[str, Any], source: str = "config.json") -> str:
    """The family a config.json names; ConfigError if it names none."""
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise ConfigError(f"{source}: expected a model_type such as 'llama', found {model_type!r}; add the key, or check that this is a model's config.json")
    return model_type


def read_family(reader: ConfigReader, model_type: str, family: Family) -> TransformerConfig:
    """A TransformerConfig from a config.json read the way a family says."""
    hidden, heads, layers = (reader.integer(key) for key in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
    head_dim = reader.integer("head_dim", family.head_dim or hidden // heads)
    context = reader.integer("max_position_embeddings", family.max_positions)
    eps = reader.number(family.eps_key, family.eps)
    caps = family.soft_caps
    return TransformerConfig(
        model_type=model_type,
        hidden_size=hidden,
        num_layers=layers,
        num_attention_heads=heads,
        num_kv_heads=reader.integer("num_key_value_heads", heads),
        head_dim=head_dim,
        intermediate_size=reader.integer("intermediate_size"),
        vocab_size=reader.integer("vocab_size"),
        max_position_embeddings=context,
        rope=read_rope(reader, head_dim, context, family.original_context or context),
        layer_windows=read_windows(reader, family.windows, layers),
        norm_type=family.norm,
        norm_eps=eps,
        activation=read_activation(reader, family),
        qkv_layout="fused" if family.fused else "separate",
        mlp_layout="plain" if family.plain_mlp else "gated_fused" if family.fused_mlp else "gated_separate",
        qkv_bias=_bias(reader, family.qkv_bias, family.bias_default),
        o_proj_bias=_bias(reader, family.o_bias, family.bias_default),
        mlp_bias=_bias(reader, family.mlp_bias, family.bias_default),
        embedding_scale=math.sqrt(hidden) if family.scaled_embedding else None,
        tie_word_embeddings=reader.flag("tie_word_embeddings", family.tied),
        attn_logit_softcapping=caps and reader.optional_number("attn_logit_softcapping", caps[0]),
        final_logit_softcapping=caps and reader.optional_number("final_logit_softcapping", caps[1]),
        query_pre_attn_scalar=family.query_scalar and reader.number("query_pre_attn_scalar", family.query_scalar),
        use_post_norms=family.post_norms,
        use_qk_norm=family.qk_norm,
        qk_norm_eps=eps,
    )  # fmt: skip


def read_activation(reader: ConfigReader, family: Family) -> Activation:
    """The activation a config names; a null key does not shadow the next one."""
    name = next((reader.text(key) for key in family.activation_keys if reader.has(key)), family.activation)
    if family.gelu_is_tanh and name == "gelu":
        name = "gelu_pytorch_tanh"
    if name not in ACTIVATIONS:
        raise ConfigError(f"{reader.source}: expected an activation among {', '.join(ACTIVATIONS)}, found {name!r}")
    return ACTIVATIONS[name]


def read_windows(reader: ConfigReader, windows: Windows, layers: int) -> tuple[int | None, ...]:
    """Window of each layer: how many keys back a query sees, itself included."""
    size = reader.optional_integer("sliding_window")
    types = reader.strings("layer_types")
    if windows == "none" or size is None:
        return (None,) * layers
    if windows == "from_max_window_layers" and not reader.flag("use_sliding_window", False):
        return (None,) * layers
    if types is not None and windows != "all":
        if len(types) != layers:
            raise ConfigError(f"{reader.source}: expected one layer_types entry per layer ({layers}), found {len(types)}")
        return tuple(size if kind == "sliding_attention" else None for kind in types)
    if windows == "alternating":
        return tuple(size if layer % 2 == 0 else None for layer in range(layers))
    first = reader.integer("max_window_layers", 28) if windows == "from_max_window_layers" else 0
    return tuple(size if layer >= first else None for layer in range(layers))


def read_rope(reader: ConfigReader, head_dim: int, context: int, unscaled: int) -> RopeConfig:
    """Rope settings from `rope_parameters`, or from `rope_scaling` and `rope_theta` as older configs write them."""
    section = "rope_scaling" if reader.has("rope_scaling") else "rope_parameters"
    rope = ConfigReader(reader.mapping(section), f"{reader.source}: {section}")
    name = rope.text("rope_type", rope.text("type", "default"))
    if name not in ROPE_SCHEMES:
        raise ConfigError(f"{rope.source}: expected rope_type to be one of {', '.join(ROPE_SCHEMES)}, found {name!r}")
    scheme = ROPE_SCHEMES[name]
    theta = rope.number("rope_theta", reader.number("rope_theta", 10000.0))
    dim = int(head_dim * rope.number("partial_rotary_factor", reader.number("partial_rotary_factor", 1.0)))
    if scheme == "default":
        return RopeConfig(theta, dim)
    original = reader.optional_integer("original_max_position_embeddings") or rope.integer("original_max_position_embeddings", unscaled)
    if scheme == "longrope":
        return RopeConfig(
            theta, dim, scheme, rope.number("factor", context / original), original_max_position_embeddings=original,
            short_factor=_factors(rope, "short_factor", dim), long_factor=_factors(rope, "long_factor", dim),
            attention_factor=rope.optional_number("attention_factor"),
        )  # fmt: skip
    factor = rope.number("factor")
    if scheme == "llama3":
        low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
        return RopeConfig(theta, dim, scheme, factor, low, high, original)
    # Dynamic NTK grows from the context the config declares, whatever else it mentions.
    return RopeConfig(theta, dim, scheme, factor, original_max_position_embeddings=context if scheme == "dynamic" else None)


def _factors(rope: ConfigReader, key: str, dim: int) -> tuple[float, ...]:
    values = rope.raw.get(key)
    if not isinstance(values, list) or len(values) != dim // 2:
        found = f"{len(values)} of them" if isinstance(values, list) else repr(values)
        raise ConfigError(f"{rope.source}: expected {key} to list {dim // 2} numbers, one per frequency, found {found}")
    return tuple(float(value) for value in values)


def _bias(reader: ConfigReader, rule: bool | str, default: bool) -> bool:
    return reader.flag(rule, default) if isinstance(rule, str) else rule
