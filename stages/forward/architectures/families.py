"""Keys of config.json that many families have: how each is read, whatever the family.

Semantics and defaults are those of the reference implementation (transformers); where candle-mi's table
differs, DESIGN.md says so. Which families there are is told in known.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ....store.errors import ConfigError
from .transformer import ActivationName, ConfigReader, RopeConfig, RopeScheme

ACTIVATIONS: dict[str, ActivationName] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}
ROPE_SCHEMES: tuple[RopeScheme, ...] = ("default", "linear", "dynamic", "llama3", "longrope", "yarn")
LAYER_TYPES = {"full_attention", "sliding_attention"}


def model_type_of(raw: dict[str, Any], source: str = "config.json") -> str:
    """The family a config.json names; ConfigError if it names none."""
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise ConfigError(
            f"{source}: expected a model_type such as 'llama', found {model_type!r}; add the key, or check "
            "that this is a model's config.json"
        )
    return model_type


def asks_to_look_ahead(reader: ConfigReader) -> bool:
    """Whether a config asks a decoder for attention to later tokens; a null is_causal is false to the
    reference."""
    return not reader.raw.get("is_causal", True)


def refuse_unfollowed(reader: ConfigReader, *, looks_ahead: bool = False, both_ways: bool = False) -> None:
    """Raise ConfigError for settings that change numbers in every family and that are not followed.
    looks_ahead, both_ways: whether attention to later tokens is, as is_causal or use_bidirectional_attention
    ask for it.
    """
    if reader.has("quantization_config"):
        raise ConfigError(
            f"{reader.source}: expected weights as plain numbers, found a quantization_config; fetch the "
            "model's unquantised checkpoint"
        )
    causal = {"use_bidirectional_attention": False, "is_encoder_decoder": False, "is_causal": True}
    found = {key: reader.raw.get(key, usual) for key, usual in causal.items()}
    found |= {"is_causal": True} if looks_ahead else {}
    found |= {"use_bidirectional_attention": False} if both_ways else {}
    if any(bool(found[key]) is not usual for key, usual in causal.items()):
        told = ", ".join(f"{key}={value!r}" for key, value in found.items())
        raise ConfigError(
            f"{reader.source}: expected a causal decoder, found {told}; this model cannot run here"
        )
    reader.read |= {"quantization_config", *causal}


def read_activation(
    reader: ConfigReader, default: str = "silu", *keys: str, gelu_is_tanh: bool = False
) -> ActivationName:
    """The activation under the first of these keys that is there and not null; hidden_act where none is
    given. One that learns something is known to families that have it by default alone, as its tensors are.

    gelu_is_tanh: whether configs write "gelu" and mean the tanh approximation (Gemma 1).
    """
    name = next((reader.text(key) for key in keys or ("hidden_act",) if reader.has(key)), default)
    reader.read |= {"hidden_act", "hidden_activation"}
    if gelu_is_tanh and name == "gelu":
        name = "gelu_pytorch_tanh"
    if name == default == "xielu":
        return "xielu"
    if name not in ACTIVATIONS:
        raise ConfigError(
            f"{reader.source}: expected an activation among {', '.join(ACTIVATIONS)}, found {name!r}; this "
            "model cannot run here"
        )
    return ACTIVATIONS[name]


def confirm_derived(reader: ConfigReader, key: str, derived: Sequence[Any]) -> None:
    """Check a list that the reference derives from other keys, and writes beside them.

    Raises:
        ConfigError: The file lists something else than follows from the other keys.
    """
    reader.read.add(key)
    listed = reader.raw.get(key)
    if listed is not None and listed != list(derived):
        raise ConfigError(
            f"{reader.source}: expected {key} to be {list(derived)}, as other keys say, found {listed!r}; "
            "the keys contradict each other"
        )


def both_ways(windows: Sequence[int | None]) -> tuple[int | None, ...]:
    """Windows of a decoder that looks ahead, of which the reference does not count the query itself."""
    return tuple(None if window is None else window + 1 for window in windows)


def read_rope(
    reader: ConfigReader,
    head_dim: int,
    context: int,
    *,
    theta: float = 10000.0,
    is_partial: bool = False,
    original_context: int | None = None,
    aliases: Mapping[str, str] | None = None,
) -> RopeConfig:
    """Rope settings from `rope_parameters`, or from `rope_scaling` and `rope_theta` as older configs write
    them.

    Args:
        head_dim: Entries of a head.
        context: max_position_embeddings.
        theta: Where rope_theta is absent.
        is_partial: Whether rope may rotate a share of each head; the reference ignores the key elsewhere, or
            cannot run.
        original_context: Context before rope scaling where the config names none at its top level.
        aliases: Older names of rope schemes, which elsewhere mean something else or nothing.
    """
    scaling, parameters = reader.mapping("rope_scaling"), reader.mapping("rope_parameters")
    section = "rope_scaling" if scaling else "rope_parameters"
    rope = ConfigReader(scaling or parameters, f"{reader.source}: {section}")
    theta = rope.number("rope_theta", reader.number("rope_theta", theta))
    share = rope.number("partial_rotary_factor", reader.number("partial_rotary_factor", 1.0))
    top = reader.optional_integer("original_max_position_embeddings") or original_context
    name = rope.text("rope_type", rope.text("type", "default"))
    scheme = next((known for known in ROPE_SCHEMES if known == (aliases or {}).get(name, name)), None)
    nested = next((key for key, value in rope.raw.items() if isinstance(value, dict)), None)
    if scheme is None or nested is not None:
        found = f"rope_type {name!r}" if scheme is None else f"parameters of its own for {nested!r} layers"
        raise ConfigError(
            f"{rope.source}: expected one rope_type for all layers, of {', '.join(ROPE_SCHEMES)}, found "
            f"{found}; this model cannot run here"
        )
    dim = int(head_dim * share)
    if dim != head_dim and not is_partial:
        raise ConfigError(
            f"{rope.source}: expected no partial_rotary_factor, as rope turns whole heads here, found "
            f"{share:g}; remove the key if the model was trained without it"
        )
    if scheme == "default":
        reader.ignored |= {f"{section}.{key}" for key in set(rope.raw) - rope.read}
        return RopeConfig(theta, dim)
    original = top or rope.integer("original_max_position_embeddings", context)
    rope.read.add("original_max_position_embeddings")
    if scheme == "longrope":
        short, long = (_factors(rope, key, dim) for key in ("short_factor", "long_factor"))
        made = RopeConfig(
            theta,
            dim,
            scheme,
            rope.number("factor", context / original),
            original_max_position_embeddings=original,
            short_factor=short,
            long_factor=long,
            attention_factor=rope.optional_number("attention_factor"),
        )
    elif scheme == "llama3":
        low, high = rope.positive("low_freq_factor"), rope.positive("high_freq_factor")
        made = RopeConfig(theta, dim, scheme, rope.number("factor"), low, high, original)
    elif scheme == "yarn":
        made = _yarn(
            rope, RopeConfig(theta, dim, scheme, rope.number("factor", context / original)), original
        )
    else:
        if scheme == "dynamic" and dim <= 2:
            raise ConfigError(
                f"{rope.source}: expected more than 2 rotary dimensions with rope_type 'dynamic', whose base "
                f"grows by the power dim / (dim - 2), found {dim}; check head_dim and partial_rotary_factor"
            )
        # Dynamic NTK grows from the context the config declares, whatever else it mentions.
        start = context if scheme == "dynamic" else None
        made = RopeConfig(theta, dim, scheme, rope.number("factor"), original_max_position_embeddings=start)
    reader.ignored |= {f"{section}.{key}" for key in set(rope.raw) - rope.read}
    return made


def _yarn(rope: ConfigReader, told: RopeConfig, original: int) -> RopeConfig:
    """Frequencies by parts (Peng et al., YaRN, 2023, section 3.2), and the factor of cos and sin (3.4)."""
    # To the reference, 0 means the default.
    fast, slow = (
        default if rope.number(key, default) == 0 else rope.positive(key, default)
        for key, default in (("beta_fast", 32.0), ("beta_slow", 1.0))
    )
    both = [rope.optional_number(key) for key in ("mscale", "mscale_all_dim")]
    magnitude = rope.optional_number("attention_factor")
    if magnitude is None:
        over, under = both if all(both) else (1.0, None)
        magnitude = yarn_magnitude(told.factor, over or 1.0) / (
            yarn_magnitude(told.factor, under) if under else 1.0
        )
    return replace(
        told,
        original_max_position_embeddings=original,
        attention_factor=magnitude,
        bounds=(fast, slow),
        is_truncated=rope.flag("truncate", True),
    )


def yarn_magnitude(factor: float, share: float) -> float:
    """How much larger scores become where rope is stretched, by the reference of DeepSeek."""
    return 1.0 if factor <= 1 else 0.1 * share * math.log(factor) + 1.0


def kv_heads_of(reader: ConfigReader, default: int | None, heads: int) -> int:
    """Key/value heads; a family's default counts where it can hold, and one per query head elsewhere.

    Either way the shapes of the weights have the last word.
    """
    if "num_key_value_heads" not in reader.raw and default and heads % default == 0:
        return default
    return reader.integer("num_key_value_heads", heads)


def listed_windows(
    reader: ConfigReader, types: list[str], size: int | None, layers: int
) -> tuple[int | None, ...]:
    """Windows of layers whose types a config lists; `size` where a type has one. Raises ConfigError for types
    that are unknown, too many or too few, and for a type with a window where no size is given."""
    strange = next((kind for kind in types if kind not in LAYER_TYPES), None)
    if strange is not None:
        raise ConfigError(
            f"{reader.source}: expected layer_types among {', '.join(sorted(LAYER_TYPES))}, found "
            f"{strange!r}; this model cannot run here"
        )
    if len(types) != layers:
        raise ConfigError(
            f"{reader.source}: expected one layer_types entry per layer ({layers}), found {len(types)}; "
            "correct the file, or fetch it again"
        )
    if size is None and "sliding_attention" in types:
        raise ConfigError(
            f"{reader.source}: expected a window for layers of the type 'sliding_attention', found "
            f"sliding_window {reader.raw.get('sliding_window')!r} and use_sliding_window "
            f"{reader.raw.get('use_sliding_window')!r}; the keys contradict each other"
        )
    return tuple(size if kind == "sliding_attention" else None for kind in types)


def _factors(rope: ConfigReader, key: str, dim: int) -> tuple[float, ...]:
    values = rope.raw.get(key)
    rope.read.add(key)
    if not isinstance(values, list) or len(values) != dim // 2:
        found = f"{len(values)} of them" if isinstance(values, list) else repr(values)
        raise ConfigError(
            f"{rope.source}: expected {key} to list {dim // 2} numbers, one per frequency, found {found}; "
            "correct the file, or fetch it again"
        )
    return tuple(float(value) for value in values)
