"""Families since Mixtral that attend everywhere and route tokens to experts, one row each.

Border: never imports torch. How a row is read is told in reading.py, and what routes in experts.py.
"""

from __future__ import annotations

import math
from dataclasses import replace

from .....store.errors import ConfigError
from ..layer_tensors import LLAMA
from ..linear_families import OF_MIXTRAL
from ..mixers import AttentionSpec, RoutedAttentionSpec
from ..transformer import ConfigReader, RopeConfig
from .dense_decoders import OF_HUNYUAN, stretched_by_alpha
from .experts import (
    corrected_experts,
    granite_experts,
    hunyuan_experts,
    jetmoe_experts,
    kolibri_experts,
    limited_experts,
    llama4_experts,
    qwen_experts,
    sigmoid_experts,
    sparsely_mixed_experts,
)
from .family import Attends, Factors, Windows
from .reading import AttentionContext, grouped
from .spellings import OF_GRANITE
from .windows import (
    all_whole,
    but_every,
    flags_of_rope,
    in_windows,
    in_windows_if_any,
    none_in_every,
    windows_in_upper_layers,
)

__all__ = ["ROUTED"]

YARN_OF_GPT_OSS = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
SHARED = replace(LLAMA, shared="mlp.shared_experts.")


def _as_wide_as_it_is(reader: ConfigReader) -> Factors:
    """Embeddings by the root of their width, where it says so."""
    hidden, is_scaled = reader.integer("hidden_size"), reader.flag("mup_enabled", False)
    return Factors(embedding=math.sqrt(hidden) if is_scaled else 1.0)


def _chunks(reader: ConfigReader, *, layers: int) -> Windows:
    """Llama 4: layers that turn see their own chunk, unless types are listed."""
    usual = ["chunked_attention" if turns else "full_attention" for turns in flags_of_rope(reader, layers)]
    types = reader.strings("layer_types") or usual
    if len(types) != layers or not set(types) <= set(_CHUNKED):
        raise ConfigError(
            f"{reader.source}: expected layer_types to list {' or '.join(_CHUNKED)} for each of {layers} "
            f"layers, found {types!r}; correct the file, or fetch it again"
        )
    size = reader.integer("attention_chunk_size", 8192)
    return [size if kind == _CHUNKED[0] else None for kind in types]


_CHUNKED = ("chunked_attention", "full_attention")


