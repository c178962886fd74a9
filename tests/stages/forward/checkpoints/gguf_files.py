"""Random checkpoints as the files llama.cpp's converter makes of them.

Names of tensors are the format's own (`gguf.get_tensor_name_map`); what else the converter does is written
out here, from its source: rows of Llama's queries and keys, Gemma's norms, matrices of GPT-2, experts in one
tensor.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

KINDS = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "phi3": "phi3",
    "starcoder2": "starcoder2",
    "stablelm": "stablelm",
    "gpt2": "gpt2",
}
"""model_type -> general.architecture."""
SHIFTED = ("gemma2", "gemma3_text")


def draw_config(model_type: str, seed: int, **given: Any) -> Any:
    """A random small configuration whose rows are whole blocks of 32 numbers."""
    from transformers import CONFIG_MAPPING

    rng = np.random.default_rng(seed)
    heads, groups = (4, int(rng.choice([1, 2, 4]))) if model_type != "gpt2" else (4, 4)
    hidden, inner = int(rng.choice([64, 128])), int(rng.choice([96, 160]))
    sizes: dict[str, Any] = {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "num_hidden_layers": int(rng.choice([2, 3])),
        "vocab_size": 96,
        "max_position_embeddings": 128,
        "tie_word_embeddings": bool(rng.integers(2)),
        "pad_token_id": 0,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    if model_type == "gpt2":
        sizes = {
            "n_embd": hidden, "n_inner": inner, "n_head": heads, "n_layer": sizes["num_hidden_layers"],
            "vocab_size": 96, "n_positions": 128,
        }  # fmt: skip
    if model_type in ("qwen3", "qwen3_moe", "gemma2", "gemma3_text"):
        sizes["head_dim"] = 32
    if model_type in ("gemma2", "gemma3_text"):
        sizes |= {"query_pre_attn_scalar": 32, "sliding_window": 16, "tie_word_embeddings": True}
    if model_type in ("mistral", "phi3", "starcoder2"):
        sizes["sliding_window"] = 16
    if model_type == "mixtral":
        sizes |= {"num_local_experts": 4, "num_experts_per_tok": 2}
    if model_type in ("qwen2_moe", "qwen3_moe"):
        sizes |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    if model_type == "qwen2_moe":
        sizes["shared_expert_intermediate_size"] = 64
    if model_type == "qwen3_moe":
        sizes["norm_topk_prob"] = True
    if model_type == "stablelm":
        sizes |= {"use_qkv_bias": bool(rng.integers(2)), "partial_rotary_factor": 0.5}
    if model_type == "llama":
        sizes["rope_theta"] = 5e4
    return CONFIG_MAPPING[model_type](**sizes | given)


def save_gguf(
    path: Path,
    model: Any,
    kind: Any = None,
    metadata: dict[str, Any] | None = None,
    tensors: Any = None,
    words: Any = None,
) -> None:
    """Write a reference model as one file; kind: how matrices are quantised; None for float32. words: adds a
    vocabulary to the writer."""
    config, model_type = model.config, model.config.model_type
    architecture = KINDS[model_type]
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in (_metadata(config) | (metadata or {})).items():
        if value is None:
            continue
        add = {
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
        }
        add[type(value)](f"{architecture}.{key}", value)
    if words is not None:
        words(writer)
    for name, value in (_tensors(model) | (tensors or {})).items():
        if kind is None or value.ndim < 2 or "ffn_gate_inp" in name:
            writer.add_tensor(name, value)
        else:
            packed = gguf.quantize(value, kind)
            writer.add_tensor(name, packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _metadata(config: Any) -> dict[str, Any]:
    told = config.to_dict()
    if config.model_type == "gpt2":
        return {
            "context_length": config.n_positions,
            "embedding_length": config.n_embd,
            "block_count": config.n_layer,
            "feed_forward_length": config.n_inner,
            "attention.head_count": config.n_head,
            "attention.layer_norm_epsilon": config.layer_norm_epsilon,
        }
    eps = told.get("rms_norm_eps")
    rope = told.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    head = told.get("head_dim") or config.hidden_size // config.num_attention_heads
    return {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": eps,
        "attention.layer_norm_epsilon": None
        if eps
        else told.get("norm_epsilon") or told.get("layer_norm_eps"),
        "attention.key_length": head,
        "attention.sliding_window": told.get("sliding_window"),
        "attn_logit_softcapping": told.get("attn_logit_softcapping"),
        "final_logit_softcapping": told.get("final_logit_softcapping"),
        "rope.freq_base": float(rope.get("rope_theta", 10000.0)),
        "rope.dimension_count": int(head * rope.get("partial_rotary_factor", 1.0)),
        "expert_count": told.get("num_local_experts") or told.get("num_experts"),
        "expert_used_count": told.get("num_experts_per_tok"),
        "vocab_size": config.vocab_size,
    }


def _tensors(model: Any) -> dict[str, np.ndarray]:
    config, model_type = model.config, model.config.model_type
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == KINDS[model_type])
    layers = config.num_hidden_layers
    names = gguf.get_tensor_name_map(arch, layers)
    found: dict[str, np.ndarray] = {}
    for name, tensor in model.state_dict().items():
        value = tensor.float().numpy()
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if ".experts." in name:  # transformers holds them stacked, gate and up as one
            block = f"blk.{name.split('.')[2]}"
            if name.endswith("gate_up_proj"):
                gate, up = np.split(value, 2, axis=1)
                found[f"{block}.ffn_gate_exps.weight"] = np.ascontiguousarray(gate)
                found[f"{block}.ffn_up_exps.weight"] = np.ascontiguousarray(up)
            else:
                found[f"{block}.ffn_down_exps.weight"] = value
            continue
        stem, _, kind = name.rpartition(".")
        target = names.get_name(stem)
        if target is None and model_type == "mixtral" and stem.endswith("mlp.gate"):
            target = f"blk.{name.split('.')[2]}.ffn_gate_inp"
        assert target is not None, name
        if KINDS[model_type] == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            value = value.reshape(heads, 2, value.shape[0] // heads // 2, *value.shape[1:])
            value = value.swapaxes(1, 2).reshape(tensor.shape)
        if model_type in SHIFTED and name.endswith("norm.weight"):
            value = value + 1
        if model_type == "gpt2" and kind == "weight" and stem.endswith(("c_attn", "c_proj", "c_fc")):
            value = value.T
        if name.endswith("shared_expert_gate.weight"):
            value = value[0]
        found[f"{target}.{kind}"] = np.ascontiguousarray(value)
    return found
