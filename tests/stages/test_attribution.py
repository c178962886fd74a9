"""Shares of a logit add up to the logit, whatever the norm."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr

from mizarr.stages.attribution import (
    accumulated_resid,
    constant_share,
    decompose_resid,
    logit_attribution,
)
from mizarr.stages.lens import logits
from mizarr.stages.readout import readout
from mizarr.store.errors import ShapeError

LAYERS, TOKENS, HIDDEN, VOCAB = 3, 5, 8, 11


@pytest.fixture
def parts() -> dict[str, xr.DataArray]:
    rng = np.random.default_rng(0)
    dims, coords = ("layer", "token", "hidden"), {"layer": np.arange(LAYERS)}
    written = {
        name: xr.DataArray(rng.normal(size=(LAYERS, TOKENS, HIDDEN)), dims=dims, coords=coords)
        for name in ("attn_out", "mlp_out")
    }
    return {"embed": xr.DataArray(rng.normal(size=(TOKENS, HIDDEN)), dims=dims[1:]), **written}


def head(norm: str) -> xr.Dataset:
    rng = np.random.default_rng(1)
    return readout(
        rng.normal(size=(VOCAB, HIDDEN)),
        rng.normal(size=HIDDEN),
        norm=norm,
        eps=0.01,
        norm_bias=rng.normal(size=HIDDEN) if norm == "layer" else None,
        unembed_bias=rng.normal(size=VOCAB) if norm == "layer" else None,
        logit_scale=0.5,
    )


def test_two_parts_share_a_logit_as_on_paper():
    # State (3, 4) = (3, 0) + (0, 4), rms sqrt(12.5), read along (1, 1): shares 3 and 4 over that.
    components = xr.DataArray([[3.0, 0], [0, 4.0]], dims=("component", "hidden"))
    table = readout(np.array([[1.0, 1.0]]), np.ones(2), norm="rms", eps=0.0)
    found = logit_attribution(components, components.sum("component"), table, token=0)
    np.testing.assert_allclose(found, np.array([3, 4]) / 12.5**0.5)


@pytest.mark.parametrize("norm", ["rms", "gemma_rms", "layer"])
def test_shares_and_constant_sum_to_the_logit(norm: str, parts: dict[str, xr.DataArray]):
    components = decompose_resid(**parts)
    final = components.sum("component")
    table = head(norm)
    ids = xr.DataArray([0, 3, 3, 10, 7], dims="token")
    expected = logits(final, table)
    shares = logit_attribution(components, final, table, token=ids).sum("component")
    want = [float(expected[i, t]) for i, t in enumerate(ids.values)]
    np.testing.assert_allclose(shares + constant_share(table, token=ids), want, rtol=1e-5)
    difference = logit_attribution(components, final, table, token=ids, against=2).sum("component")
    constant = constant_share(table, token=ids, against=2)
    np.testing.assert_allclose(difference + constant, want - expected.isel(vocab=2), rtol=1e-4, atol=1e-5)


def test_components_are_labelled_in_order_of_writing_and_sum_to_the_stream(parts: dict[str, xr.DataArray]):
    found = decompose_resid(**parts)
    assert found["component"].values.tolist()[:4] == ["embed", "0_attn_out", "0_mlp_out", "1_attn_out"]
    whole = parts["embed"] + parts["attn_out"].sum("layer") + parts["mlp_out"].sum("layer")
    xr.testing.assert_allclose(found.sum("component"), whole)


def test_a_missing_layer_is_refused(parts: dict[str, xr.DataArray]):
    parts["mlp_out"] = parts["mlp_out"].isel(layer=[0, 2])
    with pytest.raises(ShapeError, match="capture all layers"):
        decompose_resid(**parts)


def test_accumulated_streams_are_labelled_pre_mid_and_final(parts: dict[str, xr.DataArray]):
    pre, mid = parts["attn_out"], parts["mlp_out"]
    found = accumulated_resid(pre, mid, final=parts["embed"])
    assert found["component"].values.tolist() == [
        *(f"{i}_{n}" for i in range(LAYERS) for n in ("pre", "mid")),
        "final_post",
    ]
    np.testing.assert_array_equal(found.sel(component="1_mid"), mid.sel(layer=1))
