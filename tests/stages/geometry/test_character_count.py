"""Geometry of mean states on curves whose cosines and variances are known."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr

from mizarr.stages.geometry.character_count import (
    add_sums,
    count_geometry,
    count_sums,
    decodability,
    ringing,
    shuffled,
)
from mizarr.store.errors import ShapeError

PERIOD = 24


def labels(values: object) -> xr.DataArray:
    return xr.DataArray(np.asarray(values), dims=("token",))


def states(values: object) -> xr.DataArray:
    return xr.DataArray(np.asarray(values), dims=("token", "hidden"))


@pytest.fixture
def circle() -> tuple[xr.DataArray, xr.DataArray]:
    """Two turns of a circle in dims 0 and 1, ten tokens per count with noise that cancels, dim 2 at 100."""
    counts = np.repeat(np.arange(1, 2 * PERIOD + 1), 10)
    angle = 2 * np.pi * counts / PERIOD
    rows = np.zeros((len(counts), 4))
    rows[:, 0], rows[:, 1], rows[:, 2] = np.cos(angle), np.sin(angle), 100
    rows[::2, 3], rows[1::2, 3] = 5, -5
    return states(rows), labels(counts)


def test_sums_take_each_token_at_its_own_count_and_no_other():
    rows = states([[1.0, 0.0], [2.0, 0.0], [4.0, 1.0], [8.0, 0.0], [16.0, 0.0]])
    found = count_sums(rows, labels([1, 3, 1, 0, 4]), max_count=3)
    assert found["count"].values.tolist() == [1, 2, 3]
    assert found["n"].values.tolist() == [2, 0, 1]
    assert found["total"].sel(counts="true").values.tolist() == [[5, 1], [0, 0], [2, 0]]


def test_sums_of_segments_add_up_to_the_sums_of_the_whole():
    rng = np.random.default_rng(0)
    both = xr.DataArray(
        rng.normal(size=(2, 20_000, 5)).astype(np.float32),
        dims=("layer", "token", "hidden"),
        coords={"layer": [0, 3]},
    )
    counts = labels(rng.integers(-1, 12, 20_000))
    cuts = [slice(0, 9000), slice(9000, 9001), slice(9001, 20_000)]
    parts = [count_sums(both.isel(token=cut), counts.isel(token=cut), max_count=9) for cut in cuts]
    whole = count_sums(both, counts, max_count=9)
    added = add_sums(parts)
    xr.testing.assert_allclose(added.sel(counts="true"), whole.sel(counts="true"), rtol=1e-12)
    # Counts are shuffled within each segment: where the sums lie differs, what they add up to does not.
    np.testing.assert_allclose(added["total"].sum("count"), whole["total"].sum("count"), rtol=1e-9)
    expected = both.values[1][counts.values == 4].astype(np.float64).sum(axis=0)
    np.testing.assert_allclose(whole["total"].sel(layer=3, counts="true", count=4), expected, rtol=1e-12)


def test_means_on_a_circle_ring_with_its_period(circle: tuple[xr.DataArray, xr.DataArray]):
    found = count_geometry(count_sums(*circle, max_count=60), n_components=3)
    offset = found["offset"].values
    np.testing.assert_allclose(found["ringing"], np.cos(2 * np.pi * offset / PERIOD), atol=1e-9)
    np.testing.assert_allclose(found["explained_variance_ratio"], [0.5, 0.5, 0], atol=1e-9)
    np.testing.assert_allclose(np.hypot(*found["projection"].values[:, :2].T), 1, atol=1e-9)


def test_without_centring_a_shared_offset_makes_every_cosine_one(circle: tuple[xr.DataArray, xr.DataArray]):
    sums = count_sums(*circle, max_count=60)
    centred, raw = (count_geometry(sums, n_components=2, centre=centre) for centre in (True, False))
    assert float(raw["cosine"].min()) > 0.999
    assert float(centred["cosine"].min()) < -0.999
    np.testing.assert_allclose(raw["components"], centred["components"])
    shift = raw["projection"] - centred["projection"]
    np.testing.assert_allclose(shift, shift.isel(count=[0]).values.repeat(48, axis=0), atol=1e-9)


def test_with_shuffled_counts_the_curve_vanishes(circle: tuple[xr.DataArray, xr.DataArray]):
    rows, counts = circle
    many, of = rows.isel(token=np.tile(np.arange(480), 50)), labels(np.tile(counts.values, 50))
    sums = count_sums(many, of, max_count=60, shuffle_seed=1)
    spread = (sums["total"] / sums["n"]).isel(hidden=0).std("count")
    assert float(spread.sel(counts="shuffled")) < 0.1 * float(spread.sel(counts="true"))
    other = count_geometry(sums, counts="shuffled", n_components=2)["ringing"].sel(offset=slice(5, 40))
    assert float(np.abs(other).max()) < 0.5


def test_cells_of_layers_and_segments_are_put_together_whatever_their_order():
    rng = np.random.default_rng(7)
    both = xr.DataArray(
        rng.normal(size=(2, 40, 3)), dims=("layer", "token", "hidden"), coords={"layer": [1, 4]}
    )
    counts = labels(rng.integers(0, 6, 40))
    whole = count_sums(both, counts, max_count=5).sel(counts="true")
    cells = [
        count_sums(both.isel(layer=[i], token=cut), counts.isel(token=cut), max_count=5)
        for i in (0, 1)
        for cut in (slice(0, 25), slice(25, 40))
    ]
    xr.testing.assert_allclose(add_sums(cells).sel(counts="true"), whole)
    xr.testing.assert_allclose(add_sums(cells[i] for i in (1, 0, 3, 2)).sel(counts="true"), whole)


def test_shuffling_moves_only_counts_in_range_and_depends_on_the_seed_alone():
    counts = np.array([-1, 0, 1, 2, 3, 4, 5, 99])
    moved = shuffled(counts, 5, seed=3)
    assert moved[[0, 1, 7]].tolist() == [-1, 0, 99]
    assert sorted(moved) == sorted(counts)
    assert moved.tolist() == shuffled(counts, 5, seed=3).tolist()
    assert len({tuple(shuffled(counts, 5, seed=s)) for s in range(20)}) > 5


def test_ringing_goes_by_character_counts_not_by_rows():
    # Counts 1, 2, 4: offsets 1 (1-2), 2 (2-4), 3 (1-4), each with one pair; offset 0 is the diagonal.
    cosine = xr.DataArray(
        [[1, 0.5, 0.3], [0.5, 1, 0.2], [0.3, 0.2, 1]],
        dims=("count", "other_count"),
        coords={"count": [1, 2, 4], "other_count": [1, 2, 4]},
    )
    found = ringing(cosine)
    assert found["offset"].values.tolist() == [0, 1, 2, 3]
    np.testing.assert_allclose(found, [1, 0.5, 0.2, 0.3])


def test_first_positions_and_rare_counts_can_be_left_out(circle: tuple[xr.DataArray, xr.DataArray]):
    sums = count_sums(*circle, max_count=60)
    sums["n"].loc[{"count": 30}] = 2
    found = count_geometry(sums, n_components=2, min_count=5, min_tokens=3)
    assert found["count"].values.tolist() == [c for c in range(5, 49) if c != 30]


def test_layers_give_what_each_gives_alone(circle: tuple[xr.DataArray, xr.DataArray]):
    rows, counts = circle
    both = xr.concat([rows, rows[:, ::-1]], dim="layer").assign_coords(layer=[2, 5])
    together = count_geometry(count_sums(both, counts, max_count=60), n_components=2)
    alone = count_geometry(count_sums(rows, counts, max_count=60), n_components=2)
    for name in ("cosine", "ringing", "explained_variance_ratio"):
        np.testing.assert_allclose(together[name].sel(layer=2), alone[name], atol=1e-9)
    assert together["ringing"].dims == ("layer", "offset")


def test_a_linear_code_of_the_count_is_decodable_and_a_shuffled_one_is_not():
    rng = np.random.default_rng(4)
    counts = rng.integers(1, 81, 4000)
    rows = rng.normal(size=(4000, 16))
    rows += np.outer(counts / 23.1, rng.normal(size=16))  # standard deviation of the count: 23.1
    prompts = labels(np.repeat(np.arange(40), 100))
    found = decodability(states(rows.astype(np.float32)), labels(counts), prompts, max_count=80)
    assert float(found["r2"].sel(counts="true")) > 0.9
    assert -0.05 < float(found["r2"].sel(counts="shuffled")) < 0.01


def test_wide_noise_does_not_decode_because_scores_are_held_out():
    rng = np.random.default_rng(5)
    rows, counts = rng.normal(size=(600, 200)), rng.integers(1, 81, 600)
    found = decodability(states(rows), labels(counts), labels(np.repeat(np.arange(6), 100)), max_count=80)
    assert float(found["r2"].sel(counts="true")) < 0  # in-sample R2 would be about 200 / 300


def test_decodability_agrees_with_ordinary_least_squares():
    rng = np.random.default_rng(6)
    counts = rng.integers(1, 31, 1000).astype(float)
    rows = rng.normal(size=(1000, 5)) + 0.05 * counts[:, None]
    half = np.repeat([0, 1], 500)
    scores = []
    for fit, test in ((0, 1), (1, 0)):
        design = np.column_stack([rows, np.ones(1000)])
        weights = np.linalg.lstsq(design[half == fit], counts[half == fit], rcond=None)[0]
        rest, y = counts[half == test] - design[half == test] @ weights, counts[half == test]
        scores.append(1 - rest @ rest / ((y - y.mean()) @ (y - y.mean())))
    found = decodability(states(rows), labels(counts.astype(int)), labels(half), max_count=30, ridge=1e-12)
    np.testing.assert_allclose(found["r2"].sel(counts="true"), np.mean(scores), rtol=1e-4)


def test_one_prompt_alone_has_no_held_out_score():
    found = decodability(states(np.eye(4)), labels([1, 2, 3, 4]), labels([0, 0, 0, 0]), max_count=9)
    assert np.isnan(found["r2"]).all()


def test_too_few_counts_and_misfitting_labels_are_refused():
    sums = count_sums(states(np.eye(3)), labels([1, 2, 3]), max_count=5)
    with pytest.raises(ShapeError, match="more than 6 character counts"):
        count_geometry(sums)
    with pytest.raises(ShapeError, match="a count or prompt for each of the 3 tokens"):
        count_sums(states(np.eye(3)), labels([1, 2]), max_count=5)
