"""Cohere's Command models (parallel layers, layer norms without biases, scaled logits), and GLM.

GLM 4.7 Flash is in deepseek.py, as it has latent attention.

Border: never imports torch.
"""

from __future__ import annotations

from dataclasses import replace

from ..composed import ComposedArchitecture
from ..layer_tensors import LLAMA
from ..mixers import ChannelMixerSpec, QkNorm
from ..transformer import ConfigReader
from . import builders as build
from .builders import TensorShapes, family
from .experts import DEEPSEEK_SPELLING, ExpertDefaults, sigmoid_experts


@family("cohere", "Command R", never=("use_qk_norm",))
def cohere(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of Command R: parallel attention and MLP with one norm, rope of neighbouring entries."""
    return build.decoder(
        config,
        build.attention(config, bias=build.attention_bias(config)),
        build.mlp(config),
        context=build.PositionContext(8192, rope=build.rope_everywhere(500000.0, interleaved=True)),
        parallel_norms=1,
        norm_type="layer",
        # Cohere's layer norms have weights only.
        norm_biases="none",
        eps=config.number("layer_norm_eps", 1e-5),
        logit_factor=config.number("logit_scale", 0.0625),
        tied=True,
    )


@family("cohere2", "Command R7B and A")
def cohere2(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of Command R7B (Cohere 2): rope only in layers with a sliding window."""
    return build.decoder(
        config,
        build.attention(config, bias=build.attention_bias(config)),
        build.mlp(config),
        context=build.PositionContext(
            8192,
            rope=build.rope_in_windows(interleaved=True),
            windows=build.windows_by_type(config, build.every_nth_full(4, "sliding_window_pattern")),
        ),
        parallel_norms=1,
        norm_type="layer",
        norm_biases="none",
        eps=config.number("layer_norm_eps", 1e-5),
        logit_factor=config.number("logit_scale", 0.0625),
        tied=True,
    )


FUSED_MLP_PARTS = ("gate_up_proj", "down_proj")
"""Tensor names of the fused gate and up projection, and of the down projection."""


@family("glm", "GLM 4, 9B")
def glm(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of GLM 4: rope of the first half of each head, fused gate and up projection."""
    return build.decoder(
        config,
        build.attention(config, head_dim=128, kv_heads=2, qkv_bias=config.flag("attention_bias", True)),
        build.mlp(config, is_fused=True),
        context=build.PositionContext(131072, rope=build.rope_everywhere(share=0.5, interleaved=True)),
        eps=config.number("rms_norm_eps", 1.5625e-07),
        spelling=replace(LLAMA, mlp_parts=FUSED_MLP_PARTS),
    )


@family("glm4", "GLM 4, 0414")
def glm4(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of GLM 4 0414: as `glm`, with norms before and after each half of a layer."""
    return build.decoder(
        config,
        build.attention(config, head_dim=128, kv_heads=2, qkv_bias=config.flag("attention_bias", True)),
        build.mlp(config, is_fused=True),
        context=build.PositionContext(131072, rope=build.rope_everywhere(share=0.5, interleaved=True)),
        norms="around",
        eps=config.number("rms_norm_eps", 1.5625e-07),
        spelling=replace(
            LLAMA,
            ln1_post="post_self_attn_layernorm",
            # Llama's name of the second pre-norm, though there is a norm after attention as well.
            ln2="post_attention_layernorm",
            ln2_post="post_mlp_layernorm",
            mlp_parts=FUSED_MLP_PARTS,
        ),
    )


@family("glm4_moe", "GLM 4.5 and 4.6")
def glm4_moe(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of GLM 4.5: an MLP in the first layers, then sigmoid-routed and shared experts."""
    eps = config.number("rms_norm_eps", 1e-5)
    qk_norm = QkNorm("head", eps) if config.flag("use_qk_norm", False) else None

    def channel_mixer(layer: int) -> ChannelMixerSpec:
        if layer < config.integer("first_k_dense_replace", 1, least=0):
            return build.mlp(config)
        return sigmoid_experts(config, ExpertDefaults(count=128, chosen=8, width=1408))

    return build.decoder(
        config,
        build.attention(config, kv_heads=8, qkv_bias=config.flag("attention_bias", False), qk_norm=qk_norm),
        channel_mixer,
        context=build.PositionContext(131072, rope=build.rope_everywhere(share=0.5)),
        eps=eps,
        spelling=DEEPSEEK_SPELLING,
    )
