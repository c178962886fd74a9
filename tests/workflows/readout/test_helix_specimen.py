"""The phenomenon itself, on the specimen: the count lies on a curve, and shuffled counts do not.

Every number is held against the same number of the control, never against a constant of this model.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mizarr.workflows import compute


@pytest.fixture(scope="module")
def helix(tmp_path_factory: pytest.TempPathFactory):
    store: Path = tmp_path_factory.mktemp("helix") / "store"
    return compute("character_count_helix", store=store, characters=8000, widths=(40, 60), layers=(2, 3))


def test_means_lie_in_far_fewer_dimensions_than_shuffled_ones(helix):
    for layer in (2, 3):
        told = helix.document(layer)
        missed, missed_shuffled = 1 - told["total_variance_top6"], 1 - told["total_variance_top6_shuffled"]
        assert missed < missed_shuffled / 3


def test_cosines_ring_where_shuffled_ones_stay_flat(helix):
    for layer in (2, 3):
        ringing, control = (of["ringing"].sel(layer=layer) for of in (helix.geometry, helix.control))
        apart = [offset for offset in ringing["offset"].values if offset > 0]  # at 0 both are 1
        swing, swing_shuffled = (np.ptp(curve.sel(offset=apart).values) for curve in (ringing, control))
        assert swing > 3 * swing_shuffled
        assert float(ringing.min()) < float(control.min())


def test_the_count_is_read_off_where_shuffled_counts_are_not(helix):
    r2 = helix.r2.sel(layer=[2, 3])
    unexplained = 1 - r2
    assert (unexplained.sel(counts="true") < unexplained.sel(counts="shuffled") / 2).all()


def test_the_controls_are_told_beside_the_numbers(helix):
    layers, ringing = helix.tables()
    assert [column.header for column in layers.columns].count("(shuffled)") == 3
    assert list(ringing.columns[0].cells) == ["true", "shuffled"]
