"""The reference arrays of the Jacobian lens, opened: models, prompts, fits, settings and tolerances."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mizarr

SET = Path(__file__).parents[3] / ".." / "shared" / "reference" / "jlens"
NAMES = ("llama", "gpt2", "gemma2")
needs_reference = pytest.mark.skipif(not SET.is_dir(), reason="needs the reference lenses in ../shared")

OF_J, OF_LOGITS, OF_VECTORS, OF_CODES, OF_SHARES = 5e-6, 1e-4, 5e-6, 2e-5, 5e-6
"""Tolerances that the reference states, absolute."""


@cache
def meta(name: str) -> dict[str, Any]:
    return json.loads((SET / "meta.json").read_text())["models"][name]


@cache
def arrays(name: str, case: str) -> dict[str, np.ndarray]:
    with np.load(SET / "cases" / name / f"{case}.npz") as file:
        return dict(file)


@cache
def model_of(name: str) -> mizarr.Model:
    return mizarr.Model.from_pretrained(str(SET / "models" / name))


def prompts_of(name: str, numbers: list[int]) -> tuple[tuple[int, ...], ...]:
    found = arrays(name, "prompts")
    return tuple(tuple(found[f"prompt_{number:02d}"].tolist()) for number in numbers)
