"""RWKV-6 written down once more, token by token in float64 numpy, with nothing of ours: for interventions on
its state to agree with.

From the equations of Peng et al. 2024, "Eagle and Finch", and a checkpoint as transformers' fork spells it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass
class Pass:
    """logits [position, vocab]; by (layer, position) states [head, key, value], and keys and values as they
    are written [head, width]."""

    logits: Array
    states: dict[tuple[int, int], Array] = field(default_factory=dict)
    keys: dict[tuple[int, int], Array] = field(default_factory=dict)
    values: dict[tuple[int, int], Array] = field(default_factory=dict)


def forward(
    tensors: Mapping[str, Any],
    config: Mapping[str, Any],
    ids: Sequence[int],
    *,
    writes: Mapping[tuple[int, int], float] | None = None,
    states: Mapping[tuple[int, int], Array] | None = None,
) -> Pass:
    """The pass over ids. writes: factor of what a token writes, by (layer, position). states: what stands in
    place of the state behind a token, likewise."""
    writes, states, held = writes or {}, states or {}, Pass(np.zeros(0))
    w = {name: np.asarray(value, np.float64) for name, value in tensors.items()}
    eps, size = config["layer_norm_epsilon"], config.get("head_size", config["num_attention_heads"])

    def norm(x: Array, name: str) -> Array:
        return _normed(x, eps) * w[f"{name}.weight"] + w[f"{name}.bias"]

    x = w["rwkv.embeddings.weight"][list(ids)]
    for layer in range(config["num_hidden_layers"]):
        at = f"rwkv.blocks.{layer}."
        x = norm(x, at + "pre_ln") if layer == 0 else x
        y, a = norm(x, at + "ln1"), at + "attention."
        d = _before(y) - y
        mixed = np.tanh((y + d * _flat(w[a + "time_maa_x"])) @ w[a + "time_maa_w1"]).reshape(len(y), 5, -1)
        of = {}
        for place, name in enumerate("wkvrg"):
            more = mixed[:, place] @ w[a + "time_maa_w2"][place]
            of[name] = y + d * (_flat(w[a + f"time_maa_{name}"]) + more)
        r, k, v, g = (
            of[name] @ w[a + f"{word}.weight"].T
            for name, word in (("r", "receptance"), ("k", "key"), ("v", "value"), ("g", "gate"))
        )
        low = np.tanh(of["w"] @ w[a + "time_decay_w1"]) @ w[a + "time_decay_w2"]
        decay = np.exp(-np.exp(_flat(w[a + "time_decay"]) + low))
        r, k, v, decay = (each.reshape(len(y), -1, size) for each in (r, k, v, decay))
        bonus, state = w[a + "time_faaaa"], np.zeros((r.shape[1], size, size))
        read = np.zeros_like(v)
        for t in range(len(y)):
            now = k[t][:, :, None] * v[t][:, None, :]
            read[t] = np.einsum("hk,hkv->hv", r[t], bonus[:, :, None] * now + state)
            state = decay[t][:, :, None] * state + writes.get((layer, t), 1.0) * now
            state = states.get((layer, t), state)
            held.states[layer, t], held.keys[layer, t], held.values[layer, t] = state, k[t], v[t]
        flat = _normed(read, eps * config["head_size_divisor"] ** 2).reshape(len(y), -1)
        flat = flat * w[a + "ln_x.weight"] + w[a + "ln_x.bias"]
        x = x + (flat * g * _logistic(g)) @ w[a + "output.weight"].T
        z, f = norm(x, at + "ln2"), at + "feed_forward."
        d = _before(z) - z
        inner = np.maximum((z + d * _flat(w[f + "time_maa_k"])) @ w[f + "key.weight"].T, 0) ** 2
        gate = _logistic((z + d * _flat(w[f + "time_maa_r"])) @ w[f + "receptance.weight"].T)
        x = x + gate * (inner @ w[f + "value.weight"].T)
    head = w["rwkv.embeddings.weight" if config["tie_word_embeddings"] else "head.weight"]
    held.logits = norm(x, "rwkv.ln_out") @ head.T
    return held


def _normed(x: Array, eps: float) -> Array:
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps)


def _before(x: Array) -> Array:
    return np.concatenate([np.zeros_like(x[:1]), x[:-1]])


def _flat(x: Array) -> Array:
    return x.reshape(-1)


def _logistic(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))
