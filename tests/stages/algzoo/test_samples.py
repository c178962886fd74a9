"""Seeded inputs: the same for everybody, and what they are said to be."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy.stats import kstest

from mizarr.stages.algzoo import samples
from mizarr.stages.algzoo.samples import algzoo_samples, drawn, lcg, slices
from mizarr.stages.algzoo.tasks import TASKS
from mizarr.store.errors import ConfigError

from .reference import CLASSES, needs_reference, told


def by_the_recurrence(count: int, state: int) -> list[float]:
    found = []
    for _ in range(count):
        state = (6364136223846793005 * state + 1) % (1 << 64)
        u = np.float32(state >> 33) / np.float32(2**31)
        found.append(float((u - np.float32(0.5)) * np.float32(6)))
    return found


@pytest.mark.parametrize("state", [42, 123456789])
def test_the_congruential_generator_follows_its_recurrence(state):
    assert lcg(5, 3, state).ravel().tolist() == by_the_recurrence(15, state)


@needs_reference
@pytest.mark.parametrize("name", CLASSES)
def test_the_congruential_generator_gives_the_reference_inputs(name):
    x = np.array(told(name)["input"], np.float32)
    np.testing.assert_array_equal(lcg(*x.shape, 123456789), x)


def test_a_sample_is_the_same_however_many_are_drawn(monkeypatch):
    monkeypatch.setattr(samples, "BLOCK", 20_000)
    task = TASKS["argmax"]
    many = drawn(task, 4, 50_000, seed=3)
    np.testing.assert_array_equal(many[:25_001], drawn(task, 4, 25_001, seed=3))
    third = np.concatenate(list(slices(task, 4, 2, 10_000, seed=3)))
    np.testing.assert_array_equal(many[40_000:], third)
    assert not np.array_equal(many, drawn(task, 4, 50_000, seed=4))
    assert len(np.unique(many[:, 0])) > 49_000, "blocks do not repeat each other"


def test_numbers_are_standard_normal_and_independent():
    x = drawn(TASKS["argmax"], 3, 100_000, seed=1)
    assert x.dtype == np.float32
    assert all(kstest(column, "norm").pvalue > 1e-4 for column in x.T)
    assert np.abs(np.corrcoef(x.T) - np.eye(3)).max() < 0.015


def test_integers_are_uniform_and_all_of_them_are_all_functions():
    task = TASKS["longest_cycle"]
    counts = np.bincount(drawn(task, 4, 40_000, seed=0).ravel(), minlength=4)
    assert np.abs(counts / 40_000 - 1).max() < 0.02
    every = np.concatenate(list(slices(task, 4, 0, 256, draw="all")))
    assert every.tolist() == [list(row) for row in itertools.product(range(4), repeat=4)]


def test_with_an_end_token_the_last_integer_is_that_and_no_other_is():
    x = drawn(TASKS["longest_cycle"], 5, 2000, seed=0, end_token=True)
    assert (x[:, -1] == 4).all()
    assert set(np.unique(x[:, :-1])) == {0, 1, 2, 3}


@pytest.mark.parametrize(("task", "told"), [("argmax", {"end_token": True}), ("median", {"draw": "all"})])
def test_numbers_have_no_end_and_are_not_enumerated(task, told):
    with pytest.raises(ConfigError, match="is for tasks on integers"):
        next(slices(TASKS[task], 3, 0, 10, **told))
    with pytest.raises(ConfigError, match="found both"):
        next(slices(TASKS["longest_cycle"], 3, 0, 10, end_token=True, draw="all"))


def test_the_stage_gives_inputs_with_their_answers():
    found = algzoo_samples(task="median", sequence=4, samples=50, seed=2)
    np.testing.assert_allclose(found["target"], np.median(found["x"].values.astype(float), axis=1))
    with pytest.raises(ConfigError, match="draws real numbers"):
        algzoo_samples(task="longest_cycle", sequence=4, samples=5, source="lcg")
    with pytest.raises(ConfigError, match="samples to be at least 1"):
        algzoo_samples(task="median", sequence=4, samples=0)
