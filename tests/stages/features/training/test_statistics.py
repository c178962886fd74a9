"""Moments joined block by block are those of all rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mizarr.stages.features.training.statistics import moments

CELL = ("resid_post", 0)


def test_moments_of_blocks_are_those_of_all_rows_far_from_zero_too():
    rows = torch.randn(1000, 5, generator=torch.Generator().manual_seed(0)) + 300
    found = moments({CELL: part} for part in rows.split([1, 499, 37, 463]))[CELL]
    wide = rows.double().numpy()
    assert found.count == 1000
    assert np.allclose(found.mean, wide.mean(0))
    assert found.variance == pytest.approx(((wide - wide.mean(0)) ** 2).sum(1).mean())
    norms = np.linalg.norm(wide, axis=1)
    assert (found.norm, found.max_norm) == pytest.approx((norms.mean(), norms.max()))
