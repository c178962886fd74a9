"""Qwen 1 to 3 with dense MLPs or experts, and Dream.

Border: never imports torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from .....store.errors import ConfigError
from ..composed import ComposedArchitecture
from ..layer_tensors import LLAMA, ExpertNames
from ..mixers import ChannelMixerSpec, ExpertsSpec, QkNorm
from ..transformer import ConfigReader
from . import builders as build
from .builders import TensorShapes, family
from .experts import qwen_experts
from .gpt import GPT2_SPELLING

QWEN1_SPELLING = replace(GPT2_SPELLING, positions="", mlp_parts=("w2", "w1", "c_proj"), is_transposed=False)


@family(
    "qwen",
    "Qwen 1",
    aliases={"head_dim": "kv_channels", "rope_theta": "rotary_emb_base"},
    always={"no_bias": True, "rotary_pct": 1.0, "scale_attn_weights": True},
)
def qwen(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of Qwen 1 as computed by the code in its repositories on the Hugging Face hub, where
    intermediate_size is the sum of the widths of gate and up projection."""
    both = config.integer("intermediate_size")
    if both % 2:
        raise ConfigError(
            f"{config.source}: expected an intermediate_size of 2 projections together, found {both}; "
            "correct the file, or fetch it again"
        )
    return build.decoder(
        config,
        build.attention(config, qkv_bias=True, layout="by part"),
        build.mlp(config, width=both // 2),
        context=build.PositionContext(
            8192,  # For longer prompts transformers scales queries by log(position) and stretches rope.
            longest=config.integer("seq_length", 8192),
        ),
        eps=config.number("layer_norm_epsilon", 1e-6),
        spelling=QWEN1_SPELLING,
    )


@family("qwen2", "Qwen 2 and 2.5", reports_unread_keys=True)
def qwen2(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of Qwen 2: Llama with biases of queries, keys and values, and windows in the upper
    layers."""
    return build.decoder(
        config,
        build.attention(config, kv_heads=32, qkv_bias=True),
        build.mlp(config),
        context=build.PositionContext(32768, windows=build.upper_windows(config)),
        eps=config.number("rms_norm_eps", 1e-6),
    )


@family("qwen3", "Qwen 3", reports_unread_keys=True)
def qwen3(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of Qwen 3: Qwen 2 with norms of queries and keys instead of biases."""
    eps, bias = config.number("rms_norm_eps", 1e-6), build.attention_bias(config)
    width = config.integer("head_dim", 128)
    return build.decoder(
        config,
        build.attention(config, width=width, kv_heads=32, bias=bias, qk_norm=QkNorm("head", eps)),
        build.mlp(config),
        context=build.PositionContext(32768, windows=build.upper_windows(config)),
        eps=eps,
    )


@family("qwen2_5_vl_text", "Qwen2-VL and Qwen2.5-VL, their text model")
@family("qwen2_vl_text", "Qwen2-VL and Qwen2.5-VL, their text model")
def qwen2_vl_text(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of the text models of Qwen2-VL and Qwen2.5-VL, with plain rope (see towers.py)."""
    return build.decoder(
        config,
        build.attention(config, kv_heads=8, qkv_bias=True),
        build.mlp(config),
        context=build.PositionContext(
            32768,
            rope=build.rope_everywhere(1000000.0),
            windows=build.windows_by_type(config, build.full_then_windows(80), has_flag=True),
        ),
        eps=config.number("rms_norm_eps", 1e-5),
    )


@family("qwen3_vl_text", "Qwen3-VL, its text model")
def qwen3_vl_text(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of the text model of Qwen3-VL, with plain rope (see towers.py)."""
    eps = config.number("rms_norm_eps", 1e-6)
    return build.decoder(
        config,
        build.attention(
            config, head_dim=128, kv_heads=32, bias=build.attention_bias(config), qk_norm=QkNorm("head", eps)
        ),
        build.mlp(config),
        context=build.PositionContext(128000, rope=build.rope_everywhere(500000.0)),
        eps=eps,
    )


def _sparse(config: ConfigReader, experts: Callable[[], ExpertsSpec]) -> Callable[[int], ChannelMixerSpec]:
    """Make a function (number of a layer) -> its channel mixer: experts in every decoder_sparse_step-th
    layer that the config key mlp_only_layers does not list, else an MLP. experts: function that builds the
    experts."""
    dense_layers = config.raw.get("mlp_only_layers") or []

    def mixer(layer: int) -> ChannelMixerSpec:
        if layer in dense_layers or (layer + 1) % config.integer("decoder_sparse_step", 1):
            return build.mlp(config)
        return experts()

    return mixer


@family("qwen2_moe", "Qwen 1.5 and 2 MoE")
def qwen2_moe(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of Qwen 1.5 and 2 MoE: softmax-routed experts and a gated shared expert."""

    def types(config: ConfigReader, layers: int) -> list[str]:
        # Unlike Qwen 2: windows in even layers before max_window_layers.
        end = config.integer("max_window_layers", 28, least=0)
        has_window = [layer % 2 == 0 and layer < end for layer in range(layers)]
        return ["sliding_attention" if flag else "full_attention" for flag in has_window]

    return build.decoder(
        config,
        build.attention(config, kv_heads=16, qkv_bias=config.flag("qkv_bias", True)),
        _sparse(config, lambda: qwen_experts(config, count=60, chosen=4, width=1408, shared=5632)),
        context=build.PositionContext(32768, windows=build.windows_by_type(config, types, has_flag=True)),
        eps=config.number("rms_norm_eps", 1e-6),
        spelling=replace(
            LLAMA,
            experts=ExpertNames(shared="mlp.shared_expert.", shared_gate="shared_expert_gate"),
        ),
    )


@family("qwen3_moe", "Qwen 3 MoE")
def qwen3_moe(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of Qwen 3 MoE: Qwen 3 with softmax-routed experts, without a shared expert."""
    eps = config.number("rms_norm_eps", 1e-6)
    if config.flag("use_sliding_window", False):
        windows = build.window_everywhere(config, 4096)
    else:
        windows = build.windows_by_type(config, build.every_layer_full, has_flag=True)
    return build.decoder(
        config,
        build.attention(config, kv_heads=4, bias=build.attention_bias(config), qk_norm=QkNorm("head", eps)),
        _sparse(config, lambda: qwen_experts(config, count=128, chosen=8, width=768)),
        context=build.PositionContext(32768, windows=windows),
        eps=eps,
    )


@family("Dream", "Dream 7B", never=("use_mrope", "use_sliding_window"))
def dream(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of Dream: a Qwen 2.5 that was trained further as a masked diffusion model (Ye et al.,
    Dream 7B, 2025); reference is the code in its repository on the Hugging Face hub."""
    return build.decoder(
        config,
        build.attention(config, qkv_bias=True),
        build.mlp(config),
        context=build.PositionContext(131072, looks_ahead=True),
        eps=config.number("rms_norm_eps", 1e-6),
    )
