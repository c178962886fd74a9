"""Attention from markers to targets, and Welch's t test on it."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import xarray as xr
from hypothesis import given, strategies as st
from scipy.stats import ttest_ind

from mizarr.stages.attention.layer_scan import (
    UNSEEN,
    best_layer,
    layer_scan,
    permuted_t,
    welch_t,
    welch_t_test,
)
from mizarr.store.errors import MissingExtra, ShapeError


def arrays(pair, sample, condition) -> dict[str, xr.DataArray]:
    return {
        "pair": xr.DataArray(pair, dims="target"),
        "sample": xr.DataArray(sample, dims="target"),
        "condition": xr.DataArray(condition, dims="sample"),
    }


def patterns(*layers: list[list[float]]) -> xr.DataArray:
    """[layer, pair, head]"""
    return xr.DataArray(np.array(layers), {"layer": np.arange(len(layers)) + 2}, ("layer", "pair", "head"))


def moments(values) -> tuple[float, float, int]:
    return float(np.mean(values)), float(np.std(values, ddof=1)), len(values)


def test_a_sample_is_the_mean_over_targets_of_the_mean_over_heads():
    pattern = patterns([[0.1, 0.3], [0.5, 0.7], [0.2, 0.2], [1.0, 0.0]])
    found = layer_scan(pattern, **arrays([0, 1, 3, 2], [0, 0, 1, 2], [0, 1, 1]))
    np.testing.assert_allclose(found["weight"], [[0.4, 0.5, 0.2]])
    np.testing.assert_allclose(found["mean"], [[0.4, 0.35]])
    np.testing.assert_allclose(found["std"], [[0.0, np.sqrt(0.045)]])
    assert found["n"].values.tolist() == [[1, 2]]
    assert found["ratio"].item() == pytest.approx(0.4 / 0.35)
    assert found["layer"].values.tolist() == [2]


def test_a_target_behind_the_marker_gets_nothing_but_counts():
    found = layer_scan(patterns([[0.6], [0.2]]), **arrays([0, UNSEEN, 1], [0, 0, 1], [0, 1]))
    np.testing.assert_allclose(found["weight"], [[0.3, 0.2]])


def test_a_pair_may_be_looked_at_twice():
    found = layer_scan(patterns([[0.6], [0.2]]), **arrays([1, 0, 1], [0, 0, 1], [0, 1]))
    np.testing.assert_allclose(found["weight"], [[0.4, 0.2]])


def test_welch_of_two_small_groups_is_that_on_paper():
    """1 2 3 4 5 and 3 4 5 6 7: variances 2.5, t = -2 / sqrt(0.5 + 0.5), and 8 degrees of freedom."""
    found = welch_t_test(*moments([1, 2, 3, 4, 5]), *moments([3, 4, 5, 6, 7]))
    assert found.t == pytest.approx(-2)
    assert found.df == pytest.approx(8)
    assert found.p == pytest.approx(0.0805, abs=1e-4)


@given(
    st.lists(st.floats(0, 1), min_size=2, max_size=12),
    st.lists(st.floats(0, 1), min_size=2, max_size=12),
)
def test_welch_is_scipys_where_both_groups_vary(one, other):
    if min(np.std(one), np.std(other)) < 1e-6:
        return
    expected = ttest_ind(one, other, equal_var=False)
    found = welch_t_test(*moments(one), *moments(other))
    assert found.t == pytest.approx(expected.statistic, rel=1e-9, abs=1e-12)
    assert found.df == pytest.approx(expected.df, rel=1e-9)
    assert found.p == pytest.approx(expected.pvalue, rel=1e-9, abs=1e-300)


def test_published_numbers_follow_from_each_other():
    """Qwen2.5-Coder-3B, layer 14: Python 0.0847, Rust 0.0305, ratio 2.777, t 7.074, df 12.942, p 8.575e-6.

    Ten samples each; the two spreads follow from t and df, and then everything else must.
    """
    difference, t, df, n = 0.0847 - 0.0305, 7.074, 12.942, 10
    total = (difference / t) ** 2
    # total^2 (n - 1) / df = a^2 + b^2 with a + b = total
    squares = total**2 * (n - 1) / df
    gap = np.sqrt(2 * squares - total**2)
    a, b = (total + gap) / 2, (total - gap) / 2
    found = welch_t_test(0.0847, np.sqrt(n * a), n, 0.0305, np.sqrt(n * b), n)
    assert (found.t, found.df) == (pytest.approx(t), pytest.approx(df))
    assert found.p == pytest.approx(8.575e-6, rel=2e-3)  # t and df have four and five digits
    ratio = 0.0847 / 0.0305
    assert ratio == pytest.approx(2.777, abs=1e-3)


def test_groups_without_spread_or_samples_have_their_own_rules():
    assert welch_t_test(0.5, 0.0, 0, 0.1, 0.1, 4) == (0.0, 0.0, 1.0)
    assert welch_t_test(0.5, 0.0, 3, 0.1, 0.0, 4) == (0.0, 5.0, 1.0)
    assert welch_t_test(0.5, 0.0, 1, 0.1, 0.0, 1) == (0.0, 0.0, 1.0)
    one_sided = welch_t_test(0.5, 0.0, 3, 0.1, 0.2, 4)
    assert (one_sided.t, one_sided.df) == (pytest.approx(4.0), 5.0)


def test_the_best_layer_is_the_surest_in_which_a_looks_more():
    # Layer 2: B looks more, and very surely. Layer 3: A, not surely. Layer 4: A, surely.
    a = [[0.1, 0.11], [0.3, 0.9], [0.80, 0.81]]
    b = [[0.9, 0.91], [0.2, 0.5], [0.10, 0.11]]
    pattern = patterns(*([[x] for x in (*p, *q)] for p, q in zip(a, b, strict=True)))
    found = layer_scan(pattern, **arrays([0, 1, 2, 3], [0, 1, 2, 3], [0, 0, 1, 1]))
    layer, p = best_layer(found)
    assert layer == 4
    assert p == pytest.approx(ttest_ind(a[2], b[2], equal_var=False).pvalue)


def test_without_a_layer_in_which_a_looks_more_there_is_none():
    pattern = patterns([[0.1], [0.2], [0.3], [0.4]])
    found = layer_scan(pattern, **arrays([0, 1, 2, 3], [0, 1, 2, 3], [0, 0, 1, 1]))
    assert best_layer(found) == (0, 1.0)


def test_a_ratio_to_next_to_nothing_is_not_told():
    found = layer_scan(patterns([[0.5], [0.001]]), **arrays([0, 1], [0, 1], [0, 1]))
    assert found["ratio"].item() == 0
    found = layer_scan(patterns([[0.5], [0.002]]), **arrays([0, 1], [0, 1], [0, 1]))
    assert found["ratio"].item() == pytest.approx(250)


def test_what_does_not_fit_is_an_error():
    pattern = patterns([[0.5], [0.1]])
    with pytest.raises(ShapeError, match="target for each of 3 samples"):
        layer_scan(pattern, **arrays([0, 1], [0, 1], [0, 1, 1]))
    with pytest.raises(ShapeError, match=r"conditions \[0, 2\]"):
        layer_scan(pattern, **arrays([0, 1], [0, 1], [0, 2]))
    with pytest.raises(ShapeError, match=r"pair indices from -1 to 1, .*, found 0 to 2"):
        layer_scan(pattern, **arrays([0, 2], [0, 1], [0, 1]))


def test_without_scipy_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.stats", None)
    with pytest.raises(MissingExtra, match=r"mizarr\[probing\]"):
        welch_t_test(0.5, 0.1, 3, 0.1, 0.2, 4)


def test_t_of_all_layers_is_that_of_scipy_and_0_without_a_spread():
    weight = np.random.default_rng(0).random((3, 9))
    weight[2] = 0.5
    is_b = np.arange(9) > 4
    expected = ttest_ind(weight[:2, ~is_b], weight[:2, is_b], axis=1, equal_var=False).statistic
    np.testing.assert_allclose(welch_t(weight, is_b), [*expected, 0.0])


def test_random_deals_keep_the_sizes_of_the_conditions_and_take_the_best_layer():
    weight = np.array([[1.0, 2.0, 4.0, 8.0], [8.0, 4.0, 2.0, 1.0]])
    deals = [np.isin(np.arange(4), pair) for pair in ((0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3))]
    possible = {round(float(welch_t(weight, is_b).max()), 9) for is_b in deals}
    drawn = permuted_t(weight, np.array([False, False, True, True]), 200, seed=0)
    assert {round(float(t), 9) for t in drawn} == possible
    assert (
        permuted_t(weight, deals[0], 5, seed=1).tolist() != permuted_t(weight, deals[0], 5, seed=2).tolist()
    )
