"""DeepSeek and its relatives: multi-head latent attention, whose keys and values are projected from one
low-rank latent per token.

Border: never imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from .....store.errors import ConfigError
from ..composed import ComposedArchitecture
from ..families import read_activation, yarn_magnitude
from ..hybrids.mamba_families import none_if_one
from ..mixers import ChannelMixerSpec, ExpertsSpec, LatentAttentionSpec
from ..transformer import TRY_TRANSFORMERS, ConfigReader, RopeConfig
from . import builders as build
from .builders import TensorShapes, family
from .experts import DEEPSEEK_SPELLING, ExpertDefaults, is_listed_dense, sigmoid_experts


@dataclass(frozen=True)
class _LatentDefaults:
    """Sizes of latent attention for keys that a config.json leaves out."""

    key_size: int = 128
    """Number of key entries of a head without rope (config key qk_nope_head_dim)."""
    rope_size: int = 64
    """Number of key entries with rope, which all heads share (config key qk_rope_head_dim)."""
    value_size: int | None = 128
    """Number of value entries of a head (config key v_head_dim); None divides hidden_size by the number of
    heads."""
    rank: int = 512
    """Width of the latent of keys and values (config key kv_lora_rank)."""
    query_rank: int = 1536
    """Width of the latent of queries (config key q_lora_rank)."""


def _latent_decoder(
    config: ConfigReader,
    channel_mixer: ChannelMixerSpec | Callable[[int], ChannelMixerSpec],
    *,
    max_positions: int,
    defaults: _LatentDefaults = _LatentDefaults(),
    may_interleave: bool = True,
    factor: float = 1.0,
    **options: Any,
) -> ComposedArchitecture:
    """Architecture of a decoder with latent attention (DeepSeek-V2, 2024, section 2.1).

    Arguments:
        config: The config.json.
        channel_mixer: Channel mixer of all layers, or a function (number of a layer) -> its channel mixer.
        max_positions: Default of max_position_embeddings.
        defaults: Sizes for keys that the config leaves out.
        may_interleave: Whether rope_interleave is read, with default true; otherwise rope never rotates
            neighbouring entries.
        factor: Factor of the attention output.
        options: Further arguments of `decoder`.
    """
    heads = config.integer("num_attention_heads")
    key_size = config.integer("qk_nope_head_dim", defaults.key_size)
    rope_size = config.integer("qk_rope_head_dim", defaults.rope_size)
    spec = LatentAttentionSpec(
        heads,
        key_size,
        rope_size,
        config.integer("v_head_dim", defaults.value_size or config.integer("hidden_size") // heads),
        config.integer("kv_lora_rank", defaults.rank),
        # Null in DeepSeek-V2 Lite, which projects queries directly.
        config.optional_integer("q_lora_rank", defaults.query_rank),
        has_bias=build.attention_bias(config),
        # Queries and keys are both multiplied by the magnitude, so scores are multiplied by its square.
        scale=(key_size + rope_size) ** -0.5 * _rope_magnitude(config) ** 2,
        factor=factor,
    )
    # DeepSeek rotates neighbouring entries; rope_interleave=false rotates entries i and i + dim / 2.
    interleaved = may_interleave and config.flag("rope_interleave", True)

    def mixer(rope: RopeConfig | None, window: int | None, layer: int) -> LatentAttentionSpec:
        return replace(spec, rope=rope)

    return build.decoder(
        config,
        mixer,
        channel_mixer,
        context=build.PositionContext(
            max_positions, rope=build.rope_everywhere(interleaved=interleaved), head_dim=rope_size
        ),
        **options,
    )


def _rope_magnitude(config: ConfigReader) -> float:
    """Factor of queries and of keys in a model with YaRN and mscale_all_dim; 1 in other models."""
    parameters = config.mapping("rope_scaling") or config.mapping("rope_parameters")
    rope = ConfigReader(parameters, f"{config.source}: rope_parameters")
    kind = rope.text("rope_type", rope.text("type", "default"))
    share = rope.optional_number("mscale_all_dim")
    return yarn_magnitude(rope.number("factor"), share) if share and kind != "default" else 1.0


def _require_head_dim(config: ConfigReader) -> None:
    """Check that the config keys head_dim and qk_rope_head_dim agree, if both are present.

    transformers computes rotation angles for head_dim entries if config.json has that key. DeepSeek-V3 and
    Kimi K2 do not have it; transformers writes the width of the shared keys.

    Raises:
        ConfigError: The two widths differ.
    """
    if "head_dim" not in config.raw:
        return
    equal_share = config.integer("hidden_size") // config.integer("num_attention_heads")
    rotated = config.optional_integer("head_dim") or equal_share
    width = config.integer("qk_rope_head_dim", 64)
    if rotated != width:
        raise ConfigError(
            f"{config.source}: expected head_dim, from which transformers computes rotation angles, to equal "
            f"qk_rope_head_dim ({width}), found {rotated}; remove head_dim from the file"
        )


def _dense_first(
    config: ConfigReader,
    default: int,
    mlp: Callable[[], ChannelMixerSpec],
    experts: Callable[[], ChannelMixerSpec],
) -> Callable[[int], ChannelMixerSpec]:
    """Make a function (number of a layer) -> its channel mixer: an MLP in the first layers, then experts.

    Arguments:
        config: The config.json.
        default: Default of first_k_dense_replace, the number of layers with an MLP.
        mlp: Function that builds the MLP; it is not called if no layer has one.
        experts: Function that builds the experts; it is not called if no layer has them.
    """
    n_dense = config.integer("first_k_dense_replace", default, least=0)
    return lambda layer: mlp() if layer < n_dense else experts()


def _grouped_experts(config: ConfigReader, *, bias: bool) -> ExpertsSpec:
    """Spec of experts that are chosen by softmax scores (DeepSeek-V2, 2024, section 2.2.2).

    With topk_method "group_limited_greedy" only experts of the groups with the largest scores are chosen.

    Arguments:
        config: The config.json.
        bias: Whether experts have biases.
    """
    width, method = config.integer("moe_intermediate_size", 1407), config.text("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise ConfigError(
            f"{config.source}: expected topk_method to be 'greedy' or 'group_limited_greedy', found "
            f"{method!r}; {TRY_TRANSFORMERS}"
        )
    # Group keys may be present but unused with topk_method "greedy".
    is_grouped = method != "greedy"
    return ExpertsSpec(
        config.integer("n_routed_experts", config.integer("num_experts", 64)),
        config.integer("num_experts_per_tok"),
        width,
        read_activation(config),
        routing="chosen of softmax",
        shared_size=width * config.integer("n_shared_experts", 2),
        groups=config.integer("n_group") if is_grouped else 1,
        chosen_groups=config.integer("topk_group") if is_grouped else 1,
        routed_factor=config.number("routed_scaling_factor", 1.0),
        has_bias=bias,
    )


@family("deepseek_v2", "DeepSeek-V2", follows_is_causal=False)
def deepseek_v2(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of DeepSeek-V2: latent attention; softmax-routed experts."""
    bias = config.flag("mlp_bias", False)
    return _latent_decoder(
        config,
        _dense_first(
            config, 0, lambda: build.mlp(config, bias=bias), lambda: _grouped_experts(config, bias=bias)
        ),
        eps=config.number("rms_norm_eps", 1e-6),
        max_positions=2048,
        spelling=DEEPSEEK_SPELLING,
    )


