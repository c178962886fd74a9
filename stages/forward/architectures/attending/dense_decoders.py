"""Families since Llama that route nothing: norms, ropes and windows in other places, one row each.

Border: never imports torch. How a row is read is told in reading.py.
"""

from __future__ import annotations

import math
from dataclasses import replace

from ..layer_tensors import LLAMA
from ..mixers import DifferentialSpec
from ..transformer import ConfigReader, RopeConfig
from .family import Attends, Factors
from .reading import AttentionContext, grouped
from .ropes import rope_of_family
from .windows import but_every, none_in_every, windows_in_upper_layers

__all__ = ["NEWER", "stretched_by_alpha"]


def stretched_by_alpha(reader: ConfigReader, family: Attends, head_dim: int) -> RopeConfig:
    """Hunyuan: a dynamic rope with an alpha is a longer wavelength, whatever the length."""
    told = reader.mapping("rope_scaling") or reader.mapping("rope_parameters")
    kind = told.get("rope_type", told.get("type"))
    if kind != "dynamic" or not told.get("alpha"):
        return rope_of_family(reader.raw, reader, family, head_dim)
    rope = ConfigReader(told, f"{reader.source}: rope_parameters")
    theta = rope.number("rope_theta", reader.number("rope_theta", family.theta))
    reader.read |= {"rope_parameters", "rope_scaling"}
    return RopeConfig(theta * rope.number("alpha") ** (head_dim / (head_dim - 2)), head_dim)


def _differential(
    context: AttentionContext, rope: RopeConfig | None, window: int | None, layer: int
) -> DifferentialSpec:
    """Of DiffLlama, whose lambda begins larger in later layers (Ye et al., 2024, section 2.1)."""
    start = 0.8 - 0.6 * math.exp(-0.3 * layer)
    return DifferentialSpec(grouped(context, rope, window, layer), start, context.eps)


def _backwards(reader: ConfigReader, family: Attends, head_dim: int) -> RopeConfig:
    """nanochat turns the other way round."""
    return replace(rope_of_family(reader.raw, reader, family, head_dim), is_backwards=True)


def _factors_of_clova(reader: ConfigReader) -> Factors:
    """As Granite's, but that logits are multiplied, and scores scaled as those of others unless it is
    told."""
    usual = reader.integer("hidden_size") // reader.integer("num_attention_heads")
    return Factors(
        reader.number("embedding_multiplier", 1.0),
        reader.number("residual_multiplier", 1.0),
        reader.number("logits_scaling", 1.0),
        reader.number("attention_multiplier", reader.integer("head_dim", usual) ** -0.5),
    )


