"""Functions that read those keys of a config.json that many families share: activation, rope, key heads,
windows.

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
"""Name of an activation in config.json -> its name here."""
ROPE_SCHEMES: tuple[RopeScheme, ...] = ("default", "linear", "dynamic", "llama3", "longrope", "yarn")
"""Values of rope_type that most families accept."""
LAYER_TYPES = {"full_attention", "sliding_attention"}
"""Entries that the list layer_types of a config.json may have, in models whose layers all have attention."""


def model_type_of(raw: dict[str, Any], source: str = "config.json") -> str:
    """The model_type of a config.json, which names the model's family.

    Arguments:
        raw: The parsed config.json.
        source: Its path or name, for error messages.

    Raises:
        ConfigError: model_type is missing, empty or no string.
    """
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise ConfigError(
            f"{source}: expected a model_type such as 'llama', found {model_type!r}; add the key, or check "
            "that this is a model's config.json"
        )
    return model_type


def asks_to_look_ahead(reader: ConfigReader) -> bool:
    """Whether the key is_causal of a config.json is false or null, which in transformers makes a decoder
    attend to later tokens."""
    return not reader.raw.get("is_causal", True)


def refuse_unfollowed(
    reader: ConfigReader, *, looks_ahead: bool = False, bidirectional: bool = False
) -> None:
    """Raise ConfigError if a config.json has settings that mizarr does not implement and that would change
    the results: quantised weights, an encoder-decoder, or attention without a causal mask.

    Arguments:
        reader: The config.json.
        looks_ahead: Whether is_causal=false is implemented for the family.
        bidirectional: Whether use_bidirectional_attention=true is implemented for the family.
    """
    if reader.has("quantization_config"):
        raise ConfigError(
            f"{reader.source}: expected unquantised weights, found a quantization_config; fetch the model's "
            "unquantised checkpoint"
        )
    causal_values = {"use_bidirectional_attention": False, "is_encoder_decoder": False, "is_causal": True}
    values = {key: reader.raw.get(key, causal) for key, causal in causal_values.items()}
    # Keys that the family implements are accepted with any value.
    values |= {"is_causal": True} if looks_ahead else {}
    values |= {"use_bidirectional_attention": False} if bidirectional else {}
    if any(bool(values[key]) is not causal for key, causal in causal_values.items()):
        settings = ", ".join(f"{key}={value!r}" for key, value in values.items())
        raise ConfigError(f"{reader.source}: expected a causal decoder, found {settings}; {TRY_TRANSFORMERS}")
    # Checked keys count as read, so that they are not reported as ignored.
    reader.read |= {"quantization_config", *causal_values}


def read_activation(
    reader: ConfigReader, default: str = "silu", *keys: str, gelu_is_tanh: bool = False
) -> ActivationName:
    """The activation function that a config.json names.

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
    """Check that a list in config.json, which transformers derives from other keys and writes into the file,
    still agrees with the other keys.

    Arguments:
        reader: The config.json.
        key: Config key of the list; it may be absent.
        derived: The list as it follows from the other keys.

    Raises:
        ConfigError: The file has a different list.
    """
    reader.read.add(key)
    listed = reader.raw.get(key)
    if listed is not None and listed != list(derived):
        raise ConfigError(
            f"{reader.source}: expected {key} to be {list(derived)}, as follows from other keys of the file, "
            f"found {listed!r}; remove {key}, or fetch the file again"
        )


