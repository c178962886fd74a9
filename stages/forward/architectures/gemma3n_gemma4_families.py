"""Readers of config.json for the text models of Gemma 3n and Gemma 4.

Semantics and defaults are those of Hugging Face transformers.

Border: one config; never imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ....store.errors import ConfigError
from .composed import ComposedArchitecture, LayerSpec
from .families import listed_windows, read_activation, read_rope
from .hybrids.mamba_families import FamilyReader, TensorShapes, checked
from .layer_parts import AltUpSpec, LayerInputSpec
from .layer_tensors import LLAMA, ExpertNames
from .mixers import AttentionSpec, ChannelMixerSpec, ExpertsSpec, MlpAndExpertsSpec, MlpSpec, QkNorm
from .transformer import TRY_TRANSFORMERS, ConfigReader, RopeConfig

__all__ = ["GEMMAS"]

FULL, SLIDING = "full_attention", "sliding_attention"
_SPELLING = replace(
    LLAMA,
    ln2="pre_feedforward_layernorm",
    experts=ExpertNames(
        prefix="",
        router="router.proj",
        router_gains=("router.scale", "router.per_expert_scale"),
        parts=("experts.gate_up_proj", "experts.down_proj"),
        ending="",
        beside_norms=(
            "post_feedforward_layernorm_1",
            "pre_feedforward_layernorm_2",
            "post_feedforward_layernorm_2",
        ),
    ),
)


def _gemma3n(reader: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of Gemma 3n: AltUp, LAuReL, inputs of each layer, sparse MLPs, keys and values of earlier
    layers."""
    layers = reader.integer("num_hidden_layers", 35)
    types = reader.strings("layer_types") or [SLIDING if (n + 1) % 5 else FULL for n in range(layers)]
    sizes = reader.integer("head_dim", 256), reader.integer("num_key_value_heads", 2)
    inner = _by_layer(reader, "intermediate_size", 16384, layers)
    default = [0.95] * 10 + [0.0] * (layers - 10) if layers > 10 else [0.0] * layers
    sparsity = _by_layer(reader, "activation_sparsity_pattern", default, layers)
    if any(not 0 <= share < 1 for share in sparsity):
        raise ConfigError(
            f"{reader.source}: expected activation_sparsity_pattern to list numbers from 0 to below 1, found "
            f"{sparsity}; correct the file, or fetch it again"
        )
    activation = read_activation(reader, "gelu_pytorch_tanh", "hidden_activation")
    channels = [
        MlpSpec(int(width), activation, sparsity=float(share))
        for width, share in zip(inner, sparsity, strict=True)
    ]
    defaults = _Defaults(shared_layers=15, hidden=2048, heads=8, context=32768)
    ropes = _two_ropes(reader)
    layer_input = LayerInputSpec(
        reader.integer("hidden_size_per_layer_input", 256),
        reader.integer("vocab_size_per_layer_input", 262144),
        activation,
    )
    altup = AltUpSpec(
        reader.integer("altup_num_inputs", 4),
        reader.integer("altup_active_idx", 0, least=0),
        reader.flag("altup_correct_scale", True),
    )
    parts = {"layer_input": layer_input, "laurel_rank": reader.integer("laurel_rank", 64)}
    model = _config(reader, types, [sizes] * layers, channels, ropes=ropes, defaults=defaults, parts=parts)
    return replace(
        model,
        vocab_size=reader.integer("vocab_size", 262400),
        final_logit_softcapping=reader.optional_number("final_logit_softcapping", 30.0),
        altup=altup if altup.streams > 1 else None,
    )


