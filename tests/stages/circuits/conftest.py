"""A small random Llama, and the same written out."""

from __future__ import annotations

import pytest

from mizarr import Model
from tests.stages.circuits.literal import LiteralLlama
from tests.stages.forward.random_models import save_random_model

ROPE = {"rope_type": "default", "rope_theta": 1e4}


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Five layers of four heads over two of keys, 32 wide."""
    pytest.importorskip("transformers")
    found = tmp_path_factory.mktemp("edges") / "llama"
    save_random_model(
        found,
        "llama",
        3,
        tokenizer=False,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        hidden_size=32,
        head_dim=8,
        intermediate_size=40,
        attention_bias=False,
        mlp_bias=False,
        rope_parameters=ROPE,
    )
    return found


@pytest.fixture(scope="session")
def model(folder):
    return Model.from_pretrained(folder)


@pytest.fixture(scope="session")
def literal(folder):
    return LiteralLlama(folder)