LLAMA3_OF_CWM = {
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
LLAMA3_OF_APERTUS = {
    "rope_type": "llama3",
    "rope_theta": 12000000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
YARN_OF_MINISTRAL = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}
QWEN_OF_IMAGES = Attends(
    examples="Qwen2-VL and Qwen2.5-VL, their text model",
    eps=1e-5,
    kv_heads=8,
    theta=1000000.0,
    qkv_bias=True,
    has_window_flag=True,
    types=windows_in_upper_layers(80),
    max_positions=32768,
)
OF_HUNYUAN = replace(LLAMA, attention_norms=("query_layernorm", "key_layernorm"))

NEWER: dict[str, Attends] = {
    "apertus": Attends(
        examples="Apertus",
        eps=1e-5,
        activation="xielu",
        mlp="plain",
        qk_norms="head",
        theta=12000000.0,
        usual_rope=LLAMA3_OF_APERTUS,
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        max_positions=65536,
        spelling=replace(LLAMA, ln1="attention_layernorm", ln2="feedforward_layernorm"),
    ),
    "bitnet": Attends(
        examples="BitNet b1.58 2B4T, its plain weights",
        eps=1e-5,
        activation="relu2",
        kv_heads=5,
        theta=500000.0,
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        has_inner_norms=True,
        max_positions=2048,
        spelling=replace(LLAMA, inner_norms=("attn_sub_norm", "ffn_sub_norm")),
    ),
    "cwm": Attends(
        examples="Code World Model",
        eps=1e-5,
        head_dim=128,
        kv_heads=8,
        theta=1000000.0,
        usual_rope=LLAMA3_OF_CWM,
        mlp_bias="mlp_bias",
        window=8192,
        types=none_in_every(4),
        max_positions=131072,
    ),
    "ernie4_5": Attends(
        examples="ERNIE 4.5, 0.3B",
        eps=1e-5,
        head_dim=128,
        kv_heads=2,
        theta=500000.0,
        interleaved_rope=True,
        qkv_bias="use_bias",
        o_bias="use_bias",
        mlp_bias="use_bias",
        tied=True,
        max_positions=131072,
    ),
    "granite_swa": Attends(
        examples="Granite with windows and sinks",
        eps=1e-5,
        has_multipliers=True,
        has_sinks=True,
        kv_heads=4,
        types=none_in_every(4),
        window=128,
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="mlp_bias",
        tied=True,
        max_positions=8192,
    ),
    "diffllama": Attends(
        examples="DiffLlama",
        eps=1e-5,
        mixer=_differential,
        words=("pairs of heads of which one is taken from the other",),
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        max_positions=2048,
    ),
    "doge": Attends(
        examples="Doge without experts",
        qk_norms="head",
        windows="all",
        window=None,
        rises_by_values=True,
        has_gains=True,
        words=("the stream by gains",),
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="mlp_bias",
        max_positions=2048,
        # Of more keys the reference leaves out those whose values say least.
        longest=("keep_window_size", 2048),
        never=("is_moe",),
        spelling=replace(LLAMA, gains=("input_residual", "post_attention_residual")),
    ),
    "hunyuan_v1_dense": Attends(
        examples="Hunyuan, dense",
        eps=1e-5,
        qk_norms="head",
        norms_behind_rope=True,
        rope_of=stretched_by_alpha,
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        max_positions=2048,
        spelling=OF_HUNYUAN,
    ),
    "hyperclovax": Attends(
        examples="HyperCLOVA X SEED Think",
        places="around",
        factors=_factors_of_clova,
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="mlp_bias",
        max_positions=2048,
        always={"use_post_norm": True},
        spelling=replace(LLAMA, ln1_post="post_norm1", ln2_post="post_norm2"),
    ),
    "internlm3": Attends(
        examples="InternLM 3",
        eps=1e-5,
        head_dim=128,
        kv_heads=2,
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="mlp_bias",
        max_positions=32768,
        aliases={"attention_bias": "qkv_bias", "mlp_bias": "bias"},
    ),
    "iquestcoder": Attends(
        examples="IQuest-Coder",
        eps=1e-5,
        head_dim=128,
        kv_heads=8,
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="mlp_bias",
        max_positions=131072,
        never=("clip_qkv", "use_sliding_window"),
    ),
    "jais2": Attends(
        examples="Jais 2",
        norm="layer",
        eps_key="layer_norm_eps",
        eps=1e-5,
        activation="relu2",
        mlp="plain",
        qkv_bias=("attention_bias", True),
        o_bias=("attention_bias", True),
        mlp_bias=("mlp_bias", True),
        max_positions=8192,
    ),
    "ministral3": Attends(
        examples="Ministral 3",
        eps=1e-5,
        head_dim=128,
        kv_heads=8,
        usual_rope=YARN_OF_MINISTRAL,
        has_growth=True,
        windows="listed",
        window=None,
        max_positions=262144,
        never=("layer_types",),
    ),
    "nanochat": Attends(
        examples="nanochat",
        activation="relu2",
        mlp="plain",
        qk_norms="head",
        norms_behind_rope=True,
        has_norm_weights=False,
        has_embedding_norm=True,
        rope_of=_backwards,
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        soft_caps=(None, 15.0),
        max_positions=2048,
        spelling=replace(LLAMA, mlp_parts=("fc1", "fc2")),
    ),
    "nemotron": Attends(
        examples="Nemotron and Minitron",
        norm="layer",
        has_unit_norms=True,
        eps_key="norm_eps",
        eps=1e-5,
        activation="relu2",
        mlp="plain",
        share=0.5,
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="mlp_bias",
        max_positions=4096,
    ),
    "olmo": Attends(
        examples="OLMo 1",
        norm="layer",
        has_norm_weights=False,
        has_norm_bias=False,
        fixed_eps=1e-5,
        clip=lambda reader: reader.optional_number("clip_qkv"),
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        max_positions=2048,
    ),
    "qwen2_5_vl_text": QWEN_OF_IMAGES,
    "qwen2_vl_text": QWEN_OF_IMAGES,
    "qwen3_vl_text": Attends(
        examples="Qwen3-VL, its text model",
        qk_norms="head",
        head_dim=128,
        kv_heads=32,
        theta=500000.0,
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        max_positions=128000,
    ),
    "vaultgemma": Attends(
        examples="VaultGemma",
        norm="gemma_rms",
        activation_keys=("hidden_activation",),
        activation="gelu_pytorch_tanh",
        scaled_embedding=True,
        query_scalar=256.0,
        soft_caps=(50.0, 30.0),
        caps_scores=True,
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        head_dim=256,
        kv_heads=4,
        types=but_every(2, ""),
        tied=True,
        max_positions=8192,
        spelling=replace(LLAMA, ln2="pre_feedforward_layernorm"),
    ),
}
"""model_type -> row."""