def _of_jetmoe(
    context: AttentionContext, rope: RopeConfig | None, window: int | None, layer: int
) -> RoutedAttentionSpec:
    """As many heads of each expert as there are of keys."""
    reader = context.reader
    experts, chosen = reader.integer("num_local_experts", 8), reader.integer("num_experts_per_tok", 2)
    return RoutedAttentionSpec(experts, chosen, context.heads // chosen, context.head_dim, rope)


def _heads_of_jetmoe(reader: ConfigReader) -> int:
    """Of all experts that a token is sent to, whatever num_attention_heads says."""
    reader.read.add("num_attention_heads")
    return reader.integer("num_key_value_heads", 16) * reader.integer("num_experts_per_tok", 2)


def _of_llama4(
    context: AttentionContext, rope: RopeConfig | None, window: int | None, layer: int
) -> AttentionSpec:
    """Where nothing turns queries grow with positions; elsewhere queries and keys are normed, without
    weights, behind rope."""
    reader, shape = context.reader, grouped(context, rope, window, layer)
    shape = replace(shape, is_chunked=window is not None, norms=None)
    reader.read |= {"attn_temperature_tuning", "floor_scale", "attn_scale", "use_qk_norm"}
    if rope is None:
        if not reader.raw.get("attn_temperature_tuning", True):  # 4 in some files
            return shape
        growth = reader.number("attn_scale", 0.1), reader.integer("floor_scale", 8192)
        return replace(shape, growth=growth, growth_start=1)
    if not reader.flag("use_qk_norm", True):
        return shape
    return replace(shape, norms="head", has_norm_weights=False, norms_behind_rope=True)


ROUTED: dict[str, Attends] = {
    "afmoe": Attends(
        examples="Trinity",
        places="around",
        eps=1e-5,
        head_dim=128,
        has_gated_heads=True,
        qk_norms="head",
        types=but_every(4, "global_attn_every_n_layers"),
        window=1024,
        turns=in_windows,
        factors=_as_wide_as_it_is,
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        max_positions=16384,
        channel_mixer=sigmoid_experts,
        spelling=replace(
            LLAMA,
            ln2="pre_mlp_layernorm",
            ln2_post="post_mlp_layernorm",
            router="router.gate",
            shared="mlp.shared_experts.",
            correction="expert_bias",
        ),
    ),
    "dots1": Attends(
        examples="dots.llm1",
        kv_heads=32,
        qk_norms="head",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        types=windows_in_upper_layers(62),
        max_positions=2048,
        channel_mixer=sigmoid_experts,
        spelling=SHARED,
    ),
    "ernie4_5_moe": Attends(
        examples="ERNIE 4.5 with experts",
        eps=1e-5,
        kv_heads=4,
        theta=500000.0,
        interleaved_rope=True,
        qkv_bias="use_bias",
        o_bias="use_bias",
        mlp_bias="use_bias",
        head_bias="use_bias",
        tied=True,
        max_positions=131072,
        channel_mixer=corrected_experts,
        spelling=replace(SHARED, correction="moe_statics.e_score_correction_bias"),
    ),
    "exaone_moe": Attends(
        examples="K-EXAONE",
        kv_heads=32,
        qk_norms="head",
        eps=1e-5,
        types=but_every(4),
        turns=in_windows_if_any,
        max_positions=2048,
        channel_mixer=sigmoid_experts,
        spelling=replace(SHARED, correction="e_score_correction_bias"),
    ),
    "flex_olmo": Attends(
        examples="FlexOlmo",
        places="after",
        qk_norms="all",
        theta=500000.0,
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        max_positions=4096,
        channel_mixer=qwen_experts,
    ),
    "gpt_oss": Attends(
        examples="gpt-oss 20B and 120B",
        eps=1e-5,
        head_dim=64,
        kv_heads=8,
        theta=150000.0,
        usual_rope=YARN_OF_GPT_OSS,
        has_sinks=True,
        types=but_every(2, ""),
        window=128,
        qkv_bias=("attention_bias", True),
        o_bias=("attention_bias", True),
        max_positions=131072,
        channel_mixer=limited_experts,
        spelling=replace(
            LLAMA,
            router="router",
            expert_parts=("experts.gate_up_proj", "experts.down_proj"),
            expert_ending="",
        ),
    ),
    "granitemoe_swa": Attends(
        examples="Granite MoE with windows and sinks",
        has_multipliers=True,
        has_sinks=True,
        types=none_in_every(4),
        window=128,
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        max_positions=2048,
        channel_mixer=granite_experts,
        spelling=replace(
            OF_GRANITE,
            router="router",
            expert_parts=("experts.gate_up_proj", "experts.down_proj"),
            expert_ending="",
        ),
    ),
    "hunyuan_v1_moe": Attends(
        examples="Hunyuan A13B",
        eps=1e-5,
        qk_norms="head",
        norms_behind_rope=True,
        rope_of=stretched_by_alpha,
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        max_positions=2048,
        channel_mixer=hunyuan_experts,
        spelling=replace(OF_HUNYUAN, router="gate.wg", shared="mlp.shared_mlp."),
    ),
    "hy_v3": Attends(
        examples="Hunyuan 3",
        eps=1e-5,
        head_dim=128,
        kv_heads=8,
        theta=11158840.0,
        qk_norms="head",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="mlp_bias",
        max_positions=131072,
        channel_mixer=sigmoid_experts,
        spelling=replace(LLAMA, router="router.gate", shared="mlp.shared_mlp.", correction="expert_bias"),
    ),
    "kolibri1": Attends(
        examples="Kolibri 1",
        places="around",
        qk_norms="head",
        head_dim=128,
        kv_heads=4,
        types=but_every(5, ""),
        window=513,
        turns=in_windows,
        max_positions=262144,
        channel_mixer=kolibri_experts,
        spelling=replace(
            SHARED, ln1_post="post_attn_norm", ln2_post="post_ffn_norm", correction="/moe.router.expert_bias"
        ),
    ),
    "jetmoe": Attends(
        examples="JetMoE 8B",
        head_dim=128,
        kv_heads=16,
        mixer=_of_jetmoe,
        heads_from=_heads_of_jetmoe,
        words=("experts of attention",),
        tied=True,
        max_positions=4096,
        # Norms in layers have this one whatever the config says.
        always={"rms_norm_eps": 1e-6},
        aliases={"head_dim": "kv_channels", "hidden_act": "activation_function"},
        channel_mixer=jetmoe_experts,
        spelling=replace(
            LLAMA,
            attention="self_attention.",
            experts="mlp.",
            router="router.layer",
            expert_parts=("input_linear", "output_linear"),
        ),
    ),
    "llama4_text": Attends(
        examples="Llama 4 Scout and Maverick, their text model",
        eps=1e-5,
        head_dim=128,
        kv_heads=8,
        theta=500000.0,
        interleaved_rope=True,
        windows_of=_chunks,
        turns=lambda reader, windows: flags_of_rope(reader, len(windows)),
        mixer=_of_llama4,
        words=("chunks where rope turns", "queries grow with positions elsewhere"),
        qk_norms="head",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        max_positions=131072,
        channel_mixer=llama4_experts,
        spelling=replace(
            LLAMA,
            mlp="feed_forward.",
            experts="feed_forward.",
            expert_parts=("experts.gate_up_proj", "experts.down_proj"),
            expert_ending="",
            shared="feed_forward.shared_expert.",
            router="router",
        ),
    ),
    "mellum": Attends(
        examples="Mellum 2",
        qk_norms="head",
        head_dim=128,
        kv_heads=4,
        types=all_whole,
        window=1024,
        theta=500000.0,
        local_rope=("", 10000.0),
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        max_positions=131072,
        channel_mixer=qwen_experts,
    ),
    "phimoe": Attends(
        examples="Phi 3.5 MoE",
        norm="layer",
        eps=1e-5,
        kv_heads=8,
        theta=1000000.0,
        windows="all",
        window=None,
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        head_bias="lm_head_bias",
        max_positions=131072,
        channel_mixer=sparsely_mixed_experts,
        spelling=replace(LLAMA, experts="block_sparse_moe.", expert_parts=OF_MIXTRAL),
    ),
    "solar_open": Attends(
        examples="Solar Open",
        eps=1e-5,
        head_dim=128,
        kv_heads=8,
        theta=1000000.0,
        qkv_bias="attention_bias",
        max_positions=131072,
        channel_mixer=sigmoid_experts,
        spelling=SHARED,
    ),
}
"""model_type -> row."""
