"""Random models of the families whose attention differs most, beside their reference, for tests."""

from __future__ import annotations

from typing import Any

from mizarr.stages.forward.models.model import Model

from .random_models import VOCAB, save_random_model

FAMILIES = {"llama": 3, "gemma2": 1, "qwen3": 3, "starcoder2": 1, "phi3": 0}
"""Family -> seed. Grouped queries in all; soft cap in gemma2; sliding windows of 5 to 9 in the last four."""

IDS = (0, 31, 7, 200, 45, 11, 150, 90, 3, 77, 260, 18)
"""A prompt longer than the windows."""

assert max(IDS) < VOCAB


def both(folder: Any, family: str) -> tuple[Model, Any]:
    """A random model as mizarr and as the reference run it."""
    reference = save_random_model(folder, family, FAMILIES[family])
    return Model.from_pretrained(folder), reference
