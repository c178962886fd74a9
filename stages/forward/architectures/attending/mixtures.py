"""Mixture-of-experts decoders whose developers have no dense family here: gpt-oss, Trinity, dots, JetMoE,
Kolibri, Mellum and Solar.

Border: never imports torch.
"""

from __future__ import annotations

import math
from dataclasses import replace

from ..composed import ComposedArchitecture
from ..families import read_activation
from ..hybrids.mamba_families import none_if_one
from ..layer_tensors import LLAMA, ExpertNames
from ..mixers import ChannelMixerSpec, ExpertsSpec, GatedAttentionSpec, QkNorm, RoutedAttentionSpec
from ..transformer import ConfigReader, RopeConfig
from . import builders as build
from .builders import TensorShapes, family
from .experts import (
    DEEPSEEK_SPELLING,
    ExpertDefaults,
    ExpertKeys,
    is_listed_dense,
    qwen_experts,
    sigmoid_experts,
)

GPT_OSS_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


@family("gpt_oss", "gpt-oss 20B and 120B")
def gpt_oss(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of gpt-oss: attention sinks; experts with biases, whose gate and up projections are
    clamped."""
    experts = ExpertsSpec(
        config.integer("num_local_experts", config.integer("num_experts", 128)),
        config.integer("num_experts_per_tok", 4),
        config.integer("intermediate_size", 2880),
        "silu",
        routing="softmax of chosen",
        is_listed=False,
        has_routed_bias=True,
        limits=(config.number("swiglu_alpha", 1.702), config.number("swiglu_limit", 7.0)),
    )
    return build.decoder(
        config,
        build.attention(
            config, head_dim=64, kv_heads=8, bias=config.flag("attention_bias", True), attention_sinks=True
        ),
        experts,
        context=build.PositionContext(
            131072,
            rope=build.rope_everywhere(150000.0, default=GPT_OSS_YARN),
            windows=build.windows_by_type(config, build.every_nth_full(2), 128),
        ),
        eps=config.number("rms_norm_eps", 1e-5),
        spelling=replace(
            LLAMA,
            experts=ExpertNames(
                router="router", parts=("experts.gate_up_proj", "experts.down_proj"), ending=""
            ),
        ),
    )


@family("afmoe", "Trinity")
def afmoe(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of Trinity (AFMoE): gated heads; rope only in layers with a window; with mup_enabled,
    embeddings times sqrt(hidden_size)."""
    eps, bias = config.number("rms_norm_eps", 1e-5), build.attention_bias(config)
    is_scaled = config.flag("mup_enabled", False)
    heads = build.attention(config, head_dim=128, bias=bias, qk_norm=QkNorm("head", eps))

    def channel_mixer(layer: int) -> ChannelMixerSpec:
        if layer < config.integer("num_dense_layers", 1, least=0):
            return build.mlp(config)
        return sigmoid_experts(
            config,
            ExpertDefaults(count=64, chosen=6, width=1408, shared=2),
            keys=ExpertKeys(count="num_experts", shared="num_shared_experts", factor="route_scale"),
            # Trinity has no norm_topk_prob and always normalises the weights.
            sums_to_one=None,
        )

    return build.decoder(
        config,
        GatedAttentionSpec(**vars(heads), has_gate_projection=True),
        channel_mixer,
        context=build.PositionContext(
            16384,
            rope=build.rope_in_windows(),
            windows=build.windows_by_type(
                config, build.every_nth_full(4, "global_attn_every_n_layers"), 1024
            ),
        ),
        norms="around",
        eps=eps,
        embedding_scale=none_if_one(math.sqrt(config.integer("hidden_size")) if is_scaled else 1.0),
        spelling=replace(
            LLAMA,
            ln2="pre_mlp_layernorm",
            ln2_post="post_mlp_layernorm",
            experts=ExpertNames(router="router.gate", shared="mlp.shared_experts.", correction="expert_bias"),
        ),
    )


@family("dots1", "dots.llm1")
def dots1(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of dots.llm1: norms of queries and keys, an MLP in the first layers, then sigmoid-routed
    experts."""
    eps = config.number("rms_norm_eps", 1e-6)

    def channel_mixer(layer: int) -> ChannelMixerSpec:
        if layer < config.integer("first_k_dense_replace", 0, least=0):
            return build.mlp(config)
        # transformers has no defaults for the numbers of experts of dots.llm1.
        defaults = ExpertDefaults(count=None, chosen=None, width=1408, shared=None)
        return sigmoid_experts(config, defaults, sums_to_one=False)

    return build.decoder(
        config,
        build.attention(config, kv_heads=32, bias=build.attention_bias(config), qk_norm=QkNorm("head", eps)),
        channel_mixer,
        context=build.PositionContext(
            2048, windows=build.windows_by_type(config, build.full_then_windows(62))
        ),
        eps=eps,
        spelling=DEEPSEEK_SPELLING,
    )


@family(
    "jetmoe",
    "JetMoE 8B",
    # transformers ignores rms_norm_eps in layers and uses 1e-6 there.
    always={"rms_norm_eps": 1e-6},
    aliases={"head_dim": "kv_channels", "hidden_act": "activation_function"},
    follows_is_causal=False,
)
def jetmoe(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of JetMoE: attention consists of routed experts, too; each expert has num_key_value_heads
    query heads."""
    count, top_k = config.integer("num_local_experts", 8), config.integer("num_experts_per_tok", 2)
    kv_heads = config.integer("num_key_value_heads", 16)
    # At each token, the heads of its top-k experts attend, num_key_value_heads each.
    heads = build.attention(config, heads=kv_heads * top_k, head_dim=128, num_kv_heads=kv_heads)

    def mixer(rope: RopeConfig | None, window: int | None, layer: int) -> RoutedAttentionSpec:
        return RoutedAttentionSpec(count, top_k, kv_heads, heads.head_dim, rope)

    experts = ExpertsSpec(
        count,
        top_k,
        config.integer("intermediate_size", 5632),
        read_activation(config),
        routing="softmax of chosen",
        is_listed=False,
        has_output_bias=True,
    )
    return build.decoder(
        config,
        mixer,
        experts,
        context=build.PositionContext(4096, head_dim=heads.head_dim),
        eps=config.number("rms_norm_eps", 1e-6),
        tied=True,
        spelling=replace(
            LLAMA,
            attention="self_attention.",
            experts=ExpertNames(
                prefix="mlp.", router="router.layer", parts=("input_linear", "output_linear")
            ),
        ),
    )


@family("kolibri1", "Kolibri 1")
def kolibri1(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of Kolibri 1: experts chosen by router logits plus a correction bias and weighed by
    sigmoids; rope only in layers with a window."""
    eps = config.number("rms_norm_eps", 1e-6)
    experts = ExpertsSpec(
        config.integer("num_experts", config.integer("num_local_experts", 384)),
        config.integer("num_experts_per_tok", 6),
        config.integer("moe_intermediate_size", 512),
        read_activation(config),
        routing="sigmoid of chosen",
        shared_size=config.integer("shared_expert_intermediate_size", 512),
        sums_to_one=config.flag("norm_topk_prob", False),
        # transformers adds no epsilon to the sum of the weights.
        sum_eps=0.0,
    )
    return build.decoder(
        config,
        build.attention(config, head_dim=128, kv_heads=4, qk_norm=QkNorm("head", eps)),
        experts,
        context=build.PositionContext(
            262144,
            rope=build.rope_in_windows(),
            windows=build.windows_by_type(config, build.every_nth_full(5), 513),
        ),
        norms="around",
        eps=eps,
        spelling=replace(
            DEEPSEEK_SPELLING,
            ln1_post="post_attn_norm",
            ln2_post="post_ffn_norm",
            experts=replace(DEEPSEEK_SPELLING.experts, correction="/moe.router.expert_bias"),
        ),
    )


@family("mellum", "Mellum 2")
def mellum(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of Mellum 2: different ropes in windows and in full attention; softmax-routed experts."""
    eps = config.number("rms_norm_eps", 1e-6)

    def channel_mixer(layer: int) -> ChannelMixerSpec:
        if is_listed_dense(config, layer):
            return build.mlp(config)
        return qwen_experts(config, count=64, chosen=8, width=896, sums_to_one=True)

    return build.decoder(
        config,
        build.attention(
            config, head_dim=128, kv_heads=4, bias=build.attention_bias(config), qk_norm=QkNorm("head", eps)
        ),
        channel_mixer,
        context=build.PositionContext(
            131072,
            rope=build.two_ropes(500000.0, 10000.0),
            windows=build.windows_by_type(config, build.every_layer_full, 1024),
        ),
        eps=eps,
    )


@family("solar_open", "Solar Open")
def solar_open(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of Solar Open: sigmoid-routed experts in all layers."""
    return build.decoder(
        config,
        build.attention(config, head_dim=128, kv_heads=8, qkv_bias=config.flag("attention_bias", False)),
        lambda layer: sigmoid_experts(config, ExpertDefaults(count=128, chosen=8, width=1280)),
        context=build.PositionContext(131072, rope=build.rope_everywhere(1000000.0)),
        eps=config.number("rms_norm_eps", 1e-5),
        spelling=DEEPSEEK_SPELLING,
    )
