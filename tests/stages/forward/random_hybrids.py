"""Small random state-space models and hybrids of every family, made by the reference and saved as it does.

`draw` picks a configuration from a family's axes by seed; `save_random_hybrid` writes it with random tensors,
drawn so that step sizes, decays, gates and the state all matter, and float32 is within 1e-6 of float64.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from . import random_attending, random_gemmas
from .literal_fla import MIXERS, LiteralFla
from .random_models import CONTEXT, VOCAB, save_tokenizer

HYBRIDS = (
    "mamba",
    "falcon_mamba",
    "mamba2",
    "bamba",
    "granitemoehybrid",
    "jamba",
    "falcon_h1",
    "nemotron_h",
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "olmo_hybrid",
    "kimi_linear",
    "lfm2",
    "lfm2_moe",
    "recurrent_gemma",
    "minimax",
    "zamba",
    "zamba2",
    "xlstm",
    "minimax_m2",
    *MIXERS,
)

GEMMA_NORMS = ("gemma3_text", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "recurrent_gemma")


def draw(family: str, seed: int) -> dict[str, Any]:
    """Keyword arguments of the family's reference configuration."""
    rng = random.Random(f"{family} {seed}")
    common = {
        "vocab_size": VOCAB,
        "tie_word_embeddings": rng.random() < 0.5,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": None,
    }
    return common | DRAWS[family](rng)


def _mamba(rng: random.Random) -> dict[str, Any]:
    return {
        "hidden_size": rng.choice([12, 16]),
        "num_hidden_layers": rng.choice([2, 3]),
        "state_size": rng.choice([3, 6]),
        "conv_kernel": rng.choice([3, 4]),
        "expand": rng.choice([1, 2]),
        "time_step_rank": rng.choice(["auto", 3]),
        "use_bias": rng.random() < 0.5,
        "use_conv_bias": rng.random() < 0.7,
        "layer_norm_epsilon": rng.choice([1e-5, 1e-6]),
    }


def _mamba2(rng: random.Random) -> dict[str, Any]:
    size, groups = rng.choice([4, 6]), rng.choice([1, 2])
    heads = groups * rng.choice([2, 4])
    return {
        "hidden_size": heads * size // 2,
        "num_hidden_layers": rng.choice([2, 3]),
        "num_heads": heads,
        "head_dim": size,
        "n_groups": groups,
        "state_size": rng.choice([3, 6]),
        "conv_kernel": rng.choice([3, 4]),
        "use_bias": rng.random() < 0.5,
        "use_conv_bias": rng.random() < 0.7,
        "time_step_limit": rng.choice([(0.0, float("inf")), (0.2, 0.9)]),
        "chunk_size": 16,
    }


def _sizes(rng: random.Random) -> dict[str, Any]:
    """Of a hybrid's stream, attention and MLP."""
    kv = rng.choice([1, 2])
    heads = kv * rng.choice([1, 2])
    return {
        "hidden_size": heads * 8,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "intermediate_size": rng.choice([20, 36]),
        "max_position_embeddings": CONTEXT,
    }


def _mamba2_sizes(rng: random.Random, hidden: int) -> dict[str, Any]:
    """Of Mamba-2 in a hybrid."""
    return {
        "mamba_n_heads": rng.choice([2, 4]),
        "mamba_n_groups": rng.choice([1, 2]),
        "mamba_d_state": rng.choice([3, 6]),
        "mamba_d_conv": rng.choice([3, 4]),
        "mamba_expand": rng.choice([1, 2]),
        "mamba_chunk_size": 16,
        "mamba_conv_bias": rng.random() < 0.7,
        "mamba_proj_bias": rng.random() < 0.5,
        "time_step_limit": rng.choice([(0.0, float("inf")), (0.2, 0.9)]),
    }


