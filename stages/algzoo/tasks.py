"""The six tasks of AlgZoo: what is drawn, and what is right.

    TASKS["2nd_argmax"].targets(x)       # which of the numbers of each row is the second largest

Border: numpy; knows no network. Where the Rust library candle-mi differs from the tasks as they are trained,
the tasks count: the median of an even number of values is the mean of the middle two, and the longest cycle
is found by following every start until it comes back to itself.

Axes: sample, time.

Source: Alignment Research Center, "AlgZoo: uninterpreted models with fewer than 1,500 parameters".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ...store.arrays import Array, Ints
from ...store.errors import ConfigError, ShapeError, nearest

__all__ = ["TASKS", "Task", "task_named"]


@dataclass(frozen=True)
class Task:
    """One task.

    draws: what its inputs are, independent standard normal numbers or integers in 0..n-1.  is_scalar: whether
    the answer is a number; else it is one of n classes.  right: the answers for rows of inputs.
    """

    name: str
    draws: Literal["normal", "integers"]
    is_scalar: bool
    right: Callable[[Array], Array]
    meaning: str
    least: int = 2
    """Shortest sequence it makes sense for."""

    def outputs(self, sequence: int) -> int:
        """How many numbers a network says: a logit per class, or one."""
        return 1 if self.is_scalar else sequence

    def chance(self, sequence: int) -> float:
        """Accuracy of a guess, 0 for a number."""
        return 0.0 if self.is_scalar else 1.0 / sequence

    def targets(self, x: Array) -> Array:
        """Right answers [sample] for inputs [sample, time]: int64 classes, or float64 numbers.

        Raises ShapeError for other dims, sequences too short, and integers outside of 0..n-1.
        """
        if x.ndim != 2 or x.shape[1] < self.least:
            raise ShapeError(
                f"{self.name}: expected inputs [sample, time] of at least {self.least} time steps, found "
                f"shape {list(x.shape)}"
            )
        if self.draws == "integers" and x.size and not (x.min() >= 0 and x.max() < x.shape[1]):
            raise ShapeError(
                f"{self.name}: expected integers in 0..{x.shape[1] - 1}, found {x.min()} to {x.max()}; an "
                "input is a function of its positions"
            )
        return self.right(x)


def task_named(name: str) -> Task:
    """The task of this name; ConfigError for an unknown one, with the nearest."""
    if name not in TASKS:
        near = nearest(name, TASKS)
        hint = f"did you mean {near!r}?" if near else f"there are {', '.join(TASKS)}"
        raise ConfigError(f"expected a task of AlgZoo, found {name!r}; {hint}")
    return TASKS[name]


def _second_argmax(x: Array) -> Ints:
    return _at_rank(x, x.shape[1] - 2)


def _argmax(x: Array) -> Ints:
    found: Ints = x.argmax(axis=1)
    return found


def _argmedian(x: Array) -> Ints:
    return _at_rank(x, x.shape[1] // 2)


def _median(x: Array) -> Array:
    found: Array = np.median(x.astype(np.float64), axis=1)
    return found


def _argoutlier(x: Array) -> Ints:
    exact = x.astype(np.float64)
    found: Ints = np.abs(exact - exact.mean(axis=1, keepdims=True)).argmax(axis=1)
    return found


def _longest_cycle(x: Array) -> Ints:
    """Longest cycle of each row read as a function, less one: the least L with f^L(s) = s, over all s."""
    f = x.astype(np.int64)
    start = np.broadcast_to(np.arange(f.shape[1]), f.shape)
    place, longest = start, np.zeros(len(f), np.int64)
    is_open = np.ones(f.shape, bool)
    for steps in range(f.shape[1]):
        place = np.take_along_axis(f, place, axis=1)
        closes = is_open & (place == start)
        longest[closes.any(axis=1)] = steps
        is_open &= ~closes
    return longest


def _at_rank(x: Array, rank: int) -> Ints:
    """Index of the value of each row that has this place in ascending order; earlier ones first among equals.

    Places are counted by comparing pairs, over contiguous columns: five times as fast as sorting short rows.
    """
    columns = np.ascontiguousarray(x.T)
    below = np.zeros(columns.shape, np.int16)
    for i in range(1, len(columns)):
        for j in range(i):
            is_less = columns[i] < columns[j]
            below[j] += is_less
            below[i] += ~is_less
    found: Ints = (below == rank).argmax(axis=0)
    return found


# Name -> task, in the order of the zoo.
TASKS = {
    task.name: task
    for task in (
        Task("2nd_argmax", "normal", False, _second_argmax, "index of the second largest number"),
        Task("argmax", "normal", False, _argmax, "index of the largest number"),
        Task("argmedian", "normal", False, _argmedian, "index of the number at ascending rank n // 2"),
        Task("median", "normal", True, _median, "the median; of an even number, the mean of the middle two"),
        Task("argoutlier", "normal", False, _argoutlier, "index of the number farthest from the mean", 3),
        Task("longest_cycle", "integers", False, _longest_cycle, "length of the longest cycle, less one"),
    )
}
