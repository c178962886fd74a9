"""Llama-like decoder families, one row each, and how a row and a config.json make an architecture.

Semantics and defaults are those of the reference implementation (transformers); where candle-mi's table
differs, DESIGN.md says so. A new family that differs along existing axes is a new row here and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ....store.errors import ConfigError, nearest
from .composed import ComposedArchitecture, LayerSpec
from .layer_tensors import LLAMA
from .mixers import AttentionSpec, MlpSpec, QkNorm
from .transformer import ActivationName, ConfigReader, Norm, RopeConfig, RopeScheme

Windows = Literal["none", "all", "listed", "alternating", "from_max_window_layers"]
Bias = bool | str | tuple[str, bool]
"""Whether there is one; or the key that says, with its default where that is not false."""
MlpLayout = Literal["gated_separate", "gated_fused", "plain"]

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


@dataclass(frozen=True)
class Family:
    """How a family's config.json is read, and what its architecture fixes.

    examples: what people know the family by. Of biases, see `Bias`.
    """

    examples: str = ""
    norm: Norm = "rms"
    eps_key: str = "rms_norm_eps"
    eps: float = 1e-6
    activation_keys: tuple[str, ...] = ("hidden_act",)
    activation: str = "silu"
    gelu_is_tanh: bool = False
    """Legacy configs write "gelu" and mean the tanh approximation (Gemma 1)."""
    qkv: Literal["separate", "fused"] = "separate"
    mlp: MlpLayout = "gated_separate"
    qkv_bias: Bias = False
    o_bias: Bias = False
    mlp_bias: Bias = False
    scaled_embedding: bool = False
    tied: bool = False
    max_positions: int | None = 4096
    """Where the key is absent; None where nothing bounds the context."""
    head_dim: int | None = None
    """Where the key is absent; None divides hidden_size by heads."""
    kv_heads: int | None = None
    """Where the key is absent; None is one per query head."""
    theta: float = 10000.0
    """Of rope, where the key is absent."""
    interleaved_rope: bool = False
    """Whether rope turns neighbouring entries of a head together."""
    partial_rotary: bool = False
    """Whether rope may turn a share of each head; the reference ignores the key elsewhere, or cannot run."""
    windows: Windows = "none"
    """listed: by layer_types where they are, else all."""
    window: int | None = 4096
    """Where the key is absent; an explicit null is no window in every family."""
    soft_caps: tuple[float | None, float | None] | None = None
    """Defaults for attention scores and final logits, in families that have them."""
    query_scalar: float | None = None
    post_norms: bool = False
    qk_norm: bool = False
    original_context: int | None = None
    """Context before rope scaling where the config names none at its top level."""
    rope_aliases: Mapping[str, str] = field(default_factory=dict)
    """Older names of rope schemes, which elsewhere mean something else or nothing."""


FAMILIES: dict[str, Family] = {
    "llama": Family(
        examples="Llama 2 and 3, SmolLM",
        max_positions=2048,
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="mlp_bias",
    ),
    "mistral": Family(examples="Mistral 7B", max_positions=131072, kv_heads=8, windows="listed"),
    "ministral": Family(examples="Ministral 8B", max_positions=131072, kv_heads=8, windows="listed"),
    "helium": Family(
        examples="Helium 1",
        eps=1e-8,
        head_dim=128,
        kv_heads=20,
        qkv_bias="attention_bias",
        mlp_bias="mlp_bias",
        theta=100000.0,
        interleaved_rope=True,
    ),
    "qwen2": Family(
        examples="Qwen 2 and 2.5",
        max_positions=32768,
        kv_heads=32,
        qkv_bias=True,
        windows="from_max_window_layers",
    ),
    "qwen3": Family(
        examples="Qwen 3",
        max_positions=32768,
        head_dim=128,
        kv_heads=32,
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm=True,
        windows="from_max_window_layers",
    ),
    "gemma": Family(
        examples="Gemma 1, CodeGemma",
        norm="gemma_rms",
        activation="gelu_pytorch_tanh",
        gelu_is_tanh=True,
        scaled_embedding=True,
        tied=True,
        max_positions=8192,
        head_dim=256,
        kv_heads=16,
        qkv_bias="attention_bias",
        o_bias="attention_bias",
    ),
    "gemma2": Family(
        examples="Gemma 2",
        norm="gemma_rms",
        activation_keys=("hidden_activation",),
        activation="gelu_pytorch_tanh",
        scaled_embedding=True,
        tied=True,
        max_positions=8192,
        head_dim=256,
        kv_heads=4,
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        soft_caps=(50.0, 30.0),
        query_scalar=256.0,
        post_norms=True,
        windows="alternating",
    ),
    "phi3": Family(
        examples="Phi 3 and 3.5",
        eps=1e-5,
        qkv="fused",
        mlp="gated_fused",
        partial_rotary=True,
        windows="all",
        window=None,
        original_context=4096,
        rope_aliases={"su": "longrope", "yarn": "longrope"},
    ),
    "starcoder2": Family(
        examples="StarCoder 2",
        norm="layer",
        eps_key="norm_epsilon",
        eps=1e-5,
        activation="gelu_pytorch_tanh",
        mlp="plain",
        kv_heads=2,
        qkv_bias=("use_bias", True),
        o_bias=("use_bias", True),
        mlp_bias=("use_bias", True),
        tied=True,
        windows="all",
        window=None,
    ),
}
SUPPORTED_MODEL_TYPES = tuple(sorted(FAMILIES))
NORM_WORDS = {"rms": "RMS", "gemma_rms": "RMS, weight + 1", "layer": "layer norm"}
ACTIVATION_WORDS = {
    "silu": "SiLU",
    "gelu": "GELU",
    "gelu_tanh": "tanh-GELU",
    "relu": "ReLU",
    "relu2": "squared ReLU",
    "xielu": "xIELU",
}
_MLPS = {"gated_separate": "gated {}", "gated_fused": "gated {}, fused", "plain": "plain {}"}
_WINDOWS = {
    "none": "",
    "all": "sliding window",
    "listed": "sliding window",
    "alternating": "alternating windows",
    "from_max_window_layers": "windows in upper layers",
}


def described(model_type: str, family: Family) -> dict[str, str]:
    """A family in words: model_type, examples, norm, mlp, attention, head. What its config.json may leave out
    (windows, soft caps, biases it has a key for) is named where it may be there."""
    caps = "" if family.soft_caps is None else "soft caps"
    attention = (
        "fused projection" if family.qkv == "fused" else "",
        "biases" if family.qkv_bias else "",
        "norms on q and k" if family.qk_norm else "",
        "rope turns neighbours" if family.interleaved_rope else "",
        caps,
        _WINDOWS[family.windows],
    )
    head = ("scaled embedding" if family.scaled_embedding else "", "tied" if family.tied else "", caps)
    return {
        "model_type": model_type,
        "examples": family.examples,
        "norm": NORM_WORDS[family.norm] + (", four per block" if family.post_norms else ""),
        "mlp": _MLPS[family.mlp].format(ACTIVATION_WORDS[ACTIVATIONS.get(family.activation, "xielu")]),
        "attention": ", ".join(filter(None, attention)) or "plain",
        "head": ", ".join(filter(None, head)) or "untied",
    }


def from_hf_config(raw: dict[str, Any], source: str = "config.json") -> ComposedArchitecture:
    """The architecture that the config.json of one of `FAMILIES` describes.

    Raises ConfigError for a missing or unknown model_type, a missing required key, a value of the wrong type,
    an unknown rope scheme, and for settings no part of the forward pass follows (quantised weights, attention
    to later tokens).
    """
    model_type = model_type_of(raw, source)
    family = FAMILIES.get(model_type)
    if family is None:
        near = nearest(model_type, FAMILIES)
        raise ConfigError(
            f"{source}: expected model_type to be one of {', '.join(SUPPORTED_MODEL_TYPES)}, found "
            f"{model_type!r}" + (f"; nearest is {near!r}" if near else "")
        )
    return read_family(ConfigReader(raw, source), model_type, family)


def model_type_of(raw: dict[str, Any], source: str = "config.json") -> str:
    """The family a config.json names; ConfigError if it names none."""
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise ConfigError(
            f"{source}: expected a model_type such as 'llama', found {model_type!r}; add the key, or check "
            "that this is a model's config.json"
        )
    return model_type


def read_family(reader: ConfigReader, model_type: str, family: Family) -> ComposedArchitecture:
    """The architecture of a Llama-like decoder: every layer attends and has an MLP.

    reader: config.json. family: defaults and switches of its family.

    Raises:
        ConfigError: A key is missing, of the wrong type, contradicts another, or asks for what is not
            computed here.
    """
    refuse_unfollowed(reader, looks_ahead=True)
    is_bidirectional = asks_to_look_ahead(reader)
    hidden, heads, num_layers = (
        reader.integer(key) for key in ("hidden_size", "num_attention_heads", "num_hidden_layers")
    )
    head_dim = reader.integer("head_dim", family.head_dim or hidden // heads)
    context = reader.integer("max_position_embeddings", family.max_positions)
    eps, caps = reader.number(family.eps_key, family.eps), family.soft_caps
    windows = read_windows(reader, family, num_layers)
    scalar = family.query_scalar and reader.positive("query_pre_attn_scalar", family.query_scalar)
    attention = AttentionSpec(
        num_attention_heads=heads,
        num_kv_heads=kv_heads_of(reader, family, heads),
        head_dim=head_dim,
        rope=replace(read_rope(reader, family, head_dim, context), interleaved=family.interleaved_rope),
        scale=None if scalar is None else 1 / math.sqrt(scalar),
        qkv_bias=has_bias(reader, family.qkv_bias),
        o_bias=has_bias(reader, family.o_bias),
        qk_norm=QkNorm("head", eps, family.norm) if family.qk_norm else None,
        layout="by part" if family.qkv == "fused" else "separate",
        logit_softcap=caps and reader.optional_number("attn_logit_softcapping", caps[0]),
        is_bidirectional=is_bidirectional,
    )
    mlp = MlpSpec(
        reader.integer("intermediate_size"),
        read_activation(reader, family),
        is_gated=family.mlp != "plain",
        is_fused=family.mlp == "gated_fused",
        has_bias=has_bias(reader, family.mlp_bias),
    )
    norms: Literal["around", "before"] = "around" if family.post_norms else "before"
    windows = both_ways(windows) if is_bidirectional else windows
    blocks = {window: LayerSpec((replace(attention, window=window),), mlp, norms) for window in set(windows)}
    mlp_parts = {"plain": ("c_fc", "c_proj"), "gated_fused": ("gate_up_proj", "down_proj")}
    return ComposedArchitecture(
        model_type=model_type,
        hidden_size=hidden,
        vocab_size=reader.integer("vocab_size"),
        blocks=tuple(blocks[window] for window in windows),
        spelling=replace(
            LLAMA,
            ln2="pre_feedforward_layernorm" if family.post_norms else LLAMA.ln2,
            attention_in="qkv_proj",
            mlp_parts=mlp_parts.get(family.mlp, LLAMA.mlp_parts),
        ),
        norm_eps=eps,
        norm_type=family.norm,
        max_position_embeddings=context,
        embedding_scale=math.sqrt(hidden) if family.scaled_embedding else None,
        rounds_embedding_scale=family.scaled_embedding,
        final_logit_softcapping=caps and reader.optional_number("final_logit_softcapping", caps[1]),
        tie_word_embeddings=reader.flag("tie_word_embeddings", family.tied),
    )


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


def read_activation(reader: ConfigReader, family: Family) -> ActivationName:
    """The activation a config names; a null key does not shadow the next one. One that learns something is
    known to families that have it by default alone, as its tensors are."""
    name = next((reader.text(key) for key in family.activation_keys if reader.has(key)), family.activation)
    reader.read |= {"hidden_act", "hidden_activation"}
    if family.gelu_is_tanh and name == "gelu":
        name = "gelu_pytorch_tanh"
    if name == family.activation == "xielu":
        return "xielu"
    if name not in ACTIVATIONS:
        raise ConfigError(
            f"{reader.source}: expected an activation among {', '.join(ACTIVATIONS)}, found {name!r}; this "
            "model cannot run here"
        )
    return ACTIVATIONS[name]


def read_windows(reader: ConfigReader, family: Family, layers: int) -> tuple[int | None, ...]:
    """Window of each layer: how many keys back a query sees, itself included."""
    if family.windows == "none":
        return (None,) * layers
    size = reader.optional_integer("sliding_window", family.window)
    types = None if family.windows == "all" else reader.strings("layer_types")
    first = 0
    if family.windows == "from_max_window_layers":
        first = reader.integer("max_window_layers", 28, least=0)
        if not reader.flag("use_sliding_window", False):
            size = None
    if types is not None:
        return listed_windows(reader, types, size, layers)
    if family.windows == "alternating":
        return tuple(size if layer % 2 == 0 else None for layer in range(layers))
    return tuple(size if layer >= first else None for layer in range(layers))


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


def read_rope(reader: ConfigReader, family: Family, head_dim: int, context: int) -> RopeConfig:
    """Rope settings from `rope_parameters`, or from `rope_scaling` and `rope_theta` as older configs write
    them.
    """
    scaling, parameters = reader.mapping("rope_scaling"), reader.mapping("rope_parameters")
    section = "rope_scaling" if scaling else "rope_parameters"
    rope = ConfigReader(scaling or parameters, f"{reader.source}: {section}")
    theta = rope.number("rope_theta", reader.number("rope_theta", family.theta))
    share = rope.number("partial_rotary_factor", reader.number("partial_rotary_factor", 1.0))
    top = reader.optional_integer("original_max_position_embeddings") or family.original_context
    name = rope.text("rope_type", rope.text("type", "default"))
    scheme = next((known for known in ROPE_SCHEMES if known == family.rope_aliases.get(name, name)), None)
    nested = next((key for key, value in rope.raw.items() if isinstance(value, dict)), None)
    if scheme is None or nested is not None:
        found = f"rope_type {name!r}" if scheme is None else f"parameters of its own for {nested!r} layers"
        raise ConfigError(
            f"{rope.source}: expected one rope_type for all layers, of {', '.join(ROPE_SCHEMES)}, found "
            f"{found}; this model cannot run here"
        )
    dim = int(head_dim * share)
    if dim != head_dim and not family.partial_rotary:
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


def kv_heads_of(reader: ConfigReader, family: Family, heads: int) -> int:
    """Key/value heads; a family's default counts where it can hold, and one per query head elsewhere.

    Either way the shapes of the weights have the last word.
    """
    if "num_key_value_heads" not in reader.raw and family.kv_heads and heads % family.kv_heads == 0:
        return family.kv_heads
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


def has_bias(reader: ConfigReader, rule: Bias) -> bool:
    """Whether there is a bias."""
    if isinstance(rule, bool):
        return rule
    return reader.flag(*rule) if isinstance(rule, tuple) else reader.flag(rule, False)
