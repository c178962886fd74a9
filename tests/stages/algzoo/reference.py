"""The published and measured networks of ../shared, where they are; and small random ones, computed by plain
loops."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

REFERENCE = Path(__file__).parents[3] / ".." / "shared" / "reference" / "stoicheia"
needs_reference = pytest.mark.skipif(
    not REFERENCE.is_dir(), reason="needs the stoicheia references in ../shared"
)
MODELS = sorted(path.stem for path in REFERENCE.glob("models/*.json"))
RNNS = [name for name in MODELS if not name.startswith("longest_cycle")]
CLASSES = [name for name in RNNS if not name.startswith("median")]


def told(name: str) -> dict[str, Any]:
    """What was measured of a reference model."""
    found: dict[str, Any] = json.loads((REFERENCE / "models" / f"{name}.json").read_text())
    return found


def file_of(name: str, ending: str = ".safetensors") -> Path:
    return REFERENCE / "models" / f"{name}{ending}"


def random_rnn(seed: int, hidden: int, outputs: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "rnn.weight_ih_l0": rng.normal(size=(hidden, 1)).astype(np.float32),
        "rnn.weight_hh_l0": (rng.normal(size=(hidden, hidden)) / np.sqrt(hidden)).astype(np.float32),
        "linear.weight": rng.normal(size=(outputs, hidden)).astype(np.float32),
    }


def random_transformer(seed: int, hidden: int, sequence: int, layers: int = 2) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32)

    found = {"embed.weight": draw(sequence, hidden), "pos_embed.weight": draw(sequence, hidden)}
    for i in range(layers):
        found[f"attns.{i}.in_proj_weight"] = draw(3 * hidden, hidden)
        found[f"attns.{i}.out_proj.weight"] = draw(hidden, hidden)
    return found | {"unembed.weight": draw(sequence, hidden)}
