"""Inputs and right answers: drawn from seeds, enumerated, or by the linear congruential generator of
candle-mi.

Sample i of a seed is the same however many are drawn, and by whom: samples come in blocks of a million, and
each block has a generator of its own, made of seed and number (`SeedSequence`).

Border: numpy; knows tasks, no networks.

Axes: sample, time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

import numpy as np

from ...pipeline import Output, stage
from ...store.arrays import Array
from ...store.errors import ConfigError
from .tasks import Task, task_named

if TYPE_CHECKING:
    import xarray as xr

__all__ = [
    "BLOCK",
    "PROBE_STATE",
    "SURPRISE_STATE",
    "Draw",
    "algzoo_samples",
    "block_sizes",
    "drawn",
    "lcg",
    "slices",
]

BLOCK = 1_000_000
"""Samples that share a generator, and a cell of a cached count."""
SLICE = 8192
"""Samples in the hands of a network at once: its states then stay in the cache of a core."""
PROBE_STATE, SURPRISE_STATE = 42, 123456789
"""Where candle-mi starts its generator for probes, and for surprise accounting."""
MULTIPLIER = 6364136223846793005
MOST = 10**12
"""Inputs there may be at most to be enumerated."""

Draw = Literal["random", "all"]
"""How a block is filled: from its seed, or with all inputs of integers in order."""


def slices(
    task: Task,
    sequence: int,
    block: int,
    count: int,
    *,
    seed: int = 0,
    draw: Draw = "random",
    end_token: bool = False,
) -> Iterator[Array]:
    """The first `count` inputs of a block, [sample, time] float32 or int64, a few thousand at a time.

    end_token: of integers: n - 1 of them in 0..n-2, and then n - 1, from which the answer is read. Raises
    ConfigError for what only a task of integers has.
    """
    if task.draws != "integers" and (end_token or draw == "all"):
        raise ConfigError(f"expected a task of integers to end or enumerate, found {task.name}")
    if end_token and draw == "all":
        raise ConfigError("expected all inputs, or samples with an end token, found both; draw samples")
    rng = np.random.default_rng([seed, block])
    for first in range(0, count, SLICE):
        rows = min(SLICE, count - first)
        if draw == "all":
            yield _enumerated(sequence, block * BLOCK + first, rows)
        elif task.draws == "normal":
            yield rng.standard_normal((rows, sequence), dtype=np.float32)
        elif end_token:
            free = rng.integers(sequence - 1, size=(rows, sequence - 1))
            yield np.column_stack([free, np.full(rows, sequence - 1)])
        else:
            yield rng.integers(sequence, size=(rows, sequence))


def drawn(
    task: Task, sequence: int, count: int, *, seed: int = 0, draw: Draw = "random", end_token: bool = False
) -> Array:
    """The first `count` inputs of a seed, [sample, time], in memory."""
    parts = [
        part
        for block, size in enumerate(block_sizes(count))
        for part in slices(task, sequence, block, size, seed=seed, draw=draw, end_token=end_token)
    ]
    return np.concatenate(parts)


def block_sizes(count: int) -> list[int]:
    """How many samples each block of the first `count` has."""
    if count < 1:
        raise ConfigError(f"expected at least one sample, found {count}")
    whole, rest = divmod(count, BLOCK)
    return [BLOCK] * whole + [rest] * bool(rest)


def inputs_there_are(task: Task, sequence: int) -> int:
    """How many inputs a task of integers has, n to the n. Raises ConfigError for another, or too many."""
    if task.draws != "integers":
        raise ConfigError(
            f"expected a task of integers to enumerate, found {task.name}; draw samples instead"
        )
    if (many := sequence**sequence) > MOST:
        raise ConfigError(
            f"expected at most {MOST:,} inputs to enumerate, found {many:,}; draw samples instead"
        )
    return int(many)


def lcg(count: int, sequence: int, state: int = PROBE_STATE) -> Array:
    """Inputs [sample, time] as candle-mi draws them for its analyses: uniform on [-3, 3), float32.

    s <- 6364136223846793005 s + 1 mod 2^64;  x = (float32(s >> 33) / 2^31 - 0.5) * 6, samples then time.
    """
    bits = np.empty(count * sequence, np.uint64)
    for i in range(bits.size):
        state = (MULTIPLIER * state + 1) % 2**64
        bits[i] = state >> 33
    found = (bits.astype(np.float32) / np.float32(2**31) - np.float32(0.5)) * np.float32(6)
    return found.reshape(count, sequence)


@stage(
    version=1,
    inputs={},
    outputs={
        "x": Output(("sample", "time"), "1", "what a network reads"),
        "target": Output(("sample",), "1", "the right answer"),
    },
)
def algzoo_samples(
    *,
    task: str,
    sequence: int,
    samples: int,
    seed: int = 0,
    source: Literal["task", "lcg"] = "task",
    end_token: bool = False,
) -> xr.Dataset:
    """Inputs of a task with their right answers.

    source: "task" draws what the task is trained on, from `seed`; "lcg" the uniform numbers of candle-mi,
    whose generator starts at `seed`. Returns x [sample, time] (float32, or int64 for integers), target
    [sample]. Raises ConfigError for an unknown task, or "lcg" for integers.
    """
    import xarray as xr

    chosen = task_named(task)
    if source == "lcg" and chosen.draws == "integers":
        raise ConfigError(f"expected a task of numbers with source='lcg', found {task}; use source='task'")
    x = (
        lcg(samples, sequence, seed)
        if source == "lcg"
        else drawn(chosen, sequence, samples, seed=seed, end_token=end_token)
    )
    return xr.Dataset({"x": (("sample", "time"), x), "target": ("sample", chosen.targets(x))})


def _enumerated(sequence: int, first: int, rows: int) -> Array:
    """Rows `first` and on of all functions of n positions to n, counted in base n."""
    numbers = np.arange(first, first + rows)
    powers = sequence ** np.arange(sequence - 1, -1, -1, dtype=np.int64)
    return numbers[:, None] // powers % sequence