def _bamba(rng: random.Random) -> dict[str, Any]:
    sizes = _sizes(rng)
    own = {
        "num_hidden_layers": 3,
        "attn_layer_indices": rng.choice([[1], [0, 2]]),
        "rms_norm_eps": rng.choice([1e-5, 1e-6]),
        "attention_bias": rng.random() < 0.5,
        "mlp_bias": rng.random() < 0.5,
    }
    return sizes | _mamba2_sizes(rng, sizes["hidden_size"]) | own


def _granite(rng: random.Random) -> dict[str, Any]:
    sizes = _sizes(rng)
    own = {
        "num_hidden_layers": 3,
        "layer_types": rng.choice([["mamba", "attention", "mamba"], ["attention", "mamba", "attention"]]),
        "position_embedding_type": rng.choice(["rope", None]),
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.0,
        "residual_multiplier": 0.6,
        "attention_multiplier": 0.2,
        "shared_intermediate_size": 24,
        "num_local_experts": rng.choice([0, 4]),
        "num_experts_per_tok": 2,
    }
    return sizes | _mamba2_sizes(rng, sizes["hidden_size"]) | own


def _jamba(rng: random.Random) -> dict[str, Any]:
    return _sizes(rng) | {
        "num_hidden_layers": 3,
        "attn_layer_period": 2,
        "attn_layer_offset": rng.choice([0, 1]),
        "expert_layer_period": 2,
        "expert_layer_offset": rng.choice([0, 1]),
        "num_experts": rng.choice([1, 4]),
        "num_experts_per_tok": 2,
        "mamba_d_state": rng.choice([3, 6]),
        "mamba_d_conv": rng.choice([3, 4]),
        "mamba_expand": rng.choice([1, 2]),
        "mamba_dt_rank": rng.choice(["auto", 3]),
        "mamba_conv_bias": rng.random() < 0.7,
        "mamba_proj_bias": rng.random() < 0.5,
    }


def _falcon_h1(rng: random.Random) -> dict[str, Any]:
    sizes = _sizes(rng)
    own = {
        "num_hidden_layers": 2,
        "mamba_d_ssm": rng.choice([16, 24]),
        "mamba_rms_norm": rng.random() < 0.6,
        "mamba_norm_before_gate": rng.random() < 0.5,
        "attention_bias": rng.random() < 0.5,
        "mlp_bias": rng.random() < 0.5,
        "projectors_bias": rng.random() < 0.5,
        "embedding_multiplier": 1.5,
        "lm_head_multiplier": 0.5,
        "key_multiplier": 0.7,
        "attention_in_multiplier": 1.2,
        "attention_out_multiplier": 0.8,
        "ssm_in_multiplier": 1.3,
        "ssm_out_multiplier": 0.9,
        "mlp_multipliers": [0.7, 1.4],
        "ssm_multipliers": [0.5, 1.1, 0.9, 1.2, 0.8],
        "tie_word_embeddings": False,
    }
    return sizes | _mamba2_sizes(rng, sizes["hidden_size"]) | own


def _nemotron_h(rng: random.Random) -> dict[str, Any]:
    sizes = _sizes(rng)
    types = ["linear_attention", "mlp", "full_attention", "moe"]
    rng.shuffle(types)
    return sizes | {
        "layers_block_type": types,
        "head_dim": 8,
        "mamba_num_heads": 4,
        "mamba_head_dim": rng.choice([4, 6]),
        "n_groups": rng.choice([1, 2]),
        "ssm_state_size": rng.choice([3, 6]),
        "conv_kernel": rng.choice([3, 4]),
        "chunk_size": 16,
        "use_bias": rng.random() < 0.5,
        "mlp_bias": rng.random() < 0.5,
        "use_conv_bias": rng.random() < 0.7,
        "time_step_min": rng.choice([0.001, 0.3]),
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 12,
        "moe_shared_expert_intermediate_size": 20,
        "moe_latent_size": rng.choice([None, 6]),
        "norm_topk_prob": rng.random() < 0.5,
        "routed_scaling_factor": 1.5,
        "tie_word_embeddings": False,
    }


