"""Parallel reads of a file into a tensor, which are faster both for the disk and for fresh memory pages."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from io import FileIO
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["fill"]

SLICE = 8 << 20
"""Bytes per read."""
READS = 4
"""Parallel reads. Measured with 6 GiB on a virtual disk and two cores: 11.7 s sequentially, 6.5 s in
parallel; from the page cache 4.3 s and 3.4 s (bench_loading.py)."""


def fill(tensor: Tensor, file: FileIO, start: int) -> int:
    """Fill a contiguous tensor with bytes of a file, read in parallel.

    Arguments:
        tensor: tensor to fill.
        file: open file.
        start: offset of the first byte in the file.

    Returns:
        Number of bytes read; fewer than the tensor has if the file ends early.
    """
    import torch

    # Read straight into the tensor's memory, without a second copy.
    buffer = tensor.reshape(-1).view(torch.uint8).numpy().data
    offsets = range(0, len(buffer), SLICE)

    def read(offset: int) -> int:
        return _read_into(file.fileno(), buffer[offset : offset + SLICE], start + offset)

    if len(offsets) <= 1:
        return sum(map(read, offsets))
    with ThreadPoolExecutor(READS, "mizarr-read") as pool:
        return sum(pool.map(read, offsets))


def _read_into(file: int, buffer: memoryview, offset: int) -> int:
    # `preadv` may return fewer bytes than asked for, and none at the end of the file.
    n_read = 0
    while n_read < len(buffer) and (count := os.preadv(file, [buffer[n_read:]], offset + n_read)):
        n_read += count
    return n_read
