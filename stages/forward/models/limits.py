"""Bytes that this process may still allocate before the system kills it.

The least of what the machine has free, what its control groups allow (limits of a container or a batch job),
and what the process limits allow (ulimit). `MIZARR_MEMORY` overrides all of them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ....pipeline.plan import as_bytes

__all__ = ["memory_said", "memory_there_is"]

VARIABLE = "MIZARR_MEMORY"
_GROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")


def memory_there_is() -> int | None:
    """Further bytes that this process may allocate; None if the system reports no limit.

    Raises:
        PlanError: if MIZARR_MEMORY is no size such as "4GiB".
    """
    if (configured := memory_said()) is not None:
        return configured
    limits = (*_free_in_machine(), *_free_in_groups(), *_free_in_process())
    # A process may be above a limit that was lowered later: then nothing is free.
    return min((max(0, free) for free in limits), default=None)


def memory_said() -> int | None:
    """Bytes that MIZARR_MEMORY sets; None if it is not set."""
    return as_bytes(os.environ.get(VARIABLE) or None)


def _free_in_machine() -> Iterator[int]:
    """Bytes that the machine can give without swapping (MemAvailable); yields nothing if unknown."""
    with suppress(OSError, IndexError, ValueError):  # systems other than Linux have no /proc
        yield _kibibytes(Path("/proc/meminfo"), "MemAvailable:")


def _free_in_groups() -> Iterator[int]:
    """Bytes free in each control group (version 1 or 2) of this process and its parents."""
    with suppress(OSError):
        for line in _MEMBERSHIP.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            # "" is version 2, in which one hierarchy has all controllers.
            if controllers not in ("", "memory"):
                continue
            root = _GROUPS if not controllers else _GROUPS / "memory"
            names = ("memory.max", "memory.current") if not controllers else (
                "memory.limit_in_bytes", "memory.usage_in_bytes"
            )  # fmt: skip
            inside = Path(path.lstrip("/"))
            # A parent may have less free than the group itself.
            for group in (root / inside, *(root / above for above in inside.parents)):
                yield from _free_in_group(group, *names)


def _free_in_group(group: Path, limit_file: str, usage_file: str) -> Iterator[int]:
    with suppress(OSError, ValueError):  # "max": no limit
        limit, used = int((group / limit_file).read_text()), int((group / usage_file).read_text())
        cached = sum(  # the page cache counts as used, but the kernel frees it on demand
            int(line.split()[1])
            for line in (group / "memory.stat").read_text().splitlines()
            if line.startswith(("inactive_file ", "active_file "))
        )
        yield limit - used + cached


def _free_in_process() -> Iterator[int]:
    """Bytes free under the process limits (setrlimit) on address space and data."""
    with suppress(ImportError, OSError, IndexError, ValueError):
        import resource

        status = Path("/proc/self/status")
        for kind, usage_name in ((resource.RLIMIT_AS, "VmSize:"), (resource.RLIMIT_DATA, "VmData:")):
            limit = resource.getrlimit(kind)[0]
            if limit != resource.RLIM_INFINITY:
                yield limit - _kibibytes(status, usage_name)


def _kibibytes(file: Path, name: str) -> int:
    # "kB" in these files are units of 1024 bytes.
    return int(file.read_text().partition(name)[2].split()[0]) << 10
