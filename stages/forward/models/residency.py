"""How much of a model is in memory: all of its weights, or as many layers as there is room for.

And what happens to memory that a pass frees (`keep_freed_memory`).

Border: sizes of tensors and of memory; what comes and goes, and how, is in streamed.py.
"""

from __future__ import annotations

import ctypes
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from ....pipeline.plan import human_bytes
from ....store.errors import ConfigError
from ..architectures.architecture import Architecture, Stored
from ..networks.kernels.tuning import is_tuned
from .limits import memory_said, memory_there_is

if TYPE_CHECKING:
    import torch

__all__ = [
    "EMBEDDING",
    "EVERYTHING",
    "HEAD",
    "Unit",
    "UnitBytes",
    "bytes_of",
    "free_bytes",
    "keep_freed_memory",
    "room_for",
    "told",
]

Unit = int | str
"""What comes and goes as one: a layer by its number, `EMBEDDING`, `HEAD`."""
EMBEDDING, HEAD = "embedding", "LM head"
EVERYTHING = 1 << 62
"""More than any weights take: for `max_memory`, where all of them are to stay."""
TOKENS = 4096
"""Of a pass, whose memory is left free beside weights."""


@dataclass(frozen=True)
class UnitBytes:
    """Bytes of weights as they are computed with. units: of what comes and goes. always: of the rest, norms
    and what several layers share."""

    units: Mapping[Unit, int]
    always: int

    @property
    def total(self) -> int:
        """Of all weights; a tied head is its embedding."""
        return sum(self.units.values()) + self.always

    @property
    def least(self) -> int:
        """With which a pass can be made: the largest layer, and what is always there."""
        return self.always + max(size for unit, size in self.units.items() if isinstance(unit, int))


def bytes_of(config: Architecture, itemsize: int) -> UnitBytes:
    """What an architecture's weights take in a dtype of so many bytes. ConfigError for one whose tensors are
    not ours to read."""
    if config.kind == "bridge":
        raise ConfigError(
            f"expected a model that is computed here, found {config.model_type} behind a bridge, whose "
            "weights are all in memory; choose a machine that holds them"
        )
    tensors = config.tensors
    outside = dict(tensors.outside)
    embed, head = outside.pop("embed"), outside.pop("head")
    units: dict[Unit, int] = {EMBEDDING: _numbers(embed)}
    if head != embed:
        units[HEAD] = _numbers(head)
    always = {stored.name: _numbers(stored) for stored in outside.values()}
    always["position waves"] = config.has_position_waves * config.position_rows * config.hidden_size
    for layer, weights in enumerate(tensors.layers):
        units[layer] = sum(_numbers(stored) for stored in weights.values() if stored.layer is None)
        shared = {weight: stored for weight, stored in weights.items() if stored.layer is not None}
        always |= {tensors.in_layer(layer, weight): _numbers(stored) for weight, stored in shared.items()}
    sizes = {unit: itemsize * numbers for unit, numbers in units.items()}
    return UnitBytes(sizes, itemsize * sum(always.values()))


def _numbers(stored: Stored) -> int:
    return math.prod(stored.shape)


def free_bytes(device: torch.device) -> int | None:
    """What weights and passes may take where a model is computed; None where nobody says."""
    import torch

    if device.type == "cuda":
        said = memory_said()
        return torch.cuda.mem_get_info(device)[0] if said is None else said
    return memory_there_is() if device.type == "cpu" else None


def told(total: int, room: int) -> str:
    """In one line that weights come and go, and why."""
    return (
        f"weights of {human_bytes(total)} do not fit the {human_bytes(room)} there are for them; layers come "
        "and go"
    )


def room_for(
    config: Architecture,
    itemsize: int,
    device: torch.device,
    max_memory: int | None,
    name: str,
    beside: int | None = None,
) -> int | None:
    """Bytes within which weights come and go; None where all of them stay.

    max_memory: what they may take; None for what there is but for `beside`, by default what a pass takes.
    Raises ConfigError where not even one layer fits what was said.
    """
    if max_memory is None:
        free = free_bytes(device)
        if free is None or config.kind == "bridge":
            return None
        needed = bytes_of(config, itemsize)
        room = free - (TOKENS * config.bytes_per_token(itemsize) if beside is None else beside)
        # As little as it takes, where that is more than there seems to be: some of it may be swapped.
        return None if needed.total <= room else max(room, needed.least)
    if config.kind == "bridge" and max_memory >= EVERYTHING:
        return None
    needed = bytes_of(config, itemsize)
    if needed.total <= max_memory:
        return None
    if needed.least > max_memory:
        raise ConfigError(
            f"expected at least {human_bytes(needed.least)} for the weights of {name}, one layer at a time, "
            f"found {human_bytes(max_memory)} allowed; allow more, or compute in bfloat16"
        )
    return max_memory


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # mallopt(3)
_KEPT = (1 << 31) - 1  # bytes of freed memory that stay with the process; the largest number mallopt takes
_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "LD_PRELOAD")


@cache
def keep_freed_memory() -> bool:
    """Ask glibc to keep up to 2 GiB of freed memory for the next pass; whether it will. Once per process.

    The kernel hands out fresh memory page by page, zeroed at the first touch: for the hundreds of megabytes
    that a pass captures this costs as much as a third of the pass, and glibc returns large blocks when they
    are freed. Measured on two cores, 8 x 256 tokens through 8 layers: every hook point captured takes 1.44 of
    a plain pass with glibc's defaults, 1.11 with memory kept (tests/benchmarks/bench_tuning.py).

    Left alone: other systems, whoever has set glibc's own variables or another allocator, and a process that
    is not to be tuned (tuning.py).
    """
    if (
        not is_tuned()
        or not sys.platform.startswith("linux")
        or any(name in os.environ for name in _SETTINGS)
    ):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _KEPT)) and bool(mallopt(_TRIM_THRESHOLD, _KEPT))
