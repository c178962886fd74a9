"""Order: every row once an epoch, aligned over hook points, the same again from any cursor."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
import torch

from mizarr.stages.features.training.batches import Batches
from mizarr.stages.features.training.source import StoredActivations
from mizarr.store.errors import ConfigError, ShapeError

A, B = ("resid_mid", 0), ("mlp_out", 0)


@pytest.fixture
def numbered(stored):
    """1000 rows, each its own number; the other hook point holds the negative of it."""
    rows = torch.arange(1008, dtype=torch.float32)[:, None].expand(-1, 3).clone()
    return StoredActivations(stored({"resid_mid": {0: rows}, "mlp_out": {0: -rows[:, :2]}}, segment=256))


def batches(source, **changed):
    options = {"batch": 100, "window": 192, "block": 64, "seed": 0, "skip_positions": 0} | changed
    return Batches(source, [A, B], **options)


def drawn(source, count, **changed):
    with batches(source, **changed) as them:
        return [batch[A][:, 0].tolist() for batch in islice(them, count)]


def test_an_epoch_holds_every_row_once_and_batches_run_across_windows_and_epochs(numbered):
    flat = np.concatenate(drawn(numbered, 21))
    assert sorted(flat[:1008]) == list(range(1008))
    assert sorted(flat[1008:2016]) == list(range(1008))
    assert flat[:1008].tolist() != flat[1008:2016].tolist()


def test_hook_points_stay_aligned(numbered):
    with batches(numbered) as them:
        for batch in islice(them, 15):
            assert torch.equal(batch[B], -batch[A][:, :2])


def test_order_follows_the_seed(numbered):
    assert drawn(numbered, 5) == drawn(numbered, 5)
    assert drawn(numbered, 5) != drawn(numbered, 5, seed=1)


def test_neighbours_in_the_store_are_apart_in_a_batch(numbered):
    first = np.array(drawn(numbered, 10)).ravel()
    assert (np.abs(np.diff(first)) == 1).mean() < 0.05


@pytest.mark.parametrize("taken", [0, 1, 2, 7, 10, 13])
def test_a_cursor_says_all_there_is_to_know_about_where_it_stands(numbered, taken):
    whole = drawn(numbered, 25)
    with batches(numbered) as them:
        list(islice(them, taken))
        cursor = them.cursor
    assert drawn(numbered, 25 - taken, cursor=cursor) == whole[taken:]


def test_first_positions_and_held_out_prompts_never_come_up(numbered):
    kept, held = numbered.split(0.25, seed=3)
    assert held.chosen.sum() == 16
    seen = np.concatenate(drawn(kept, 20, skip_positions=2)).astype(int)
    assert (seen % 16 >= 2).all()
    assert not held.chosen[seen // 16].any()
    assert len(set(seen)) == kept.count(2) == (63 - 16) * 14


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_every_stored_dtype_comes_as_float32(stored, dtype):
    rows = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    source = StoredActivations(stored({"resid_mid": {0: rows}}, dtype=dtype))
    options = {"batch": 64, "window": 64, "block": 64, "seed": 0, "skip_positions": 0}
    with Batches(source, [A], **options) as them:
        found = next(them)[A]
    wanted = rows.to(getattr(torch, dtype)).float()
    assert found.dtype == torch.float32
    assert torch.equal(found.sort(0).values, wanted.sort(0).values)


def test_a_number_that_is_not_finite_is_told_with_its_place(stored):
    rows = torch.zeros(64, 4)
    rows[37, 2] = torch.nan
    source = StoredActivations(stored({"resid_mid": {0: rows}}))
    options = {"batch": 8, "window": 64, "block": 64, "seed": 0, "skip_positions": 1}
    with (
        Batches(source, [A], **options) as them,
        pytest.raises(ShapeError, match="resid_mid of layer 0, prompt 2, position 5"),
    ):
        next(them)


def test_fewer_rows_than_a_batch_are_refused(numbered):
    with pytest.raises(ConfigError, match="one batch of 2000 tokens to train on, found 1008"):
        batches(numbered, batch=2000)


def test_prompts_of_a_larger_run_are_found_in_it(numbered):
    some = numbered.of_prompts([3, 5])
    assert sorted(np.concatenate(drawn(some, 1, batch=32)).tolist()) == [*range(48, 64), *range(80, 96)]
    assert some.identity([A]) != numbered.identity([A])