def _gated_delta(rng: random.Random) -> dict[str, Any]:
    """Sizes of a gated delta net in a hybrid."""
    groups = rng.choice([1, 2])
    return {
        "linear_num_key_heads": groups,
        "linear_num_value_heads": groups * rng.choice([1, 2]),
        "linear_key_head_dim": rng.choice([4, 6]),
        "linear_value_head_dim": rng.choice([4, 8]),
        "linear_conv_kernel_dim": rng.choice([3, 4]),
    }


def _types(rng: random.Random, other: str) -> list[str]:
    """Of three layers."""
    kinds = [other, "full_attention"]
    rng.shuffle(kinds)
    return [*kinds, rng.choice(kinds)]


def _qwen(rng: random.Random) -> dict[str, Any]:
    own = {
        "num_hidden_layers": 3,
        "layer_types": _types(rng, "linear_attention"),
        "head_dim": rng.choice([8, 16]),
        "attention_bias": rng.random() < 0.5,
        "rms_norm_eps": rng.choice([1e-5, 1e-6]),
    }
    return _sizes(rng) | _gated_delta(rng) | own


def _qwen_of_experts(rng: random.Random) -> dict[str, Any]:
    return _qwen(rng) | {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 12,
        "shared_expert_intermediate_size": 20,
    }


def _qwen_next(rng: random.Random) -> dict[str, Any]:
    return _qwen_of_experts(rng) | {
        "norm_topk_prob": rng.random() < 0.5,
        "mlp_only_layers": rng.choice([[], [1]]),
        "decoder_sparse_step": rng.choice([1, 2]),
    }


def _olmo(rng: random.Random) -> dict[str, Any]:
    return (
        _sizes(rng)
        | _gated_delta(rng)
        | {
            "num_hidden_layers": 3,
            "layer_types": _types(rng, "linear_attention"),
            "attention_bias": rng.random() < 0.5,
            "linear_allow_neg_eigval": rng.random() < 0.7,
            "rope_parameters": {"rope_type": "default", "rope_theta": rng.choice([None, 5000.0])},
        }
    )


def _kimi(rng: random.Random) -> dict[str, Any]:
    heads = rng.choice([1, 2])
    return {
        "hidden_size": 16,
        "intermediate_size": 20,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": CONTEXT,
        "num_hidden_layers": 3,
        "layer_types": _types(rng, "linear_attention"),
        "mlp_layer_types": rng.choice([["dense", "sparse", "sparse"], ["sparse", "dense", "dense"]]),
        "linear_num_heads": rng.choice([2, 3]),
        "linear_head_dim": rng.choice([4, 6]),
        "linear_conv_kernel_dim": rng.choice([3, 4]),
        "num_experts": 8,
        "num_experts_per_token": 2,
        "tie_word_embeddings": False,
        "num_shared_experts": rng.choice([1, 2]),
        "num_expert_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 12,
        "moe_renormalize": rng.random() < 0.5,
        "routed_scaling_factor": 1.5,
        "kv_lora_rank": 10,
        "q_lora_rank": rng.choice([None, 6]),
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": rng.choice([4, 6]),
        "v_head_dim": rng.choice([4, 8]),
        "attention_bias": rng.random() < 0.5,
    }


def _lfm2(rng: random.Random) -> dict[str, Any]:
    return _sizes(rng) | {
        "num_hidden_layers": 3,
        "layer_types": _types(rng, "conv"),
        "conv_L_cache": rng.choice([2, 3]),
        "conv_bias": rng.random() < 0.5,
        "block_multiple_of": 8,
        "block_ffn_dim_multiplier": rng.choice([1.0, 1.3]),
        "block_auto_adjust_ff_dim": rng.random() < 0.7,
    }


def _lfm2_moe(rng: random.Random) -> dict[str, Any]:
    found = {key: value for key, value in _lfm2(rng).items() if not key.startswith("block_")}
    return found | {
        "num_dense_layers": rng.choice([0, 1]),
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 12,
        "use_expert_bias": rng.random() < 0.7,
        "norm_topk_prob": rng.random() < 0.5,
        "routed_scaling_factor": 1.5,
    }


