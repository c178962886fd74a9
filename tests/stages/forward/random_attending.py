"""Small random configurations of families whose layers all attend, by axis and seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from . import random_later
from .random_later import LAYERS, bias, rms, sizes, types
from .random_models import CONTEXT

ATTENDING = (
    "arcee",
    "cohere",
    "cohere2",
    "exaone4",
    "gemma3_text",
    "glm",
    "glm4",
    "glm4_moe",
    "gpt2",
    "gpt_neo",
    "gpt_neox",
    "granite",
    "granitemoe",
    "granitemoeshared",
    "mixtral",
    "olmo2",
    "olmo3",
    "olmoe",
    "opt",
    "qwen2_moe",
    "qwen3_moe",
    "seed_oss",
    "smollm3",
    "stablelm",
    *random_later.DRAWS,
)
AXES = (
    *("cohere2", "gemma3_text", "gpt2", "gpt_neox", "olmo3", "qwen2_moe", "smollm3"),
    *random_later.AXES,
)
"""Families that between them have what no decoder of all layers alike has: parallel layers, layers without
rope, two ropes, norms around and behind, experts, learned positions, projections as one; slopes, sinks, norms
behind rope, latents that turn, queries that grow, embeddings that are normed."""


def _rope(rng: random.Random, share: float | None = None) -> dict[str, Any]:
    theta = rng.choice([1e4, 5e5])
    scaled = {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    scheme: dict[str, Any] = rng.choice(
        [{"rope_type": "default"}, {"rope_type": "linear", "factor": 2.0}, scaled]
    )
    return {"rope_theta": theta, **scheme} | ({"partial_rotary_factor": share} if share else {})


def _dense(*biases: str) -> Callable[[random.Random], dict[str, Any]]:
    def draw(rng: random.Random) -> dict[str, Any]:
        return (
            sizes(rng) | rms(rng) | {"rope_parameters": _rope(rng)} | (bias(rng, *biases) if biases else {})
        )

    return draw


def _multiplied(rng: random.Random) -> dict[str, Any]:
    return {
        "embedding_multiplier": rng.choice([1.0, 1.5]),
        "attention_multiplier": rng.choice([0.2, 0.5]),
        "residual_multiplier": rng.choice([0.7, 1.0]),
        "logits_scaling": rng.choice([1.0, 2.5]),
    }


def _granite(rng: random.Random) -> dict[str, Any]:
    own = bias(rng, "attention_bias", "mlp_bias") | _multiplied(rng)
    return sizes(rng, wide_heads=False) | rms(rng) | own | {"rope_parameters": _rope(rng)}


def _granite_of_experts(rng: random.Random) -> dict[str, Any]:
    own = {"num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": _rope(rng)}
    return sizes(rng, wide_heads=False) | rms(rng) | bias(rng) | _multiplied(rng) | own


def _granite_shared(rng: random.Random) -> dict[str, Any]:
    return _granite_of_experts(rng) | {"shared_intermediate_size": rng.choice([0, 20])}


def _cohere(rng: random.Random) -> dict[str, Any]:
    own = {"layer_norm_eps": rng.choice([1e-5, 1e-6]), "logit_scale": rng.choice([0.0625, 0.5])}
    return sizes(rng, wide_heads=False) | bias(rng) | own | {"rope_parameters": _rope(rng)}


def _gemma(rng: random.Random) -> dict[str, Any]:
    """Two ropes; the activation has a key of its own."""
    own = {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": rng.choice([16, 24]),
        "final_logit_softcapping": rng.choice([None, 20.0]),
        "rope_parameters": _two_ropes(rng),
    }
    return (
        {k: v for k, v in sizes(rng).items() if k != "hidden_act"} | rms(rng) | bias(rng) | types(rng) | own
    )


def _two_ropes(rng: random.Random) -> dict[str, Any]:
    return {
        "full_attention": _rope(rng),
        "sliding_attention": {"rope_type": "default", "rope_theta": rng.choice([1e4, 300.0])},
    }


def _glm(rng: random.Random) -> dict[str, Any]:
    return sizes(rng) | rms(rng) | bias(rng) | {"rope_parameters": _rope(rng, rng.choice([0.5, 1.0]))}


def _glm_of_experts(rng: random.Random) -> dict[str, Any]:
    return _glm(rng) | {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": rng.choice([1, 2]),
        "moe_intermediate_size": 12,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": rng.choice([0, 1]),
        "norm_topk_prob": rng.random() < 0.5,
        "routed_scaling_factor": 1.5,
        "use_qk_norm": rng.random() < 0.5,
    }


def _olmo2(rng: random.Random) -> dict[str, Any]:
    return sizes(rng, wide_heads=False) | rms(rng) | bias(rng) | {"rope_parameters": _rope(rng)}


def _olmo3(rng: random.Random) -> dict[str, Any]:
    return _olmo2(rng) | types(rng) | {"rope_parameters": _two_ropes(rng)}


def _of_experts(rng: random.Random) -> dict[str, Any]:
    return {"num_experts_per_tok": 2, "norm_topk_prob": rng.random() < 0.5}


def _olmoe(rng: random.Random) -> dict[str, Any]:
    return _olmo2(rng) | _of_experts(rng) | {"num_experts": 4}


def _mixtral(rng: random.Random) -> dict[str, Any]:
    own = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": rng.choice([None, 7])}
    return sizes(rng) | rms(rng) | own | {"rope_parameters": _rope(rng)}


def _qwen(rng: random.Random) -> dict[str, Any]:
    own = {
        "moe_intermediate_size": 12,
        "decoder_sparse_step": rng.choice([1, 2]),
        "mlp_only_layers": rng.choice([[], [1]]),
        "rope_parameters": _rope(rng),
    }
    windows = {"use_sliding_window": rng.random() < 0.5, "sliding_window": 7}
    return rms(rng) | _of_experts(rng) | own | windows


def _qwen2(rng: random.Random) -> dict[str, Any]:
    own = {"num_experts": 4, "shared_expert_intermediate_size": 20, "max_window_layers": 1}
    return sizes(rng, wide_heads=False) | _qwen(rng) | own | {"qkv_bias": rng.random() < 0.5}


def _qwen3(rng: random.Random) -> dict[str, Any]:
    return sizes(rng) | _qwen(rng) | bias(rng) | {"num_experts": 4}


def _exaone(rng: random.Random) -> dict[str, Any]:
    windows: dict[str, Any] = rng.choice(
        [{"sliding_window": None, "layer_types": ["full_attention"] * LAYERS}, types(rng)]
    )
    return sizes(rng) | rms(rng) | {"rope_parameters": _rope(rng)} | windows


def _smollm(rng: random.Random) -> dict[str, Any]:
    own = {"use_sliding_window": rng.random() < 0.5, "sliding_window": 6}
    if rng.random() < 0.7:
        own["no_rope_layers"] = [rng.choice([0, 1]) for _ in range(LAYERS)]
    biases = bias(rng, "attention_bias", "mlp_bias")
    return sizes(rng, wide_heads=False) | rms(rng) | biases | own | {"rope_parameters": _rope(rng)}


def _gpt2(rng: random.Random) -> dict[str, Any]:
    heads = rng.choice([1, 2, 3])
    return {
        "n_embd": heads * 8,
        "n_head": heads,
        "n_layer": LAYERS,
        "n_positions": CONTEXT,
        "n_inner": rng.choice([None, 20]),
        "activation_function": rng.choice(["gelu_new", "relu"]),
        "layer_norm_epsilon": rng.choice([1e-5, 1e-6]),
        "scale_attn_weights": rng.random() < 0.7,
        "scale_attn_by_inverse_layer_idx": rng.random() < 0.5,
    }


def _gpt_neo(rng: random.Random) -> dict[str, Any]:
    heads = rng.choice([1, 2, 3])
    return {
        "hidden_size": heads * 8,
        "num_heads": heads,
        "num_layers": 4,
        "attention_types": rng.choice([[[["global", "local"], 2]], [[["local"], 1], [["global"], 3]]]),
        "window_size": rng.choice([5, 9]),
        "intermediate_size": rng.choice([None, 20]),
        "max_position_embeddings": CONTEXT,
        "activation_function": rng.choice(["gelu_new", "relu"]),
        "layer_norm_epsilon": rng.choice([1e-5, 1e-6]),
    }


def _gpt_neox(rng: random.Random) -> dict[str, Any]:
    drawn = sizes(rng, wide_heads=False)
    del drawn["num_key_value_heads"], drawn["head_dim"]
    return drawn | {
        "use_parallel_residual": rng.random() < 0.6,
        "attention_bias": rng.random() < 0.6,
        "layer_norm_eps": rng.choice([1e-5, 1e-6]),
        "rope_parameters": _rope(rng, rng.choice([0.25, 0.5, 1.0])),
    }


def _opt(rng: random.Random) -> dict[str, Any]:
    heads = rng.choice([1, 2, 3])
    return {
        "hidden_size": heads * 8,
        "word_embed_proj_dim": heads * 8,
        "num_attention_heads": heads,
        "num_hidden_layers": LAYERS,
        "ffn_dim": rng.choice([20, 36]),
        "max_position_embeddings": CONTEXT,
        "activation_function": rng.choice(["relu", "gelu"]),
        "enable_bias": rng.random() < 0.6,
    }


def _stablelm(rng: random.Random) -> dict[str, Any]:
    own = {"layer_norm_eps": rng.choice([1e-5, 1e-6]), "rope_parameters": _rope(rng, rng.choice([0.25, 0.5]))}
    return sizes(rng, wide_heads=False) | bias(rng, "use_qkv_bias", "use_parallel_residual") | own


DRAWS: dict[str, Callable[[random.Random], dict[str, Any]]] = {
    "arcee": _dense("attention_bias", "mlp_bias"),
    "cohere": _cohere,
    "cohere2": lambda rng: _cohere(rng) | types(rng),
    "exaone4": _exaone,
    "gemma3_text": _gemma,
    "glm": _glm,
    "glm4": _glm,
    "glm4_moe": _glm_of_experts,
    "gpt2": _gpt2,
    "gpt_neo": _gpt_neo,
    "gpt_neox": _gpt_neox,
    "granite": _granite,
    "granitemoe": _granite_of_experts,
    "granitemoeshared": _granite_shared,
    "mixtral": _mixtral,
    "olmo2": _olmo2,
    "olmo3": _olmo3,
    "olmoe": _olmoe,
    "qwen2_moe": _qwen2,
    "qwen3_moe": _qwen3,
    "opt": _opt,
    "stablelm": _stablelm,
    "seed_oss": _dense("attention_bias", "attention_out_bias", "mlp_bias"),
    "smollm3": _smollm,
    **random_later.DRAWS,
}
