"""What happens to memory that a forward pass frees: kept for the next pass instead of given back to the
kernel.

The kernel hands out fresh memory page by page, zeroed, and on the first touch of each: for the hundreds of
megabytes that a pass captures this costs as much as a third of the pass. glibc gives large blocks back when
they are freed, so every pass would pay again. Measured on two cores, 8 x 256 tokens through 8 layers: every
hook point captured takes 1.44 of a plain pass with glibc's defaults, 1.11 with memory kept; to measure it
again: tests/benchmarks/bench_tuning.py. MIZARR_TUNING=off leaves the allocator alone.
"""

from __future__ import annotations

import ctypes
import os
import sys
from functools import cache

from ..networks.kernels.tuning import is_tuned

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # mallopt(3)
_KEPT = (1 << 31) - 1  # bytes of freed memory that stay with the process; the largest number mallopt takes
_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "LD_PRELOAD")


@cache
def keep_freed_memory() -> bool:
    """Ask glibc to keep up to 2 GiB of freed memory; whether it will. Once per process.

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