def _recurrent_gemma(rng: random.Random) -> dict[str, Any]:
    sizes = _sizes(rng)
    return sizes | {
        "num_hidden_layers": 3,
        "block_types": rng.choice([["recurrent", "recurrent", "attention"], ["attention", "recurrent"]]),
        "lru_width": sizes["hidden_size"] * rng.choice([1, 2]),
        "attention_window_size": rng.choice([5, 64]),
        "conv1d_width": rng.choice([3, 4]),
        "attention_bias": rng.random() < 0.5,
        "logits_soft_cap": rng.choice([3.0, 30.0]),
    }


def _minimax(rng: random.Random) -> dict[str, Any]:
    return _sizes(rng) | {
        "num_hidden_layers": 3,
        "layer_types": _types(rng, "linear_attention"),
        "head_dim": rng.choice([None, 16]),
        "block_size": 16,
        "sliding_window": rng.choice([None, 7]),
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "full_attn_alpha_factor": 1.3,
        "full_attn_beta_factor": 0.8,
        "linear_attn_alpha_factor": 0.9,
        "linear_attn_beta_factor": 1.2,
        "mlp_alpha_factor": 1.1,
        "mlp_beta_factor": 0.7,
    }


def _shared_blocks(rng: random.Random) -> dict[str, Any]:
    """Of a Zamba of five layers: which of them have a shared block, and sizes of its attention and MLP."""
    heads, having = rng.choice([1, 2, 4]), rng.sample(range(5), rng.choice([2, 3, 4]))
    return {
        "hidden_size": 16,
        "num_hidden_layers": 5,
        "layers_block_type": ["hybrid" if i in having else "linear_attention" for i in range(5)],
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "intermediate_size": rng.choice([20, 36]),
        "hidden_act": rng.choice(["gelu", "silu"]),
        "rms_norm_eps": rng.choice([1e-5, 1e-6]),
        "max_position_embeddings": CONTEXT,
        "mamba_d_state": rng.choice([3, 6]),
        "mamba_d_conv": rng.choice([3, 4]),
        "mamba_expand": rng.choice([1, 2]),
    }


def _zamba(rng: random.Random) -> dict[str, Any]:
    found = _shared_blocks(rng)
    return found | {
        "hidden_size": 12,
        "num_key_value_heads": rng.choice([1, found["num_attention_heads"]]),
        "n_mamba_heads": rng.choice([1, 2, 4]),
        "mamba_dt_rank": rng.choice(["auto", 3]),
        "mamba_conv_bias": rng.random() < 0.7,
        "mamba_proj_bias": rng.random() < 0.5,
    }


def _zamba2(rng: random.Random) -> dict[str, Any]:
    groups = rng.choice([1, 2])
    found, adapts = _shared_blocks(rng), rng.random() < 0.6
    kv = found["num_attention_heads"] if adapts else rng.choice([1, found["num_attention_heads"]])
    return found | {
        "num_key_value_heads": kv,
        "n_mamba_heads": groups * rng.choice([1, 2, 4]),
        "mamba_ngroups": groups,
        "num_mem_blocks": rng.choice([1, 2, 3]),
        "use_shared_attention_adapter": adapts,
        "adapter_rank": rng.choice([2, 5]),
        "use_mem_rope": rng.random() < 0.6,
        "rope_parameters": {"rope_type": "default", "rope_theta": rng.choice([10000.0, 500.0])},
        "add_bias_linear": rng.random() < 0.5,
        "time_step_min": rng.choice([0.001, 0.3]),
        "chunk_size": 16,
    }


