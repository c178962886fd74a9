"""Right answers, against the plainest way of saying them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from mizarr.stages.algzoo.tasks import TASKS, task_named
from mizarr.store.errors import ConfigError, ShapeError


def by_sorting(name: str, row: np.ndarray) -> float:
    n = len(row)
    order = sorted(range(n), key=lambda i: row[i])
    if name == "median":
        return float((row[order[(n - 1) // 2]].astype(float) + row[order[n // 2]].astype(float)) / 2)
    if name == "argoutlier":
        middle = sum(map(float, row)) / n
        return max(range(n), key=lambda i: abs(float(row[i]) - middle))
    return order[{"2nd_argmax": n - 2, "argmax": n - 1, "argmedian": n // 2}[name]]


@pytest.mark.parametrize(
    ("name", "n"),
    [
        (name, n)
        for name in ("2nd_argmax", "argmax", "argmedian", "median", "argoutlier")
        for n in (2, 3, 4, 7, 10)
        if n >= TASKS[name].min_sequence
    ],
)
def test_numbers_have_the_answer_that_sorting_gives(name, n):
    x = np.random.default_rng(n).standard_normal((200, n)).astype(np.float32)
    np.testing.assert_allclose(
        TASKS[name].targets(x), [by_sorting(name, row) for row in x], rtol=0, atol=1e-12
    )


def longest_cycle(f: tuple[int, ...]) -> int:
    """From every start, steps until it is back there, if it ever is."""
    lengths = []
    for start in range(len(f)):
        place = f[start]
        for steps in range(1, len(f) + 1):
            if place == start:
                lengths.append(steps)
                break
            place = f[place]
    return max(lengths)


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_the_longest_cycle_of_every_function(n):
    functions = list(itertools.product(range(n), repeat=n))
    found = TASKS["longest_cycle"].targets(np.array(functions))
    assert found.tolist() == [longest_cycle(f) - 1 for f in functions]


def test_a_tail_is_no_cycle_and_hides_none():
    # 0 -> 1 -> 2 -> 2: counting until anything was seen would say 3. And 4 <-> 5 behind it counts.
    assert TASKS["longest_cycle"].targets(np.array([[1, 2, 2, 2], [1, 2, 3, 3]])).tolist() == [0, 0]
    assert TASKS["longest_cycle"].targets(np.array([[1, 2, 2, 0, 5, 4]])).tolist() == [1]


def test_the_median_of_an_even_number_is_the_mean_of_the_middle_two():
    assert TASKS["median"].targets(np.array([[4.0, 1.0, 2.0, 9.0]])).tolist() == [3.0]


def test_an_unknown_task_and_inputs_that_are_none_are_one_line():
    with pytest.raises(ConfigError, match="did you mean 'argmedian'"):
        task_named("arg_median")
    with pytest.raises(ShapeError, match=r"integers from 0 to 2, .* found values from 0 to 3"):
        TASKS["longest_cycle"].targets(np.array([[0, 3, 1]]))
    with pytest.raises(ShapeError, match="with at least 3 time steps"):
        TASKS["argoutlier"].targets(np.zeros((4, 2)))  # both are equally far from their mean
    with pytest.raises(ShapeError, match=r"needs inputs of shape \[sample, time\]"):
        TASKS["argmax"].targets(np.zeros(3))
