"""Draws: the experiments they hold, one by one, and what more of them cost."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import mizarr
from mizarr.pipeline import run
from mizarr.stages.causal.draws import AtOnce, Draws
from mizarr.stages.causal.knockout import EdgeKnockout, HeadKnockout
from mizarr.stages.forward.runs.experiment import Experiment
from mizarr.store import open_store
from mizarr.store.errors import StageError

PROMPT = (1, 9, 2, 31, 7, 4)


@pytest.fixture(scope="module")
def model() -> mizarr.Model:
    return mizarr.Model.from_pretrained("specimen")


def drawn(*keys: int) -> tuple[Experiment, ...]:
    return tuple(EdgeKnockout(PROMPT, ((-1, key),), layers=(0, 3), target=(42,)) for key in keys)


def test_draws_are_the_experiments_one_by_one(model: mizarr.Model, tmp_path: Path):
    experiments = drawn(0, 2, 5)
    store = open_store(tmp_path)
    node = Draws(experiments).on(model)
    run(node, store)
    found = node.open(store).load()
    assert found.sizes["draw"] == 3
    for number, each in enumerate(experiments):
        alone = each.on(model)
        run(alone, store)
        expected = alone.open(store).load()
        for name in ("kl", "attention", "logit_diff"):  # to rounding: runs lie in other blocks
            ours = found[name].isel(draw=number)
            np.testing.assert_allclose(ours, expected[name], rtol=1e-4, atol=1e-5)
    assert len(np.unique(found["kl"].isel(layer=1, edge=0))) == 3


def test_more_draws_cost_the_new_ones_only(model: mizarr.Model, tmp_path: Path):
    store = open_store(tmp_path)
    run(Draws(drawn(0, 2)).on(model), store)
    more = Draws(drawn(0, 2, 4)).on(model)
    status = more.status(store)
    assert (status.cells, status.cells_cached) == (6, 4)
    run(more, store)
    fewer = Draws(drawn(4, 0)).on(model)
    assert fewer.status(store).cells_cached == 4
    run(fewer, store)
    kl = more.open(store)["kl"].values
    np.testing.assert_array_equal(fewer.open(store)["kl"].values, kl[[2, 0]])


def test_draws_at_once_are_the_same_in_one_cell(model: mizarr.Model, tmp_path: Path):
    store = open_store(tmp_path)
    experiments = drawn(0, 2, 5)
    one, several = AtOnce(experiments).on(model), Draws(experiments).on(model)
    for node in (one, several):
        run(node, store)
    assert (len(one.cells()), len(several.cells())) == (1, 6)
    ours, theirs = one.open(store).load(), several.open(store).load()
    assert ours.sizes == theirs.sizes
    assert ours["kl"].dims == theirs["kl"].dims
    for name in ("kl", "attention", "logit_diff", "target_logprob"):
        np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("experiments", "said"), [
    ((), "found none"),
    ((EdgeKnockout(PROMPT, ((-1, 0),)), HeadKnockout(PROMPT, ((-1, 0),))), "edge_knockout 1, head_k"),
    (drawn(1, 1), "found two equal ones"),
])  # fmt: skip
def test_what_is_no_set_of_draws_is_refused(experiments: tuple[Experiment, ...], said: str):
    with pytest.raises(StageError, match=said):
        Draws(experiments)
