"""Transcoders of the reference circuits: what is active, and what is left over, as circuit-tracer says."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

import mizarr
from mizarr.stages.features.dictionary import Dictionary

CIRCUITS = Path(__file__).parents[3] / ".." / "shared" / "reference" / "circuits" / "a"
CASES = ("clt_p0", "clt_p1", "clt_p2_targets", "plt_p1", "gemma2_p1")

pytestmark = pytest.mark.skipif(not CIRCUITS.is_dir(), reason="needs the reference circuits in ../shared")


@cache
def model_of(name: str) -> mizarr.Model:
    return mizarr.Model.from_pretrained(str(CIRCUITS / "models" / name))


@cache
def opened(case: str) -> tuple[Dictionary, dict[str, np.ndarray], mizarr.HookCache]:
    """The case's dictionary, its reference arrays, and what our model has at the dictionary's hook points."""
    meta = json.loads((CIRCUITS / "cases" / case / "meta.json").read_text())
    with np.load(CIRCUITS / "cases" / case / "graph.npz") as file:
        arrays = dict(file)
    dictionary = Dictionary.from_pretrained(CIRCUITS / "transcoders" / meta["transcoder"])
    hooks = mizarr.HookSpec().capture(*dictionary.read_hooks, *dictionary.write_hooks)
    model = model_of(meta["model"])
    dictionary.require_fit(model.config, model.name)
    return dictionary, arrays, model.forward([arrays["input_tokens"].tolist()], hooks)


@pytest.mark.parametrize("case", CASES)
def test_what_features_read_and_write_is_the_same(case: str):
    dictionary, arrays, found = opened(case)
    for layer in dictionary.layers:
        for hook, name in (
            (dictionary.read_hook(layer), "feature_inputs"),
            (dictionary.write_hook(layer), "feature_outputs"),
        ):
            expected = arrays[name][layer]
            largest = np.abs(expected).max()  # rounding goes with it, and differs between processors
            np.testing.assert_allclose(found[hook][0], expected, rtol=0, atol=1e-5 * max(1.0, largest))


@pytest.mark.parametrize("case", CASES)
def test_the_same_features_are_active(case: str):
    dictionary, arrays, found = opened(case)
    states = {layer: found[dictionary.read_hook(layer)][0] for layer in dictionary.layers}
    active = dictionary.encode(states, zero_positions=1)
    np.testing.assert_array_equal(active.indices, arrays["active_features"])
    np.testing.assert_allclose(active.value, arrays["activation_values"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_what_is_left_over_is_the_same(case: str):
    dictionary, arrays, found = opened(case)
    states = {layer: found[dictionary.read_hook(layer)][0] for layer in dictionary.layers}
    rebuilt = dictionary.reconstruct(dictionary.encode(states, zero_positions=1), states)
    for layer in dictionary.layers:
        left = found[dictionary.write_hook(layer)][0] - rebuilt[layer]
        np.testing.assert_allclose(left[1:], arrays["error_vectors"][layer][1:], rtol=0, atol=2e-5)


def test_features_in_blocks_are_features_at_once(monkeypatch: pytest.MonkeyPatch):
    dictionary, _, found = opened("clt_p0")
    x = found[dictionary.read_hook(1)][0]
    whole = dictionary.layer(1).active(x)
    monkeypatch.setattr("mizarr.stages.features.layers.layer.BLOCK_BYTES", 4 * dictionary.d_in * 7)
    for ours, theirs in zip(dictionary.layer(1).active(x), whole, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_model_of_another_width_is_refused():
    dictionary, _, _ = opened("clt_p0")
    with pytest.raises(mizarr.MizarrError, match=r"read states of width 64 at .*gemma2 has width 48"):
        dictionary.require_fit(model_of("gemma2").config, "gemma2")


@pytest.mark.parametrize("k", [0, 1, 3, 1000])
def test_the_strongest_of_every_layer_and_position(k: int):
    dictionary, _, found = opened("clt_p0")
    states = {layer: found[dictionary.read_hook(layer)][0] for layer in dictionary.layers}
    active = dictionary.encode(states)
    rows = list(zip(*(column.tolist() for column in (*active.indices.T, active.value)), strict=True))
    expected = []
    for place in sorted({row[:2] for row in rows}):
        here = sorted((row for row in rows if row[:2] == place), key=lambda row: (-row[3], row[2]))
        expected += sorted(here[:k])
    top = active.top(k)
    assert top.indices.tolist() == [list(row[:3]) for row in expected]
    assert top.value.tolist() == [row[3] for row in expected]
