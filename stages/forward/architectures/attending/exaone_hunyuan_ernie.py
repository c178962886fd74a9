"""Decoders of LG (EXAONE), Tencent (Hunyuan) and Baidu (ERNIE 4.5).

Border: never imports torch.
"""

from __future__ import annotations

from dataclasses import replace

from ..composed import ComposedArchitecture
from ..families import read_activation
from ..layer_tensors import LLAMA, ExpertNames
from ..mixers import ChannelMixerSpec, ExpertsSpec, QkNorm
from ..transformer import ConfigReader, RopeConfig
from . import builders as build
from .builders import TensorShapes, Windows, family
from .experts import DEEPSEEK_SPELLING, ExpertDefaults, ExpertKeys, is_listed_dense, sigmoid_experts
from .qwen import QWEN1_SPELLING


@family(
    "exaone",
    "EXAONE 3 and 3.5",
    aliases={"num_hidden_layers": "num_layers", "hidden_act": "activation_function"},
)
def exaone(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of EXAONE 3 as computed by the code in its repositories on the Hugging Face hub, not by
    transformers."""
    return build.decoder(
        config,
        build.attention(config),
        build.mlp(config),
        context=build.PositionContext(2048),
        eps=config.number("layer_norm_epsilon", 1e-5),
        spelling=replace(
            QWEN1_SPELLING,
            attention="attn.attention.",
            attention_in="",
            attention_out="out_proj",
            mlp_parts=("c_fc_0", "c_fc_1", "c_proj"),
        ),
    )


@family("exaone4", "EXAONE 4")
def exaone4(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of EXAONE 4: rope only in layers with a sliding window; in all layers of a model without
    windows."""
    eps = config.number("rms_norm_eps", 1e-5)
    return build.decoder(
        config,
        build.attention(config, kv_heads=32, qk_norm=QkNorm("head", eps)),
        build.mlp(config),
        context=build.PositionContext(
            2048,
            rope=build.rope_in_windows(unless_none=True),
            windows=build.windows_by_type(config, build.every_nth_full(4, "sliding_window_pattern")),
        ),
        norms="after",
        eps=eps,
    )


@family("exaone_moe", "K-EXAONE")
def exaone_moe(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of K-EXAONE: rope only in layers with a window; sigmoid-routed experts."""
    eps = config.number("rms_norm_eps", 1e-5)

    def channel_mixer(layer: int) -> ChannelMixerSpec:
        is_dense = is_listed_dense(config, layer)
        if is_dense is None:
            is_dense = layer < config.integer("first_k_dense_replace", 1, least=0)
        if is_dense:
            return build.mlp(config)
        return sigmoid_experts(
            config,
            ExpertDefaults(count=64, chosen=8, width=1024, factor=2.5),
            keys=ExpertKeys(count="num_experts", shared="num_shared_experts"),
        )

    return build.decoder(
        config,
        build.attention(config, kv_heads=32, qk_norm=QkNorm("head", eps)),
        channel_mixer,
        context=build.PositionContext(
            2048,
            rope=build.rope_in_windows(unless_none=True),
            windows=build.windows_by_type(config, build.every_nth_full(4, "sliding_window_pattern")),
        ),
        eps=eps,
        spelling=replace(
            DEEPSEEK_SPELLING,
            experts=replace(DEEPSEEK_SPELLING.experts, correction="e_score_correction_bias"),
        ),
    )


# -- Hunyuan

HUNYUAN_SPELLING = replace(LLAMA, attention_norms=("query_layernorm", "key_layernorm"))


def _stretched_by_alpha(
    config: ConfigReader, head_dim: int, max_positions: int | None, windows: Windows
) -> tuple[RopeConfig, ...]:
    """Rope of each layer of Hunyuan, in which rope_type "dynamic" with a key alpha means a larger base for
    all prompt lengths."""
    parameters = config.mapping("rope_scaling") or config.mapping("rope_parameters")
    if parameters.get("rope_type", parameters.get("type")) != "dynamic" or not parameters.get("alpha"):
        return (build.rope()(config, head_dim, max_positions),) * len(windows)
    section = ConfigReader(parameters, f"{config.source}: rope_parameters")
    theta = section.number("rope_theta", config.number("rope_theta", 10000.0))
    # NTK-aware scaling with a fixed factor: theta * alpha^(d / (d - 2)).
    stretched = theta * section.number("alpha") ** (head_dim / (head_dim - 2))
    return (RopeConfig(stretched, head_dim),) * len(windows)


@family("hunyuan_v1_dense", "Hunyuan, dense")
def hunyuan_v1_dense(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of Hunyuan: queries and keys are normalised after rope."""
    eps = config.number("rms_norm_eps", 1e-5)
    return build.decoder(
        config,
        build.attention(
            config, bias=build.attention_bias(config), qk_norm=QkNorm("head", eps, after_rope=True)
        ),
        build.mlp(config),
        context=build.PositionContext(2048, rope=_stretched_by_alpha),
        eps=eps,
        spelling=HUNYUAN_SPELLING,
    )


@family("hunyuan_v1_moe", "Hunyuan A13B")
def hunyuan_v1_moe(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of Hunyuan with experts: routed experts and a shared expert of the same width in every
    layer; moe_topk may be a list with the number of experts per token for each layer."""
    eps = config.number("rms_norm_eps", 1e-5)

    def experts(layer: int) -> ExpertsSpec:
        width, chosen = config.integer("intermediate_size"), config.raw.get("moe_topk", 1)
        if isinstance(chosen, list) and len(chosen) == build.layers_of(config):
            chosen = chosen[layer]
        top_k = ConfigReader({"moe_topk": chosen}, config.source).integer("moe_topk", 1)
        return ExpertsSpec(
            config.integer("num_experts", config.integer("num_local_experts", 1)),
            config.integer("num_experts_per_tok", top_k),
            width,
            read_activation(config),
            routing="softmax of chosen",
            shared_size=width,
        )

    return build.decoder(
        config,
        build.attention(
            config, bias=build.attention_bias(config), qk_norm=QkNorm("head", eps, after_rope=True)
        ),
        experts,
        context=build.PositionContext(2048, rope=_stretched_by_alpha),
        eps=eps,
        spelling=replace(
            HUNYUAN_SPELLING,
            experts=replace(HUNYUAN_SPELLING.experts, router="gate.wg", shared="mlp.shared_mlp."),
        ),
    )


@family("hy_v3", "Hunyuan 3")
def hy_v3(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of Hunyuan 3: sigmoid-routed experts in all layers but the first."""
    eps, bias = config.number("rms_norm_eps", 1e-5), config.flag("mlp_bias", False)

    def channel_mixer(layer: int) -> ChannelMixerSpec:
        listed = is_listed_dense(config, layer)
        if layer < 1 if listed is None else listed:
            return build.mlp(config, bias=bias)
        return sigmoid_experts(
            config,
            ExpertDefaults(count=192, chosen=8, width=1536, factor=2.826),
            keys=ExpertKeys(count="num_experts", shared="num_shared_experts", factor="router_scaling_factor"),
            sums_to_one=None,
            bias=bias,
        )

    return build.decoder(
        config,
        build.attention(
            config, head_dim=128, kv_heads=8, bias=build.attention_bias(config), qk_norm=QkNorm("head", eps)
        ),
        channel_mixer,
        context=build.PositionContext(131072, rope=build.rope_everywhere(11158840.0)),
        eps=eps,
        spelling=replace(
            LLAMA,
            experts=ExpertNames(router="router.gate", shared="mlp.shared_mlp.", correction="expert_bias"),
        ),
    )


# -- ERNIE 4.5


@family("ernie4_5", "ERNIE 4.5, 0.3B")
def ernie4_5(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of ERNIE 4.5, dense: rope of neighbouring entries."""
    bias = config.flag("use_bias", False)
    return build.decoder(
        config,
        build.attention(config, head_dim=128, kv_heads=2, bias=bias),
        build.mlp(config, bias=bias),
        context=build.PositionContext(131072, rope=build.rope_everywhere(500000.0, interleaved=True)),
        eps=config.number("rms_norm_eps", 1e-5),
        tied=True,
    )


@family("ernie4_5_moe", "ERNIE 4.5 with experts")
def ernie4_5_moe(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of ERNIE 4.5 with experts: experts in some layers, chosen by softmax scores plus a
    correction bias, and shared experts."""
    bias = config.flag("use_bias", False)
    start = config.integer("moe_layer_start_index", 1, least=0)
    # moe_layer_end_index = -1 means the last layer.
    last = build.layers_of(config) - 1
    if config.raw.get("moe_layer_end_index", -1) != -1:
        last = config.integer("moe_layer_end_index", least=0)

    def channel_mixer(layer: int) -> ChannelMixerSpec:
        if (layer + 1) % config.integer("moe_layer_interval", 1) or not start <= layer <= last:
            return build.mlp(config, bias=bias)
        width = config.integer("moe_intermediate_size", 1536)
        return ExpertsSpec(
            config.integer("moe_num_experts", config.integer("num_experts", 64)),
            config.integer("moe_k", config.integer("num_experts_per_tok", 6)),
            width,
            read_activation(config),
            routing="chosen of corrected softmax",
            shared_size=width * config.integer("moe_num_shared_experts", 2, least=0),
            sums_to_one=True,
            sum_eps=config.number("moe_norm_min", 1e-12),
            has_bias=bias,
        )

    return build.decoder(
        config,
        build.attention(config, kv_heads=4, bias=bias),
        channel_mixer,
        context=build.PositionContext(131072, rope=build.rope_everywhere(500000.0, interleaved=True)),
        eps=config.number("rms_norm_eps", 1e-5),
        has_head_bias=bias,
        tied=True,
        spelling=replace(
            DEEPSEEK_SPELLING,
            experts=replace(DEEPSEEK_SPELLING.experts, correction="moe_statics.e_score_correction_bias"),
        ),
    )
