"""Tiny transformers whose weights are set by hand, so that the right answer to a causal question is known.

`routed` has a fact that one head brings from one position to the last, `local` has the same answer and routes
nothing. `contracting` shrinks what a push leaves in some directions, layer by layer.

All are Llamas whose stream has a constant as its first dimension, far larger than all others: every norm
divides by nearly the same number, so that layers are nearly linear. Attention weights that are asked for are
nearly 1, all others alike.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from mizarr.stages.forward.architectures.known import from_hf_config
from mizarr.stages.forward.networks.weights import expected_tensors

__all__ = ["CITIES", "FACT", "SUBJECTS", "contracting", "local", "routed"]

SUBJECTS, CITIES = ("france", "italy", "spain", "poland"), ("paris", "rome", "madrid", "warsaw")
FILLERS = ("the", "city", "of", "is", "a", "b", "c", "d")
WORDS = ("<unk>", *SUBJECTS, *CITIES, *FILLERS)
FACT = "the city of france a b c d a b is"
"""A prompt: its subject stands at position 3, and " is" reads."""
HIDDEN, HEADS, CONSTANT = 16, 2, 40.0
SCALE = CONSTANT / np.sqrt(HIDDEN)
"""What a norm divides by."""
Tensors = dict[str, np.ndarray]


def _blank(layers: int) -> tuple[dict[str, object], Tensors]:
    """A model that adds nothing: zeros, norms of ones, the constant in every embedding."""
    config = {
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "intermediate_size": HIDDEN,
        "vocab_size": len(WORDS),
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e30,  # position enters attention through the fastest pair of dimensions alone
        "tie_word_embeddings": False,
    }
    shapes = expected_tensors(from_hf_config(config))
    tensors = {
        name: (np.ones if "norm" in name else np.zeros)(shape, np.float32) for name, shape in shapes.items()
    }
    tensors["model.embed_tokens.weight"][:, 0] = CONSTANT
    return config, tensors


def _save(folder: Path, config: dict[str, object], tensors: Tensors) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


# Dimensions of the stream: 0 the constant, 1 to 4 which subject, 5 reads, 6 is a subject, 7 to 10 which city.
READS, IS_SUBJECT, CITY = 5, 6, 7


def _answers(routes: bool) -> tuple[dict[str, object], Tensors]:
    config, tensors = _blank(2)
    embed, head = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
    for i, (subject, city) in enumerate(zip(SUBJECTS, CITIES, strict=True)):
        embed[WORDS.index(subject), [1 + i, IS_SUBJECT]] = 1.0
        head[WORDS.index(city), CITY + i] = 8.0 * SCALE
    embed[WORDS.index("is"), READS] = 1.0
    size = HIDDEN // HEADS
    if routes:
        # Layer 1, head 1: what reads looks at a subject, in dimensions that do not turn with the position,
        # and writes its city.
        attention = "model.layers.1.self_attn.{}_proj.weight"
        turns_not = size + size // 2 - 1
        tensors[attention.format("q")][turns_not, READS] = 12.0 * SCALE
        tensors[attention.format("k")][turns_not, IS_SUBJECT] = 3.0 * SCALE
        for i in range(len(CITIES)):
            tensors[attention.format("v")][size + i, 1 + i] = SCALE
            tensors[attention.format("o")][CITY + i, size + i] = 1.0
    else:
        embed[WORDS.index("is"), CITY] = 1.0
    return config, tensors


def routed(folder: Path) -> Path:
    """Says "paris" after " is" because head 1 of layer 1 brings it from "france"; so for any subject."""
    return _save(folder, *_answers(routes=True))


def local(folder: Path) -> Path:
    """Says "paris" after " is" whatever stands before."""
    return _save(folder, *_answers(routes=False))


def contracting(folder: Path, dimensions: Sequence[int], by: float = 0.6, layers: int = 6) -> Path:
    """Every layer takes this share of some dimensions of the stream away; all others stay as they are.

    A push along these dimensions shrinks in every layer, one along others never does. Subjects differ in
    dimensions 1 to 4, and in no other.
    """
    config, tensors = _blank(layers)
    embed = tensors["model.embed_tokens.weight"]
    rng = np.random.default_rng(0)
    embed[:, CITY:] = rng.standard_normal((len(WORDS), HIDDEN - CITY))
    for i, subject in enumerate(SUBJECTS):
        embed[WORDS.index(subject), 1:] = 0.0
        embed[WORDS.index(subject), 1 + i] = 3.0
    tensors["lm_head.weight"][:] = embed
    root = float(np.sqrt(HIDDEN))
    # The gate reads the constant, whose normalised value is the root of the width: silu(1) opens it the same
    # everywhere.
    opened = 1.0 / (1.0 + np.exp(-1.0))
    for layer in range(layers):
        mlp = f"model.layers.{layer}.mlp.{{}}_proj.weight"
        for row, dimension in enumerate(dimensions):
            tensors[mlp.format("gate")][row, 0] = 1.0 / root
            tensors[mlp.format("up")][row, dimension] = SCALE
            tensors[mlp.format("down")][dimension, row] = -by / opened
    return _save(folder, config, tensors)
