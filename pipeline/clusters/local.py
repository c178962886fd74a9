"""Workers of this machine: processes that are started for one run and stopped with it.

Each gets its share of the cores and of the memory, and, where the machine shows GPUs, one of them: its
environment says which, so that no code below has to choose. A worker holds one task at a time.

Border: processes and their environment; knows no cells. Imports `distributed` when it starts them.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from logging import CRITICAL
from pathlib import Path
from typing import Any

from ...store.errors import PlanError

__all__ = ["local_workers", "threads_each"]

_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_GPUS = Path("/proc/driver/nvidia/gpus")
"""A folder for every GPU that the driver shows; asked before any library of CUDA is loaded."""


@contextmanager
def local_workers(count: int, say: Callable[[str], None] = lambda line: None) -> Iterator[str]:
    """Start `count` worker processes; gives the address of their scheduler, and stops them at the end.

    say: told how they share the machine. They listen on 127.0.0.1. Raises PlanError where they cannot be
    started: from a script, the call must stand under `if __name__ == "__main__":`, as each worker imports it.
    """
    import dask
    from dask.utils import format_bytes
    from distributed import Nanny, Scheduler, SpecCluster
    from distributed.system import MEMORY_LIMIT

    cards, threads, memory = visible_gpus(), threads_each(count), MEMORY_LIMIT // count
    with (
        tempfile.TemporaryDirectory(prefix="mizarr-workers-", ignore_cleanup_errors=True) as scratch,
        # What is loaded before a worker reads its own environment (numpy) splits its work likewise.
        dask.config.set({"distributed.nanny.pre-spawn-environ": _threads(threads)}),
    ):
        place = {"host": "127.0.0.1", "port": 0, "dashboard": False}
        # A port of its own: the usual one may be taken by another run of this kind, which would be warned of.
        head = {**place, "dashboard_address": "127.0.0.1:0"}
        options = {
            **place,
            "nthreads": 1,
            "memory_limit": memory,
            "local_directory": scratch,
            "silence_logs": CRITICAL,
            "preload": ["mizarr.pipeline.clusters.worker"],
        }
        shares = [share_of(number, threads, cards) for number in range(count)]
        workers = {number: {"cls": Nanny, "options": options | share} for number, share in enumerate(shares)}
        try:
            cluster = SpecCluster(workers, {"cls": Scheduler, "options": head}, silence_logs=CRITICAL)
        except (RuntimeError, OSError) as error:
            raise PlanError(
                f"expected {count} workers to start, found {error}; in a script, call this under "
                '`if __name__ == "__main__":`, or run without workers'
            ) from error
        with cluster:
            of_cards = f", {min(count, len(cards))} with a GPU" if cards else ""
            threads_told = f"{threads} thread{'s' if threads > 1 else ''}"
            say(f"{count} workers, each of {threads_told} and at most {format_bytes(memory)}{of_cards}")
            yield str(cluster.scheduler_address)


def share_of(number: int, threads: int, cards: Sequence[str]) -> dict[str, Any]:
    """What worker `number` has of the machine: its environment, and a GPU among its resources if it has one.

    Where there are more workers than GPUs, those left over see none, and take what needs none.
    """
    environment, resources = _threads(threads), {}
    if cards:
        environment["CUDA_VISIBLE_DEVICES"] = cards[number] if number < len(cards) else ""
        resources = {"GPU": 1} if number < len(cards) else {}
    return {"env": environment, "resources": resources}


def visible_gpus() -> list[str]:
    """Names of the GPUs this process may use, as CUDA_VISIBLE_DEVICES says them."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [name.strip() for name in chosen.split(",") if name.strip() and name.strip() != "-1"]
    return [str(number) for number, _ in enumerate(_GPUS.iterdir())] if _GPUS.is_dir() else []


def threads_each(count: int) -> int:
    """Threads of each of `count` workers: of all that this process would use, an equal share."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    given = os.environ.get("OMP_NUM_THREADS", "")
    return max(1, (int(given) if given.isdigit() else cores) // count)


def _threads(count: int) -> dict[str, str]:
    return dict.fromkeys(_THREADS, str(count))