@family("deepseek_v3", "DeepSeek-V3 and R1", follows_is_causal=False)
def deepseek_v3(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of DeepSeek-V3 and R1: latent attention; sigmoid-routed experts in groups."""
    _require_head_dim(config)

    def experts() -> ExpertsSpec:
        defaults = ExpertDefaults(count=256, chosen=8, width=2048, groups=(8, 4), factor=2.5)
        return sigmoid_experts(config, defaults)

    return _latent_decoder(
        config,
        _dense_first(config, 3, lambda: build.mlp(config), experts),
        eps=config.number("rms_norm_eps", 1e-6),
        max_positions=4096,
        spelling=DEEPSEEK_SPELLING,
    )


@family("glm4_moe_lite", "GLM 4.7 Flash", follows_is_causal=False)
def glm4_moe_lite(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of GLM 4.7 Flash: latent attention; an MLP in the first layer or where mlp_layer_types
    lists it, then experts."""

    def channel_mixer(layer: int) -> ChannelMixerSpec:
        listed = is_listed_dense(config, layer)
        if layer < 1 if listed is None else listed:
            return build.mlp(config)
        return sigmoid_experts(config, ExpertDefaults(count=64, chosen=4, width=1536, factor=1.8))

    return _latent_decoder(
        config,
        channel_mixer,
        defaults=_LatentDefaults(key_size=192, value_size=256, query_rank=768),
        eps=config.number("rms_norm_eps", 1e-5),
        max_positions=202752,
        spelling=DEEPSEEK_SPELLING,
    )


@family("minicpm3", "MiniCPM 3", follows_is_causal=False)
def minicpm3(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of MiniCPM 3: factors of the embedding, of each layer's outputs (by the number of layers),
    and of the logits (by the width) (Hu et al., MiniCPM, 2024, section 3)."""
    layers, hidden = config.integer("num_hidden_layers"), config.integer("hidden_size")
    depth = config.optional_number("scale_depth", 1.4)
    residual = 1.0 if depth is None else depth / math.sqrt(layers)
    base = config.optional_integer("dim_model_base", 256) or hidden
    return _latent_decoder(
        config,
        build.mlp(config, bias=config.flag("mlp_bias", False), factors=(1.0, residual)),
        defaults=_LatentDefaults(key_size=64, rope_size=32, value_size=None, rank=256, query_rank=768),
        may_interleave=False,
        factor=residual,
        eps=config.number("rms_norm_eps", 1e-5),
        max_positions=32768,
        embedding_scale=none_if_one(config.number("scale_emb", 12.0)),
        logit_factor=base / hidden,
        tied=True,
    )


@family("youtu", "Youtu-LLM", follows_is_causal=False)
def youtu(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of Youtu-LLM: latent attention and a dense MLP."""
    _require_head_dim(config)
    return _latent_decoder(
        config,
        build.mlp(config),
        eps=config.number("rms_norm_eps", 1e-6),
        max_positions=131072,
        tied=True,
    )
