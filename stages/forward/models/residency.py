"""Memory residency of weights: decides whether all weights stay in memory, or layers are streamed from files.

Also sets what glibc does with memory that a pass frees (`keep_freed_memory`). Only sizes are computed here;
streamed.py loads and evicts weights.
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
    "describe_shortage",
    "free_bytes",
    "keep_freed_memory",
    "room_for",
]

Unit = int | str
"""Weights that are loaded and evicted together: a layer by its number, `EMBEDDING` or `HEAD`."""
EMBEDDING, HEAD = "embedding", "LM head"
EVERYTHING = 1 << 62
"""Value of `max_memory` beyond the bytes of any model: all weights stay in memory."""
TOKENS = 4096
"""Memory beside the weights is reserved for the activations of a pass over so many tokens."""


@dataclass(frozen=True)
class UnitBytes:
    """Bytes of a model's weights in the compute dtype, by the parts that are loaded and evicted together."""

    units: Mapping[Unit, int]
    """Bytes of each layer (by its number), of the embedding, and of the LM head unless it is tied."""
    always: int
    """Bytes of weights that stay in memory: norms outside the layers, and tensors that several layers
    share."""

    @property
    def total(self) -> int:
        """Bytes of all weights; a tied head is counted once, as the embedding."""
        return sum(self.units.values()) + self.always

    @property
    def least(self) -> int:
        """Fewest bytes with which a pass can run: the largest layer, and the weights that stay in memory."""
        return self.always + max(size for unit, size in self.units.items() if isinstance(unit, int))


def bytes_of(config: Architecture, itemsize: int) -> UnitBytes:
    """Bytes of the weights of an architecture, in a dtype of `itemsize` bytes per number.

    Arguments:
        config: architecture of the model.
        itemsize: bytes of a number in the compute dtype.

    Raises:
        ConfigError: for a model that runs through the transformers bridge, whose tensors transformers loads.
    """
    if config.kind == "bridge":
        raise ConfigError(
            f"max_memory: expected a model that mizarr's own networks run, found {config.model_type}, which "
            "transformers runs with all weights in memory; leave max_memory out, or use a larger machine"
        )
    tensors = config.tensors
    outside = dict(tensors.outside)
    embed, head = outside.pop("embed"), outside.pop("head", None)
    units: dict[Unit, int] = {EMBEDDING: _numbers(embed)}
    # A tied head is the embedding's tensor, under the same name.
    if head not in (embed, None):
        units[HEAD] = _numbers(head)
    always = {stored.name: _numbers(stored) for stored in outside.values()}
    # Computed and not read from a file, but as large as a learned table.
    always["position waves"] = (config.position_waves is not None) * config.position_rows * config.hidden_size
    for layer, weights in enumerate(tensors.layers):
        named = [(tensors.in_layer(layer, weight), _numbers(stored)) for weight, stored in weights.items()]
        units[layer] = sum(numbers for name, numbers in named if name not in tensors.shared)
        # Tensors that several layers read (Zamba's block, ALBERT's groups, T5's bias) are in memory once.
        always |= {name: numbers for name, numbers in named if name in tensors.shared}
    sizes = {unit: itemsize * numbers for unit, numbers in units.items()}
    return UnitBytes(sizes, itemsize * sum(always.values()))


def _numbers(stored: Stored) -> int:
    return math.prod(stored.shape)


def free_bytes(device: torch.device) -> int | None:
    """Free bytes of a device, for weights and activations; None if unknown."""
    import torch

    if device.type == "cuda":
        configured = memory_said()
        return torch.cuda.mem_get_info(device)[0] if configured is None else configured
    return memory_there_is() if device.type == "cpu" else None


def describe_shortage(total: int, room: int) -> str:
    """Message for the user that the weights do not fit in memory, so that each pass reads layers from files.

    Arguments:
        total: bytes of all weights.
        room: bytes that weights may take.
    """
    return (
        f"weights of {human_bytes(total)} do not fit in the {human_bytes(room)} available for them; each "
        "pass reads layers from files"
    )


def room_for(
    config: Architecture,
    itemsize: int,
    device: torch.device,
    max_memory: int | None,
    name: str,
    beside: int | None = None,
) -> int | None:
    """Most bytes of weights in memory, if layers must be read from files; None if all weights fit in memory.

    Arguments:
        config: architecture of the model.
        itemsize: bytes per number of the dtype it computes in.
        device: device it computes on.
        max_memory: most bytes of weights; None for the free bytes of the device less `beside`.
        name: name of the model, for errors.
        beside: bytes to leave free beside the weights; None for a pass over `TOKENS` tokens.

    Raises:
        ConfigError: if `max_memory` is too small for one layer.
    """
    if max_memory is None:
        free = free_bytes(device)
        if free is None or config.kind == "bridge":
            return None
        needed = bytes_of(config, itemsize)
        room = free - (TOKENS * config.bytes_per_token(itemsize) if beside is None else beside)
        # At least one layer, even if less memory seems to be free: the system may swap.
        return None if needed.total <= room else max(room, needed.least)
    if config.kind == "bridge" and max_memory >= EVERYTHING:
        return None
    needed = bytes_of(config, itemsize)
    if needed.total <= max_memory:
        return None
    if needed.least > max_memory:
        raise ConfigError(
            f"max_memory: expected at least {human_bytes(needed.least)} for {name}, the bytes of its largest "
            f"layer and shared weights, found {human_bytes(max_memory)}; allow more, or compute in bfloat16"
        )
    return max_memory


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # mallopt(3)
_KEPT = (1 << 31) - 1  # bytes of freed memory that stay with the process; the largest number mallopt takes
_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "LD_PRELOAD")


@cache
def keep_freed_memory() -> bool:
    """Ask glibc, once per process, to keep up to 2 GiB of freed memory; returns whether it will.

    The kernel hands out fresh memory page by page, zeroed at the first touch: for the hundreds of megabytes
    that a pass captures this costs as much as a third of the pass, and glibc returns large blocks when they
    are freed. Measured on two cores, 8 x 256 tokens through 8 layers: every hook point captured takes 1.44 of
    a plain pass with glibc's defaults, 1.11 with memory kept (tests/benchmarks/bench_tuning.py).

    Changes nothing on other systems, in processes with glibc's own variables or another allocator set, and if
    tuning is off (tuning.py).
    """
    if (
        not is_tuned()
        or not sys.platform.startswith("linux")
        # Whoever sets glibc's own variables, or another allocator (LD_PRELOAD), has decided already.
        or any(name in os.environ for name in _SETTINGS)
    ):
        return False
    try:
        # Missing where the C library is musl.
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    # Both: blocks above the mmap threshold are returned to the kernel when freed, the top of the heap when
    # trimmed.
    return bool(mallopt(_MMAP_THRESHOLD, _KEPT)) and bool(mallopt(_TRIM_THRESHOLD, _KEPT))
