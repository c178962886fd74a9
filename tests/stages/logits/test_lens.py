"""The lens on states whose distributions can be worked out on paper."""

from __future__ import annotations

import math

import numpy as np
import pytest
import xarray as xr

from mizarr.stages.logits import lens
from mizarr.stages.logits.lens import (
    first_appearance,
    format_probability,
    format_text,
    format_token,
    logit_lens,
    logits,
    next_tokens,
)
from mizarr.stages.logits.ranking import top_columns
from mizarr.store.errors import ShapeError


def readout(unembed: object, norm: str = "none", **attrs: float) -> xr.Dataset:
    values = np.asarray(unembed, np.float32)
    return xr.Dataset(
        {
            "unembed": (("vocab", "hidden"), values),
            "norm_weight": ("hidden", np.ones(values.shape[1], np.float32)),
        },
        attrs={"norm": norm, "eps": 0.0, "soft_cap": 0.0, **attrs},
    )


def stream(values: object) -> xr.DataArray:
    values = np.asarray(values, np.float32)
    return xr.DataArray(values, dims=("layer", "token", "hidden"), coords={"layer": np.arange(len(values))})


def test_the_lens_reads_back_the_token_written_into_the_stream():
    found = logit_lens(stream([[[0, 0, 2]], [[0, 3, 0]]]), None, readout(np.eye(3)), top_k=1)
    assert found["top_id"].values[:, 0, 0].tolist() == [2, 1]


def test_probabilities_entropy_and_kl_are_those_of_the_softmax():
    # Logits log 1, log 2, log 5 give 1/8, 2/8, 5/8; the final layer is uniform over three tokens.
    early, final = np.log([1.0, 2.0, 5.0]), np.zeros(3)
    found = logit_lens(stream([[early], [final]]), None, readout(np.eye(3)), top_k=3).isel(token=0)
    p = np.array([1, 2, 5]) / 8
    assert found["top_id"].values.tolist() == [[2, 1, 0], [0, 1, 2]]  # equal tokens: smaller id first
    np.testing.assert_allclose(np.exp(found["top_logprob"][0]), [5 / 8, 2 / 8, 1 / 8], rtol=1e-6)
    np.testing.assert_allclose(found["entropy"], [-(p * np.log(p)).sum(), math.log(3)], rtol=1e-6)
    np.testing.assert_allclose(found["kl"], [(np.log(1 / 3) - np.log(p)).sum() / 3, 0], rtol=1e-5)


def test_the_target_is_ranked_from_one_and_missing_targets_have_rank_zero():
    states = stream([[[3, 2, 1], [1, 2, 3], [1, 1, 1]]])
    targets = xr.DataArray([1, 0, -1], dims="token")
    found = logit_lens(states, targets, readout(np.eye(3))).isel(layer=0)
    assert found["target_rank"].values.tolist() == [2, 3, 0]
    assert found["target_id"].values.tolist() == [1, 0, -1]
    norm = math.log(sum(math.exp(x) for x in (1, 2, 3)))
    np.testing.assert_allclose(found["target_logprob"], [2 - norm, 1 - norm, np.nan], rtol=1e-6)


def test_rms_norm_takes_its_statistics_from_every_state_itself():
    # (3, 4) has root mean square sqrt(12.5); scaling a state changes nothing.
    one = logits(stream([[[3, 4], [30, 40]]]), readout(np.eye(2), norm="rms"))
    np.testing.assert_allclose(one[0], [[3 / 12.5**0.5, 4 / 12.5**0.5]] * 2, rtol=1e-6)


def test_layer_norm_subtracts_the_mean_and_adds_its_bias():
    head = readout(np.eye(2), norm="layer")
    head["norm_weight"] = ("hidden", np.array([2.0, 3.0], np.float32))
    head["norm_bias"] = ("hidden", np.array([0.5, 0.0], np.float32))
    # (1, 5): mean 3, standard deviation 2, normalised (-1, 1).
    np.testing.assert_allclose(logits(stream([[[1, 5]]]), head)[0, 0], [-2 + 0.5, 3], rtol=1e-6)


def test_eps_enters_under_the_root():
    head = readout(np.eye(2), norm="rms", eps=3.5)
    np.testing.assert_allclose(logits(stream([[[3, 4]]]), head)[0, 0], [3 / 4, 4 / 4], rtol=1e-6)


