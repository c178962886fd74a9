"""Random models as code that came with their checkpoints names and lays out what Llama or Qwen 2 computes.

Border: the reference is transformers' model of that arithmetic; what is written here are names and layouts.
"""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from .random_models import save_random_model

Weights = dict[str, torch.Tensor]
_PARTS = ("q_proj", "k_proj", "v_proj")
_LAYER = "model.layers.{}."


def save_random_hub_code(folder: Path, family: str, seed: int, **told: Any) -> Any:
    """Write a random model; returns the reference, eager, float32. told: further keys of its config."""
    kind, drawn, layout, keys = MADE[family]
    rng = random.Random(f"{family} {seed}")
    shape = drawn(rng) | {"tie_word_embeddings": False}
    reference = save_random_model(folder, kind, seed, tokenizer=False, **shape)
    config = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    laid = layout(weights, config)
    save_file({name: tensor.contiguous() for name, tensor in laid.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(keys(config) | {"model_type": family} | told))
    return reference


def _shape(rng: random.Random, *, grouped: bool) -> dict[str, Any]:
    kv = rng.choice([1, 2])
    heads = kv * (rng.choice([1, 2, 3]) if grouped else 1) if grouped else rng.choice([2, 4])
    return {
        "hidden_size": heads * 8,
        "num_attention_heads": heads,
        "num_key_value_heads": kv if grouped else heads,
        "head_dim": 8,
        "intermediate_size": rng.choice([24, 40]),
        "num_hidden_layers": rng.choice([2, 3]),
        "rope_parameters": {"rope_type": "default", "rope_theta": rng.choice([1e4, 500.0])},
    }


def _plain(config: dict[str, Any], **own: Any) -> dict[str, Any]:
    names = ("vocab_size", "hidden_size", "num_attention_heads", "num_hidden_layers", "intermediate_size")
    return {name: config[name] for name in names} | {"tie_word_embeddings": False} | own


def _theta(config: dict[str, Any]) -> float:
    found: float = config["rope_parameters"]["rope_theta"]
    return found


def _renamed(weights: Weights, names: dict[str, str]) -> Weights:
    def renamed(name: str) -> str:
        return functools.reduce(lambda told, pair: told.replace(*pair), names.items(), name)

    return {renamed(name): tensor for name, tensor in weights.items()}


def _together(
    weights: Weights, config: dict[str, Any], name: str, join: Callable[[list[torch.Tensor]], torch.Tensor]
) -> Weights:
    """Queries, keys and values as one tensor, and one of their biases."""
    for layer in range(config["num_hidden_layers"]):
        room = f"{_LAYER.format(layer)}self_attn."
        for end in ("weight", "bias"):
            parts = [weights.pop(f"{room}{part}.{end}", None) for part in _PARTS]
            if parts[0] is not None:
                weights[f"{room}{name}.{end}"] = join(parts)
    return weights


def _stacked(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(parts)


def _by_key_head(kv: int) -> Callable[[list[torch.Tensor]], torch.Tensor]:
    """Of each key head its queries, its keys and its values."""
    return lambda parts: torch.cat([part.unflatten(0, (kv, -1)) for part in parts], dim=1).flatten(0, 1)


def _baichuan(weights: Weights, config: dict[str, Any]) -> Weights:
    return _together(weights, config, "W_pack", _stacked)


def _internlm(weights: Weights, config: dict[str, Any]) -> Weights:
    laid = _together(weights, config, "wqkv", _by_key_head(config["num_key_value_heads"]))
    names = {
        "self_attn.o_proj": "attention.wo",
        "self_attn.": "attention.",
        "mlp.gate_proj": "feed_forward.w1",
    }
    names |= {"mlp.up_proj": "feed_forward.w3", "mlp.down_proj": "feed_forward.w2"}
    names |= {"input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm"}
    return _renamed(laid, names | {"embed_tokens": "tok_embeddings", "lm_head": "output"})


_OF_GPT = {"model.embed_tokens": "transformer.wte", "model.norm": "transformer.ln_f"}
_OF_GPT |= {"model.layers.": "transformer.h.", "input_layernorm": "ln_1", "post_attention_layernorm": "ln_2"}


def _qwen(weights: Weights, config: dict[str, Any]) -> Weights:
    laid = _together(weights, config, "c_attn", _stacked)
    names = {"self_attn.o_proj": "attn.c_proj", "self_attn.": "attn.", "mlp.gate_proj": "mlp.w2"}
    return _renamed(laid, _OF_GPT | names | {"mlp.up_proj": "mlp.w1", "mlp.down_proj": "mlp.c_proj"})


def _exaone(weights: Weights, config: dict[str, Any]) -> Weights:
    names = {"self_attn.o_proj": "attn.attention.out_proj", "self_attn.": "attn.attention."}
    names |= {"mlp.gate_proj": "mlp.c_fc_0", "mlp.up_proj": "mlp.c_fc_1", "mlp.down_proj": "mlp.c_proj"}
    return _renamed(weights, _OF_GPT | names)


def _keys_of_baichuan(config: dict[str, Any]) -> dict[str, Any]:
    kept = {"rms_norm_eps": config["rms_norm_eps"], "hidden_act": "silu", "model_max_length": 4096}
    return _plain(config, max_position_embeddings=config["max_position_embeddings"], **kept)


def _keys_of_internlm(config: dict[str, Any]) -> dict[str, Any]:
    return _plain(
        config,
        num_key_value_heads=config["num_key_value_heads"],
        rms_norm_eps=config["rms_norm_eps"],
        hidden_act="silu",
        bias=config["attention_bias"],
        rope_theta=_theta(config),
        max_position_embeddings=config["max_position_embeddings"],
    )


def _keys_of_qwen(config: dict[str, Any]) -> dict[str, Any]:
    return _plain(config) | {
        "intermediate_size": 2 * config["intermediate_size"],
        "layer_norm_epsilon": config["rms_norm_eps"],
        "kv_channels": config["head_dim"],
        "rotary_emb_base": _theta(config),
        "rotary_pct": 1.0,
        "no_bias": True,
        "seq_length": 200,
        "max_position_embeddings": 400,
        "use_dynamic_ntk": True,
        "use_logn_attn": True,
        "scale_attn_weights": True,
    }


def _keys_of_exaone(config: dict[str, Any]) -> dict[str, Any]:
    found = _plain(config) | {
        "num_layers": config["num_hidden_layers"],
        "num_key_value_heads": config["num_key_value_heads"],
        "activation_function": "silu",
        "layer_norm_epsilon": config["rms_norm_eps"],
        "rope_theta": _theta(config),
        "max_position_embeddings": config["max_position_embeddings"],
    }
    del found["num_hidden_layers"]
    return found


Draw = Callable[[random.Random], dict[str, Any]]
Lay = Callable[[Weights, dict[str, Any]], Weights]
Keys = Callable[[dict[str, Any]], dict[str, Any]]
MADE: dict[str, tuple[str, Draw, Lay, Keys]] = {
    "baichuan": (
        "llama",
        lambda rng: (
            _shape(rng, grouped=False)
            | {"attention_bias": False, "mlp_bias": False}
            | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
        ),
        _baichuan,
        _keys_of_baichuan,
    ),
    "exaone": (
        "llama",
        lambda rng: _shape(rng, grouped=True) | {"attention_bias": False, "mlp_bias": False},
        _exaone,
        _keys_of_exaone,
    ),
    "internlm2": (
        "llama",
        lambda rng: _shape(rng, grouped=True) | {"attention_bias": rng.random() < 0.5, "mlp_bias": False},
        _internlm,
        _keys_of_internlm,
    ),
    "qwen": (
        "qwen2",
        lambda rng: _shape(rng, grouped=False) | {"use_sliding_window": False},
        _qwen,
        _keys_of_qwen,
    ),
}
"""Family -> (what computes as it does, what is drawn, how it lays weights out, what its config says)."""
