"""Worker processes of this machine, started for one run and stopped with it.

Each gets an equal share of cores and memory, and one GPU if there are enough; CUDA_VISIBLE_DEVICES in its
environment states which, so the code that it runs need not choose. A worker computes one task at a time.

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

__all__ = ["local_workers", "threads_per_worker"]

_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_GPUS = Path("/proc/driver/nvidia/gpus")
"""The driver's folder with one entry per GPU; reading it loads no CUDA library."""


@contextmanager
def local_workers(count: int, say: Callable[[str], None] = lambda line: None) -> Iterator[str]:
    """Context manager: start worker processes, give the address of their scheduler, stop them at the end.

    The scheduler listens on 127.0.0.1 only. A script must call this under `if __name__ == "__main__":`,
    because each worker imports the script.

    Arguments:
        count: Number of worker processes.
        say: Called with one line of text about threads, memory and GPUs of the workers.

    Raises:
        PlanError: The processes cannot be started.
    """
    import dask
    from dask.utils import format_bytes
    from distributed import Nanny, Scheduler, SpecCluster
    from distributed.system import MEMORY_LIMIT

    # MEMORY_LIMIT respects cgroups, unlike the size of the machine's memory.
    cards, threads, memory = visible_gpus(), threads_per_worker(count), MEMORY_LIMIT // count
    with (
        tempfile.TemporaryDirectory(prefix="mizarr-workers-", ignore_cleanup_errors=True) as scratch,
        # numpy is loaded before a worker sets its own environment, so the thread limits are set before it.
        dask.config.set({"distributed.nanny.pre-spawn-environ": _threads(threads)}),
    ):
        address_options = {"host": "127.0.0.1", "port": 0, "dashboard": False}
        # Port 0 for the dashboard: if another run had taken the default port, Dask would print a warning.
        head = {**address_options, "dashboard_address": "127.0.0.1:0"}
        options = {
            **address_options,
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
                f"the {count} worker processes could not be started ({error}); in a script, compute under "
                '`if __name__ == "__main__":`, or run without workers (workers=0, no --workers)'
            ) from error
        with cluster:
            gpu_note = f", {min(count, len(cards))} with a GPU" if cards else ""
            thread_note = f"{threads} thread{'s' if threads > 1 else ''}"
            say(f"{count} workers, each with {thread_note} and at most {format_bytes(memory)}{gpu_note}")
            yield str(cluster.scheduler_address)


def share_of(number: int, threads: int, cards: Sequence[str]) -> dict[str, Any]:
    """Options of a worker process: thread limits, and at most one GPU.

    If there are more workers than GPUs, the remaining workers see none and take tasks that need none.

    Arguments:
        number: Number of the worker, from 0.
        threads: Threads of the worker.
        cards: Identifiers of the GPUs, as `visible_gpus` returns them.

    Returns:
        {"env": environment variables, "resources": Dask resources}.
    """
    environment, resources = _threads(threads), {}
    if cards:
        # An empty value hides all GPUs; a missing one would show all of them.
        environment["CUDA_VISIBLE_DEVICES"] = cards[number] if number < len(cards) else ""
        resources = {"GPU": 1} if number < len(cards) else {}
    return {"env": environment, "resources": resources}


def visible_gpus() -> list[str]:
    """Identifiers of the GPUs that this process may use, as CUDA_VISIBLE_DEVICES spells them."""
    setting = os.environ.get("CUDA_VISIBLE_DEVICES")
    if setting is not None:
        return [name.strip() for name in setting.split(",") if name.strip() and name.strip() != "-1"]
    # CUDA numbers the GPUs from 0; the names of the driver's entries are PCI addresses.
    return [str(number) for number, _ in enumerate(_GPUS.iterdir())] if _GPUS.is_dir() else []


def threads_per_worker(count: int) -> int:
    """Threads per worker: an equal share of OMP_NUM_THREADS or of the available cores, at least 1."""
    # The affinity mask respects taskset and container limits; os.cpu_count does not.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    setting = os.environ.get("OMP_NUM_THREADS", "")
    return max(1, (int(setting) if setting.isdigit() else cores) // count)


def _threads(count: int) -> dict[str, str]:
    """Environment variables that limit the threads of numerical libraries."""
    return dict.fromkeys(_THREADS, str(count))