def test_the_soft_cap_is_on_by_default_and_can_be_left_out():
    head = readout(np.eye(2), soft_cap=30.0)
    states = stream([[[60, 0]]])
    np.testing.assert_allclose(logits(states, head)[0, 0], [30 * math.tanh(2), 0], rtol=1e-6)
    np.testing.assert_allclose(logits(states, head, soft_cap=False)[0, 0], [60, 0], rtol=1e-6)
    capped, plain = (
        logit_lens(states, None, head, soft_cap=on)["top_logprob"].values[0, 0, 1] for on in (True, False)
    )
    np.testing.assert_allclose([capped, plain], [-30 * math.tanh(2), -60], rtol=1e-5)


def test_unembedding_bias_is_added():
    head = readout(np.eye(2))
    head["unembed_bias"] = ("vocab", np.array([1.0, 0.0], np.float32))
    np.testing.assert_allclose(logits(stream([[[1, 4]]]), head)[0, 0], [2.0, 4.0])


def test_blocks_of_tokens_change_nothing(monkeypatch: pytest.MonkeyPatch):
    rng = np.random.default_rng(0)
    states = stream(rng.normal(size=(3, 17, 8)))
    head = readout(rng.normal(size=(50, 8)), norm="rms")
    targets = xr.DataArray(rng.integers(0, 50, 17), dims="token")
    whole = logit_lens(states, targets, head)
    monkeypatch.setattr(lens, "BLOCK_BYTES", 4 * 50 * 3)  # three tokens at a time
    xr.testing.assert_allclose(logit_lens(states, targets, head), whole, rtol=1e-5)


def test_lazy_states_are_read_block_by_block(monkeypatch: pytest.MonkeyPatch):
    rng = np.random.default_rng(1)
    states, head = stream(rng.normal(size=(2, 12, 4))), readout(rng.normal(size=(9, 4)))
    monkeypatch.setattr(lens, "BLOCK_BYTES", 4 * 9 * 5)
    xr.testing.assert_allclose(logit_lens(states.chunk(token=4), None, head), logit_lens(states, None, head))


def test_top_k_of_many_ties_takes_the_smallest_ids():
    values = np.zeros((1, 1, 1), np.float32)
    found = logit_lens(stream(values), None, readout(np.zeros((1000, 1))), top_k=5)
    assert found["top_id"].values.ravel().tolist() == [0, 1, 2, 3, 4]


def test_top_k_agrees_with_a_full_sort():
    rng = np.random.default_rng(2)
    values = rng.integers(0, 30, (40, 200)).astype(np.float32)  # plenty of ties
    order = np.argsort(-values, axis=1, kind="stable")
    for k in (1, 7, 199, 200):
        np.testing.assert_array_equal(top_columns(values, k), order[:, :k])


def test_the_next_token_is_never_taken_from_another_prompt():
    assert next_tokens(np.array([4, 5, 6, 7, 8]), np.array([0, 0, 0, 1, 2])).tolist() == [5, 6, -1, -1, -1]


def test_first_appearance_goes_by_id_and_reports_the_layer_label():
    top_id = xr.DataArray(
        [[1, 2, 3], [2, 7, 1], [7, 2, 1]], dims=("layer", "rank"), coords={"layer": [0, 5, 9]}
    )
    assert first_appearance(top_id, 7, k=3) == 5
    assert first_appearance(top_id, 7, k=1) == 9
    assert first_appearance(top_id, 8, k=3) is None
    with pytest.raises(ShapeError, match="select a token"):
        first_appearance(top_id.expand_dims("token"), 7)


def test_probabilities_and_tokens_print_on_one_line():
    assert [format_probability(p) for p in (1.0, 0.01, 0.0099, 0.0001, 0.00005)] == [
        "100.0%",
        "1.0%",
        "0.990%",
        "0.010%",
        "5.0e-03%",
    ]
    assert format_token(" a\n\tb\r\x0b é漢") == "␣a⏎⇥b\\r\\x0b␣é漢"
    assert format_text(" a\n\tb\r\x0b é漢") == " a⏎⇥b\\r\\x0b é漢"


def test_states_of_another_width_and_targets_outside_the_vocabulary_are_refused():
    with pytest.raises(ShapeError, match="same model"):
        logit_lens(stream([[[1, 2]]]), None, readout(np.eye(3)))
    with pytest.raises(ShapeError, match="target token ids"):
        logit_lens(stream([[[1, 2]]]), xr.DataArray([2], dims="token"), readout(np.eye(2)))
    with pytest.raises(ShapeError, match="single layer"):
        logit_lens(stream([[[1, 2]]])[0], None, readout(np.eye(2)))
