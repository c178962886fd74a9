"""The six tasks of AlgZoo: distribution of inputs and correct answers.

    TASKS["2nd_argmax"].targets(x)       # index of the second largest number of each row

Border: numpy; no networks. Definitions are those of the training, also where the Rust library candle-mi
differs: the median of an even number of values is the mean of the middle two, and the longest cycle follows
every start until it returns to itself.

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
    """A task of AlgZoo: the distribution of its inputs of n numbers, and the correct answer to each input."""

    name: str
    """Name of the task in AlgZoo."""
    draws: Literal["normal", "integers"]
    """Distribution of an input: n independent standard normal numbers, or n integers in 0..n-1."""
    is_scalar: bool
    """True if the answer is a number, False if it is one of n classes."""
    right: Callable[[Array], Array]
    """Function from valid inputs [sample, time] to correct answers [sample]."""
    meaning: str
    """What the correct answer is, in words."""
    min_sequence: int = 2
    """Smallest number of time steps for which the task is defined."""

    def outputs(self, sequence: int) -> int:
        """Number of outputs that a network needs: a logit per class, or one number.

        Arguments:
            sequence: number of time steps per input, n.
        """
        return 1 if self.is_scalar else sequence

    def chance(self, sequence: int) -> float:
        """Accuracy of a random guess, for inputs of `sequence` time steps; 0 for a scalar answer."""
        return 0.0 if self.is_scalar else 1.0 / sequence

    def targets(self, x: Array) -> Array:
        """Correct answers [sample] for inputs [sample, time]: int64 classes, or float64 numbers.

        Raises:
            ShapeError: the inputs have other dims, too few time steps, or integers outside 0..n-1.
        """
        if x.ndim != 2 or x.shape[1] < self.min_sequence:
            raise ShapeError(
                f"the task {self.name} needs inputs of shape [sample, time] with at least "
                f"{self.min_sequence} time steps, found shape {list(x.shape)}"
            )
        if self.draws == "integers" and x.size and not (x.min() >= 0 and x.max() < x.shape[1]):
            raise ShapeError(
                f"the task {self.name} needs inputs of integers from 0 to {x.shape[1] - 1}, because each is "
                f"the index of a position of the input; found values from {x.min()} to {x.max()}"
            )
        return self.right(x)


def task_named(name: str) -> Task:
    """Look up a task by its name in AlgZoo.

    Raises:
        ConfigError: there is no task of this name; the message suggests the nearest one.
    """
    if name not in TASKS:
        near = nearest(name, TASKS)
        hint = f"did you mean {near!r}?" if near else f"there are {', '.join(TASKS)}"
        raise ConfigError(f"AlgZoo has no task {name!r}; {hint}")
    return TASKS[name]


def _second_argmax(x: Array) -> Ints:
    """Index of the second largest number of each row."""
    return _index_of_rank(x, x.shape[1] - 2)


def _argmax(x: Array) -> Ints:
    """Index of the largest number of each row."""
    index: Ints = x.argmax(axis=1)
    return index


def _argmedian(x: Array) -> Ints:
    """Index of the median of each row; of an even number of numbers, of the upper of the middle two."""
    return _index_of_rank(x, x.shape[1] // 2)


def _median(x: Array) -> Array:
    """Median of each row."""
    median: Array = np.median(x.astype(np.float64), axis=1)
    return median


def _argoutlier(x: Array) -> Ints:
    """Index of the number of each row that is farthest from the row's mean."""
    # float64: in float32 the mean's rounding may decide between two nearly equal distances.
    exact = x.astype(np.float64)
    index: Ints = np.abs(exact - exact.mean(axis=1, keepdims=True)).argmax(axis=1)
    return index


def _longest_cycle(x: Array) -> Ints:
    """Length of the longest cycle minus 1, of each row read as a function f from positions to positions."""
    # All starts are followed at once; a start on the tail of a cycle never returns, and stays open.
    f = x.astype(np.int64)
    start = np.broadcast_to(np.arange(f.shape[1]), f.shape)
    current, longest = start, np.zeros(len(f), np.int64)
    is_open = np.ones(f.shape, bool)
    for steps in range(f.shape[1]):
        current = np.take_along_axis(f, current, axis=1)
        closes = is_open & (current == start)
        longest[closes.any(axis=1)] = steps
        is_open &= ~closes
    return longest


def _index_of_rank(x: Array, rank: int) -> Ints:
    """Index of the number with an ascending rank (0 = smallest) in each row; of equal ones the first is
    lower."""
    # Ranks from pairwise comparisons over contiguous columns: 5 times as fast as sorting short rows.
    columns = np.ascontiguousarray(x.T)
    # Number of smaller numbers in the row: the rank.
    n_smaller = np.zeros(columns.shape, np.int16)
    for i in range(1, len(columns)):
        for j in range(i):
            is_less = columns[i] < columns[j]
            # i > j: of equal values the later one counts as larger.
            n_smaller[j] += is_less
            n_smaller[i] += ~is_less
    index: Ints = (n_smaller == rank).argmax(axis=0)
    return index


# Name -> task, in the order of AlgZoo.
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
