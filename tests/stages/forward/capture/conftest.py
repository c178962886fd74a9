"""A small model and ragged prompts, for what a store keeps of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from mizarr import Model
from mizarr.store.runs.packed import PackedTokens

from ..random_models import VOCAB, save_random_model


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """Random weights, from a folder."""
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("model")
    save_random_model(folder, "llama", 3)
    return Model.from_pretrained(folder)


@pytest.fixture(scope="session")
def tokens():
    """Prompts of 1 to 30 tokens."""
    rng = np.random.default_rng(5)
    return PackedTokens.from_lists(
        [rng.integers(0, VOCAB, size).tolist() for size in (5, 9, 1, 30, 2, 17, 9)]
    )


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    """torch.set_num_threads, undone at the end."""
    import torch

    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture(
    params=[
        {"segment_tokens": 8},
        {"segment_tokens": 128},
        {"batch_tokens": 7},
        {"batch_tokens": 4096},
        {"order": "layer"},
    ],
    ids=lambda options: "-".join(str(each) for item in options.items() for each in item),
)
def another_way(request: pytest.FixtureRequest) -> dict[str, Any]:
    """To cut and to order a capture, which no number depends on."""
    found: dict[str, Any] = request.param
    return found
