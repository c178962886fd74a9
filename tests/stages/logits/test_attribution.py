"""Shares of a logit add up to the logit, whatever the norm."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr

from mizarr.stages.logits.attribution import (
    component_attribution,
    constant_share,
    contrasted_tokens,
    logit_attrs,
)
from mizarr.stages.logits.lens import logits
from mizarr.stages.logits.logit_directions import MOST_LIKELY, NONE
from mizarr.stages.logits.readout import readout
from mizarr.stages.logits.residual import accumulated_resid, apply_ln_to_stack, decompose_resid
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
    )


def scale_of(final: xr.DataArray, table: xr.Dataset) -> xr.DataArray:
    """What the final norm divides a state by."""
    if table.attrs["norm"] == "layer":
        final = final - final.mean("hidden")
    return np.sqrt((final**2).mean("hidden") + table.attrs["eps"])


def test_two_parts_share_a_logit_as_on_paper():
    # State (3, 4) = (3, 0) + (0, 4), rms sqrt(12.5), read along (1, 1): shares 3 and 4 over that.
    components = xr.DataArray([[3.0, 0], [0, 4.0]], dims=("component", "hidden"))
    table = readout(np.array([[1.0, 1.0]]), np.ones(2), norm="rms", eps=0.0)
    found = logit_attrs(components, scale_of(components.sum("component"), table), table, token=0)
    np.testing.assert_allclose(found, np.array([3, 4]) / 12.5**0.5)


@pytest.mark.parametrize("norm", ["rms", "gemma_rms", "layer"])
def test_shares_and_constant_sum_to_the_logit(norm: str, parts: dict[str, xr.DataArray]):
    components = decompose_resid(**parts)
    final = components.sum("component")
    table = head(norm)
    ids = xr.DataArray([0, 3, 3, 10, 7], dims="token")
    expected = logits(final, table)
    scale = scale_of(final, table)
    shares = logit_attrs(components, scale, table, token=ids).sum("component")
    want = [float(expected[i, t]) for i, t in enumerate(ids.values)]
    np.testing.assert_allclose(shares + constant_share(table, token=ids), want, rtol=1e-5)
    difference = logit_attrs(components, scale, table, token=ids, against=2).sum("component")
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


def test_the_stream_may_be_followed_up_to_a_layer_and_its_mlp(parts: dict[str, xr.DataArray]):
    pre, mid = parts["attn_out"], parts["mlp_out"]
    labels = [
        accumulated_resid(pre, mid, final=parts["embed"], layer=1, mlp_input=given)[
            "component"
        ].values.tolist()
        for given in (False, True)
    ]
    assert labels == [["0_pre", "0_mid", "1_pre"], ["0_pre", "0_mid", "1_pre", "1_mid"]]
    with pytest.raises(ShapeError, match="hook_resid_mid"):
        accumulated_resid(pre, layer=1, mlp_input=True)
    with pytest.raises(ShapeError, match="of layer 3"):
        decompose_resid(**parts, layer=LAYERS, mlp_input=True)


def test_kinds_that_are_not_given_are_left_out(parts: dict[str, xr.DataArray]):
    found = decompose_resid(None, None, parts["mlp_out"])
    assert found["component"].values.tolist() == ["0_mlp_out", "1_mlp_out", "2_mlp_out"]
    np.testing.assert_array_equal(found, parts["mlp_out"])


def test_layers_that_differ_or_states_of_another_width_are_refused(parts: dict[str, xr.DataArray]):
    ids = xr.DataArray(np.zeros(TOKENS, int), dims="token")
    scale = xr.DataArray(np.ones(TOKENS), dims="token")
    told = {"scale": scale, "targets": ids, "against": ids, "readout": head("rms")}
    with pytest.raises(ShapeError, match=r"mizarr capture MODEL PROMPTS --hooks"):
        component_attribution(parts["embed"], parts["attn_out"][1:], **told, mlp_out=parts["mlp_out"][1:])
    narrow = {name: part.isel(hidden=slice(4)) for name, part in parts.items()}
    with pytest.raises(ShapeError, match="same model"):
        component_attribution(**narrow, **told)
    with pytest.raises(ShapeError, match=r"from -1 \(none\) to 10"):
        component_attribution(**parts, **told | {"targets": ids + VOCAB})


def test_equal_logits_are_settled_by_the_smaller_id():
    table = readout(np.array([[1.0], [2.0], [2.0], [2.0]]), np.ones(1), norm="rms", eps=0.0)
    final = xr.DataArray(np.ones((1, 2, 1)), dims=("layer", "token", "hidden"))
    either = xr.DataArray([MOST_LIKELY, MOST_LIKELY], dims="token")
    found = contrasted_tokens(final, either, xr.DataArray([MOST_LIKELY, NONE], dims="token"), table)
    assert found["target_id"].values.tolist() == [1, 1]
    assert found["other_id"].values.tolist() == [2, NONE]
    np.testing.assert_allclose(found["other_logit"], [2, np.nan])


def test_a_norm_with_its_scale_fixed_keeps_sums_and_applies_its_weight():
    stack = xr.DataArray([[1.0, 3.0], [2.0, 6.0]], dims=("component", "hidden"))
    scale, weight = xr.DataArray(2.0), xr.DataArray([1.0, 10.0], dims="hidden")
    found = apply_ln_to_stack(stack, scale, norm="rms", weight=weight)
    np.testing.assert_allclose(found, [[0.5, 15], [1, 30]])
    np.testing.assert_allclose(apply_ln_to_stack(stack, scale, norm="layer"), [[-0.5, 0.5], [-1, 1]])
    with pytest.raises(ShapeError, match="'rms' or 'layer'"):
        apply_ln_to_stack(stack, scale, norm="batch")
