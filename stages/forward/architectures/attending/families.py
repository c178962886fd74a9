"""Families whose layers all attend, one row each.

Border: never imports torch. How a row is read is told in reading.py; families that a decoder with all layers
alike computes are rows of ../families.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .....store.errors import ConfigError
from ..families import confirm_derived
from ..layer_tensors import LLAMA, Spelling
from ..linear_families import OF_MIXTRAL
from ..transformer import ConfigReader
from .deberta_mpnet import NEWER_ENCODERS
from .dense_decoders import NEWER
from .diffusion import DIFFUSION
from .encoders import ENCODERS
from .expert_decoders import ROUTED
from .experts import granite_experts, mixtral_experts, qwen_experts, sigmoid_experts
from .family import Attends, Windows
from .gpt1_bert_decoders import LIKE_ENCODERS
from .gpt_bloom_falcon import OLDER
from .hub_code import FROM_HUBS
from .latent import LATENT
from .spellings import KEYS_OF_GPT2, OF_GLM, OF_GLM4, OF_GPT2, OF_GRANITE
from .windows import alternating_windows_below, but_every, flags_of_rope, in_windows, in_windows_if_any

__all__ = ["ATTENDING"]


def _listed(reader: ConfigReader, windows: Windows) -> Sequence[bool]:
    return flags_of_rope(reader, len(windows))


def _window_where_nothing_turns(reader: ConfigReader, layers: int) -> list[str]:
    flags = flags_of_rope(reader, layers)
    return ["full_attention" if turns else "sliding_attention" for turns in flags]


def _scale_of_gpt2(reader: ConfigReader, layer: int, head_dim: int) -> float:
    """By the width of heads and the number of the layer, either of which a config may leave out."""
    scale = head_dim**-0.5 if reader.flag("scale_attn_weights", True) else 1.0
    return scale / (layer + 1) if reader.flag("scale_attn_by_inverse_layer_idx", False) else scale


def _windows_of_gpt_neo(reader: ConfigReader, *, layers: int) -> Windows:
    """attention_types lists kinds of layers, and how often to repeat them."""
    reader.read.add("attention_types")
    listed = reader.raw.get("attention_types")
    if listed is None:
        listed = [[reader.strings("attention_layers") or ["global", "local"] * (layers // 2), 1]]
    try:
        kinds = [kind for kinds, times in listed for _ in range(times) for kind in kinds]
    except (TypeError, ValueError):
        kinds = []
    if len(kinds) != layers or not set(kinds) <= {"global", "local"}:
        raise ConfigError(
            f"{reader.source}: expected attention_types to say global or local for each of {layers} layers, "
            f"found {listed!r}; correct the file, or fetch it again"
        )
    confirm_derived(reader, "attention_layers", kinds)
    window = reader.integer("window_size", 256)
    return tuple(window if kind == "local" else None for kind in kinds)


ATTENDING: dict[str, Attends] = {
    "arcee": Attends(
        examples="AFM",
        eps=1e-5,
        activation="relu2",
        mlp="plain",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="mlp_bias",
    ),
    "cohere": Attends(
        examples="Command R",
        norm="layer",
        has_norm_bias=False,
        parallel=True,
        eps_key="layer_norm_eps",
        eps=1e-5,
        interleaved_rope=True,
        theta=500000.0,
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        logit_scale=0.0625,
        tied=True,
        max_positions=8192,
        never=("use_qk_norm",),
    ),
    "cohere2": Attends(
        examples="Command R7B and A",
        norm="layer",
        has_norm_bias=False,
        parallel=True,
        eps_key="layer_norm_eps",
        eps=1e-5,
        interleaved_rope=True,
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        types=but_every(4),
        turns=in_windows,
        logit_scale=0.0625,
        tied=True,
        max_positions=8192,
    ),
    "exaone4": Attends(
        examples="EXAONE 4",
        kv_heads=32,
        places="after",
        qk_norms="head",
        eps=1e-5,
        types=but_every(4),
        turns=in_windows_if_any,
        max_positions=2048,
    ),
    "gemma3_text": Attends(
        examples="Gemma 3, text; EmbeddingGemma",
        norm="gemma_rms",
        places="around",
        qk_norms="head",
        activation_keys=("hidden_activation",),
        activation="gelu_pytorch_tanh",
        scaled_embedding=True,
        query_scalar=256.0,
        soft_caps=(None, None),
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        head_dim=256,
        kv_heads=4,
        theta=1000000.0,
        local_rope=("rope_local_base_freq", 10000.0),
        types=but_every(6),
        may_look_both_ways=True,
        tied=True,
        max_positions=131072,
        never=("attn_logit_softcapping",),
        spelling=replace(LLAMA, ln2="pre_feedforward_layernorm"),
    ),
    "glm": Attends(
        examples="GLM 4, 9B",
        mlp="gated_fused",
        eps=1.5625e-07,
        head_dim=128,
        kv_heads=2,
        share=0.5,
        interleaved_rope=True,
        qkv_bias=("attention_bias", True),
        max_positions=131072,
        spelling=replace(LLAMA, mlp_parts=OF_GLM),
    ),
    "glm4": Attends(
        examples="GLM 4, 0414",
        mlp="gated_fused",
        places="around",
        eps=1.5625e-07,
        head_dim=128,
        kv_heads=2,
        share=0.5,
        interleaved_rope=True,
        qkv_bias=("attention_bias", True),
        max_positions=131072,
        spelling=replace(OF_GLM4, mlp_parts=OF_GLM),
    ),
    "glm4_moe": Attends(
        examples="GLM 4.5 and 4.6",
        eps=1e-5,
        kv_heads=8,
        share=0.5,
        qk_norms="head",
        qk_norm_key=("use_qk_norm", False),
        qkv_bias="attention_bias",
        max_positions=131072,
        channel_mixer=sigmoid_experts,
        spelling=replace(LLAMA, shared="mlp.shared_experts."),
    ),
    "gpt2": Attends(
        examples="GPT-2, DistilGPT-2",
        norm="layer",
        eps_key="layer_norm_epsilon",
        eps=1e-5,
        activation="gelu_new",
        mlp="plain",
        layout="by part",
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        inner_factor=4,
        first_position=0,
        scale_of=_scale_of_gpt2,
        tied=True,
        max_positions=1024,
        aliases=KEYS_OF_GPT2,
        root="transformer.",
        spelling=OF_GPT2,
        never=("add_cross_attention",),
    ),
    "gpt_neo": Attends(
        examples="GPT-Neo, TinyStories",
        norm="layer",
        eps_key="layer_norm_epsilon",
        eps=1e-5,
        activation="gelu_new",
        mlp="plain",
        o_bias=True,
        mlp_bias=True,
        inner_factor=4,
        first_position=0,
        scale_of=lambda reader, layer, head_dim: 1.0,
        windows_of=_windows_of_gpt_neo,
        tied=True,
        max_positions=2048,
        aliases={
            "num_attention_heads": "num_heads",
            "num_hidden_layers": "num_layers",
            "hidden_act": "activation_function",
        },
        root="transformer.",
        spelling=replace(OF_GPT2, attention="attn.attention.", attention_out="out_proj", is_transposed=False),
    ),
    "gpt_neox": Attends(
        examples="Pythia, GPT-NeoX",
        norm="layer",
        eps_key="layer_norm_eps",
        eps=1e-5,
        activation="gelu",
        mlp="plain",
        layout="by head",
        parallel=("use_parallel_residual", True),
        has_two_norms=True,
        qkv_bias=("attention_bias", True),
        o_bias=("attention_bias", True),
        mlp_bias=True,
        share=0.25,
        max_positions=2048,
        aliases={"partial_rotary_factor": "rotary_pct", "rope_theta": "rotary_emb_base"},
        root="gpt_neox.",
        spelling=Spelling(
            embed="gpt_neox.embed_in",
            head="embed_out",
            final_norm="gpt_neox.final_layer_norm",
            layer="gpt_neox.layers.{}.",
            ln2="post_attention_layernorm",
            attention="attention.",
            attention_in="query_key_value",
            attention_out="dense",
            mlp="mlp.",
            mlp_parts=("dense_h_to_4h", "dense_4h_to_h"),
        ),
    ),
    "granite": Attends(
        examples="Granite 3",
        has_multipliers=True,
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="mlp_bias",
        max_positions=2048,
    ),
    "granitemoe": Attends(
        examples="Granite 3 MoE",
        has_multipliers=True,
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        max_positions=2048,
        channel_mixer=granite_experts,
        spelling=OF_GRANITE,
    ),
    "granitemoeshared": Attends(
        examples="Granite 3.1 MoE with a shared expert",
        has_multipliers=True,
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        max_positions=2048,
        channel_mixer=granite_experts,
        spelling=OF_GRANITE,
    ),
    "mixtral": Attends(
        examples="Mixtral 8x7B and 8x22B",
        eps=1e-5,
        kv_heads=8,
        theta=1000000.0,
        windows="all",
        window=None,
        max_positions=131072,
        channel_mixer=mixtral_experts,
        spelling=replace(LLAMA, experts="block_sparse_moe.", expert_parts=OF_MIXTRAL),
    ),
    "olmo2": Attends(
        examples="OLMo 2",
        places="after",
        qk_norms="all",
        eps=1e-5,
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        max_positions=2048,
    ),
    "olmo3": Attends(
        examples="Olmo 3",
        places="after",
        qk_norms="all",
        eps=1e-5,
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        types=but_every(4, ""),
        theta=500000.0,
        local_rope=("", 500000.0),
        max_positions=2048,
    ),
    "olmoe": Attends(
        examples="OLMoE",
        qk_norms="all",
        eps=1e-5,
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        max_positions=4096,
        channel_mixer=qwen_experts,
        never=("clip_qkv",),
    ),
    "opt": Attends(
        examples="OPT, but for 350M",
        norm="layer",
        fixed_eps=1e-5,
        activation="relu",
        mlp="plain",
        qkv_bias=("enable_bias", True),
        o_bias=("enable_bias", True),
        mlp_bias=("enable_bias", True),
        first_position=2,
        tied=True,
        max_positions=2048,
        aliases={"intermediate_size": "ffn_dim", "hidden_act": "activation_function"},
        root="model.",
        always={
            "do_layer_norm_before": True,
            "_remove_final_layer_norm": False,
            "layer_norm_elementwise_affine": True,
        },
        spelling=Spelling(
            embed="model.decoder.embed_tokens",
            positions="model.decoder.embed_positions",
            final_norm="model.decoder.final_layer_norm",
            layer="model.decoder.layers.{}.",
            ln1="self_attn_layer_norm",
            ln2="final_layer_norm",
            attention_out="out_proj",
            mlp="",
            mlp_parts=("fc1", "fc2"),
        ),
    ),
    "qwen2_moe": Attends(
        examples="Qwen 1.5 and 2 MoE",
        qkv_bias=("qkv_bias", True),
        kv_heads=16,
        has_window_flag=True,
        types=alternating_windows_below(28),
        max_positions=32768,
        channel_mixer=qwen_experts,
        spelling=replace(LLAMA, shared="mlp.shared_expert.", shared_gate="shared_expert_gate"),
    ),
    "qwen3_moe": Attends(
        examples="Qwen 3 MoE",
        qk_norms="head",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        kv_heads=4,
        has_window_flag=True,
        windows="all",
        max_positions=32768,
        channel_mixer=qwen_experts,
    ),
    "seed_oss": Attends(
        examples="Seed-OSS",
        head_dim=128,
        kv_heads=8,
        qkv_bias=("attention_bias", True),
        o_bias="attention_out_bias",
        mlp_bias="mlp_bias",
        max_positions=524288,
    ),
    "stablelm": Attends(
        examples="StableLM 2 and 3B",
        norm="layer",
        eps_key="layer_norm_eps",
        eps=1e-5,
        kv_heads=32,
        share=0.25,
        qkv_bias="use_qkv_bias",
        parallel=("use_parallel_residual", False),
        never=("qk_layernorm",),
        max_positions=4096,
    ),
    "smollm3": Attends(
        examples="SmolLM 3",
        kv_heads=4,
        theta=2000000.0,
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="mlp_bias",
        has_window_flag=True,
        types=_window_where_nothing_turns,
        window=None,
        turns=_listed,
        tied=True,
        max_positions=32768,
    ),
    **DIFFUSION,
    **ENCODERS,
    **FROM_HUBS,
    **LATENT,
    **LIKE_ENCODERS,
    **NEWER,
    **NEWER_ENCODERS,
    **OLDER,
    **ROUTED,
}
"""Every family of this kind."""
ATTENDING["gpt-sw3"] = replace(ATTENDING["gpt2"], examples="GPT-SW3")
