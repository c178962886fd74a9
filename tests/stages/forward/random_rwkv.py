"""Small random RWKV models of every generation and spelling, saved as their checkpoints are.

`draw_config` picks a config.json by seed; `save_random_rwkv` writes it with random tensors, drawn so that
decays, gates and the state all matter.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from .random_models import VOCAB, save_tokenizer

GENERATIONS = ("rwkv", "rwkv5", "rwkv6", "rwkv7")
LAYER = {"hf": "rwkv.blocks.{}.", "fla": "model.layers.{}.", "native": "blocks.{}."}


def draw_config(model_type: str, seed: int) -> dict[str, Any]:
    """A config.json of a generation."""
    rng = random.Random(f"{model_type} {seed}")
    size, heads = rng.choice([4, 8]), rng.choice([4, 6])
    hidden = size * heads
    common = {
        "model_type": model_type,
        "hidden_size": hidden,
        "num_hidden_layers": rng.choice([2, 3]),
        "vocab_size": VOCAB,
        "tie_word_embeddings": rng.random() < 0.5,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    if model_type == "rwkv7":
        return common | {
            "head_dim": size,
            "norm_eps": rng.choice([1e-5, 1e-6]),
            "intermediate_size": rng.choice([40, 72]),
            "hidden_act": "sqrelu",
            "norm_first": rng.random() < 0.8,
        }
    inner = {"intermediate_size": rng.choice([40, None]), "layer_norm_epsilon": 1e-5, "rescale_every": 6}
    if model_type == "rwkv":
        return common | inner | {"attention_hidden_size": rng.choice([hidden, hidden + 4])}
    own = rng.choice([{"head_size": size, "num_attention_heads": 64}, {"num_attention_heads": size}])
    return common | inner | own | {"head_size_divisor": rng.choice([4, 8])}


def draw_tensors(config: dict[str, Any], seed: int, spelling: str | None = None) -> dict[str, Tensor]:
    """Random tensors of a config.json, by the names of a checkpoint. spelling: "hf" or "fla", as is usual
    for the generation, or "native"; "x_x" keeps the six mixes of RWKV-7 in one tensor."""
    rng = random.Random(f"{config} {seed}")
    generator = torch.Generator().manual_seed(seed)

    def matrix(*shape: int) -> Tensor:
        # Outputs as large as inputs, whatever the width: larger ones amplify rounding from layer to layer.
        return 0.7 * torch.randn(*shape, generator=generator) / shape[-1] ** 0.5

    def share(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator)

    model_type = config["model_type"]
    style = "native" if spelling == "native" else "fla" if model_type == "rwkv7" else "hf"
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    width = config.get("attention_hidden_size", hidden)
    size = config.get("head_dim") or config.get("head_size") or config.get("num_attention_heads", 1)
    usual = 4 * hidden if model_type == "rwkv" else int(3.5 * hidden) // 32 * 32
    inner = config["intermediate_size"] or usual
    embed, final, head = {
        "hf": ("rwkv.embeddings", "rwkv.ln_out", "head"),
        "fla": ("model.embeddings", "model.norm", "lm_head"),
        "native": ("emb", "ln_out", "head"),
    }[style]
    found = {f"{embed}.weight": matrix(vocab, hidden)}
    if not config["tie_word_embeddings"]:
        found[f"{head}.weight"] = matrix(vocab, hidden)

    def norm(name: str, width: int) -> None:
        found[f"{name}.weight"], found[f"{name}.bias"] = 0.5 + share(width), 0.3 * matrix(width)

    norm(final, hidden)
    ranks = {name: rng.choice([3, 5, 8]) for name in ("w", "a", "v", "g", "mix")}
    names = {
        "hf": ("pre_ln", "ln1", "ln2", "attention", "ln_x", "feed_forward"),
        "fla": ("pre_norm", "attn_norm", "ffn_norm", "attn", "g_norm", "ffn"),
        "native": ("ln0", "ln1", "ln2", "att", "ln_x", "ffn"),
    }[style]
    for layer in range(config["num_hidden_layers"]):
        at = LAYER[style].format(layer)
        if layer == 0 and config.get("norm_first", True):
            norm(at + names[0], hidden)
        norm(at + names[1], hidden)
        norm(at + names[2], hidden)
        mix, ffn = at + names[3] + ".", at + names[5] + "."
        if model_type != "rwkv":
            norm(mix + names[4], width)
        words = {"r": "receptance", "k": "key", "v": "value", "o": "output", "g": "gate"}
        for weight in "rkvo" + ("g" if model_type in ("rwkv5", "rwkv6") else ""):
            name = f"{weight}_proj" if style == "fla" else words[weight]
            shape = (hidden, width) if weight == "o" else (width, hidden)
            found[f"{mix}{name}.weight"] = matrix(*shape)
        found[f"{ffn}key.weight"] = matrix(inner, hidden)
        found[f"{ffn}value.weight"] = matrix(hidden, inner)
        if model_type == "rwkv7":
            mixes = {s: share(1, 1, hidden) for s in "rwkvag"}
            if spelling == "x_x":
                found[f"{mix}x_x"] = torch.cat([each[0] for each in mixes.values()])
            else:
                found |= {f"{mix}x_{s}": each for s, each in mixes.items()}
            flat = (width,) if style == "fla" else (1, 1, width)
            found[f"{mix}k_k"], found[f"{mix}k_a"] = 0.5 + share(*flat), share(*flat)
            found[f"{mix}r_k"] = matrix(width // size, size)
            for s in "wag" + ("v" if layer else ""):
                one, two = matrix(ranks[s], hidden), matrix(width, ranks[s])
                bias = matrix(width)
                if style == "fla":
                    found[f"{mix}{s}_lora.lora.0.weight"], found[f"{mix}{s}_lora.lora.2.weight"] = one, two
                    found |= {} if s == "g" else {f"{mix}{s}_lora.lora.2.bias": bias}
                else:
                    found[f"{mix}{s}1"], found[f"{mix}{s}2"] = one.T.contiguous(), two.T.contiguous()
                    found |= {} if s == "g" else {f"{mix}{s}0": bias[None, None]}
            found[f"{ffn}x_k"] = share(hidden) if style == "fla" else share(1, 1, hidden)
            continue
        found[f"{ffn}receptance.weight"] = matrix(hidden, hidden)
        word = "time_maa" if model_type == "rwkv6" else "time_mix"
        long = {} if model_type == "rwkv6" else {"k": "key", "v": "value", "r": "receptance", "g": "gate"}
        for s in "kr":
            found[f"{ffn}{word}_{long.get(s, s)}"] = share(1, 1, hidden)
        for s in {"rwkv": "kvr", "rwkv5": "kvrg", "rwkv6": "xwkvrg"}[model_type]:
            found[f"{mix}{word}_{long.get(s, s)}"] = share(1, 1, hidden)
        channels = {"rwkv": (width,), "rwkv5": (width // size, size), "rwkv6": (1, 1, width)}[model_type]
        found[f"{mix}time_decay"] = 2 * share(*channels) - 2
        bonus = "time_first" if model_type == "rwkv" else "time_faaaa"
        found[f"{mix}{bonus}"] = matrix(*((width,) if model_type == "rwkv" else (width // size, size)))
        if model_type == "rwkv6":
            found[f"{mix}time_maa_w1"] = matrix(hidden, 5 * ranks["mix"])
            found[f"{mix}time_maa_w2"] = matrix(5, ranks["mix"], hidden)
            found[f"{mix}time_decay_w1"] = matrix(hidden, ranks["w"])
            found[f"{mix}time_decay_w2"] = matrix(ranks["w"], width)
    return found


def save_random_rwkv(
    directory: Path, model_type: str, seed: int = 0, *, spelling: str | None = None, tokenizer: bool = True
) -> dict[str, Tensor]:
    """Write a random model of a generation into `directory`; returns its tensors."""
    config = draw_config(model_type, seed)
    tensors = draw_tensors(config, seed, spelling)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors")
    if tokenizer:
        save_tokenizer(directory)
    return tensors