def _xlstm(rng: random.Random) -> dict[str, Any]:
    heads = rng.choice([1, 2])
    return {
        "hidden_size": 16,
        "num_hidden_layers": rng.choice([2, 3]),
        "num_heads": heads,
        "use_bias": rng.random() < 0.5,
        "qk_dim_factor": rng.choice([0.5, 0.25]),
        "v_dim_factor": rng.choice([1.0, 0.5]),
        "ffn_proj_factor": rng.choice([2.667, 1.3]),
        "ffn_round_up_to_multiple_of": rng.choice([4, 32]),
        "gate_soft_cap": rng.choice([15.0, 2.0]),
        "output_logit_soft_cap": rng.choice([30.0, 3.0]),
        # A head that has read next to nothing is normed all the same: rounding as much as what it read.
        "norm_eps": rng.choice([1e-2, 3e-3]),
        "eps": rng.choice([1e-6, 1e-3]),
        "chunk_size": rng.choice([16, 64]),
        "use_cache": False,
    }


def _of_fla(rng: random.Random) -> dict[str, Any]:
    """What models of flash-linear-attention have in common, some of them with attention in a layer."""
    attends = {"layers": [rng.randrange(3)], "num_heads": 2, "num_kv_heads": rng.choice([1, 2])}
    attends |= {"qkv_bias": rng.random() < 0.5, "window_size": rng.choice([None, 5])}
    attends |= {"rope_theta": rng.choice([10000.0, 500.0])}
    return {
        "hidden_size": 16,
        "num_hidden_layers": 3,
        "intermediate_size": rng.choice([20, 36]),
        "norm_eps": rng.choice([1e-2, 3e-3]),  # of heads, too: as for xLSTM
        "use_short_conv": rng.random() < 0.6,
        "conv_size": rng.choice([3, 4]),
        "attn": rng.choice([None, [attends]]),
    }


def _fading(rng: random.Random) -> dict[str, Any]:
    """Of GLA and RetNet."""
    heads = rng.choice([1, 2, 4])
    return _of_fla(rng) | {
        "num_heads": heads,
        "num_kv_heads": rng.choice([None, 1, heads]),
        "expand_k": rng.choice([0.5, 1.0]),
        "expand_v": rng.choice([1.0, 2.0]),
        "feature_map": rng.choice([None, None, "relu"]),
        "use_output_gate": rng.random() < 0.7,
        "fuse_norm": rng.random() < 0.5,
        "elementwise_affine": rng.random() < 0.8,
        "clamp_min": rng.choice([None, -0.05]),
    }


def _delta_net(rng: random.Random) -> dict[str, Any]:
    return _of_fla(rng) | {
        "num_heads": rng.choice([1, 2]),  # keys of four entries or more: over their length, two are a sign
        "expand_k": rng.choice([0.5, 1.0]),
        "expand_v": rng.choice([1.0, 2.0]),
        "use_gate": rng.random() < 0.5,
        "allow_neg_eigval": rng.random() < 0.5,
    }


def _gated_deltanet(rng: random.Random) -> dict[str, Any]:
    heads = rng.choice([1, 2])
    return _of_fla(rng) | {
        "num_heads": heads,
        "num_v_heads": rng.choice([None, 2 * heads]),
        "head_dim": rng.choice([4, 6]),
        "expand_v": rng.choice([1.0, 1.5, 2.0]),
        "use_gate": rng.random() < 0.7,
        "allow_neg_eigval": rng.random() < 0.5,
    }


def _minimax_m2(rng: random.Random) -> dict[str, Any]:
    return _sizes(rng) | {
        "num_hidden_layers": rng.choice([2, 3]),
        "head_dim": rng.choice([8, 16]),
        "num_local_experts": rng.choice([4, 8]),
        "num_experts_per_tok": rng.choice([1, 2]),
        "rms_norm_eps": rng.choice([1e-5, 1e-6]),
        "rotary_dim": rng.choice([4, 8]),
    }


