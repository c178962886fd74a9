"""Reading attention patterns, on patterns with answers one can do on paper, and on a captured one."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr

from mizarr.stages.attention.flow import (
    attention_flow,
    attention_from_position,
    attention_to_position,
    head_mean,
    peak_layer,
    top_attended_positions,
    unpacked,
)
from mizarr.stages.forward.capture.capture import capture
from mizarr.store import open_store
from mizarr.store.errors import PromptError, ShapeError, StageError

from ..forward.attention_models import IDS, both
from ..forward.attention_reference import attention

DIMS = ("layer", "head", "query_position", "key_position")


@pytest.fixture
def pattern() -> xr.DataArray:
    """Layers 3 and 7, two heads, three positions."""
    even = [[1, 0, 0], [0.5, 0.5, 0], [0.25, 0.25, 0.5]]
    first = [[1, 0, 0], [1, 0, 0], [1, 0, 0]]
    own = [[1, 0, 0], [0, 1, 0], [0, 0, 1]]
    return xr.DataArray([[even, first], [even, own]], {"layer": [3, 7]}, DIMS)


def packed(pattern: xr.DataArray) -> xr.DataArray:
    rows, columns = np.tril_indices(pattern.sizes["query_position"])
    return xr.DataArray(
        pattern.values[..., rows, columns], {"layer": pattern["layer"]}, ("layer", "head", "pair")
    )


def test_attention_from_a_position_is_the_mean_of_its_row(pattern):
    assert attention_from_position(pattern, 3, 2).values.tolist() == [0.625, 0.125, 0.25]
    assert attention_from_position(pattern, 7, -1).values.tolist() == [0.125, 0.125, 0.75]
    assert attention_from_position(head_mean(pattern), 3, 2).values.tolist() == [0.625, 0.125, 0.25]


def test_attention_to_a_position_is_the_mean_of_its_column(pattern):
    assert attention_to_position(pattern, 3, 0).values.tolist() == [1.0, 0.75, 0.625]
    assert attention_to_position(pattern, 7, 2).values.tolist() == [0.0, 0.0, 0.75]


def test_the_most_attended_come_first_and_equals_by_position(pattern):
    assert top_attended_positions(pattern, 7, 2, 2) == [(2, 0.75), (0, 0.125)]
    assert top_attended_positions(pattern, 7, 2, 9) == [(2, 0.75), (0, 0.125), (1, 0.125)]


def test_the_peak_layer_is_the_first_of_the_largest(pattern):
    assert peak_layer(pattern, -1, 0) == (3, 0.625)
    assert peak_layer(pattern, 2, 2) == (7, 0.75)
    assert peak_layer(pattern, 0, 0) == (3, 1.0)


def test_the_flow_of_a_packed_pattern_says_the_same(pattern):
    flow = attention_flow(packed(pattern))
    np.testing.assert_allclose(flow["mean_pattern"], pattern.mean("head"))
    assert flow["from_query"].sel(layer=7)[1].values.tolist() == [0, 0, 1]
    np.testing.assert_array_equal(flow["largest"], pattern.max("head"))
    np.testing.assert_array_equal(flow["largest_head"], pattern.argmax("head"))
    assert flow["layer"].values.tolist() == [3, 7]
    np.testing.assert_allclose(
        flow["entropy"].sel(layer=3), [[0, np.log(2), 1.5 * np.log(2)], [0, 0, 0]], atol=1e-6
    )


def test_another_query_is_read_when_asked_for(pattern):
    flow = attention_flow(packed(pattern), query=1)
    np.testing.assert_array_equal(flow["from_query"], pattern.isel(query_position=1))


def test_a_captured_pattern_reads_as_the_reference_has_it(tmp_path_factory, tmp_path):
    model, reference = both(tmp_path_factory.mktemp("gemma2"), "gemma2")
    run = capture(model, [IDS], "blocks.*.attn.hook_pattern", store=open_store(tmp_path), progress=False)
    own = np.stack(attention(reference, IDS))
    np.testing.assert_allclose(
        unpacked(run["pattern"].transpose("layer", "head", "pair")), own, rtol=1e-4, atol=1e-6
    )
    flow = attention_flow(run["pattern"].transpose("layer", "head", "pair"))
    np.testing.assert_allclose(flow["mean_pattern"], own.mean(1), rtol=1e-4, atol=1e-6)
    layer, weight = peak_layer(flow["mean_pattern"], -1, -2)
    assert layer == own[:, :, -1, -2].mean(1).argmax()
    assert weight == pytest.approx(own[:, :, -1, -2].mean(1).max(), abs=1e-5)


def test_what_is_not_there_is_an_error(pattern):
    with pytest.raises(StageError, match=r"from 3 to 7, found layer 4"):
        attention_from_position(pattern, 4, 0)
    with pytest.raises(PromptError, match=r"in 0\.\.2, .* found 3"):
        attention_to_position(pattern, 3, 3)
    with pytest.raises(PromptError, match="found -4"):
        peak_layer(pattern, -4, 0)
    with pytest.raises(ShapeError, match=r"1, 3, 6, 10, ….*found 5"):
        unpacked(packed(pattern).isel(pair=slice(5)))


def test_two_prompts_are_not_taken_for_one(tmp_path_factory, tmp_path):
    """Two prompts of 2 tokens have 6 pairs, as many as one of 3."""
    model, _ = both(tmp_path_factory.mktemp("llama"), "llama")
    prompts = [IDS[:2], IDS[:2]]
    run = capture(model, prompts, "blocks.0.attn.hook_pattern", store=open_store(tmp_path), progress=False)
    with pytest.raises(ShapeError, match="several prompts"):
        unpacked(run["pattern"])
