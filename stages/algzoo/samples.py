"""Inputs with correct answers: random from a seed, enumerated, or from candle-mi's random number generator.

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
"""Samples that share a generator, and form a cell of a stored count."""
SLICE = 8192
"""Samples that a network processes at a time: their states then fit in the cache of a core."""
PROBE_STATE, SURPRISE_STATE = 42, 123456789
"""Start states of candle-mi's generator, for probes and for surprise accounting, so that numbers compare."""
MULTIPLIER = 6364136223846793005
"""Multiplier of the generator (Knuth's MMIX)."""
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
        sequence: time steps per input.
        block: number of the block.
        count: number of inputs.
        seed: seed of random inputs.
        draw: "random", or "all" for all integer inputs in order.
        end_token: whether integer inputs are n - 1 values in 0..n-2 followed by n - 1, at the position from
            which the transformer is read out.

    Raises:
        ConfigError: for draw="all" or an end token with another than an integer task, or for both.
    """
    if task.draws != "integers" and (end_token or draw == "all"):
        raise ConfigError(f"expected a task of integers to end or enumerate, found {task.name}")
    if end_token and draw == "all":
        raise ConfigError("expected all inputs, or samples with an end token, found both; draw samples")
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
    """The first inputs of a seed, [sample, time], in memory.

    Arguments:
        task: the task.
        sequence: time steps per input.
        count: number of inputs.
        seed: seed of random inputs.
        draw: "random", or "all" for all integer inputs in order.
        end_token: see `slices`.
    """
    parts = [
        part
        for block, size in enumerate(block_sizes(count))
        for part in slices(task, sequence, block, size, seed=seed, draw=draw, end_token=end_token)
    ]
    return np.concatenate(parts)


def block_sizes(count: int) -> list[int]:
    """Number of samples in each block of the first `count` samples."""
    if count < 1:
        raise ConfigError(f"expected at least one sample, found {count}")
    whole, remainder = divmod(count, BLOCK)
    return [BLOCK] * whole + [remainder] * bool(remainder)


def count_inputs(task: Task, sequence: int) -> int:
    """Number of inputs of an integer task, n^n.

    Arguments:
        task: the task.
        sequence: time steps per input, n.

    Raises:
        ConfigError: for another task, or more than `MOST` inputs.
    """
    if task.draws != "integers":
        raise ConfigError(
            f"expected a task of integers to enumerate, found {task.name}; draw samples instead"
        )
    if (count := sequence**sequence) > MOST:
        raise ConfigError(
            f"expected at most {MOST:,} inputs to enumerate, found {count:,}; draw samples instead"
        )
    return int(count)


def lcg(count: int, sequence: int, state: int = PROBE_STATE) -> Array:
    """Inputs [sample, time] of candle-mi's analyses: uniform on [-3, 3), float32.

    s <- 6364136223846793005 s + 1 mod 2^64;  x = (float32(s >> 33) / 2^31 - 0.5) * 6; time varies fastest.

    Arguments:
        count: number of inputs.
        sequence: time steps per input.
        state: start state s.
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
        sequence: time steps per input.
        samples: number of inputs.
        seed: of the inputs, or start state of the generator.
        source: "task" draws from the distribution of training, "lcg" candle-mi's uniform numbers.
        end_token: see `slices`.

    Returns:
        x [sample, time], float32 or int64 for integers, and target [sample].

    Raises:
        ConfigError: for an unknown task, or "lcg" with an integer task.
    """
    import xarray as xr

    zoo_task = task_named(task)
    if source == "lcg" and zoo_task.draws == "integers":
        raise ConfigError(f"expected a task of numbers with source='lcg', found {task}; use source='task'")
    x = (
        lcg(samples, sequence, seed)
        if source == "lcg"
        else drawn(zoo_task, sequence, samples, seed=seed, end_token=end_token)
    )
    return xr.Dataset({"x": (("sample", "time"), x), "target": ("sample", zoo_task.targets(x))})


def _enumerated(sequence: int, first: int, rows: int) -> Array:
    """Rows `first` and following of all functions from n positions to n values, counted in base n."""
    numbers = np.arange(first, first + rows)
    # int64: n^n reaches 1e12 for the largest n that is enumerated.
    powers = sequence ** np.arange(sequence - 1, -1, -1, dtype=np.int64)
    return numbers[:, None] // powers % sequence
