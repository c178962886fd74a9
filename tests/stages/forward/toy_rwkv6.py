"""RWKV-6 models whose weights are set by hand, so that it is known what their states carry.

Both have the specimen's tokenizer, and neither token shift nor, in any layer but the first, a time mix: what
reaches a later token goes through the state of layer 0 and through nothing else.

`one_write`: one word writes, along one direction, that an answer follows; no other word writes anything.
`memory`: every word writes what it is.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

import mizarr

from .random_rwkv import draw_tensors

SPECIMEN = Path(mizarr.__file__).parent / "stages" / "forward" / "specimen"
SIZE = 32
CONFIG: dict[str, Any] = {
    "model_type": "rwkv6",
    "hidden_size": SIZE,
    "num_hidden_layers": 2,
    "vocab_size": json.loads((SPECIMEN / "config.json").read_text())["vocab_size"],
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "intermediate_size": 40,
    "layer_norm_epsilon": 1e-5,
    "head_size_divisor": 8,
    "head_size": SIZE,
    "num_attention_heads": SIZE,
}


def save(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> Path:
    """A checkpoint with the specimen's tokenizer; the random ones of random_rwkv.py, too."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: each.contiguous() for name, each in tensors.items()}, folder / "model.safetensors")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(SPECIMEN / name, folder)
    return folder


def one_write(word: int, answer: int) -> dict[str, Tensor]:
    """Tensors of a model in which token `word` writes that token `answer` follows."""
    tensors = _without_other_ways()
    patterns = torch.linalg.qr(_centred(torch.randn(SIZE, 4, generator=torch.Generator().manual_seed(0))))[0]
    ours, others, written, said = (patterns[:, i] * SIZE**0.5 for i in range(4))
    embedding = others.repeat(CONFIG["vocab_size"], 1)
    embedding[word] = ours
    tensors["rwkv.embeddings.weight"] = embedding
    at = "rwkv.blocks.0.attention."
    once = torch.ones(SIZE)
    for name, to, of in (
        ("value", written, ours),
        ("key", once, ours),
        ("receptance", once, others),
        ("gate", once, others),
        ("output", said, written),
    ):
        tensors[f"{at}{name}.weight"] = torch.outer(to, of) / SIZE
    tensors["head.weight"] = 0.01 * tensors["head.weight"]
    tensors["head.weight"][answer] = 10 * said / SIZE
    return tensors


def memory() -> dict[str, Tensor]:
    """Tensors of a model whose state holds every word for good."""
    tensors = _without_other_ways()
    for name in ("receptance", "key", "value", "output"):
        tensors[f"rwkv.blocks.0.attention.{name}.weight"] *= 5
    return tensors


def _without_other_ways() -> dict[str, Tensor]:
    """Random tensors without token shift, decay, biases and the time mix of layer 1."""
    tensors = draw_tensors(CONFIG, 0)
    for name, each in tensors.items():
        if "time_maa" in name or "1.attention.output" in name or "faaaa" in name:
            tensors[name] = torch.zeros_like(each)
        elif "time_decay" in name:
            tensors[name] = torch.full_like(each, -7.0 if name.endswith("decay") else 0.0)
        elif "ln" in name:
            tensors[name] = torch.full_like(each, float(name.endswith("weight")))
        elif "feed_forward.value" in name:
            tensors[name] = torch.zeros_like(each)
    return tensors


def _centred(x: Tensor) -> Tensor:
    return x - x.mean(0)
