"""Stages on a stored run of several segments: cells are cached one by one and add up to the whole."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import xarray as xr

import mizarr
from mizarr.pipeline import run
from mizarr.stages.forward.capture.capture import CaptureNode
from mizarr.stages.forward.models.files import resolve
from mizarr.stages.geometry.character_count import count_sums
from mizarr.stages.geometry.pca import moments, pca, principal_components
from mizarr.stages.logits.lens import logit_lens
from mizarr.stages.logits.readout import readout_node


@pytest.fixture(scope="module")
def captured(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory):
    """Three layers of 10 prompts in segments of 64 tokens, stored."""
    store = mizarr.open_store(tmp_path_factory.mktemp("segments") / "store", durability="process")
    prompts = [f"it was the {word} of times, we had everything before us" for word in "abcdefghij"]
    hooks = mizarr.HookSpec().capture("blocks.*.hook_resid_post")
    node = CaptureNode(str(tiny_model), prompts, hooks, segment_tokens=64)
    run(node, store)
    assert len(node.labels(store, "segment")) > 2
    return store, node


def test_components_from_cached_segments_are_those_of_the_whole(captured):
    store, node = captured
    summary = moments.on(states=node["resid_post"])
    fitted = principal_components.on(summary=summary, n_components=5)
    run(fitted, store)
    whole = pca(node.open(store)["resid_post"].load().astype(np.float64), n_components=5)
    found = fitted.open(store)
    np.testing.assert_allclose(found["explained_variance"], whole["explained_variance"], rtol=1e-4)
    np.testing.assert_allclose(
        np.abs(xr.dot(found["components"], whole["components"], dim="hidden")), 1, atol=1e-4
    )
    assert found["n"].values.tolist() == [node.tokens.n_tokens] * 3


def test_a_cell_is_a_layer_of_a_segment_and_is_kept(captured):
    store, node = captured
    run(moments.on(states=node["resid_post"]), store)
    labels = [record.label for record in store.records()]
    assert labels.count("moments/cell/1") == 3 * len(node.labels(store, "segment"))


def test_sums_by_count_do_not_depend_on_where_segments_end(captured):
    store, node = captured
    states = node.open(store)["resid_post"]
    count = xr.DataArray(node.tokens.position_of(slice(None)), dims="token", name="count")
    sums = count_sums.on(states=node["resid_post"], count=count, max_count=12)
    run(sums, store)
    whole = count_sums(states, count, max_count=12)
    xr.testing.assert_allclose(sums.open(store).sel(counts="true"), whole.sel(counts="true"), rtol=1e-9)


def test_the_lens_of_segments_is_the_lens_of_the_whole(captured, tiny_model: Path):
    store, node = captured
    head = readout_node(resolve(str(tiny_model)))
    targets = xr.DataArray(np.full(node.tokens.n_tokens, 7), dims="token", name="targets")
    lens = logit_lens.on(resid_post=node["resid_post"], targets=targets, readout=head, top_k=4)
    run(lens, store)
    whole = logit_lens(node.open(store)["resid_post"], targets, head.open(store), top_k=4)
    found = lens.open(store)
    np.testing.assert_array_equal(found["top_id"], whole["top_id"])
    np.testing.assert_allclose(found["target_logprob"], whole["target_logprob"], atol=1e-5)
    assert found["prompt"].values.tolist() == node.tokens.prompt_of(slice(None)).tolist()
