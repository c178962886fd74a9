"""What is in a checkpoint? Its tensors with shapes and norms, without loading a model; time and memory of a
forward pass.

Border: a checkpoint in, plain values out. Torch is imported to time a pass, and for tensors that must be
computed or unpickled (quantised weights, adapters, files written by torch). All others are read a block of
rows at a time, so that a checkpoint too large to run can be inspected with the memory of one block.
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
BLOCK = 1 << 22
"""Number of entries that are converted to float64 at a time: 32 MiB."""


@dataclass(frozen=True)
class TensorFacts:
    """Shape, dtype and statistics of one tensor of a checkpoint."""

    name: str
    """Name in the checkpoint."""
    shape: tuple[int, ...]
    """Size of each axis; empty for a scalar."""
    dtype: str
    """Dtype as safetensors spells it, such as "BF16"."""
    norm: float | None = None
    """Frobenius norm; None for unread values, or if a value is infinite or NaN."""
    mean: float | None = None
    """Mean over all entries; None like `norm`, and for a tensor without entries."""
    std: float | None = None
    """Standard deviation over all entries; None like `mean`."""
    finite: bool | None = None
    """Whether no entry is NaN or infinite; None if values were not read."""

    @property
    def parameters(self) -> int:
        """Number of entries."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class PassTimes:
    """Time and memory that loading a model and running it take."""

    dtype: str
    """Dtype of computation, such as "float32"."""
    device: str
    """Torch device of the model."""
    load_seconds: float
    """Time to load the model, in seconds."""
    first_pass_seconds: float
    """Time of the first forward pass over `tokens` tokens with the logits of the last one, in seconds."""
    pass_seconds: float
    """Median time of the passes after the first, in seconds."""
    tokens: int
    """Number of tokens of a pass."""
    weight_bytes: int
    """Size of the weights in the dtype of computation."""
    memory: dict[str, Any]
    """Memory of this process in bytes: before loading, after the last pass, and peak."""


def pass_times(name: str, revision: str | None = None, *, tokens: int = 16, passes: int = 5) -> PassTimes:
    """Time and memory of loading a model in float32, and of forward passes over its first token ids.

    Arguments:
        name: hub id or directory.
        revision: revision on the hub; None for the default one.
        tokens: number of tokens of a pass, at most the context length.
        passes: number of passes after the first, whose median is returned.

    Raises:
        MizarrError: of any kind that `Model.from_pretrained` raises.
    """
    from ...pipeline.memory import memory
    from ...stages.forward.architectures.points import HookPoint
    from ...stages.forward.hooks.spec import HookSpec
    from ...stages.forward.hooks.wants import LAST_LOGITS
    from ...stages.forward.models.model import Model

    with memory() as used:
        model, loaded = _timed(lambda: Model.from_pretrained(name, revision=revision, progress=False))
        size = min(tokens, model.config.context_length)
        last = HookPoint.resid_post(model.config.num_layers - 1)
        ids = [number % model.config.vocab_size for number in range(size)]

        def run_pass() -> float:
            # Reading one number waits for the device: kernels on a GPU run asynchronously.
            cache = model.forward(ids, HookSpec().capture(last), want=LAST_LOGITS)
            return float(cache[last].flatten()[0])

        seconds = [_timed(run_pass)[1] for _ in range(1 + passes)]
        weight_bytes = model.weight_bytes
    later_passes = sorted(seconds[1:])
    return PassTimes(
        str(model.dtype).removeprefix("torch."),
        str(model.device),
        round(loaded, 6),
        round(seconds[0], 6),
        round(later_passes[len(later_passes) // 2], 6),
        size,
        weight_bytes,
        used.to_json(),
    )


def _timed(work: Callable[[], T]) -> tuple[T, float]:
    """(result of a function, seconds that it took)."""
    # `perf_counter` is monotonic: a corrected system clock does not change it.
    started = time.perf_counter()
    return work(), time.perf_counter() - started


def tensor_facts(
    files: Files, *, values: bool = True, on_progress: Callable[[int], object] = lambda entries: None
) -> Iterator[TensorFacts]:
    """Shape, dtype and statistics of every tensor, in the order of their names.

    Arguments:
        files: files of a checkpoint.
        values: whether to read the tensors for norm, mean and std; otherwise only headers are read.
        on_progress: called after each block with its number of entries.

    Raises:
        WeightsError: for a damaged file.
    """
    checkpoint = checkpoint_of(files)
    for name, entry in sorted(checkpoint.entries.items()):
        statistics = _statistics(checkpoint.numbers(name), entry.shape, on_progress) if values else {}
        yield TensorFacts(name, entry.shape, entry.dtype, **statistics)


def _statistics(tensor: Any, shape: tuple[int, ...], on_progress: Callable[[int], object]) -> dict[str, Any]:
    """Norm, mean and standard deviation of a tensor, accumulated in float64 block by block."""
    count = math.prod(shape)
    if not count:
        return {"norm": 0.0, "mean": None, "std": None, "finite": True}
    total = squares = 0.0
    for block in _blocks(tensor, shape):
        # Squares of large float16 or float32 entries would overflow in their own dtype.
        entries = np.asarray(block).astype(np.float64)
        total += float(entries.sum())
        squares += float(np.square(entries).sum())
        on_progress(entries.size)
    # One NaN or infinite entry makes the sum NaN or infinite, so no entry needs a test of its own.
    if not math.isfinite(squares):
        return {"norm": None, "mean": None, "std": None, "finite": False}
    # Mean and deviation from two sums: deviations from the mean would need a second pass over the file.
    mean = total / count
    # Rounding may make the difference slightly negative.
    variance = max(squares / count - mean * mean, 0.0)
    return {"norm": math.sqrt(squares), "mean": mean, "std": math.sqrt(variance), "finite": True}


def _blocks(tensor: Any, shape: tuple[int, ...]) -> Iterator[Any]:
    """Consecutive rows of a tensor with about `BLOCK` entries; the whole of a scalar."""
    if not shape:
        yield tensor[...]
        return
    rows = max(1, BLOCK // max(1, math.prod(shape[1:])))
    for start in range(0, shape[0], rows):
        yield tensor[start : min(start + rows, shape[0])]
