"""How the config.json of a Gemma 3n or Gemma 4 is read: their text models.

As in mamba_families.py, whose table of families these are part of: semantics and defaults are those of the
reference implementation (transformers).

Border: one config; never imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from .....store.errors import ConfigError
from ..composed import LayerSpec
from ..families import listed_windows, read_activation, read_rope
from ..layer_tensors import LLAMA, ExpertNames
from ..mamba_families import FamilyReader, TensorShapes, checked
from ..mixers import AttentionSpec, ChannelMixerSpec, ExpertsSpec, MlpAndExpertsSpec, MlpSpec, QkNorm
from ..transformer import ConfigReader, RopeConfig
from .config import CarryingConfig

__all__ = ["CARRYING"]

FULL, SLIDING = "full_attention", "sliding_attention"
_SPELLING = replace(
    LLAMA,
    ln2="pre_feedforward_layernorm",
    experts=ExpertNames(
        room="",
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


def _gemma3n(reader: ConfigReader, shapes: TensorShapes) -> CarryingConfig:
    """AltUp, LAuReL, inputs of each layer, gates of which few are open, keys of earlier layers."""
    layers = reader.integer("num_hidden_layers", 35)
    types = reader.strings("layer_types") or [SLIDING if (n + 1) % 5 else FULL for n in range(layers)]
    sizes = reader.integer("head_dim", 256), reader.integer("num_key_value_heads", 2)
    inner = _by_layer(reader, "intermediate_size", 16384, layers)
    usual = [0.95] * 10 + [0.0] * (layers - 10) if layers > 10 else [0.0] * layers
    sparsity = _by_layer(reader, "activation_sparsity_pattern", usual, layers)
    if any(not 0 <= share < 1 for share in sparsity):
        raise ConfigError(
            f"{reader.source}: expected activation_sparsity_pattern to list shares from 0 to below 1, found "
            f"{sparsity}; correct the file, or fetch it again"
        )
    activation = read_activation(reader, "gelu_pytorch_tanh", "hidden_activation")
    channels = [
        MlpSpec(int(width), activation, sparsity=float(share))
        for width, share in zip(inner, sparsity, strict=True)
    ]
    told = _config(
        reader,
        types,
        [sizes] * layers,
        channels,
        sharing=15,
        hidden=2048,
        heads=8,
        context=32768,
        kinds=_two_ropes(reader),
    )
    return replace(
        told,
        vocab_size=reader.integer("vocab_size", 262400),
        final_logit_softcapping=reader.optional_number("final_logit_softcapping", 30.0),
        input_size=reader.integer("hidden_size_per_layer_input", 256),
        input_rows=reader.integer("vocab_size_per_layer_input", 262144),
        streams=reader.integer("altup_num_inputs", 4),
        active=reader.integer("altup_active_idx", 0, least=0),
        scales_corrected=reader.flag("altup_correct_scale", True),
        laurel_rank=reader.integer("laurel_rank", 64),
    )


def _gemma4(reader: ConfigReader, shapes: TensorShapes) -> CarryingConfig:
    """Heads that are wider in layers without a window, inputs of each layer, keys of earlier layers, values
    made of keys, experts beside the MLP."""
    layers = reader.integer("num_hidden_layers", 30)
    types = reader.strings("layer_types") or [SLIDING if (n + 1) % 6 else FULL for n in range(layers)]
    types = [*types[:-1], FULL]  # as the reference has it, whatever is listed
    if (ahead := reader.raw.get("use_bidirectional_attention")) not in (None, False, "vision"):
        raise ConfigError(
            f"{reader.source}: expected use_bidirectional_attention of images alone ('vision'), found "
            f"{ahead!r}; this model cannot run here"
        )
    has_key_values = reader.flag("attention_k_eq_v", False)
    sizes = _sizes_of_gemma4(reader, types, has_key_values=has_key_values)
    sharing = reader.integer("num_kv_shared_layers", 0, least=0)
    inner, is_wider = reader.integer("intermediate_size", 9216), reader.flag("use_double_wide_mlp", False)
    channels = [
        _channel_of_gemma4(reader, inner * (2 if is_wider and layer >= layers - sharing else 1))
        for layer in range(layers)
    ]
    told = _config(
        reader,
        types,
        sizes,
        channels,
        sharing=0,
        hidden=2304,
        heads=8,
        context=131072,
        kinds=_two_ropes_of_gemma4(reader),
    )
    if has_key_values:
        told = replace(told, blocks=tuple(map(_with_key_values, told.blocks)))
    rows = reader.integer("vocab_size_per_layer_input", 262144)
    if (width := reader.integer("hidden_size_per_layer_input", 256, least=0)) and rows < told.vocab_size:
        raise ConfigError(
            f"{reader.source}: expected inputs of layers for all {told.vocab_size} tokens, found "
            f"vocab_size_per_layer_input={rows}; this model cannot run here"
        )
    return replace(told, has_scalars=True, input_size=width, input_rows=rows if width else 0)


def _with_key_values(block: LayerSpec) -> LayerSpec:
    """A layer whose values are what its keys are made of, unless it has a window."""
    (attention,) = block.mixers
    assert isinstance(attention, AttentionSpec)
    made = replace(attention, values_from_keys=attention.window is None and attention.source is None)
    return replace(block, mixers=(made,))


def _channel_of_gemma4(reader: ConfigReader, inner: int) -> ChannelMixerSpec:
    activation, eps = (
        read_activation(reader, "gelu_pytorch_tanh", "hidden_activation"),
        reader.number("rms_norm_eps", 1e-6),
    )
    mlp = MlpSpec(inner, activation)
    if not reader.flag("enable_moe_block", False):
        return mlp
    experts = ExpertsSpec(
        count=reader.integer("num_experts"),
        chosen=reader.integer("top_k_experts"),
        intermediate_size=reader.integer("moe_intermediate_size"),
        activation=activation,
        # The largest of a softmax over all, over their sum.
        routing="softmax of chosen",
        is_listed=False,
    )
    return MlpAndExpertsSpec(mlp, experts, eps)


def _sizes_of_gemma4(
    reader: ConfigReader, types: Sequence[str], *, has_key_values: bool
) -> list[tuple[int, int]]:
    """Width of heads, and key heads, of each layer: of layers without a window their own."""
    usual = reader.integer("head_dim", 256), reader.integer("num_key_value_heads", 4)
    if reader.has("per_layer_config"):
        sizes = _told_by_layer(reader, usual, len(types))
    else:
        own = reader.optional_integer("num_global_key_value_heads") if has_key_values else None
        whole = reader.integer("global_head_dim", 512), own or usual[1]
        sizes = [usual if kind == SLIDING else whole for kind in types]
    for kind in dict.fromkeys(types):
        found = sorted({size for size, own in zip(sizes, types, strict=True) if own == kind})
        if len(found) > 1:
            raise ConfigError(
                f"{reader.source}: expected heads of one width and number in all {kind} layers, found "
                f"(head_dim, num_key_value_heads) {found}; this model cannot run here"
            )
    return sizes


def _told_by_layer(reader: ConfigReader, usual: tuple[int, int], layers: int) -> list[tuple[int, int]]:
    """The same as `per_layer_config` lists what differs in some layers."""
    sizes, keys = [usual] * layers, ("head_dim", "num_key_value_heads")
    for name, own in reader.mapping("per_layer_config").items():
        is_known = isinstance(own, dict) and set(own) <= set(keys)
        if not name.isdigit() or int(name) >= layers or not is_known:
            raise ConfigError(
                f"{reader.source}: expected per_layer_config to tell {' and '.join(keys)} of layers below "
                f"{layers}, found {name!r}: {own!r}; this model cannot run here"
            )
        told = ConfigReader(own, f"{reader.source}: per_layer_config")
        sizes[int(name)] = (told.integer(keys[0], usual[0]), told.integer(keys[1], usual[1]))
    return sizes


Ropes = Mapping[str, tuple[ConfigReader, float]]
"""By type of layer: what a config says of its rope, and its wavelength where that says none."""


def _config(
    reader: ConfigReader,
    types: Sequence[str],
    sizes: Sequence[tuple[int, int]],
    channels: Sequence[ChannelMixerSpec],
    *,
    sharing: int,
    hidden: int,
    heads: int,
    context: int,
    kinds: Ropes,
) -> CarryingConfig:
    """What both families have in common. sizes: width of heads, and key heads, of each layer. sharing,
    hidden, heads, context: how many layers read keys of others, the stream's width, heads, and positions,
    where the config does not say."""
    layers, eps = len(types), reader.number("rms_norm_eps", 1e-6)
    windows = listed_windows(
        reader,
        list(types),
        reader.integer("sliding_window", 512),
        reader.integer("num_hidden_layers", layers),
    )
    hidden, heads = reader.integer("hidden_size", hidden), reader.integer("num_attention_heads", heads)
    sources = _sources(reader, types, reader.integer("num_kv_shared_layers", sharing, least=0))
    context = reader.integer("max_position_embeddings", context)
    has_bias = reader.flag("attention_bias", False)
    reader.read |= {"rope_parameters", "rope_scaling", "rope_theta", "rope_local_base_freq"}

    def block(layer: int) -> LayerSpec:
        head_dim, kv_heads = sizes[layer]
        told, theta = kinds[types[layer]]
        attention = AttentionSpec(
            heads,
            kv_heads,
            head_dim,
            rope=_rope(told, theta, head_dim, context),
            scale=1.0,
            window=windows[layer],
            qkv_bias=has_bias,
            o_bias=has_bias,
            qk_norm=QkNorm("head", eps),
            source=sources[layer],
            has_v_norm=True,
        )
        return checked(reader, LayerSpec((attention,), channels[layer], "around"))

    return CarryingConfig(
        model_type=reader.raw["model_type"],
        hidden_size=hidden,
        vocab_size=reader.integer("vocab_size", 262144),
        blocks=tuple(map(block, range(layers))),
        spelling=_SPELLING,
        norm_eps=eps,
        max_position_embeddings=context,
        embedding_scale=math.sqrt(hidden),
        rounds_embedding_scale=True,
        final_logit_softcapping=reader.optional_number("final_logit_softcapping"),
        tie_word_embeddings=reader.flag("tie_word_embeddings", True),
    )


def _sources(reader: ConfigReader, types: Sequence[str], sharing: int) -> list[int | None]:
    """The layer whose keys each layer reads: of the last few, the last one before them of their type."""
    first = len(types) - sharing
    missing = set(types) - set(types[: max(first, 0)])
    if sharing and missing:
        raise ConfigError(
            f"{reader.source}: expected a layer of each type before the last {sharing}, which read its keys "
            f"and values (num_kv_shared_layers), found no {sorted(missing)[0]} among the first "
            f"{max(first, 0)}; correct the file, or fetch it again"
        )
    last = {kind: layer for layer, kind in enumerate(types[:first])}
    return [None if layer < first else last[kind] for layer, kind in enumerate(types)]


def _two_ropes(reader: ConfigReader) -> Ropes:
    """Of Gemma 3n, whose older configs tell them as Gemma 3's do."""
    raw, told = reader.raw, reader.mapping("rope_parameters")
    of_whole = {
        "rope_theta": raw.get("rope_theta"),
        **(told.get(FULL) or {}),
        **reader.mapping("rope_scaling"),
    }
    of_window = {"rope_theta": raw.get("rope_local_base_freq"), **(told.get(SLIDING) or {})}
    section = f"{reader.source}: rope_parameters"
    return {
        FULL: (ConfigReader(_without_nulls(of_whole), section), 1000000.0),
        SLIDING: (ConfigReader(_without_nulls(of_window), section), 10000.0),
    }


