"""Small random encoders with decoders, as transformers makes and saves them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

VOCABULARY = 60
BARTS = {
    "bart": "Bart",
    "mbart": "MBart",
    "plbart": "PLBart",
    "mvp": "Mvp",
    "marian": "Marian",
    "marian with positions in the file": "Marian",
    "pegasus": "Pegasus",
    "m2m_100": "M2M100",
    "blenderbot": "Blenderbot",
    "blenderbot-small": "BlenderbotSmall",
}
KINDS = ("t5", "t5 1.1", "t5 with a head of its own", "mt5", "umt5", *BARTS)
LONGEST = 128
"""Positions of a side, where the kind bounds them."""


def random_pair(kind: str, seed: int, folder: Path) -> Any:
    """A model of transformers, eager, float32, saved into a folder."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    drawn = random.Random(seed)
    torch.manual_seed(seed)
    family, settings = settings_of(kind, drawn)
    config = getattr(transformers, f"{family}Config")(**settings)
    head = "MTModel" if family == "Marian" else "ForConditionalGeneration"
    model = getattr(transformers, f"{family}{head}")(config).eval()
    model.set_attn_implementation("eager")
    if kind == "t5 with a head of its own":
        model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if kind != "marian" or "embed_positions" not in name:
                weight.add_(torch.randn_like(weight) * 0.1)
        if hasattr(model, "final_logits_bias"):
            model.final_logits_bias.normal_()
    if kind == "marian with positions in the file":
        model._keys_to_ignore_on_save = None
    model.save_pretrained(folder)
    return model


def settings_of(kind: str, drawn: random.Random) -> tuple[str, dict[str, Any]]:
    """Beginning of the names of a kind's classes, and a random configuration."""
    depth = (drawn.randint(1, 3), drawn.randint(1, 3))
    return (_bart if kind in BARTS else _t5)(kind, drawn, depth)


def _t5(kind: str, drawn: random.Random, depth: tuple[int, int]) -> tuple[str, dict[str, Any]]:
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "d_model": drawn.choice([16, 24]),
        "d_kv": drawn.choice([4, 8]),
        "d_ff": drawn.choice([20, 32]),
        "num_layers": depth[0],
        "num_decoder_layers": depth[1],
        "num_heads": drawn.choice([2, 3]),
        "relative_attention_num_buckets": drawn.choice([8, 32]),
        "relative_attention_max_distance": drawn.choice([20, 128]),
        "decoder_start_token_id": drawn.choice([0, 3]),
    }
    if kind in ("t5 1.1", "t5 with a head of its own"):
        settings |= {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
    return {"mt5": "MT5", "umt5": "UMT5"}.get(kind, "T5"), settings


def _bart(kind: str, drawn: random.Random, depth: tuple[int, int]) -> tuple[str, dict[str, Any]]:
    heads, inner = drawn.choice([2, 4]), drawn.choice([24, 40])
    settings = {
        "vocab_size": VOCABULARY,
        "d_model": 8 * heads,
        "encoder_layers": depth[0],
        "decoder_layers": depth[1],
        "encoder_attention_heads": heads,
        "decoder_attention_heads": heads,
        "encoder_ffn_dim": inner,
        "decoder_ffn_dim": inner,
        "max_position_embeddings": LONGEST,
        "scale_embedding": drawn.random() < 0.5,
        "decoder_start_token_id": 2,
    }
    if kind not in ("bart", "mbart"):
        settings |= {
            "activation_function": drawn.choice(["gelu", "relu", "swish", "gelu_new"]),
            "decoder_start_token_id": drawn.choice([2, 4]),
            "pad_token_id": drawn.choice([0, 1, 3]),
        }
    return BARTS[kind], settings
