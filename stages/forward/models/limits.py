"""Memory there is: what this process may still take before the system ends it.

The least of what the machine has left, what its control groups allow (the limit of a container, of a batch
job), and what the process itself is limited to (ulimit). `MIZARR_MEMORY` says otherwise: that much, whatever
the system tells.

Border: reads numbers of the system; who takes how much of it for what is known elsewhere.
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
    """Bytes this process may still take, beside what it holds; None where the system does not say.

    PlanError for a MIZARR_MEMORY that is no size such as "4GiB".
    """
    if (said := memory_said()) is not None:
        return said
    return min((max(0, left) for left in (*_of_machine(), *_of_groups(), *_of_process())), default=None)


def memory_said() -> int | None:
    """What MIZARR_MEMORY says; None where it is not set."""
    return as_bytes(os.environ.get(VARIABLE) or None)


def _of_machine() -> Iterator[int]:
    """What could be had without swapping."""
    with suppress(OSError, IndexError, ValueError):
        yield _kibibytes(Path("/proc/meminfo"), "MemAvailable:")


def _of_groups() -> Iterator[int]:
    """Under the limit of each control group it is in, version 2 or 1. Cached files can be let go."""
    with suppress(OSError):
        for line in _MEMBERSHIP.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers not in ("", "memory"):
                continue
            root = _GROUPS if not controllers else _GROUPS / "memory"
            names = ("memory.max", "memory.current") if not controllers else (
                "memory.limit_in_bytes", "memory.usage_in_bytes"
            )  # fmt: skip
            inside = Path(path.lstrip("/"))
            for group in (root / inside, *(root / above for above in inside.parents)):
                yield from _of_group(group, *names)


def _of_group(group: Path, limit: str, held: str) -> Iterator[int]:
    with suppress(OSError, ValueError):  # "max": no limit
        most, now = int((group / limit).read_text()), int((group / held).read_text())
        cached = sum(
            int(line.split()[1])
            for line in (group / "memory.stat").read_text().splitlines()
            if line.startswith(("inactive_file ", "active_file "))
        )
        yield most - now + cached


def _of_process() -> Iterator[int]:
    """Under its own limits (setrlimit): of addresses, and of data."""
    with suppress(ImportError, OSError, IndexError, ValueError):
        import resource

        status = Path("/proc/self/status")
        for limit, held in ((resource.RLIMIT_AS, "VmSize:"), (resource.RLIMIT_DATA, "VmData:")):
            most = resource.getrlimit(limit)[0]
            if most != resource.RLIM_INFINITY:
                yield most - _kibibytes(status, held)


def _kibibytes(file: Path, name: str) -> int:
    return int(file.read_text().partition(name)[2].split()[0]) << 10