def _without_nulls(told: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in told.items() if value is not None}


def _two_ropes_of_gemma4(reader: ConfigReader) -> Ropes:
    usual: dict[str, dict[str, Any]] = {
        SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
        FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
    }
    told = reader.mapping("rope_parameters") or usual
    section = f"{reader.source}: rope_parameters"
    return {kind: (ConfigReader(told.get(kind) or {}, section), 10000.0) for kind in usual}


def _rope(told: ConfigReader, theta: float, head_dim: int, context: int) -> RopeConfig:
    """A rope as it is told of layers of one type; proportional ones turn the first pairs of a head by what
    they turn by in a head that turns as a whole."""
    if told.raw.get("truncate") is False:
        raise ConfigError(
            f"{told.source}: expected no truncate=False, which the reference looks for where there is one "
            "rope for all layers, found it of one type of layers; this model cannot run here"
        )
    if told.raw.get("rope_type") != "proportional":
        raw = {"rope_parameters": told.raw, "max_position_embeddings": context}
        return read_rope(ConfigReader(raw, told.source), head_dim, context, theta=theta)
    share = told.number("partial_rotary_factor", 1.0)
    return RopeConfig(
        told.number("rope_theta", theta),
        head_dim,
        "proportional",
        told.number("factor", 1.0),
        rotated_pairs=int(share * head_dim // 2),
    )


def _by_layer(reader: ConfigReader, key: str, usual: Any, layers: int) -> list[float]:
    """A number of each layer, listed, or one for all of them."""
    told = reader.raw.get(key, usual)
    reader.read.add(key)
    told = usual if told is None else told
    listed = told if isinstance(told, list) else [told] * layers
    if len(listed) != layers or any(isinstance(n, bool) or not isinstance(n, int | float) for n in listed):
        raise ConfigError(
            f"{reader.source}: expected {key} to be a number, or one for each of {layers} layers, found "
            f"{told!r}; correct the file, or fetch it again"
        )
    return list(listed)


CARRYING: dict[str, FamilyReader] = {
    "gemma3n_text": FamilyReader(
        _gemma3n,
        "Gemma 3n E2B and E4B, text",
        "norms on q, k and v, a rope of their own in windows, sliding window, keys of earlier layers",
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
"""Every family of this kind, by model_type."""
