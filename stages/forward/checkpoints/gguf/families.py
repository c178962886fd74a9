"""GGUF architectures: their model_type, config.json and tensor names in transformers.

A row per architecture says what llama.cpp's converter did to the checkpoint. Keys of config.json without
metadata are derived from tensor shapes, or are constants that llama.cpp assumes.

Works on names, shapes and metadata; never imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .....store.errors import ConfigError
from .header import Header

__all__ = ["FAMILIES", "GgufFamily", "family_of"]

Raw = dict[str, Any]

_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    # llama.cpp names the norm by what reads it, transformers by what it follows.
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_AROUND = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
_SHARED = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_MIXTRAL = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}


@dataclass(frozen=True)
class GgufFamily:
    """How llama.cpp's converter renamed and transformed the tensors of one architecture."""

    config: Callable[[Header], Raw]
    """Function from the header of a file to the content of config.json."""
    outside: Mapping[str, str] = field(default_factory=lambda: _OUTSIDE)
    """GGUF name -> checkpoint name of tensors outside the layers, without ".weight"."""
    layer: Mapping[str, str] = field(default_factory=lambda: _LAYER)
    """GGUF name -> checkpoint name of tensors of a layer, without ".weight"; "{}" is an expert's index."""
    prefix: str = "model.layers.{}."
    """Prefix of the checkpoint names of a layer; "{}" is the index of the layer."""
    has_paired_rope: bool = False
    """Whether the converter reorders rows of q and k, so that RoPE rotates neighbouring dimensions instead of
    halves."""
    has_shifted_norms: bool = False
    """Whether the converter adds 1 to norm weights, because the checkpoint's norms multiply by 1 + weight."""
    is_transposed: bool = False
    """Whether the checkpoint stores matrices of a layer as [in, out]."""


def family_of(header: Header) -> GgufFamily:
    """How the architecture of a GGUF file was converted.

    Raises:
        ConfigError: for an unsupported architecture.
    """
    family = FAMILIES.get(header.architecture)
    if family is None:
        raise ConfigError(
            f"{header.path}: expected a GGUF file of architecture {', '.join(FAMILIES)}, found "
            f"{header.architecture!r}; load the checkpoint from which it was converted"
        )
    return family


