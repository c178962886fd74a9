"""Readers of config.json keys that many families share: activation, rope, key heads, windows.

Semantics and defaults are those of Hugging Face transformers; differences to candle-mi are
listed in DESIGN.md. The table of families is in known.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ....store.errors import ConfigError
from .transformer import TRY_TRANSFORMERS, ActivationName, ConfigReader, RopeConfig, RopeScheme

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
    """Whether is_causal is false or null, which in transformers makes a decoder attend to later tokens."""
    return not reader.raw.get("is_causal", True)


def refuse_unfollowed(
    reader: ConfigReader, *, looks_ahead: bool = False, bidirectional: bool = False
) -> None:
    """Raise ConfigError for settings that change the results of every family and are not implemented.

    Arguments:
        reader: The config.json.
        looks_ahead: Whether is_causal=false is implemented for the family.
        bidirectional: Whether use_bidirectional_attention=true is implemented for the family.
    """
    if reader.has("quantization_config"):
        raise ConfigError(
            f"{reader.source}: expected weights as plain numbers, found a quantization_config; fetch the "
            "model's unquantised checkpoint"
        )
    causal = {"use_bidirectional_attention": False, "is_encoder_decoder": False, "is_causal": True}
    flags = {key: reader.raw.get(key, default) for key, default in causal.items()}
    flags |= {"is_causal": True} if looks_ahead else {}
    flags |= {"use_bidirectional_attention": False} if bidirectional else {}
    if any(bool(flags[key]) is not default for key, default in causal.items()):
        settings = ", ".join(f"{key}={value!r}" for key, value in flags.items())
        raise ConfigError(f"{reader.source}: expected a causal decoder, found {settings}; {TRY_TRANSFORMERS}")
    # Checked keys count as read, so that they are not reported as ignored.
    reader.read |= {"quantization_config", *causal}


def read_activation(
    reader: ConfigReader, default: str = "silu", *keys: str, gelu_is_tanh: bool = False
) -> ActivationName:
    """The activation that a config names.

    Arguments:
        reader: The config.json.
        default: Name of the activation if the keys are absent or null. "xielu" (with learned parameters) is
            only accepted in families whose default it is.
        keys: Config keys, of which the first one present is used; hidden_act if none are given.
        gelu_is_tanh: Whether configs write "gelu" and mean the tanh approximation (Gemma 1).

    Raises:
        ConfigError: The activation is not implemented.
    """
    name = next((reader.text(key) for key in keys or ("hidden_act",) if reader.has(key)), default)
    reader.read |= {"hidden_act", "hidden_activation"}
    if gelu_is_tanh and name == "gelu":
        name = "gelu_pytorch_tanh"
    if name == default == "xielu":
        return "xielu"
    if name not in ACTIVATIONS:
        raise ConfigError(
            f"{reader.source}: expected an activation among {', '.join(ACTIVATIONS)}, found {name!r}; "
            f"{TRY_TRANSFORMERS}"
        )
    return ACTIVATIONS[name]


def confirm_derived(reader: ConfigReader, key: str, derived: Sequence[Any]) -> None:
    """Check a list that transformers derives from other keys and also writes into config.json.

    Arguments:
        reader: The config.json.
        key: Config key of the list; it may be absent.
        derived: The list as it follows from the other keys.

    Raises:
        ConfigError: The file has another list.
    """
    reader.read.add(key)
    listed = reader.raw.get(key)
    if listed is not None and listed != list(derived):
        raise ConfigError(
            f"{reader.source}: expected {key} to be {list(derived)}, as other keys say, found {listed!r}; "
            "the keys contradict each other"
        )


def both_ways(windows: Sequence[int | None]) -> tuple[int | None, ...]:
    """Windows of a bidirectional decoder, one key longer: transformers does not count the query itself
    there."""
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
    """Rope from `rope_parameters`, or from `rope_scaling` and `rope_theta` in older configs.

    Arguments:
        reader: The config.json.
        head_dim: Entries of a head.
        context: Value of max_position_embeddings.
        theta: Default of rope_theta.
        is_partial: Whether the family reads partial_rotary_factor; for others transformers ignores that key
            or fails.
        original_context: Default of original_max_position_embeddings.
        aliases: The family's older names of rope schemes -> names of `ROPE_SCHEMES`.

    Raises:
        ConfigError: The scheme is unknown, differs between layers, or has values that do not fit.
    """
    scaling, parameters = reader.mapping("rope_scaling"), reader.mapping("rope_parameters")
    section = "rope_scaling" if scaling else "rope_parameters"
    rope = ConfigReader(scaling or parameters, f"{reader.source}: {section}")
    theta = rope.number("rope_theta", reader.number("rope_theta", theta))
    share = rope.number("partial_rotary_factor", reader.number("partial_rotary_factor", 1.0))
    top = reader.optional_integer("original_max_position_embeddings") or original_context
    name = rope.text("rope_type", rope.text("type", "default"))
    scheme = next((item for item in ROPE_SCHEMES if item == (aliases or {}).get(name, name)), None)
    # Sections by layer type (Gemma 3) need `two_ropes`; reading them as one rope would ignore both.
    nested = next((key for key, value in rope.raw.items() if isinstance(value, dict)), None)
    if scheme is None or nested is not None:
        found = f"rope_type {name!r}" if scheme is None else f"parameters of its own for {nested!r} layers"
        raise ConfigError(
            f"{rope.source}: expected one rope_type for all layers, of {', '.join(ROPE_SCHEMES)}, found "
            f"{found}; {TRY_TRANSFORMERS}"
        )
    # int() rounds down, as transformers does.
    dim = int(head_dim * share)
    if dim != head_dim and not is_partial:
        raise ConfigError(
            f"{rope.source}: expected no partial_rotary_factor, as rope rotates whole heads here, found "
            f"{share:g}; remove the key if the model was trained without it"
        )
    if scheme == "default":
        reader.ignored |= {f"{section}.{key}" for key in set(rope.raw) - rope.read}
        return RopeConfig(theta, dim)
    original = top or rope.integer("original_max_position_embeddings", context)
    rope.read.add("original_max_position_embeddings")
    if scheme == "longrope":
        # The factor only sets the magnitude of cos and sin; frequencies come from the two lists.
        short, long = (_factors(rope, key, dim) for key in ("short_factor", "long_factor"))
        config = RopeConfig(
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
        # Both divide the original context, so they must be positive.
        low, high = rope.positive("low_freq_factor"), rope.positive("high_freq_factor")
        config = RopeConfig(theta, dim, scheme, rope.number("factor"), low, high, original)
    elif scheme == "yarn":
        config = _yarn(
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
        config = RopeConfig(theta, dim, scheme, rope.number("factor"), original_max_position_embeddings=start)
    reader.ignored |= {f"{section}.{key}" for key in set(rope.raw) - rope.read}
    return config


def _yarn(rope: ConfigReader, config: RopeConfig, original: int) -> RopeConfig:
    """Copy of a rope with the parameters of YaRN: bounds of the frequencies (Peng et al., YaRN, 2023, section
    3.2) and factor of cos and sin (section 3.4).

    Arguments:
        rope: The section rope_parameters or rope_scaling.
        config: Rope with base, dimension and factor.
        original: PositionContext before the extension, in positions.
    """
    # A value of 0 means the default to transformers.
    fast, slow = (
        default if rope.number(key, default) == 0 else rope.positive(key, default)
        for key, default in (("beta_fast", 32.0), ("beta_slow", 1.0))
    )
    mscales = [rope.optional_number(key) for key in ("mscale", "mscale_all_dim")]
    magnitude = rope.optional_number("attention_factor")
    if magnitude is None:
        # transformers reads mscale only if both keys are present and not 0.
        numerator, denominator = mscales if all(mscales) else (1.0, None)
        magnitude = yarn_magnitude(config.factor, numerator or 1.0) / (
            yarn_magnitude(config.factor, denominator) if denominator else 1.0
        )
    return replace(
        config,
        original_max_position_embeddings=original,
        attention_factor=magnitude,
        bounds=(fast, slow),
        is_truncated=rope.flag("truncate", True),
    )


def yarn_magnitude(factor: float, share: float) -> float:
    """Magnitude of queries and keys in YaRN, 0.1 share log(factor) + 1 (`yarn_get_mscale` of DeepSeek's
    code).

    Arguments:
        factor: Factor of the context extension; up to 1, the magnitude is 1.
        share: mscale or mscale_all_dim.
    """
    return 1.0 if factor <= 1 else 0.1 * share * math.log(factor) + 1.0


def kv_heads_of(reader: ConfigReader, default: int | None, heads: int) -> int:
    """Number of key and value heads, num_key_value_heads.

    If that key is absent: the family's default if it divides the number of query heads, else one key head per
    query head. Wrong guesses are found later, when the shapes of the weights are compared.

    Arguments:
        reader: The config.json.
        default: The family's default; None without one.
        heads: Number of query heads.

    Raises:
        ConfigError: The key's value is not a positive integer.
    """
    if "num_key_value_heads" not in reader.raw and default and heads % default == 0:
        return default
    return reader.integer("num_key_value_heads", heads)


def listed_windows(
    reader: ConfigReader, types: list[str], size: int | None, layers: int
) -> tuple[int | None, ...]:
    """Window of each layer from its type: `size` for "sliding_attention", None for "full_attention".

    Arguments:
        reader: The config.json.
        types: Type of each layer.
        size: Keys that a query sees, itself included; None if the config enables no windows.
        layers: Number of layers.

    Raises:
        ConfigError: A type is unknown, the number of types is not the number of layers, or a layer has a
            window without size.
    """
    unknown = next((kind for kind in types if kind not in LAYER_TYPES), None)
    if unknown is not None:
        raise ConfigError(
            f"{reader.source}: expected layer_types among {', '.join(sorted(LAYER_TYPES))}, found "
            f"{unknown!r}; {TRY_TRANSFORMERS}"
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
    """Divisors of the frequencies of longrope, [dim / 2]; ConfigError for a list of another length."""
    values = rope.raw.get(key)
    rope.read.add(key)
    if not isinstance(values, list) or len(values) != dim // 2:
        found = f"{len(values)} of them" if isinstance(values, list) else repr(values)
        raise ConfigError(
            f"{rope.source}: expected {key} to list {dim // 2} numbers, one per frequency, found {found}; "
            "correct the file, or fetch it again"
        )
    return tuple(float(value) for value in values)
