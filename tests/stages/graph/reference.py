"""The reference circuits of circuit-tracer, opened: cases, models, dictionaries, arrays."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mizarr
from mizarr.stages.graph.graph import AttributionGraph, attribution_graph

CIRCUITS = Path(__file__).parents[3] / ".." / "shared" / "reference" / "circuits" / "a"
CASES = ("clt_p0", "clt_p1", "clt_p1_top60", "clt_p2_targets", "plt_p1", "gemma2_p1")
needs_reference = pytest.mark.skipif(
    not CIRCUITS.is_dir(), reason="needs the reference circuits in ../shared"
)


def meta(case: str) -> dict[str, Any]:
    return json.loads((CIRCUITS / "cases" / case / "meta.json").read_text())


@cache
def arrays(case: str, name: str = "graph") -> dict[str, np.ndarray]:
    with np.load(CIRCUITS / "cases" / case / f"{name}.npz") as file:
        return dict(file)


@cache
def model_of(case: str) -> mizarr.Model:
    return mizarr.Model.from_pretrained(str(CIRCUITS / "models" / meta(case)["model"]))


@cache
def dictionary_of(case: str) -> mizarr.Dictionary:
    return mizarr.Dictionary.from_pretrained(CIRCUITS / "transcoders" / meta(case)["transcoder"])


def settings_of(case: str) -> dict[str, Any]:
    told = meta(case)
    return {**told["attribute_settings"], "targets": told["attribution_targets"]}


@cache
def graph_of(case: str) -> AttributionGraph:
    return attribution_graph(model_of(case), dictionary_of(case), meta(case)["prompt"], **settings_of(case))


def edge_mask(case: str, number: int) -> np.ndarray:
    found = arrays(case)
    size = len(found["adjacency_matrix"])
    bits = np.unpackbits(found[f"prune{number}_edge_mask_packed"])[: size * size]
    return bits.reshape(size, size).astype(bool)