def _common_keys(header: Header, model_type: str) -> Raw:
    """Keys of config.json that nearly all decoders have."""
    heads = _integer(header, "attention.head_count")
    hidden = header.require("embedding_length")
    return {
        "model_type": model_type,
        "hidden_size": hidden,
        "num_hidden_layers": header.require("block_count"),
        "intermediate_size": _integer(header, "feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": _integer(header, "attention.head_count_kv", heads),
        "max_position_embeddings": header.require("context_length"),
        "vocab_size": header.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in header.tensors,
    }


def _rms_norm_keys(header: Header, model_type: str) -> Raw:
    """Keys of config.json of decoders with RMS norms and RoPE."""
    heads = _integer(header, "attention.head_count")
    head_dim = header.get("attention.key_length", header.require("embedding_length") // heads)
    return _common_keys(header, model_type) | {
        "rms_norm_eps": header.require("attention.layer_norm_rms_epsilon"),
        "rope_theta": header.get("rope.freq_base", 10000.0),
        "head_dim": head_dim,
        **_rope_scaling(header, header.get("rope.dimension_count", head_dim)),
    }


def _llama(header: Header) -> Raw:
    # llama.cpp converts Llama, Mistral and Mixtral to one architecture; what they differ in tells them apart.
    raw = _rms_norm_keys(header, "llama")
    raw["attention_bias"] = "blk.0.attn_q.bias" in header.tensors
    raw["mlp_bias"] = "blk.0.ffn_up.bias" in header.tensors
    if window := header.get("attention.sliding_window"):
        raw |= {"model_type": "mistral", "sliding_window": window}
    if experts := header.get("expert_count", 0):
        top_k = header.require("expert_used_count")
        raw |= {"model_type": "mixtral", "num_local_experts": experts, "num_experts_per_tok": top_k}
        raw["sliding_window"] = header.get("attention.sliding_window")
    return raw


def _qwen2(header: Header) -> Raw:
    return _rms_norm_keys(header, "qwen2")


def _qwen3(header: Header) -> Raw:
    return _rms_norm_keys(header, "qwen3") | {"attention_bias": "blk.0.attn_q.bias" in header.tensors}


def _expert_keys(header: Header, model_type: str) -> Raw:
    return _rms_norm_keys(header, model_type) | {
        "num_experts": header.require("expert_count"),
        "num_experts_per_tok": header.require("expert_used_count"),
        "moe_intermediate_size": header.tensors["blk.0.ffn_gate_exps.weight"].shape[1],
    }


def _qwen2_moe(header: Header) -> Raw:
    shared_size = header.tensors["blk.0.ffn_gate_shexp.weight"].shape[0]
    return _expert_keys(header, "qwen2_moe") | {"shared_expert_intermediate_size": shared_size}


def _qwen3_moe(header: Header) -> Raw:
    # No metadata say so; llama.cpp normalises in this architecture.
    return _expert_keys(header, "qwen3_moe") | {"norm_topk_prob": True}


def _gemma2(header: Header) -> Raw:
    raw = _rms_norm_keys(header, "gemma2") | {
        "attn_logit_softcapping": header.get("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": header.get("final_logit_softcapping", 30.0),
        "sliding_window": header.get("attention.sliding_window", 4096),
    }
    return raw | _query_scale(raw, largest=46)


def _gemma3(header: Header) -> Raw:
    raw = _rms_norm_keys(header, "gemma3_text") | {
        "sliding_window": header.require("attention.sliding_window"),
        "rope_local_base_freq": header.get("rope.freq_base_swa", 10000.0),
    }
    return raw | _query_scale(raw, largest=62)


def _query_scale(raw: Raw, largest: int) -> Raw:
    """Scale of the attention scores of Gemma, which GGUF metadata do not have.

    llama.cpp hard-codes an exception for the largest model of each family, recognised by its number of
    layers.

    Arguments:
        raw: the other keys of config.json.
        largest: number of layers of the largest model of the family.
    """
    width = raw["hidden_size"] // raw["num_attention_heads"]
    return {"query_pre_attn_scalar": width if raw["num_hidden_layers"] == largest else raw["head_dim"]}


def _phi3(header: Header) -> Raw:
    raw = _rms_norm_keys(header, "phi3")
    rotary_dim = header.get("rope.dimension_count", raw["head_dim"])
    if rotary_dim != raw["head_dim"]:
        raw["partial_rotary_factor"] = rotary_dim / raw["head_dim"]
    if window := header.get("attention.sliding_window"):
        raw["sliding_window"] = window
    return raw


def _starcoder2(header: Header) -> Raw:
    return _common_keys(header, "starcoder2") | {
        "norm_epsilon": header.require("attention.layer_norm_epsilon"),
        "rope_theta": header.get("rope.freq_base", 10000.0),
        "use_bias": "blk.0.attn_q.bias" in header.tensors,
        "sliding_window": header.get("attention.sliding_window"),
        **_rope_scaling(header, header.get("rope.dimension_count", 0)),
    }


def _stablelm(header: Header) -> Raw:
    raw = _common_keys(header, "stablelm")
    head_dim = raw["hidden_size"] // raw["num_attention_heads"]
    return raw | {
        "layer_norm_eps": header.require("attention.layer_norm_epsilon"),
        "rope_theta": header.get("rope.freq_base", 10000.0),
        "partial_rotary_factor": header.get("rope.dimension_count", head_dim) / head_dim,
        "use_qkv_bias": "blk.0.attn_q.bias" in header.tensors,
        "use_parallel_residual": "blk.0.ffn_norm.weight" not in header.tensors,
    }


def _gpt2(header: Header) -> Raw:
    return {
        "model_type": "gpt2",
        "n_embd": header.require("embedding_length"),
        "n_layer": header.require("block_count"),
        "n_head": _integer(header, "attention.head_count"),
        "n_inner": _integer(header, "feed_forward_length"),
        "n_positions": header.require("context_length"),
        "vocab_size": header.tensors["token_embd.weight"].shape[0],
        "layer_norm_epsilon": header.require("attention.layer_norm_epsilon"),
        "tie_word_embeddings": "output.weight" not in header.tensors,
    }


def _integer(header: Header, key: str, default: int | None = None) -> int:
    """An integer of the metadata; ConfigError for another value, such as an array with one per layer."""
    value = header.require(key) if default is None else header.get(key, default)
    if not isinstance(value, int):
        raise ConfigError(
            f"{header.path}: expected an integer as metadata {key}, found {value!r:.80}; load the checkpoint "
            "from which the file was converted"
        )
    return value


def _rope_scaling(header: Header, rotary_dim: int) -> Raw:
    """Keys of config.json that scale RoPE for contexts longer than in training; empty without scaling.

    Arguments:
        header: header of the GGUF file.
        rotary_dim: number of rotated dimensions of a head.
    """
    # Longrope divides frequencies by these factors (Phi-3 with a long context).
    long, short = (header.tensors.get(f"rope_factors_{which}.weight") for which in ("long", "short"))
    original = header.get("rope.scaling.original_context_length")
    if long is not None and short is not None:
        factors = {"long_factor": long.plain().tolist(), "short_factor": short.plain().tolist()}
        extended = {"original_max_position_embeddings": original} if original else {}
        return {"rope_scaling": {"rope_type": "longrope", **factors}, **extended}
    if "rope_freqs.weight" in header.tensors:
        return {"rope_scaling": _llama3_rope_scaling(header, rotary_dim)}
    kind = header.get("rope.scaling.type", "none")
    if kind == "none":
        return {}
    scaling = {"rope_type": kind, "factor": header.require("rope.scaling.factor")}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = original
    elif kind != "linear":
        raise ConfigError(
            f"{header.path}: expected metadata rope.scaling.type none, linear or yarn, found {kind!r}; load "
            "the checkpoint from which the file was converted"
        )
    return {"rope_scaling": scaling}


def _llama3_rope_scaling(header: Header, rotary_dim: int) -> Raw:
    """Rope scaling of Llama 3.1 and later, recovered from the frequency divisors in the file.

    Raises:
        ConfigError: where no known release has these divisors.
    """
    import numpy as np

    stored = np.asarray(header.tensors["rope_freqs.weight"].plain(), np.float64)
    frequency = float(header.get("rope.freq_base", 10000.0)) ** -(np.arange(0, rotary_dim, 2) / rotary_dim)
    # Factors of the Llama 3.1, 3.2 and later releases; a file stores only the resulting divisors.
    for factor, original in ((8.0, 8192), (32.0, 8192), (4.0, 8192), (16.0, 8192)):
        low, high = 1.0, 4.0
        smooth = np.clip((original * frequency / (2 * np.pi) - low) / (high - low), 0.0, 1.0)
        divisors = 1 / ((1 - smooth) / factor + smooth)
        if divisors.shape == stored.shape and np.allclose(divisors, stored, rtol=1e-4, atol=0):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }
    raise ConfigError(
        f"{header.path}: expected the tensor rope_freqs.weight of a release of Llama 3, found other numbers; "
        "load the checkpoint from which the file was converted"
    )


FAMILIES: dict[str, GgufFamily] = {
    "llama": GgufFamily(_llama, layer=_LAYER | _MIXTRAL, has_paired_rope=True),
    "qwen2": GgufFamily(_qwen2),
    "qwen3": GgufFamily(_qwen3, layer=_LAYER | _HEAD_NORMS),
    "qwen2moe": GgufFamily(_qwen2_moe, layer=_LAYER | _EXPERTS | _SHARED),
    "qwen3moe": GgufFamily(_qwen3_moe, layer=_LAYER | _HEAD_NORMS | _EXPERTS),
    "gemma2": GgufFamily(_gemma2, layer=_LAYER | _AROUND, has_shifted_norms=True),
    "gemma3": GgufFamily(_gemma3, layer=_LAYER | _HEAD_NORMS | _AROUND, has_shifted_norms=True),
    "phi3": GgufFamily(
        _phi3, layer=_LAYER | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
    ),
    "starcoder2": GgufFamily(_starcoder2, layer=_LAYER | {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}),
    "stablelm": GgufFamily(_stablelm),
    "gpt2": GgufFamily(
        _gpt2,
        outside={
            "token_embd": "transformer.wte",
            "position_embd": "transformer.wpe",
            "output_norm": "transformer.ln_f",
            "output": "lm_head",
        },
        layer={
            "attn_norm": "ln_1",
            "attn_qkv": "attn.c_attn",
            "attn_output": "attn.c_proj",
            "ffn_norm": "ln_2",
            "ffn_up": "mlp.c_fc",
            "ffn_down": "mlp.c_proj",
        },
        prefix="transformer.h.{}.",
        is_transposed=True,
    ),
}
"""general.architecture -> its row."""