def both_ways(windows: Sequence[int | None]) -> tuple[int | None, ...]:
    """Sliding windows of the layers of a decoder that is made bidirectional, each one key longer than in a
    causal one, because transformers does not count the query itself there; None for a layer without a
    window."""
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
    """The rotary embedding that a config.json describes: under the key `rope_parameters`, or under
    `rope_scaling` and `rope_theta` in older files.

    Arguments:
        reader: The config.json.
        head_dim: Number of entries of a head.
        context: Value of max_position_embeddings, in positions.
        theta: Base of the frequencies if the key rope_theta is absent.
        is_partial: Whether the family may rotate only a part of each head (partial_rotary_factor); in other
            families transformers ignores that key or fails.
        original_context: Context before its extension, in positions, if the key
            original_max_position_embeddings is absent; None for no default.
        aliases: Older name of a rope scheme in this family -> its name in `ROPE_SCHEMES`.

    Raises:
        ConfigError: The scheme is unknown, differs between layers, or has values that do not fit.
    """
    scaling, parameters = reader.mapping("rope_scaling"), reader.mapping("rope_parameters")
    section = "rope_scaling" if scaling else "rope_parameters"
    rope = ConfigReader(scaling or parameters, f"{reader.source}: {section}")
    theta = rope.number("rope_theta", reader.number("rope_theta", theta))
    rotated_share = rope.number("partial_rotary_factor", reader.number("partial_rotary_factor", 1.0))
    declared_original = reader.optional_integer("original_max_position_embeddings") or original_context
    name = rope.text("rope_type", rope.text("type", "default"))
    scheme = next((item for item in ROPE_SCHEMES if item == (aliases or {}).get(name, name)), None)
    # Sections by layer type (Gemma 3) need `two_ropes`; reading them as one rope would ignore both.
    nested = next((key for key, value in rope.raw.items() if isinstance(value, dict)), None)
    if scheme is None or nested is not None:
        problem = f"rope_type {name!r}" if scheme is None else f"separate parameters for {nested!r} layers"
        raise ConfigError(
            f"{rope.source}: expected one rope_type for all layers, of {', '.join(ROPE_SCHEMES)}, found "
            f"{problem}; {TRY_TRANSFORMERS}"
        )
    # int() rounds down, as transformers does.
    dim = int(head_dim * rotated_share)
    if dim != head_dim and not is_partial:
        raise ConfigError(
            f"{rope.source}: expected no partial_rotary_factor, because rope rotates whole heads in this "
            f"family, found {rotated_share:g}; remove the key if the model was trained without it"
        )
    if scheme == "default":
        reader.ignored |= {f"{section}.{key}" for key in set(rope.raw) - rope.read}
        return RopeConfig(theta, dim)
    original = declared_original or rope.integer("original_max_position_embeddings", context)
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
    """Copy of a rotary embedding with the parameters of YaRN: bounds of the frequencies (Peng et al., YaRN,
    2023, section 3.2) and factor of cos and sin (section 3.4).

    Arguments:
        rope: The section rope_parameters or rope_scaling of config.json.
        config: Rotary embedding with base, dimension and factor of the context extension.
        original: Context before the extension, in positions.
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
    """Factor of queries and keys in YaRN, 0.1 share log(factor) + 1 (`yarn_get_mscale` of DeepSeek's code).

    Arguments:
        factor: Factor of the context extension; up to 1, the result is 1.
        share: The config key mscale or mscale_all_dim.
    """
    return 1.0 if factor <= 1 else 0.1 * share * math.log(factor) + 1.0


def kv_heads_of(reader: ConfigReader, default: int | None, heads: int) -> int:
    """Number of key and value heads, from the config key num_key_value_heads.

    If the key is absent: the family's default if it divides the number of query heads, else one key head per
    query head. A wrong guess is detected later, when the shapes of the weights are compared.

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
    """Sliding window of each layer, in keys, from the layer's type: `size` for "sliding_attention", None for
    "full_attention".

    Arguments:
        reader: The config.json.
        types: Type of each layer (the config key layer_types).
        size: Number of keys that a query sees, itself included; None if the config enables no windows.
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
            f"{reader.source}: expected layer_types to have one entry for each of {layers} layers, found "
            f"{len(types)} entries; correct the file, or fetch it again"
        )
    if size is None and "sliding_attention" in types:
        raise ConfigError(
            f"{reader.source}: expected sliding_window to give the window of the layers whose type in "
            f"layer_types is 'sliding_attention', found sliding_window={reader.raw.get('sliding_window')!r} "
            f"and use_sliding_window={reader.raw.get('use_sliding_window')!r}; correct the file, or fetch it "
            "again"
        )
    return tuple(size if kind == "sliding_attention" else None for kind in types)


def _factors(rope: ConfigReader, key: str, dim: int) -> tuple[float, ...]:
    """Divisors of the frequencies in the rope scheme longrope, dim / 2 numbers; ConfigError for a list of
    another length.

    Arguments:
        rope: The section rope_parameters or rope_scaling of config.json.
        key: Key of the list: short_factor or long_factor.
        dim: Number of rotated entries of a head.
    """
    values = rope.raw.get(key)
    rope.read.add(key)
    if not isinstance(values, list) or len(values) != dim // 2:
        content = f"{len(values)} numbers" if isinstance(values, list) else repr(values)
        raise ConfigError(
            f"{rope.source}: expected {key} to list {dim // 2} numbers, one per frequency, found {content}; "
            "correct the file, or fetch it again"
        )
    return tuple(float(value) for value in values)
