"""Small random configurations of decoders with attention in every layer, by axis and seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from .random_models import CONTEXT

LAYERS = 3
Draw = Callable[[random.Random], dict[str, Any]]
AXES = (
    "bitnet",
    "bloom",
    "deepseek_v2",
    "diffllama",
    "doge",
    "gpt_oss",
    "jetmoe",
    "llama4_text",
    "ministral3",
    "nanochat",
    "openai-gpt",
)
"""Families that between them have what is new in these."""


def sizes(rng: random.Random, *, wide_heads: bool = True) -> dict[str, Any]:
    """Of the stream, heads and MLP; heads may be wider than the stream divided by their number."""
    kv = rng.choice([1, 2])
    heads = kv * rng.choice([1, 2])
    return {
        "hidden_size": heads * 8,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": rng.choice([8, 16]) if wide_heads else 8,
        "num_hidden_layers": LAYERS,
        "intermediate_size": rng.choice([20, 36]),
        "max_position_embeddings": CONTEXT,
        "hidden_act": rng.choice(["silu", "gelu_pytorch_tanh"]),
    }


def tied_or_not(rng: random.Random, *, wide_heads: bool = True) -> dict[str, Any]:
    """Sizes, and whether the head is the embedding."""
    return sizes(rng, wide_heads=wide_heads) | {"tie_word_embeddings": rng.random() < 0.4}


def rope(rng: random.Random, share: float | None = None) -> dict[str, Any]:
    """Of one of five schemes."""
    original = {"original_max_position_embeddings": rng.choice([16, 32])}
    schemes: list[dict[str, Any]] = [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **original},
        yarn(rng),
    ]
    told = {"rope_theta": rng.choice([1e4, 300.0]), **rng.choice(schemes)}
    return told | ({"partial_rotary_factor": share} if share else {})


def yarn(rng: random.Random) -> dict[str, Any]:
    """Frequencies by parts, with what it may be told besides."""
    told: dict[str, Any] = {"rope_type": "yarn", "factor": rng.choice([2.0, 4.0])}
    told["original_max_position_embeddings"] = rng.choice([16, 32])
    told |= rng.choice([{}, {"beta_fast": 8.0, "beta_slow": 2.0}, {"truncate": False}])
    return told | rng.choice([{}, {"attention_factor": 1.3}, {"mscale": 0.7, "mscale_all_dim": 1.1}])


def bias(rng: random.Random, *keys: str) -> dict[str, Any]:
    return {key: rng.random() < 0.5 for key in keys or ("attention_bias",)}


def types(rng: random.Random) -> dict[str, Any]:
    listed = ["sliding_attention", "full_attention", rng.choice(["sliding_attention", "full_attention"])]
    rng.shuffle(listed)
    return {"layer_types": listed, "sliding_window": rng.choice([5, 9])}


def rms(rng: random.Random) -> dict[str, Any]:
    return {"rms_norm_eps": rng.choice([1e-5, 1e-6])}


def _layer(rng: random.Random, key: str = "layer_norm_eps") -> dict[str, Any]:
    return {key: rng.choice([1e-5, 1e-6])}


def _dense(*biases: str, wide_heads: bool = True) -> Draw:
    def draw(rng: random.Random) -> dict[str, Any]:
        drawn = tied_or_not(rng, wide_heads=wide_heads) | rms(rng) | {"rope_parameters": rope(rng)}
        return drawn | (bias(rng, *biases) if biases else {})

    return draw


def _apertus(rng: random.Random) -> dict[str, Any]:
    drawn = _dense("attention_bias")(rng)
    return drawn | {"hidden_act": rng.choice(["xielu", "xielu", "relu2"])}


def _bitnet(rng: random.Random) -> dict[str, Any]:
    return _dense("attention_bias", wide_heads=False)(rng) | {"hidden_act": rng.choice(["relu2", "silu"])}


def _diffllama(rng: random.Random) -> dict[str, Any]:
    heads, kv = rng.choice([(2, 2), (4, 2), (4, 4)])
    own = {"num_attention_heads": heads, "num_key_value_heads": kv, "head_dim": 8, "lambda_std_dev": 0.5}
    return _dense("attention_bias")(rng) | own


def _doge(rng: random.Random) -> dict[str, Any]:
    own = {"sliding_window": rng.choice([None, 7]), "keep_window_size": rng.choice([110, 2048])}
    return _dense("attention_bias", "mlp_bias", wide_heads=False)(rng) | own


def _jetmoe(rng: random.Random) -> dict[str, Any]:
    drawn = tied_or_not(rng, wide_heads=False)
    kept = {k: v for k, v in drawn.items() if k not in ("head_dim", "num_attention_heads", "hidden_act")}
    own = {
        "kv_channels": 8,
        "activation_function": rng.choice(["silu", "gelu_pytorch_tanh"]),
        "num_local_experts": rng.choice([3, 4]),
        "num_experts_per_tok": rng.choice([1, 2]),
        "num_key_value_heads": rng.choice([1, 2]),
        "rope_parameters": rope(rng),
    }
    return kept | own


def _llama4(rng: random.Random) -> dict[str, Any]:
    """Chunks, and lengths at which queries grow, that prompts go beyond."""
    own = {
        "intermediate_size_mlp": 28,
        "num_local_experts": 4,
        "num_experts_per_tok": rng.choice([1, 2]),
        "interleave_moe_layer_step": rng.choice([1, 2]),
        "attention_chunk_size": rng.choice([5, 16, 500]),
        "floor_scale": rng.choice([7, 20]),
        "attn_scale": 0.3,
        "no_rope_layers": rng.choice([[1, 0, 1], [0, 1, 1], [1, 1, 0]]),
        "rope_parameters": {"rope_type": "default", "rope_theta": rng.choice([1e4, 300.0])},
    }
    flags = bias(rng, "use_qk_norm", "attn_temperature_tuning", "attention_bias")
    listed = {"layer_types": ["chunked_attention"] * LAYERS} if rng.random() < 0.2 else {}
    return tied_or_not(rng) | rms(rng) | own | flags | listed


def _cwm(rng: random.Random) -> dict[str, Any]:
    return _dense("mlp_bias")(rng) | types(rng)


def _multiplied(rng: random.Random) -> dict[str, Any]:
    return {
        "embedding_multiplier": rng.choice([1.0, 1.5]),
        "attention_multiplier": rng.choice([0.2, 0.5]),
        "residual_multiplier": rng.choice([0.7, 1.0]),
        "logits_scaling": rng.choice([1.0, 2.5]),
    }


def _clova(rng: random.Random) -> dict[str, Any]:
    drawn = _dense("attention_bias", "mlp_bias", wide_heads=False)(rng) | _multiplied(rng)
    return drawn | {"attention_multiplier": rng.choice([None, 0.3])}


def _swa(rng: random.Random) -> dict[str, Any]:
    drawn = _dense("attention_bias", wide_heads=False)(rng) | _multiplied(rng) | types(rng)
    # The reference cannot turn by lengths here.
    drawn["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4}
    thetas: list[Any] = [rng.choice([0, 1e4, 300.0]) for _ in range(LAYERS)]
    return drawn | ({"layer_rope_theta": thetas} if rng.random() < 0.7 else {})


def _granite_swa(rng: random.Random) -> dict[str, Any]:
    return _swa(rng) | bias(rng, "mlp_bias")


def _granitemoe_swa(rng: random.Random) -> dict[str, Any]:
    own = {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": rng.choice([0, 20])}
    return _swa(rng) | own


def _hunyuan(rng: random.Random) -> dict[str, Any]:
    drawn = _dense("attention_bias")(rng)
    if rng.random() < 0.4:
        drawn["rope_parameters"] = {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 8.0, "factor": 1.0}
    return drawn


def _hunyuan_of_experts(rng: random.Random) -> dict[str, Any]:
    return _hunyuan(rng) | {"num_experts": 4, "moe_topk": rng.choice([1, 2, [2, 1, 2]])}


def _internlm(rng: random.Random) -> dict[str, Any]:
    has = rng.random() < 0.5
    return _dense()(rng) | {"qkv_bias": has, "bias": has}


def _jais(rng: random.Random) -> dict[str, Any]:
    drawn = _dense("attention_bias", "mlp_bias", wide_heads=False)(rng) | _layer(rng)
    del drawn["rms_norm_eps"]
    return drawn | {"hidden_act": rng.choice(["relu2", "gelu"])}


def _ministral(rng: random.Random) -> dict[str, Any]:
    told = {"rope_theta": 1e4, **yarn(rng), "llama_4_scaling_beta": rng.choice([0.1, 0.4])}
    return tied_or_not(rng) | rms(rng) | {"rope_parameters": told, "sliding_window": rng.choice([None, 7])}


def _nanochat(rng: random.Random) -> dict[str, Any]:
    drawn = _dense("attention_bias", wide_heads=False)(rng)
    own = {
        "hidden_act": rng.choice(["relu2", "silu"]),
        "final_logit_softcapping": rng.choice([15.0, None, 4.0]),
    }
    return drawn | own


def _nemotron(rng: random.Random) -> dict[str, Any]:
    drawn = tied_or_not(rng) | _layer(rng, "norm_eps") | bias(rng, "attention_bias", "mlp_bias")
    told = rope(rng, rng.choice([0.5, 1.0]))
    return drawn | {"rope_parameters": told, "hidden_act": rng.choice(["relu2", "silu"])}


def _olmo(rng: random.Random) -> dict[str, Any]:
    drawn = _dense("attention_bias", wide_heads=False)(rng) | {"clip_qkv": rng.choice([None, 0.5, 2.0])}
    del drawn["rms_norm_eps"]
    return drawn


def _vaultgemma(rng: random.Random) -> dict[str, Any]:
    drawn = _dense("attention_bias")(rng) | types(rng)
    del drawn["hidden_act"]
    own = {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": rng.choice([16, 24]),
        "attn_logit_softcapping": rng.choice([None, 5.0]),
        "final_logit_softcapping": rng.choice([None, 20.0]),
    }
    return drawn | own


# -- older ones


def _without_groups(rng: random.Random, heads: int | None = None) -> dict[str, Any]:
    drawn = tied_or_not(rng, wide_heads=False)
    del drawn["num_key_value_heads"], drawn["head_dim"], drawn["hidden_act"]
    if heads is not None:
        drawn |= {"num_attention_heads": heads, "hidden_size": 8 * heads}
    return drawn


def _biogpt(rng: random.Random) -> dict[str, Any]:
    own = {"scale_embedding": rng.random() < 0.5, "hidden_act": rng.choice(["gelu", "relu", "gelu_new"])}
    return _without_groups(rng) | own


def _xglm(rng: random.Random) -> dict[str, Any]:
    heads = rng.choice([1, 2, 3])
    return {
        "d_model": heads * 8,
        "attention_heads": heads,
        "num_layers": LAYERS,
        "ffn_dim": rng.choice([20, 36]),
        "max_position_embeddings": CONTEXT,
        "activation_function": rng.choice(["gelu", "relu"]),
        "scale_embedding": rng.random() < 0.6,
        "tie_word_embeddings": rng.random() < 0.6,
    }


def _bloom(rng: random.Random) -> dict[str, Any]:
    heads = rng.choice([1, 2, 3, 4, 5])
    own = {"n_head": heads, "hidden_size": heads * 8, "n_layer": LAYERS}
    return own | _layer(rng, "layer_norm_epsilon") | {"tie_word_embeddings": rng.random() < 0.6}


def _mpt(rng: random.Random) -> dict[str, Any]:
    heads = rng.choice([1, 2, 3, 4, 5])
    attention = {"clip_qkv": rng.choice([None, 0.5]), "softmax_scale": rng.choice([None, 0.3])}
    own = {"n_heads": heads, "d_model": heads * 8, "n_layers": LAYERS, "max_seq_len": CONTEXT}
    tied = {"tie_word_embeddings": rng.random() < 0.6}
    return own | {"attn_config": attention} | _layer(rng, "layer_norm_epsilon") | tied


def _falcon(rng: random.Random) -> dict[str, Any]:
    kv = rng.choice([1, 2])
    heads = kv * rng.choice([1, 2, 3])
    own: dict[str, Any] = rng.choice(
        [
            {"new_decoder_architecture": True, "num_kv_heads": kv},
            {"new_decoder_architecture": True, "num_kv_heads": kv, "num_ln_in_parallel_attn": 1},
            {"multi_query": True, "parallel_attn": rng.random() < 0.5},
            {"multi_query": False, "parallel_attn": rng.random() < 0.5},
        ]
    )
    drawn = _without_groups(rng, heads) | own | bias(rng, "bias") | _layer(rng, "layer_norm_epsilon")
    del drawn["intermediate_size"]
    return drawn | {
        "ffn_hidden_size": rng.choice([None, 20]),
        "activation": rng.choice(["gelu", "relu"]),
        "rope_parameters": rope(rng),
    }


def _of_gpt2(rng: random.Random) -> dict[str, Any]:
    heads = rng.choice([1, 2, 3])
    return {
        "n_embd": heads * 8,
        "n_head": heads,
        "n_layer": LAYERS,
        "n_positions": CONTEXT,
        "n_inner": rng.choice([None, 20]),
        "activation_function": rng.choice(["gelu_new", "relu"]),
        "tie_word_embeddings": rng.random() < 0.4,
    } | _layer(rng, "layer_norm_epsilon")


def _bigcode(rng: random.Random) -> dict[str, Any]:
    return _of_gpt2(rng) | bias(rng, "multi_query", "scale_attn_weights")


def _gptj(rng: random.Random) -> dict[str, Any]:
    return _of_gpt2(rng) | {"rotary_dim": rng.choice([4, 8])}


def _codegen(rng: random.Random) -> dict[str, Any]:
    heads = rng.choice([4, 8])
    return _gptj(rng) | {"n_head": heads, "n_embd": heads * 8}


def _persimmon(rng: random.Random) -> dict[str, Any]:
    own = {"qk_layernorm": rng.random() < 0.6, "rope_parameters": rope(rng, rng.choice([0.5, 1.0]))}
    return _without_groups(rng) | _layer(rng) | own | {"hidden_act": rng.choice(["relu2", "gelu"])}


def _phi(rng: random.Random) -> dict[str, Any]:
    own = {"qk_layernorm": rng.random() < 0.5, "rope_parameters": rope(rng, rng.choice([0.5, 1.0]))}
    return (
        tied_or_not(rng, wide_heads=False)
        | _layer(rng)
        | own
        | {"hidden_act": rng.choice(["gelu_new", "relu"])}
    )


# -- experts


def _of_experts(rng: random.Random) -> dict[str, Any]:
    return {"num_experts_per_tok": 2, "norm_topk_prob": rng.random() < 0.5, "moe_intermediate_size": 12}


def _in_groups(rng: random.Random) -> dict[str, Any]:
    return _of_experts(rng) | {
        "n_routed_experts": 8,
        "n_shared_experts": rng.choice([1, 2]),
        "n_group": rng.choice([1, 2, 4]),
        "topk_group": 1,
        "routed_scaling_factor": rng.choice([1.0, 1.5]),
    }


def _dots(rng: random.Random) -> dict[str, Any]:
    windows = rng.choice(
        [{"sliding_window": None}, types(rng), {"sliding_window": 7, "max_window_layers": 1}]
    )
    own = {"first_k_dense_replace": rng.choice([0, 1])} | windows
    return _dense("attention_bias")(rng) | _in_groups(rng) | own


def _ernie(rng: random.Random) -> dict[str, Any]:
    return _dense("use_bias")(rng) | {
        "moe_intermediate_size": 12,
        "moe_num_experts": 6,
        "moe_k": rng.choice([1, 2]),
        "moe_num_shared_experts": rng.choice([0, 2]),
        "moe_layer_start_index": rng.choice([0, 1]),
        "moe_layer_end_index": rng.choice([-1, 1]),
        "moe_layer_interval": rng.choice([1, 2]),
    }


def _exaone(rng: random.Random) -> dict[str, Any]:
    drawn = _dense()(rng) | _in_groups(rng) | {"num_experts": 8, "num_shared_experts": rng.choice([1, 2])}
    del drawn["n_routed_experts"], drawn["n_shared_experts"]
    drawn |= rng.choice([{"first_k_dense_replace": 1}, {"mlp_layer_types": ["sparse", "dense", "sparse"]}])
    return drawn | types(rng)


def _flex(rng: random.Random) -> dict[str, Any]:
    own = {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": rng.random() < 0.5}
    return _dense("attention_bias", wide_heads=False)(rng) | own


def _gpt_oss(rng: random.Random) -> dict[str, Any]:
    own = {"num_local_experts": 4, "num_experts_per_tok": 2, "swiglu_limit": rng.choice([7.0, 0.5])}
    return _dense("attention_bias")(rng) | types(rng) | own | {"swiglu_alpha": rng.choice([1.702, 1.0])}


def _hunyuan3(rng: random.Random) -> dict[str, Any]:
    own = {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "num_shared_experts": rng.choice([1, 2]),
        "moe_intermediate_size": 12,
        "router_scaling_factor": rng.choice([1.0, 1.5]),
        "mlp_layer_types": rng.choice([None, ["sparse", "dense", "sparse"]]),
    }
    return _dense("attention_bias", "mlp_bias")(rng) | own


def _afmoe(rng: random.Random) -> dict[str, Any]:
    own = {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "num_shared_experts": rng.choice([1, 2]),
        "moe_intermediate_size": 12,
        "num_dense_layers": rng.choice([0, 1]),
        "route_scale": rng.choice([1.0, 1.5]),
        "mup_enabled": rng.random() < 0.5,
    }
    return _dense("attention_bias")(rng) | types(rng) | own


def _kolibri(rng: random.Random) -> dict[str, Any]:
    own = {"num_experts": 6, "shared_expert_intermediate_size": 20}
    drawn = _dense()(rng) | _of_experts(rng) | types(rng) | own
    del drawn["intermediate_size"]
    return drawn


def _mellum(rng: random.Random) -> dict[str, Any]:
    two = {kind: rope(rng) for kind in ("full_attention", "sliding_attention")}
    for told in two.values():
        told.pop("truncate", None)
    parts = rng.choice([None, ["sparse", "dense", "sparse"]])
    own = {"num_experts": 4, "mlp_layer_types": parts, "rope_parameters": two}
    return _dense("attention_bias")(rng) | _of_experts(rng) | types(rng) | own


def _phimoe(rng: random.Random) -> dict[str, Any]:
    own = {
        "num_local_experts": 4,
        "router_jitter_noise": rng.choice([0.01, 0.3]),
        "sliding_window": rng.choice([None, 7]),
        "rope_parameters": {"rope_type": "default", "rope_theta": rng.choice([1e4, 300.0])},
    }
    return _dense("attention_bias", "lm_head_bias", wide_heads=False)(rng) | own


def _solar(rng: random.Random) -> dict[str, Any]:
    drawn = _dense("attention_bias")(rng) | _in_groups(rng)
    del drawn["intermediate_size"]
    return drawn


# -- latents


def _latent(rng: random.Random) -> dict[str, Any]:
    heads = rng.choice([1, 2, 3])
    drawn = _dense("attention_bias")(rng)
    del drawn["head_dim"]
    return drawn | {
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "hidden_size": heads * 8,
        "kv_lora_rank": 12,
        "q_lora_rank": rng.choice([None, 10]),
        "qk_nope_head_dim": rng.choice([6, 8]),
        "qk_rope_head_dim": rng.choice([4, 8]),
        "v_head_dim": rng.choice([6, 8]),
    }


def _deepseek_v2(rng: random.Random) -> dict[str, Any]:
    own = {
        "first_k_dense_replace": rng.choice([0, 1]),
        "topk_method": rng.choice(["greedy", "group_limited_greedy"]),
    }
    return _latent(rng) | _in_groups(rng) | own | bias(rng, "mlp_bias")


def _deepseek_v3(rng: random.Random) -> dict[str, Any]:
    own = {"first_k_dense_replace": rng.choice([0, 1]), "rope_interleave": rng.random() < 0.7}
    return _latent(rng) | _in_groups(rng) | own


def _glm_lite(rng: random.Random) -> dict[str, Any]:
    own = {"mlp_layer_types": rng.choice([None, ["sparse", "dense", "sparse"]])}
    return _latent(rng) | _in_groups(rng) | own | {"rope_interleave": rng.random() < 0.7}


def _minicpm(rng: random.Random) -> dict[str, Any]:
    own = {"scale_emb": rng.choice([1, 12, 2.5]), "scale_depth": rng.choice([1.4, None])}
    return _latent(rng) | own | {"dim_model_base": rng.choice([8, None])} | bias(rng, "mlp_bias")


def _youtu(rng: random.Random) -> dict[str, Any]:
    return _latent(rng) | {"rope_interleave": rng.random() < 0.7}


def _gpt1(rng: random.Random) -> dict[str, Any]:
    heads = rng.choice([1, 2, 3])
    return {
        "n_embd": heads * rng.choice([4, 8, 12]),
        "n_head": heads,
        "n_layer": LAYERS,
        "n_positions": CONTEXT,
        "afn": rng.choice(["gelu", "relu", "silu"]),
        "layer_norm_epsilon": rng.choice([1e-5, 1e-6]),
    }


def _of_encoder(rng: random.Random) -> dict[str, Any]:
    drawn = sizes(rng, wide_heads=False)
    kept = ("hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads")
    own = {"max_position_embeddings": CONTEXT, "tie_word_embeddings": rng.random() < 0.5}
    return {key: drawn[key] for key in kept} | own


def _bert_generation(rng: random.Random) -> dict[str, Any]:
    return _of_encoder(rng) | {
        "hidden_act": rng.choice(["gelu", "gelu_new", "relu"]),
        "layer_norm_eps": rng.choice([1e-12, 1e-5]),
        "is_decoder": True,
    }


def _modernbert_decoder(rng: random.Random) -> dict[str, Any]:
    kinds = ["sliding_attention", "full_attention", rng.choice(["sliding_attention", "full_attention"])]
    rng.shuffle(kinds)
    ropes = [{"rope_theta": rng.choice([1e4, 300.0]), "rope_type": "default"} for _ in range(2)]
    biases = bias(rng, "norm_bias", "attention_bias", "mlp_bias", "decoder_bias", "classifier_bias")
    own = {
        "pad_token_id": 0,
        "norm_eps": rng.choice([1e-5, 1e-6]),
        "hidden_activation": rng.choice(["gelu", "silu"]),
        "classifier_activation": rng.choice(["gelu", "silu"]),
        "local_attention": rng.choice([4, 7, 16]),
        "layer_types": kinds,
        "rope_parameters": dict(zip(("full_attention", "sliding_attention"), ropes, strict=True)),
    }
    return _of_encoder(rng) | biases | own


DRAWS: dict[str, Draw] = {
    "afmoe": _afmoe,
    "apertus": _apertus,
    "bert-generation": _bert_generation,
    "biogpt": _biogpt,
    "bitnet": _bitnet,
    "bloom": _bloom,
    "codegen": _codegen,
    "cwm": _cwm,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "diffllama": _diffllama,
    "doge": _doge,
    "dots1": _dots,
    "ernie4_5": _dense("use_bias"),
    "ernie4_5_moe": _ernie,
    "exaone_moe": _exaone,
    "falcon": _falcon,
    "flex_olmo": _flex,
    "glm4_moe_lite": _glm_lite,
    "gpt_bigcode": _bigcode,
    "gpt_oss": _gpt_oss,
    "gptj": _gptj,
    "granite_swa": _granite_swa,
    "granitemoe_swa": _granitemoe_swa,
    "hunyuan_v1_dense": _hunyuan,
    "hunyuan_v1_moe": _hunyuan_of_experts,
    "hy_v3": _hunyuan3,
    "hyperclovax": _clova,
    "internlm3": _internlm,
    "iquestcoder": _dense("attention_bias", "mlp_bias"),
    "jais2": _jais,
    "jetmoe": _jetmoe,
    "kolibri1": _kolibri,
    "llama4_text": _llama4,
    "mellum": _mellum,
    "minicpm3": _minicpm,
    "ministral3": _ministral,
    "modernbert-decoder": _modernbert_decoder,
    "mpt": _mpt,
    "nanochat": _nanochat,
    "nemotron": _nemotron,
    "olmo": _olmo,
    "openai-gpt": _gpt1,
    "persimmon": _persimmon,
    "phi": _phi,
    "phimoe": _phimoe,
    "solar_open": _solar,
    "vaultgemma": _vaultgemma,
    "xglm": _xglm,
    "youtu": _youtu,
}
"""model_type -> what draws a configuration."""
REQUIRED: dict[str, dict[str, Any]] = {
    "bitnet": {"hidden_size": 160, "num_attention_heads": 20},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1},
}
"""Keys without which the reference makes a configuration that it cannot run."""
