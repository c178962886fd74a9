"""Inputs of AlgZoo tasks with correct answers: random from a seed, enumerated, or from candle-mi's generator.

Sample i of a seed does not depend on how many are drawn, or by which worker: samples come in blocks of a
million, and each block has a generator seeded by (seed, block).

Border: numpy; tasks but no networks.

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
"""Number of samples that share a random generator, and whose counts are computed and stored together."""
SLICE = 8192
"""Number of samples that a network processes at a time: their states then fit in the cache of a core."""
PROBE_STATE, SURPRISE_STATE = 42, 123456789
"""Start states with which candle-mi draws inputs for probes and for surprise accounting; with the same inputs
its numbers can be compared with ours."""
MULTIPLIER = 6364136223846793005
"""Multiplier of candle-mi's linear congruential generator (Knuth's MMIX)."""
MOST = 10**12
"""Largest number of inputs that is enumerated."""

Draw = Literal["random", "all"]
"""How a block is filled: from its seed, or with all integer inputs in order."""


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
    """The first inputs of a block, in parts of at most `SLICE` samples, float32 or int64 [sample, time].

    Arguments:
        task: the task.
        sequence: number of time steps per input, n.
        block: number of the block, from 0.
        count: number of inputs.
        seed: seed of random inputs.
        draw: "random", or "all" to enumerate all inputs of an integer task in order.
        end_token: whether integer inputs are n - 1 values in 0..n-2, followed by the value n - 1. The
            transformer's answer is read at the position of this last value.

    Raises:
        ConfigError: draw="all" or an end token for a task that is not on integers, or both together.
    """
    if task.draws != "integers" and (end_token or draw == "all"):
        setting = "end_token=True" if end_token else 'draw="all"'
        raise ConfigError(
            f"{setting} is for tasks on integers, found the task {task.name}, whose inputs are real numbers; "
            "leave it out"
        )
    if end_token and draw == "all":
        raise ConfigError('expected either draw="all" or end_token=True, found both; use draw="random"')
    # Drawn in order within a block: the first n samples are the same for every count.
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
    """The first inputs of a seed, float32 or int64 [sample, time], as one array.

    Arguments:
        task: the task.
        sequence: number of time steps per input.
        count: number of inputs.
        seed: seed of random inputs.
        draw: "random", or "all" to enumerate all inputs of an integer task in order.
        end_token: whether integer inputs end with a fixed value; see `slices`.
    """
    parts = [
        part
        for block, size in enumerate(block_sizes(count))
        for part in slices(task, sequence, block, size, seed=seed, draw=draw, end_token=end_token)
    ]
    return np.concatenate(parts)


def block_sizes(count: int) -> list[int]:
    """Numbers of samples of the blocks that the first `count` samples of a seed fill; the last may be
    partial."""
    if count < 1:
        raise ConfigError(f"expected the number of samples to be at least 1, found {count}")
    whole, remainder = divmod(count, BLOCK)
    return [BLOCK] * whole + [remainder] * bool(remainder)


def count_inputs(task: Task, sequence: int) -> int:
    """Number of different inputs of a task on integers, n^n.

    Arguments:
        task: the task.
        sequence: number of time steps per input, n.

    Raises:
        ConfigError: the task is not on integers, or there are more than `MOST` inputs.
    """
    if task.draws != "integers":
        raise ConfigError(
            f"only the inputs of a task on integers can be enumerated, found the task {task.name}; draw "
            "random samples instead"
        )
    if (count := sequence**sequence) > MOST:
        raise ConfigError(
            f"{task.name} has {count:,} inputs of {sequence} integers, and at most {MOST:,} can be "
            "enumerated; draw random samples instead"
        )
    return int(count)


def lcg(count: int, sequence: int, state: int = PROBE_STATE) -> Array:
    """Inputs that candle-mi's generator draws, uniform on [-3, 3), float32 [sample, time].

    s <- 6364136223846793005 s + 1 mod 2^64;  x = (float32(s >> 33) / 2^31 - 0.5) * 6; time varies fastest.

    Arguments:
        count: number of inputs.
        sequence: number of time steps per input.
        state: start state s of the generator.
    """
    bits = np.empty(count * sequence, np.uint64)
    for i in range(bits.size):
        state = (MULTIPLIER * state + 1) % 2**64
        # The high 31 bits: low bits of such a generator have short periods.
        bits[i] = state >> 33
    # In float32, step by step as in Rust: its rounding is part of candle-mi's inputs.
    numbers = (bits.astype(np.float32) / np.float32(2**31) - np.float32(0.5)) * np.float32(6)
    return numbers.reshape(count, sequence)


@stage(
    version=1,
    inputs={},
    outputs={
        "x": Output(("sample", "time"), "1", "inputs of the network"),
        "target": Output(("sample",), "1", "correct answers"),
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
    """Inputs of a task with their correct answers.

    Arguments:
        task: name of the task.
        sequence: number of time steps per input.
        samples: number of inputs.
        seed: seed of the inputs; for source="lcg" the start state of the generator.
        source: "task" draws from the task's own distribution, "lcg" uniform numbers as candle-mi does.
        end_token: whether integer inputs end with a fixed value; see `slices`.

    Returns:
        x [sample, time], float32 or int64 for integers, and target [sample].

    Raises:
        ConfigError: the task is unknown, or on integers with source="lcg".
    """
    import xarray as xr

    zoo_task = task_named(task)
    if source == "lcg" and zoo_task.draws == "integers":
        raise ConfigError(
            f"source='lcg' draws real numbers, found the task {task}, whose inputs are integers; use "
            "source='task'"
        )
    x = (
        lcg(samples, sequence, seed)
        if source == "lcg"
        else drawn(zoo_task, sequence, samples, seed=seed, end_token=end_token)
    )
    return xr.Dataset({"x": (("sample", "time"), x), "target": ("sample", zoo_task.targets(x))})


def _enumerated(sequence: int, first: int, rows: int) -> Array:
    """Some of all n^n integer inputs of length n, int64 [sample, time]: row i is the number i in base n.

    Arguments:
        sequence: number of time steps per input, n.
        first: number of the first row.
        rows: number of rows.
    """
    numbers = np.arange(first, first + rows)
    # int64: n^n reaches 1e12 for the largest n that is enumerated.
    powers = sequence ** np.arange(sequence - 1, -1, -1, dtype=np.int64)
    return numbers[:, None] // powers % sequence