def _gemma4(reader: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of Gemma 4: wider heads in layers of full attention, inputs of each layer, keys and values
    of earlier layers, values from the key projection, experts parallel to the MLP."""
    layers = reader.integer("num_hidden_layers", 30)
    types = reader.strings("layer_types") or [SLIDING if (n + 1) % 6 else FULL for n in range(layers)]
    types = [*types[:-1], FULL]  # transformers overrides the type of the last layer
    # "vision" makes image tokens attend both ways, which changes nothing in a text.
    if (ahead := reader.raw.get("use_bidirectional_attention")) not in (None, False, "vision"):
        raise ConfigError(
            f"{reader.source}: expected use_bidirectional_attention to be false, null or 'vision' (among "
            f"image tokens only), found {ahead!r}; {TRY_TRANSFORMERS}"
        )
    has_key_values = reader.flag("attention_k_eq_v", False)
    sizes = _sizes_of_gemma4(reader, types, has_key_values=has_key_values)
    n_sharing = reader.integer("num_kv_shared_layers", 0, least=0)
    inner, is_wider = reader.integer("intermediate_size", 9216), reader.flag("use_double_wide_mlp", False)
    activation = read_activation(reader, "gelu_pytorch_tanh", "hidden_activation")
    widths = [inner * (2 if is_wider and layer >= layers - n_sharing else 1) for layer in range(layers)]
    channels = [_channel_of_gemma4(reader, MlpSpec(width, activation)) for width in widths]
    defaults = _Defaults(shared_layers=0, hidden=2304, heads=8, context=131072)
    ropes = _two_ropes_of_gemma4(reader)
    rows = reader.integer("vocab_size_per_layer_input", 262144)
    vocab_size = reader.integer("vocab_size", 262144)
    if (width := reader.integer("hidden_size_per_layer_input", 256, least=0)) and rows < vocab_size:
        raise ConfigError(
            f"{reader.source}: expected vocab_size_per_layer_input to be at least vocab_size ({vocab_size}), "
            f"found {rows}; {TRY_TRANSFORMERS}"
        )
    layer_input = LayerInputSpec(width, rows, activation) if width else None
    parts = {"layer_input": layer_input, "has_scalar": True}
    return _config(
        reader,
        types,
        sizes,
        channels,
        ropes=ropes,
        defaults=defaults,
        parts=parts,
        has_key_values=has_key_values,
    )


def _channel_of_gemma4(reader: ConfigReader, mlp: MlpSpec) -> ChannelMixerSpec:
    """Spec of the channel mixer of a Gemma 4 layer: an MLP, with parallel experts if the config enables them.

    Arguments:
        reader: The config.json.
        mlp: The layer's MLP.
    """
    if not reader.flag("enable_moe_block", False):
        return mlp
    experts = ExpertsSpec(
        count=reader.integer("num_experts"),
        chosen=reader.integer("top_k_experts"),
        intermediate_size=reader.integer("moe_intermediate_size"),
        activation=mlp.activation,
        # transformers normalises the top k of a softmax over all, which is the softmax over the top k.
        routing="softmax of chosen",
        is_listed=False,
    )
    return MlpAndExpertsSpec(mlp, experts, reader.number("rms_norm_eps", 1e-6))


def _sizes_of_gemma4(
    reader: ConfigReader, types: Sequence[str], *, has_key_values: bool
) -> list[tuple[int, int]]:
    """(entries of a head, number of key heads) of each layer of Gemma 4, which depend on the layer's type.

    Arguments:
        reader: The config.json.
        types: Type of each layer.
        has_key_values: Whether values come from the key projection in layers of full attention, which may
            then have another number of key heads.

    Raises:
        ConfigError: Sizes differ between layers of one type.
    """
    default = reader.integer("head_dim", 256), reader.integer("num_key_value_heads", 4)
    if reader.has("per_layer_config"):
        sizes = _sizes_by_layer(reader, default, len(types))
    else:
        global_heads = reader.optional_integer("num_global_key_value_heads") if has_key_values else None
        full = reader.integer("global_head_dim", 512), global_heads or default[1]
        sizes = [default if kind == SLIDING else full for kind in types]
    for kind in dict.fromkeys(types):
        distinct = sorted({size for size, type_ in zip(sizes, types, strict=True) if type_ == kind})
        if len(distinct) > 1:
            raise ConfigError(
                f"{reader.source}: expected the same head_dim and num_key_value_heads in all {kind} layers, "
                f"found {distinct}; {TRY_TRANSFORMERS}"
            )
    return sizes


def _sizes_by_layer(reader: ConfigReader, default: tuple[int, int], layers: int) -> list[tuple[int, int]]:
    """(entries of a head, number of key heads) of each layer from the config key per_layer_config, which maps
    numbers of layers to sizes that differ from the default.

    Arguments:
        reader: The config.json.
        default: Sizes of layers that are not listed.
        layers: Number of layers.

    Raises:
        ConfigError: An entry is for no layer, or has other keys.
    """
    sizes, keys = [default] * layers, ("head_dim", "num_key_value_heads")
    for name, entry in reader.mapping("per_layer_config").items():
        is_valid = isinstance(entry, dict) and set(entry) <= set(keys)
        if not name.isdigit() or int(name) >= layers or not is_valid:
            raise ConfigError(
                f"{reader.source}: expected per_layer_config to map layer numbers below {layers} to "
                f"{' and '.join(keys)}, found {name!r}: {entry!r}; {TRY_TRANSFORMERS}"
            )
        section = ConfigReader(entry, f"{reader.source}: per_layer_config")
        sizes[int(name)] = (section.integer(keys[0], default[0]), section.integer(keys[1], default[1]))
    return sizes


Ropes = Mapping[str, tuple[ConfigReader, float]]
"""Layer type -> (section of config.json with the rope parameters of such layers, default of rope_theta)."""


@dataclass(frozen=True)
class _Defaults:
    """Values of settings for keys that a config.json of Gemma 3n or 4 leaves out."""

    shared_layers: int
    """Number of last layers that reuse keys and values (config key num_kv_shared_layers)."""
    hidden: int
    """Hidden size of the model."""
    heads: int
    """Number of query heads."""
    context: int
    """Largest length of a prompt, in tokens (config key max_position_embeddings)."""


def _config(
    reader: ConfigReader,
    types: Sequence[str],
    sizes: Sequence[tuple[int, int]],
    channels: Sequence[ChannelMixerSpec],
    *,
    ropes: Ropes,
    defaults: _Defaults,
    parts: Mapping[str, Any],
    has_key_values: bool = False,
) -> ComposedArchitecture:
    """Architecture of a Gemma 3n or Gemma 4, as far as both have it in common.

    Arguments:
        reader: The config.json.
        types: Type of each layer.
        sizes: (entries of a head, number of key heads) of each layer.
        channels: Channel mixer of each layer.
        ropes: Rope parameters of each layer type.
        defaults: Values for keys that the config leaves out.
        parts: Further fields of `LayerSpec`, the same for all layers.
        has_key_values: Whether values come from the key projection in layers of full attention that have keys
            of their own.
    """
    layers, eps = len(types), reader.number("rms_norm_eps", 1e-6)
    windows = listed_windows(
        reader,
        list(types),
        reader.integer("sliding_window", 512),
        reader.integer("num_hidden_layers", layers),
    )
    hidden = reader.integer("hidden_size", defaults.hidden)
    heads = reader.integer("num_attention_heads", defaults.heads)
    n_sharing = reader.integer("num_kv_shared_layers", defaults.shared_layers, least=0)
    sources = _sources(reader, types, n_sharing)
    context = reader.integer("max_position_embeddings", defaults.context)
    has_bias = reader.flag("attention_bias", False)
    reader.read |= {"rope_parameters", "rope_scaling", "rope_theta", "rope_local_base_freq"}

    def block(layer: int) -> LayerSpec:
        head_dim, kv_heads = sizes[layer]
        rope_section, theta = ropes[types[layer]]
        attention = AttentionSpec(
            heads,
            kv_heads,
            head_dim,
            rope=_rope(rope_section, theta, head_dim, context),
            # Queries and keys are normalised, so that scores need no scale.
            scale=1.0,
            window=windows[layer],
            qkv_bias=has_bias,
            o_bias=has_bias,
            qk_norm=QkNorm("head", eps),
            source=sources[layer],
            values_from_keys=has_key_values and windows[layer] is None and sources[layer] is None,
            has_v_norm=True,
        )
        return checked(reader, LayerSpec((attention,), channels[layer], "around", **parts))

    return ComposedArchitecture(
        model_type=reader.raw["model_type"],
        hidden_size=hidden,
        vocab_size=reader.integer("vocab_size", 262144),
        blocks=tuple(map(block, range(layers))),
        spelling=_SPELLING,
        norm_eps=eps,
        max_position_embeddings=context,
        embedding_scale=math.sqrt(hidden),
        # As in all Gemmas, sqrt(hidden) is rounded to the dtype of the embeddings.
        rounds_embedding_scale=True,
        final_logit_softcapping=reader.optional_number("final_logit_softcapping"),
        tie_word_embeddings=reader.flag("tie_word_embeddings", True),
    )


def _sources(reader: ConfigReader, types: Sequence[str], n_sharing: int) -> list[int | None]:
    """For each layer, the number of the layer whose keys and values it reuses; None for a layer with its own.

    The last `n_sharing` layers reuse keys and values of the last layer of the same type before them.

    Arguments:
        reader: The config.json.
        types: Type of each layer.
        n_sharing: Number of last layers that reuse keys and values.

    Raises:
        ConfigError: There is no layer of the same type before them.
    """
    n_own = len(types) - n_sharing
    missing = set(types) - set(types[: max(n_own, 0)])
    if n_sharing and missing:
        raise ConfigError(
            f"{reader.source}: expected a layer of each type before the last {n_sharing} layers, which reuse "
            f"its keys and values (num_kv_shared_layers), found no {sorted(missing)[0]} layer among the "
            f"first {max(n_own, 0)}; correct the file, or fetch it again"
        )
    last = {kind: layer for layer, kind in enumerate(types[:n_own])}
    return [None if layer < n_own else last[kind] for layer, kind in enumerate(types)]


def _two_ropes(reader: ConfigReader) -> Ropes:
    """Rope parameters of each layer type of Gemma 3n; older configs have rope_theta and rope_local_base_freq,
    like those of Gemma 3."""
    raw, parameters = reader.raw, reader.mapping("rope_parameters")
    full = {
        "rope_theta": raw.get("rope_theta"),
        **(parameters.get(FULL) or {}),
        **reader.mapping("rope_scaling"),
    }
    sliding = {"rope_theta": raw.get("rope_local_base_freq"), **(parameters.get(SLIDING) or {})}
    section = f"{reader.source}: rope_parameters"
    return {
        FULL: (ConfigReader(_without_nulls(full), section), 1000000.0),
        SLIDING: (ConfigReader(_without_nulls(sliding), section), 10000.0),
    }


def _without_nulls(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Copy of rope parameters without the keys whose value is null."""
    return {key: value for key, value in parameters.items() if value is not None}


def _two_ropes_of_gemma4(reader: ConfigReader) -> Ropes:
    """Rope parameters of each layer type of Gemma 4."""
    defaults: dict[str, dict[str, Any]] = {
        SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
        FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
    }
    parameters = reader.mapping("rope_parameters") or defaults
    section = f"{reader.source}: rope_parameters"
    return {kind: (ConfigReader(parameters.get(kind) or {}, section), 10000.0) for kind in defaults}


def _rope(section: ConfigReader, theta: float, head_dim: int, context: int) -> RopeConfig:
    """Rotary position embedding of the layers of one type.

    A "proportional" rope rotates only a share of the pairs of a head, with the frequencies that these pairs
    would have if the whole head rotated.

    Arguments:
        section: Rope parameters of the layer type.
        theta: Default of rope_theta.
        head_dim: Number of entries of a head.
        context: Value of max_position_embeddings.

    Raises:
        ConfigError: The parameters are not implemented.
    """
    if section.raw.get("truncate") is False:
        raise ConfigError(
            f"{section.source}: expected no truncate=False in the rope parameters of one layer type, where "
            f"transformers ignores it, found it; {TRY_TRANSFORMERS}"
        )
    if section.raw.get("rope_type") != "proportional":
        raw = {"rope_parameters": section.raw, "max_position_embeddings": context}
        return read_rope(ConfigReader(raw, section.source), head_dim, context, theta=theta)
    share = section.number("partial_rotary_factor", 1.0)
    return RopeConfig(
        section.number("rope_theta", theta),
        head_dim,
        "proportional",
        section.number("factor", 1.0),
        rotated_pairs=int(share * head_dim // 2),
    )


def _by_layer(reader: ConfigReader, key: str, default: Any, layers: int) -> list[float]:
    """The number that a config key gives for each layer: a list with one entry per layer, or a single number
    for all.

    Arguments:
        reader: The config.json.
        key: The config key.
        default: Value for an absent key or a null.
        layers: Number of layers.

    Raises:
        ConfigError: The value is neither a number nor a list with one number per layer.
    """
    value = reader.raw.get(key, default)
    reader.read.add(key)
    value = default if value is None else value
    numbers = value if isinstance(value, list) else [value] * layers
    are_numbers = all(isinstance(n, int | float) and not isinstance(n, bool) for n in numbers)
    if len(numbers) != layers or not are_numbers:
        raise ConfigError(
            f"{reader.source}: expected {key} to be a number, or a list with a number for each of {layers} "
            f"layers, found {value!r}; correct the file, or fetch it again"
        )
    return list(numbers)


GEMMAS: dict[str, FamilyReader] = {
    "gemma3n_text": FamilyReader(
        _gemma3n,
        "Gemma 3n E2B and E4B, text",
        "norms on q, k and v, a second rope in windows, sliding window, keys of earlier layers",
        "gated GELU, sparse; inputs of each layer; LAuReL",
        "scaled embedding, four streams (AltUp), tied, soft cap",
    ),
    "gemma4_text": FamilyReader(
        _gemma4,
        "Gemma 4, text",
        "norms on q, k and v, wider heads and another rope without a window, keys of earlier layers",
        "gated GELU, experts beside it; inputs of each layer",
        "scaled embedding, tied, soft cap",
        may_look_both_ways=True,
    ),
}
"""model_type -> family, for Gemma 3n and Gemma 4."""
