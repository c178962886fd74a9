"""int8 with scales: no value moves by more than half its scale, and what has no scale is refused."""

from __future__ import annotations

import numpy as np
import pytest

from mizarr.store.errors import ShapeError
from mizarr.store.runs.quantised import BLOCK, quantise, restored

ROUNDING = 1 + 2.0**-14
"""float32 divides and multiplies numbers up to 127 scales: some 2^-15 of half a scale."""


def per_value(scales, width):
    return np.repeat(scales.astype(np.float64), BLOCK, axis=-1)[..., :width]


def activations(kind, shape, rng):
    rows = rng.standard_normal(shape)
    if kind == "heavy":
        rows = rng.standard_t(1.5, shape)
    if kind == "massive":  # a few dimensions a thousand times the others, as real streams have them
        rows[..., rng.integers(0, shape[-1], 2)] *= 3000
    if kind == "tiny":  # down to numbers float32 holds a few bits of
        rows *= 10.0 ** rng.uniform(-45, -36, (*shape[:-1], 1))
    if kind == "huge":
        rows *= 1e37
    return rows.astype(np.float32)


@pytest.mark.parametrize("kind", ["normal", "heavy", "massive", "tiny", "huge"])
@pytest.mark.parametrize("shape", [(300, 192), (65, 100), (7, 3, 5), (1, 64), (9, 4, 128), (5, 1)])
def test_no_value_moves_by_more_than_half_its_scale(kind, shape):
    for seed in range(3):
        rows = activations(kind, shape, np.random.default_rng(seed))
        values, scales = quantise(rows, "rows")
        assert values.dtype == np.int8 and values.min() >= -127
        moved = np.abs(rows.astype(np.float64) - restored(values, scales))
        assert (moved <= per_value(scales, shape[-1]) / 2 * ROUNDING).all()


def test_the_scale_is_the_largest_magnitude_of_its_block_over_127():
    rows = activations("heavy", (50, 130), np.random.default_rng(3))
    _, scales = quantise(rows, "rows")
    by_hand = [[np.abs(row[at : at + 64]).max() / np.float32(127) for at in (0, 64, 128)] for row in rows]
    np.testing.assert_array_equal(scales, np.array(by_hand, np.float32))


def test_a_massive_value_costs_its_block_and_no_other():
    rng = np.random.default_rng(4)
    rows = rng.standard_normal((200, 256)).astype(np.float32)
    massive = rows.copy()
    massive[:, 70] = 5000
    plain, beside = (restored(*quantise(each, "rows")) for each in (rows, massive))
    others = np.r_[0:64, 128:256]
    np.testing.assert_array_equal(plain[:, others], beside[:, others])
    own = np.r_[64:70, 71:128]
    lost = np.linalg.norm(beside[:, own] - rows[:, own]) / np.linalg.norm(rows[:, own])
    assert lost > 0.9  # the error is real: beside 5000 a number of 1 is less than half a scale


def test_zeros_stay_zeros_whatever_lies_beside_them():
    rows = np.zeros((4, 128), np.float32)
    rows[1, :64] = 3
    values, scales = quantise(rows, "rows")
    np.testing.assert_array_equal(restored(values, scales)[[0, 2, 3]], 0)
    assert scales[0].tolist() == [0, 0] and scales[1, 1] == 0
    np.testing.assert_allclose(restored(values, scales)[1, :64], 3, rtol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_has_no_scale_is_refused(bad):
    rows = np.ones((40, 70), np.float32)
    rows[39, 69] = bad
    with pytest.raises(ShapeError, match=r"segment 3.*NaN or infinities.*bfloat16"):
        quantise(rows, "segment 3")


def test_other_dtypes_and_single_numbers_are_refused():
    for rows in (np.ones((3, 4)), np.ones(3, np.float32)):
        with pytest.raises(ShapeError, match="float32"):
            quantise(rows, "rows")
