"""Small random configurations of decoders whose layers hand on more than a stream, by axis and seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from .random_later import rms, yarn
from .random_models import CONTEXT, VOCAB

GEMMAS = ("gemma3n_text", "gemma4_text")
FULL, SLIDING = "full_attention", "sliding_attention"


def _sizes(rng: random.Random) -> dict[str, Any]:
    kv = rng.choice([1, 2])
    heads = kv * rng.choice([1, 2])
    return rms(rng) | {
        "hidden_size": 32 + 8 * heads,  # norms of few numbers next to nothing round by more than is compared
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": rng.choice([8, 16]),
        "max_position_embeddings": CONTEXT,
        "hidden_activation": rng.choice(["gelu_pytorch_tanh", "silu"]),
        "final_logit_softcapping": rng.choice([30.0, 4.0]),
        "attention_bias": rng.random() < 0.4,
        "sliding_window": rng.choice([5, 9]),
        "hidden_size_per_layer_input": rng.choice([4, 6]),
        "vocab_size_per_layer_input": VOCAB,
    }


def _types(rng: random.Random) -> dict[str, Any]:
    """Three to six layers, of which the last few read keys of the first ones; the last sees everything."""
    own = [SLIDING, FULL, *rng.choices([SLIDING, FULL], k=rng.choice([0, 1]))]
    rng.shuffle(own)
    shared = rng.choices([SLIDING, FULL], k=rng.choice([0, 1, 2, 3]))
    if own[-1] == SLIDING and not shared:
        shared = [FULL]
    listed = [*[*own, *shared][:-1], FULL]
    return {
        "layer_types": listed,
        "num_hidden_layers": len(listed),
        "num_kv_shared_layers": len(shared),
    }


def _rope(rng: random.Random) -> dict[str, Any]:
    original = {"original_max_position_embeddings": rng.choice([16, 32])}
    schemes: list[dict[str, Any]] = [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **original},
        {key: value for key, value in yarn(rng).items() if key != "truncate"},
    ]
    return {"rope_theta": rng.choice([1e4, 300.0]), **rng.choice(schemes)}


def _gemma3n(rng: random.Random) -> dict[str, Any]:
    listed = _types(rng)
    layers = listed["num_hidden_layers"]
    streams = rng.choice([2, 3, 4])
    inner = rng.choice([20, [rng.choice([20, 36]) for _ in range(layers)]])
    own = {
        "intermediate_size": inner,
        "vocab_size_per_layer_input": rng.choice([VOCAB, 200]),
        "activation_sparsity_pattern": [rng.choice([0.0, 0.5, 0.9]) for _ in range(layers)],
        "altup_num_inputs": streams,
        "altup_active_idx": rng.choice([0, 0, streams - 1]),
        "altup_correct_scale": rng.random() < 0.7,
        "laurel_rank": rng.choice([2, 5]),
        "rope_parameters": {FULL: _rope(rng), SLIDING: _rope(rng)},
    }
    return _sizes(rng) | listed | own


def _gemma4(rng: random.Random) -> dict[str, Any]:
    kinds: list[dict[str, Any]] = [
        {
            "rope_type": "proportional",
            "rope_theta": 1e4,
            "partial_rotary_factor": rng.choice([0.25, 0.5, 1.0]),
        },
        {"rope_type": "proportional", "rope_theta": 300.0, "factor": 2.0},
        _rope(rng),
    ]
    drawn = _sizes(rng) | {
        "global_head_dim": rng.choice([8, 16, 24]),
        "attention_k_eq_v": rng.random() < 0.4,
        "num_global_key_value_heads": rng.choice([None, 1]),
        "intermediate_size": rng.choice([20, 36]),
        "use_double_wide_mlp": rng.random() < 0.4,
        "rope_parameters": {FULL: rng.choice(kinds), SLIDING: _rope(rng)},
        "use_bidirectional_attention": rng.choice([None, "vision"]),
    }
    drawn["final_logit_softcapping"] = rng.choice([None, 20.0])
    drawn |= _types(rng)
    if not drawn["num_kv_shared_layers"] and rng.random() < 0.5:
        # Where layers read keys of others, the reference cannot do without.
        drawn["hidden_size_per_layer_input"] = 0
    if rng.random() < 0.5:
        drawn |= {"enable_moe_block": True, "num_experts": 5, "top_k_experts": rng.choice([1, 2, 3])}
        drawn["moe_intermediate_size"] = 12
    return drawn


DRAWS: dict[str, Callable[[random.Random], dict[str, Any]]] = {
    "gemma3n_text": _gemma3n,
    "gemma4_text": _gemma4,
}
"""model_type -> what draws a configuration."""