DRAWS = {
    **random_attending.DRAWS,
    **random_gemmas.DRAWS,
    "minimax_m2": _minimax_m2,
    "gla": _fading,
    "retnet": _fading,
    "delta_net": _delta_net,
    "gated_deltanet": _gated_deltanet,
    "xlstm": _xlstm,
    "zamba": _zamba,
    "zamba2": _zamba2,
    "qwen3_next": _qwen_next,
    "qwen3_5_text": _qwen,
    "qwen3_5_moe_text": _qwen_of_experts,
    "olmo_hybrid": _olmo,
    "kimi_linear": _kimi,
    "lfm2": _lfm2,
    "lfm2_moe": _lfm2_moe,
    "recurrent_gemma": _recurrent_gemma,
    "minimax": _minimax,
    "mamba": _mamba,
    "falcon_mamba": _mamba,
    "mamba2": _mamba2,
    "bamba": _bamba,
    "granitemoehybrid": _granite,
    "jamba": _jamba,
    "falcon_h1": _falcon_h1,
    "nemotron_h": _nemotron_h,
}


def save_random_hybrid(
    directory: Path, family: str, seed: int = 0, *, tokenizer: bool = True, **overrides: Any
) -> Any:
    """Write a random model of a family into `directory`; returns the reference model, eager, float32. What
    transformers does not know is written, and computed in float64, by literal_fla.py."""
    import torch

    told = draw(family, seed) | overrides
    model = _literal(family, seed, told) if family in MIXERS else _of_transformers(family, seed, told)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("A_log"):
                weight.uniform_(-2.5, 0.5)  # decays from hardly any to nearly all
            elif name.endswith("recurrent_param"):
                weight.uniform_(-4.0, -1.0)  # decays of a gated linear unit from 0.3 to nearly 1
            elif name.endswith(("dt_bias", "dt_proj.bias")):
                weight.uniform_(-2.0, 0.5)
            elif weight.ndim > 1:
                weight.normal_(std=0.2)
            elif "norm" in name and not name.endswith("linear_attn.norm.weight") and family in GEMMA_NORMS:
                weight.normal_(mean=-0.5, std=0.3)  # what multiplies is 1 more
            else:
                weight.normal_(mean=0.5, std=0.3)
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.uniform_(-0.2, 0.2)
    if family in MIXERS:
        _save_literal(model, directory, {"model_type": family} | told)
    else:
        model.save_pretrained(directory)
    if family == "olmo_hybrid":
        _as_released(directory / "model.safetensors", seed)
    if tokenizer:
        save_tokenizer(directory)
    return model.double() if family in MIXERS else model


def _of_transformers(family: str, seed: int, told: dict[str, Any]) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    described = AutoConfig.for_model(family, **told)
    described._attn_implementation = described._experts_implementation = "eager"
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(described).float().eval()


def _literal(family: str, seed: int, told: dict[str, Any]) -> Any:
    import torch

    torch.manual_seed(seed)
    return LiteralFla({"model_type": family} | told).eval()


def _save_literal(model: Any, directory: Path, config: dict[str, Any]) -> None:
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    held = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save_file(held, directory / "model.safetensors", {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config))


def _as_released(path: Path, seed: int) -> None:
    """Rewrite Olmo Hybrid with each convolution as wide as its projection, where the reference writes three
    of nearly equal width; and for odd seeds with the norms of attention under their own name."""
    import torch
    from safetensors.torch import load_file, save_file

    held = load_file(path)
    for name in [name for name in held if name.endswith("q_conv1d.weight")]:
        names = [name.replace("q_conv1d", f"{part}_conv1d") for part in "qkv"]
        widths = [len(held[each.replace("conv1d", "proj")]) for each in names]
        parts = torch.cat([held[each] for each in names]).split(widths)
        held |= {each: part.contiguous() for each, part in zip(names, parts, strict=True)}
    for name in [name for name in held if seed % 2 and name.endswith("post_feedforward_layernorm.weight")]:
        room = name.removesuffix("post_feedforward_layernorm.weight")
        held[f"{room}post_attention_layernorm.weight"] = held.pop(f"{room}feedforward_layer_norm.weight")
    save_file(held, path, {"format": "pt"})
