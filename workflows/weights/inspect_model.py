"""What is in a checkpoint? Its tensors with shapes and norms, without loading a model; and what it takes to.

Border: a checkpoint in, plain values out. Torch is imported to time a pass, and for tensors that no file
holds as they are (quantised, with an adapter, written by torch); others are read a block of rows at a time,
so that a checkpoint can be seen where it could not run, and memory stays at one block.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import ml_dtypes  # noqa: F401 - teaches numpy the bfloat16 that safetensors hands out
import numpy as np

from ...stages.forward.checkpoints.checkpoint import Files, checkpoint_of

__all__ = ["PassTimes", "TensorFacts", "pass_times", "tensor_facts"]

T = TypeVar("T")
BLOCK = 1 << 22  # elements widened to float64 at a time: 32 MiB


@dataclass(frozen=True)
class TensorFacts:
    """One tensor of a checkpoint.

    norm: Frobenius. mean, std: over all entries. All three None when values were not read.
    finite: no NaN, no infinity; None when values were not read.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    norm: float | None = None
    mean: float | None = None
    std: float | None = None
    finite: bool | None = None

    @property
    def parameters(self) -> int:
        """Number of entries."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class PassTimes:
    """What it takes to load a model and to run it.

    load_seconds; first_pass_seconds, pass_seconds: over `tokens` tokens, with the logits of the last; the
    median of several passes after the first. weight_bytes: as computed in. memory: of this process, before
    loading, after the last pass and at most.
    """

    dtype: str
    device: str
    load_seconds: float
    first_pass_seconds: float
    pass_seconds: float
    tokens: int
    weight_bytes: int
    memory: dict[str, Any]


def pass_times(name: str, revision: str | None = None, *, tokens: int = 16, passes: int = 5) -> PassTimes:
    """Load a model by name in float32, and time passes over its first token ids. Raises what loading does."""
    from ...pipeline.memory import memory
    from ...stages.forward.hooks.wants import LAST_LOGITS
    from ...stages.forward.models.model import Model

    with memory() as used:
        model, loaded = _timed(lambda: Model.from_pretrained(name, revision=revision, progress=False))
        size = min(tokens, model.config.context_length)
        ids = [number % model.config.vocab_size for number in range(size)]

        def one_pass() -> float:
            # Reading a number waits for a device to be done.
            return float(model.forward(ids, want=LAST_LOGITS).logits[0, 0, 0])

        seconds = [_timed(one_pass)[1] for _ in range(1 + passes)]
        held = model.weight_bytes
    rest = sorted(seconds[1:])
    return PassTimes(
        str(model.dtype).removeprefix("torch."),
        str(model.device),
        round(loaded, 6),
        round(seconds[0], 6),
        round(rest[len(rest) // 2], 6),
        size,
        held,
        used.to_json(),
    )


def _timed(work: Callable[[], T]) -> tuple[T, float]:
    started = time.perf_counter()
    return work(), time.perf_counter() - started


def tensor_facts(
    files: Files, *, values: bool = True, seen: Callable[[int], object] = lambda entries: None
) -> Iterator[TensorFacts]:
    """Facts about every tensor as plain numbers, in the order of their names.

    values: read the tensors for norm, mean and std; otherwise the headers are enough.
    seen: told the number of entries read, block by block.
    Raises WeightsError for a file that is damaged.
    """
    checkpoint = checkpoint_of(files)
    for name, entry in sorted(checkpoint.entries.items()):
        measured = _measure(checkpoint.numbers(name), entry.shape, seen) if values else {}
        yield TensorFacts(name, entry.shape, entry.dtype, **measured)


def _measure(part: Any, shape: tuple[int, ...], seen: Callable[[int], object]) -> dict[str, Any]:
    """Norm, mean and standard deviation, accumulated in float64."""
    count = math.prod(shape)
    if not count:
        return {"norm": 0.0, "mean": None, "std": None, "finite": True}
    total = squares = 0.0
    for block in _blocks(part, shape):
        wide = np.asarray(block).astype(np.float64)
        total += float(wide.sum())
        squares += float(np.square(wide).sum())
        seen(wide.size)
    if not math.isfinite(squares):
        return {"norm": None, "mean": None, "std": None, "finite": False}
    mean = total / count
    variance = max(squares / count - mean * mean, 0.0)
    return {"norm": math.sqrt(squares), "mean": mean, "std": math.sqrt(variance), "finite": True}


def _blocks(part: Any, shape: tuple[int, ...]) -> Iterator[Any]:
    if not shape:
        yield part[...]
        return
    rows = max(1, BLOCK // max(1, math.prod(shape[1:])))
    for start in range(0, shape[0], rows):
        yield part[start : min(start + rows, shape[0])]
