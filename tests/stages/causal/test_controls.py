"""Controls: shares, bounds and draws against their definitions, and how often chance is taken for more."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from mizarr.stages.causal.controls import (
    CHANCE,
    Null,
    chosen_at_random,
    interval,
    interval_of_mean,
    random_directions,
)
from mizarr.store.errors import ConfigError

FIFTY = np.arange(50.0)


@pytest.mark.parametrize(("side", "effect", "as_large"), [
    ("above", 49.0, 1), ("above", 48.5, 1), ("above", 100.0, 0), ("above", -1.0, 50),
    ("below", 0.0, 1), ("below", -0.1, 0), ("below", 25.0, 26),
    ("either", 24.5, 50), ("either", 49.0, 2), ("either", -0.5, 0), ("either", 50.0, 0),
])  # fmt: skip
def test_a_share_counts_the_cause_itself_among_the_draws(side: str, effect: float, as_large: int):
    null = Null(FIFTY, "numbers", side)  # type: ignore[arg-type]
    assert null.as_large(effect) == as_large
    assert null.share_as_large(effect) == pytest.approx((1 + as_large) / 51)


def test_looking_at_several_costs_as_many_chances():
    assert Null(FIFTY, "numbers", looked_at=10).share_as_large(100.0) == pytest.approx(10 / 51)
    assert Null(FIFTY, "numbers", looked_at=100).share_as_large(100.0) == 1.0
    assert Null(FIFTY, "numbers").is_beyond_chance(100.0)
    assert not Null(FIFTY, "numbers", looked_at=3).is_beyond_chance(100.0)


def test_too_few_draws_never_say_that_it_is_more_than_chance():
    assert not Null(np.zeros(18), "draws").is_beyond_chance(1.0)
    assert Null(np.zeros(19), "draws").is_beyond_chance(1.0)


def test_chance_is_taken_for_more_no_oftener_than_stated():
    """Effects drawn from the null itself: 2000 times, within three standard errors of the level."""
    rng = np.random.default_rng(3)
    claimed = [Null(rng.gamma(0.3, size=50), "draws").is_beyond_chance(rng.gamma(0.3)) for _ in range(2000)]
    assert np.mean(claimed) <= CHANCE + 3 * np.sqrt(CHANCE * (1 - CHANCE) / 2000)
    assert np.mean(claimed) > 0.01


def test_without_draws_nothing_is_beyond_chance_and_there_is_no_share():
    null = Null(np.empty(0), "draws")
    assert not null.is_run and not null.is_beyond_chance(1e9)
    assert np.isnan([null.median, *null.bound(), null.share_as_large(1.0)]).all()


@pytest.mark.parametrize(("values", "said"), [([0.0, np.nan], "found 1 that are infinite or NaN")])
def test_draws_that_are_no_numbers_are_refused(values: list[float], said: str):
    with pytest.raises(ConfigError, match=said):
        Null(np.array(values), "heads")


@pytest.mark.parametrize("count", [3, 4, 10, 100])
def test_the_interval_of_a_mean_is_that_of_students_t(count: int):
    values = np.random.default_rng(count).normal(5.0, 2.0, count)
    found = interval_of_mean(float(values.mean()), float(values.std()), count)
    expected = stats.t.interval(0.95, count - 1, values.mean(), stats.sem(values))
    assert found is not None
    assert np.diff(found) == pytest.approx(np.diff(expected), rel=0.04 if count < 5 else 0.002)
    assert np.mean(found) == pytest.approx(np.mean(expected))


def test_two_values_have_no_interval():
    assert interval_of_mean(1.0, 0.5, 2) is None


def test_an_effect_that_is_no_number_is_beyond_nothing():
    assert not Null(FIFTY, "numbers").is_beyond_chance(float("nan"))


def test_an_interval_covers_the_mean_about_as_often_as_it_says():
    rng = np.random.default_rng(0)
    covered = [low <= 2.0 <= high for low, high in (interval(rng.normal(2.0, 1.0, 40)) for _ in range(300))]
    assert 0.89 <= np.mean(covered) <= 0.98
    assert interval([3.0]) == (3.0, 3.0)
    assert interval([1.0, np.nan, 1.0]) == (1.0, 1.0)
    assert np.isnan(interval([])).all()


def test_what_is_drawn_leaves_out_the_cause_and_repeats():
    heads = [(layer, head) for layer in range(3) for head in range(4)]
    drawn = chosen_at_random(heads, 5, seed=1, without=[(0, 0)])
    assert len(set(drawn)) == 5
    assert (0, 0) not in drawn
    assert drawn == chosen_at_random(heads, 5, seed=1, without=[(0, 0)])
    assert drawn != chosen_at_random(heads, 5, seed=2, without=[(0, 0)])
    assert sorted(chosen_at_random(heads, 50, seed=1)) == heads
    with pytest.raises(ConfigError, match="all 1 are excluded"):
        chosen_at_random([1], 5, seed=1, without=[1])


def test_random_directions_are_as_long_and_point_anywhere():
    like = np.array([[3.0, 4.0, 0.0, 0.0], [0.0, 0.0, 0.5, 0.0]])
    drawn = random_directions(like, 4000, seed=0)
    np.testing.assert_allclose(np.linalg.norm(drawn, axis=-1), [[5.0, 0.5]] * 4000, rtol=1e-5)
    np.testing.assert_allclose(drawn.mean(0), 0.0, atol=0.2)
    squares = (drawn[:, 0] ** 2).mean(0)
    np.testing.assert_allclose(squares, 25 / 4, rtol=0.1)
