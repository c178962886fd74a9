"""On random models of several families what was written sums to the stream, and its shares to the logit."""

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
from mizarr.stages.logits.attribution_units import head_attribution, neuron_attribution
from mizarr.stages.logits.logit_directions import MOST_LIKELY, NONE
from mizarr.stages.logits.residual import (
    accumulated_resid,
    decompose_resid,
    full_resid_decomposition,
    stack_head_results,
    stack_neuron_results,
)
from mizarr.store.errors import ShapeError

from .attribution_corpus import FAMILIES, Corpus, make_corpus

TOLERANCE = 1e-4
"""Of logits, and of states relative to their size; float32 in another order."""


@pytest.fixture(scope="module", params=FAMILIES)
def corpus(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return make_corpus(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def gemma2(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return make_corpus(tmp_path_factory.mktemp("gemma2"), "gemma2")


def same(found: xr.DataArray, expected: xr.DataArray) -> None:
    expected = expected.transpose(*found.dims)
    np.testing.assert_allclose(
        found.values, expected.values, atol=TOLERANCE * float(np.abs(expected).max()), rtol=0
    )


def heads_of(corpus: Corpus, targets: xr.DataArray, against: xr.DataArray) -> xr.Dataset:
    states, post = corpus.states, corpus.post_scale("ln1")
    given = (states["z"], states["ln_final_scale"], targets, against, corpus.readout, corpus.attention)
    return head_attribution(*given, post)


def neurons_of(corpus: Corpus, targets: xr.DataArray, against: xr.DataArray, top_k: int) -> xr.Dataset:
    states, post = corpus.states, corpus.post_scale("ln2")
    given = (states["mlp_post_act"], states["ln_final_scale"], targets, against, corpus.readout, corpus.mlp)
    return neuron_attribution(*given, post, top_k=top_k)


def layers_of(corpus: Corpus, targets: xr.DataArray, against: xr.DataArray) -> xr.Dataset:
    states = corpus.states
    told = (states["ln_final_scale"], targets, against, corpus.readout)
    return component_attribution(states["embed"], states["attn_out"], *told, states["mlp_out"])


def test_what_was_written_sums_to_every_state_on_the_way(corpus: Corpus):
    states = corpus.states
    written = (states["embed"], states["attn_out"], states["mlp_out"])
    same(decompose_resid(*written).sum("component"), corpus.final)
    same(decompose_resid(*written, layer=1).sum("component"), states["resid_pre"].sel(layer=1))
    mid = decompose_resid(*written, layer=1, mlp_input=True)
    same(mid.sum("component"), states["resid_mid"].sel(layer=1))
    assert mid["component"].values.tolist() == ["embed", "0_attn_out", "0_mlp_out", "1_attn_out"]


def test_the_growing_stream_ends_in_the_last_state(corpus: Corpus):
    states = corpus.states
    found = accumulated_resid(states["resid_pre"], states["resid_mid"], final=corpus.final)
    np.testing.assert_array_equal(found.isel(component=-1), corpus.final)
    same(found.sel(component="1_pre"), states["resid_post"].sel(layer=0))
    same(found.sel(component="0_mid"), states["embed"] + states["attn_out"].sel(layer=0))


def test_heads_neurons_and_biases_sum_to_the_last_state(corpus: Corpus):
    states = corpus.states
    post = (corpus.post_scale("ln1"), corpus.post_scale("ln2"))
    heads = stack_head_results(states["z"], corpus.attention, post_scale=post[0])
    neurons = stack_neuron_results(states["mlp_post_act"], corpus.mlp, post_scale=post[1])
    scales = None if post[0] is None else post
    given = {"attention_weights": corpus.attention, "post_scales": scales}
    coarse = full_resid_decomposition(states["embed"], heads, states["mlp_out"], **given)
    same(coarse.sum("component"), corpus.final)
    fine = full_resid_decomposition(states["embed"], heads, neurons, mlp_weights=corpus.mlp, **given)
    same(fine.sum("component"), corpus.final)
    labels = fine["component"].values.tolist()
    assert labels[:2] == ["L0H0", "L0H1" if states.sizes["head"] > 1 else "L1H0"]
    assert labels[-2:] == ["embed", "bias"]
    rest = stack_head_results(states["z"], corpus.attention, post_scale=post[0], remainder_of=corpus.final)
    same(rest.sum("component"), corpus.final)
    assert rest["component"].values[-1] == "remainder"


def test_heads_are_what_the_model_itself_captures(corpus: Corpus):
    scale = corpus.post_scale("ln1")
    heads = stack_head_results(corpus.states["z"], corpus.attention, post_scale=scale)
    result = corpus.states["result"].transpose("layer", "head", "token", "hidden")
    if scale is not None:  # hook_result comes before the norm after attention
        result = result / scale * corpus.attention["ln1_post_weight"]
    expected = result.values.reshape(-1, *result.shape[2:])
    np.testing.assert_allclose(heads.values, expected, atol=TOLERANCE * np.abs(expected).max())


@pytest.mark.parametrize("is_difference", [False, True], ids=["logit", "difference"])
def test_shares_and_constant_sum_to_the_logit_of_the_model(corpus: Corpus, is_difference: bool):
    targets = corpus.ids(0)
    against = corpus.ids(1) if is_difference else xr.full_like(targets, NONE)
    expected = corpus.logit_difference(targets, against)
    layers = layers_of(corpus, targets, against)
    np.testing.assert_allclose(layers["total"], expected, atol=TOLERANCE)
    parts = layers["embed_share"] + (layers["attn_share"] + layers["mlp_share"]).sum("layer")
    np.testing.assert_allclose(parts + layers["constant"], expected, atol=TOLERANCE)


def test_shares_of_heads_and_neurons_sum_to_those_of_their_layers(corpus: Corpus):
    targets, against = corpus.ids(0), corpus.ids(1)
    layers = layers_of(corpus, targets, against)
    heads = heads_of(corpus, targets, against)
    whole = heads["head_share"].sum("head") + heads["attn_bias_share"]
    np.testing.assert_allclose(whole, layers["attn_share"], atol=TOLERANCE)
    width = corpus.states.sizes["mlp"]
    neurons = neurons_of(corpus, targets, against, width)
    whole = neurons["neurons_total"] + neurons["mlp_bias_share"]
    np.testing.assert_allclose(whole, layers["mlp_share"], atol=TOLERANCE)
    np.testing.assert_allclose(neurons["neuron_share"].sum("rank"), neurons["neurons_total"], atol=TOLERANCE)


def test_shares_taken_backwards_are_those_of_the_stacked_parts(corpus: Corpus):
    targets, against = corpus.ids(2), corpus.ids(3)
    given = (corpus.states["ln_final_scale"], corpus.readout)
    heads = stack_head_results(corpus.states["z"], corpus.attention, post_scale=corpus.post_scale("ln1"))
    slow = logit_attrs(heads, *given, token=targets, against=against)
    fast = heads_of(corpus, targets, against)["head_share"].transpose("layer", "head", "token")
    np.testing.assert_allclose(slow.values, fast.values.reshape(slow.shape), atol=TOLERANCE)
    stack = stack_neuron_results(
        corpus.states["mlp_post_act"], corpus.mlp, post_scale=corpus.post_scale("ln2")
    )
    slow = logit_attrs(stack, *given, token=targets, against=against)
    table = slow.values.reshape(corpus.states.sizes["layer"], -1, corpus.states.sizes["token"])
    top = neurons_of(corpus, targets, against, 3).transpose("layer", "token", "rank")
    picked = np.take_along_axis(table.transpose(0, 2, 1), top["neuron_id"].values.astype(int), axis=2)
    np.testing.assert_allclose(top["neuron_share"], picked, atol=TOLERANCE)
    np.testing.assert_allclose(np.abs(picked[..., 0]), np.abs(table).max(axis=1), atol=TOLERANCE)


def test_stacked_shares_and_constant_sum_to_the_logit(corpus: Corpus):
    states, targets = corpus.states, corpus.ids(4)
    stack = decompose_resid(states["embed"], states["attn_out"], states["mlp_out"])
    shares = logit_attrs(stack, states["ln_final_scale"], corpus.readout, token=targets).sum("component")
    expected = corpus.logit_difference(targets, xr.full_like(targets, NONE))
    np.testing.assert_allclose(
        shares + constant_share(corpus.readout, token=targets), expected, atol=TOLERANCE
    )


def test_the_most_likely_tokens_are_found_where_they_are_asked_for(corpus: Corpus):
    n = corpus.states.sizes["token"]
    targets, against = corpus.ids(0), xr.DataArray(np.full(n, MOST_LIKELY), dims="token")
    targets[0], targets[1], against[2] = NONE, MOST_LIKELY, NONE
    found = contrasted_tokens(corpus.states["resid_post"], targets, against, corpus.readout)
    order = np.argsort(-corpus.logits, axis=1)
    assert int(found["target_id"][0]) == int(found["other_id"][0]) == int(found["other_id"][2]) == NONE
    assert int(found["target_id"][1]) == order[1, 0]
    assert int(found["other_id"][1]) == order[1, 1]
    for at in range(3, n):
        rival = order[at, 0] if order[at, 0] != targets[at] else order[at, 1]
        assert (int(found["target_id"][at]), int(found["other_id"][at])) == (int(targets[at]), rival)
        assert float(found["other_logit"][at]) == pytest.approx(corpus.logits[at, rival], abs=TOLERANCE)
        assert float(found["target_logit"][at]) == pytest.approx(
            corpus.logits[at, int(targets[at])], abs=TOLERANCE
        )


def test_tokens_without_a_target_have_no_shares_and_change_none(corpus: Corpus):
    targets, against = corpus.ids(0), corpus.ids(1)
    some = targets.copy()
    some[::2] = NONE
    for of in (layers_of, heads_of, lambda *a: neurons_of(*a, 2)):
        full, part = of(corpus, targets, against), of(corpus, some, against)
        for name in full.data_vars:
            kept = part[name].isel(token=slice(1, None, 2))
            np.testing.assert_allclose(kept, full[name].isel(token=slice(1, None, 2)), atol=1e-5)
            blank = part[name].isel(token=slice(None, None, 2)).values
            assert (blank == NONE).all() if name == "neuron_id" else np.isnan(blank).all()


def test_a_norm_after_attention_needs_its_scale(gemma2: Corpus):
    states, ids = gemma2.states, gemma2.ids(0)
    with pytest.raises(ShapeError, match=r"ln1_post\.hook_scale"):
        head_attribution(states["z"], states["ln_final_scale"], ids, ids, gemma2.readout, gemma2.attention)
    with pytest.raises(ShapeError, match=r"ln2_post\.hook_scale"):
        stack_neuron_results(states["mlp_post_act"], gemma2.mlp)
    plain = gemma2.attention.drop_vars("ln1_post_weight")
    with pytest.raises(
        ShapeError, match="no norm ln1_post, but its divisor post_scale was passed; leave it out"
    ):
        stack_head_results(states["z"], plain, post_scale=states["ln1_post_scale"])
