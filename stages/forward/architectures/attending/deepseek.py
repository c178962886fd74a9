"""DeepSeek's lineage: keys and values of every layer are made of one narrow latent.

Border: never imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from .....store.errors import ConfigError
from ..composed import ComposedArchitecture
from ..families import read_activation, yarn_magnitude
from ..mixers import ChannelMixerSpec, ExpertsSpec, LatentAttentionSpec
from ..transformer import ConfigReader, RopeConfig
from . import builders as build
from .builders import TensorShapes, family
from .experts import SHARED, is_listed_dense, sigmoid_experts
from .olmo_granite import unless_one


def _latent_decoder(
    config: ConfigReader,
    mlp: Any,
    *,
    own: int = 128,
    shared: int = 64,
    values: int | None = 128,
    rank: int = 512,
    query_rank: int = 1536,
    may_interleave: bool = True,
    factor: float = 1.0,
    **options: Any,
) -> ComposedArchitecture:
    """A decoder with latent attention (DeepSeek-V2, 2024, section 2.1).

    Args:
        own, shared: Defaults of qk_nope_head_dim (key entries per head) and qk_rope_head_dim (shared by all
            heads, with rope).
        values: Default of the entries of its values; None divides hidden_size by the number of heads.
        rank, query_rank: Defaults of the rank of the latent, and of the map to queries.
        may_interleave: Whether rope_interleave is read, on where it is absent.
        factor: Factor of the attention output.
        options: Of `decoder`.
    """
    heads = config.integer("num_attention_heads")
    widths = config.integer("qk_nope_head_dim", own), config.integer("qk_rope_head_dim", shared)
    usual = values or config.integer("hidden_size") // heads
    spec = LatentAttentionSpec(
        heads,
        *widths,
        config.integer("v_head_dim", usual),
        config.integer("kv_lora_rank", rank),
        config.optional_integer("q_lora_rank", query_rank),
        has_bias=build.attention_bias(config),
        scale=sum(widths) ** -0.5 * _sharpened(config) ** 2,
        factor=factor,
    )
    interleaved = may_interleave and config.flag("rope_interleave", True)

    def mixer(rope: RopeConfig | None, window: int | None, layer: int) -> LatentAttentionSpec:
        return replace(spec, rope=rope)

    return build.decoder(
        config,
        mixer,
        mlp,
        rope=build.rope_everywhere(interleaved=interleaved),
        head_dim=widths[1],
        **options,
    )


def _sharpened(config: ConfigReader) -> float:
    """How much larger queries, and keys, are where rope is stretched."""
    told = config.mapping("rope_scaling") or config.mapping("rope_parameters")
    rope = ConfigReader(told, f"{config.source}: rope_parameters")
    kind = rope.text("rope_type", rope.text("type", "default"))
    share = rope.optional_number("mscale_all_dim")
    return yarn_magnitude(rope.number("factor"), share) if share and kind != "default" else 1.0


def _require_head_dim(config: ConfigReader) -> None:
    """The reference makes rotary angles of head_dim where config.json has it. DeepSeek-V3 and Kimi K2 have
    none; what transformers saves is the width of the shared keys."""
    if "head_dim" not in config.raw:
        return
    usual = config.integer("hidden_size") // config.integer("num_attention_heads")
    rotated, width = config.optional_integer("head_dim") or usual, config.integer("qk_rope_head_dim", 64)
    if rotated != width:
        raise ConfigError(
            f"{config.source}: expected head_dim, by which angles are made, to be qk_rope_head_dim={width}, "
            f"found {rotated}; leave head_dim out"
        )


def _dense_first(
    config: ConfigReader, default: int, dense: Callable[[], Any], routed: Callable[[], Any]
) -> Callable[[int], ChannelMixerSpec]:
    """An MLP in the first layers. default: of first_k_dense_replace."""
    first = config.integer("first_k_dense_replace", default, least=0)
    return lambda layer: dense() if layer < first else routed()


def _grouped_experts(config: ConfigReader, *, bias: bool) -> ExpertsSpec:
    """Experts chosen by softmax, in the best groups where it says so (DeepSeek-V2, 2024, section 2.2.2)."""
    width, method = config.integer("moe_intermediate_size", 1407), config.text("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise ConfigError(
            f"{config.source}: expected topk_method 'greedy' or 'group_limited_greedy', found {method!r}; "
            "this model cannot run here"
        )
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
    bias = config.flag("mlp_bias", False)
    return _latent_decoder(
        config,
        _dense_first(
            config, 0, lambda: build.mlp(config, bias=bias), lambda: _grouped_experts(config, bias=bias)
        ),
        eps=config.number("rms_norm_eps", 1e-6),
        max_positions=2048,
        spelling=SHARED,
    )


@family("deepseek_v3", "DeepSeek-V3 and R1", follows_is_causal=False)
def deepseek_v3(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    _require_head_dim(config)

    def experts() -> ExpertsSpec:
        return sigmoid_experts(config, count=256, chosen=8, width=2048, groups=(8, 4), factor=2.5)

    return _latent_decoder(
        config,
        _dense_first(config, 3, lambda: build.mlp(config), experts),
        eps=config.number("rms_norm_eps", 1e-6),
        max_positions=4096,
        spelling=SHARED,
    )


@family("glm4_moe_lite", "GLM 4.7 Flash", follows_is_causal=False)
def glm4_moe_lite(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    def channel_mixer(layer: int) -> ChannelMixerSpec:
        listed = is_listed_dense(config, layer)
        if layer < 1 if listed is None else listed:
            return build.mlp(config)
        return sigmoid_experts(config, count=64, chosen=4, width=1536, factor=1.8)

    return _latent_decoder(
        config,
        channel_mixer,
        own=192,
        values=256,
        query_rank=768,
        eps=config.number("rms_norm_eps", 1e-5),
        max_positions=202752,
        spelling=SHARED,
    )


@family("minicpm3", "MiniCPM 3", follows_is_causal=False)
def minicpm3(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Embeddings have a factor, what is added one by the number of layers, and logits one by the width (Hu et
    al., MiniCPM, 2024, section 3)."""
    layers, hidden = config.integer("num_hidden_layers"), config.integer("hidden_size")
    depth = config.optional_number("scale_depth", 1.4)
    residual = 1.0 if depth is None else depth / math.sqrt(layers)
    base = config.optional_integer("dim_model_base", 256) or hidden
    return _latent_decoder(
        config,
        build.mlp(config, bias=config.flag("mlp_bias", False), factors=(1.0, residual)),
        own=64,
        shared=32,
        values=None,
        rank=256,
        query_rank=768,
        may_interleave=False,
        factor=residual,
        eps=config.number("rms_norm_eps", 1e-5),
        max_positions=32768,
        embedding_scale=unless_one(config.number("scale_emb", 12.0)),
        logit_factor=base / hidden,
        tied=True,
    )


@family("youtu", "Youtu-LLM", follows_is_causal=False)
def youtu(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    _require_head_dim(config)
    return _latent_decoder(
        config,
        build.mlp(config),
        eps=config.number("rms_norm_eps", 1e-6),
        max_positions=131072,
        tied=True,
    )
