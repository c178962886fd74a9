"""`Context`: computes the cells of a stage in threads of this process, or on the workers of a cluster.

Each task computes one cell and publishes it before it ends. A task carries the store's address and the cell's
labels and key, never an array. So Ctrl-C, an error or a kill loses only the cells in progress.

Border: runs the work it is given; knows no node, and a key only as a name. The schedulers are Dask's: its
threaded one in this process, `dask.distributed` elsewhere. Neither is imported before the first cell runs.
"""

from __future__ import annotations

import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from threading import Lock
from typing import TYPE_CHECKING, Any, Self

from ..store.errors import MizarrError, PlanError, StageError
from .ambient import plain_torch
from .clusters import ClusterClient, local_workers
from .clusters.client import Submitted, in_one_line
from .progress import Bar, Progress

if TYPE_CHECKING:
    from ..store import Store
    from ..store.keys import ResultKey

Selection = Mapping[str, Any]
"""Labels by cell axis: index for "layer" and "block", (first token, end) for "segment"."""


@dataclass(frozen=True)
class Cell:
    """Smallest unit of a stage's result that is computed and stored by itself, such as a single layer."""

    selection: Selection
    """Labels that select the cell's part of the inputs, such as {"layer": 3}."""
    key: ResultKey
    """Key of the cell's result."""


@dataclass(frozen=True)
class Group:
    """Cells (parts of a stage's work) that one task computes together because they share forward passes."""

    cells: tuple[Selection, ...]
    """Labels of the cells, in order of computation."""


Task = Selection | Cell | Group
"""The work of one task: a selection, a cell with its key, or a group of selections."""
Work = Callable[[Any, Any, Any], None]
"""`work(job, store, cell)` computes and publishes one cell; job and cell are pickled without arrays."""


@dataclass
class Context:
    """How the parts (cells) of a stage's work are computed: threads or workers, memory budget, progress bars.

    Use it as a context manager: on exit it disconnects from the cluster and stops local workers.
    """

    threads: int = 1
    """Number of threads of this process that compute cells."""
    cluster: str | None = None
    """Address of a Dask scheduler; None to compute on this machine."""
    memory: int | None = None
    """Memory budget in bytes; None for no limit."""
    progress: Progress = field(default_factory=lambda: Progress(quiet=True))
    """Bars, lines or log of the run; shows nothing by default."""
    workers: int = 0
    """Number of worker processes on this machine, started when the first cell runs; 0 or 1 means none."""
    _client: ClusterClient | None = None
    """Connection to the workers; None until the first cell runs."""
    _exit_stack: ExitStack = field(default_factory=ExitStack)
    """Closes the connection, then stops the local workers."""

    @property
    def has_workers(self) -> bool:
        """Whether other processes do the computation; they read their inputs from the store."""
        return self.cluster is not None or self.workers > 1

    def require_shared(self, store: Store) -> None:
        """Check that worker processes can read the store, and that just one kind of workers is configured.

        Raises:
            PlanError: Both a cluster and local workers are configured, or the store is in this process's
                memory.
        """
        if self.cluster is not None and self.workers > 1:
            raise PlanError(
                f"both a cluster ({self.cluster!r}) and {self.workers} workers of this machine were given; "
                "leave out cluster= (--cluster) or workers= (--workers)"
            )
        if store.address.startswith("memory://"):
            raise PlanError(
                f"worker processes cannot read the store {store.address}, which is in the memory of this "
                "process; use a store in a folder or bucket, or run without workers"
            )

    def width(self, needs: str = "") -> int:
        """Number of cells (parts of a stage's work) that can be computed at once.

        Arguments:
            needs: Dask resource ("GPU") that a worker must have, if any worker has it; "" for none.
        """
        return self._connected().width(needs) if self.has_workers else self.threads

    def map(
        self,
        work: Work,
        job: Any,
        store: Store,
        cells: Sequence[Task],
        *,
        peak: int = 0,
        needs: str = "",
    ) -> None:
        """Compute many cells (parts of one stage's work) in threads or on workers, and wait for all of them.

        At the first error no further cell is started. Cells in progress end, cells that ended stay stored,
        and the error is raised with the names of job and cell.

        Arguments:
            work: Computes and publishes one cell.
            job: Object with a `name`, such as a node.
            store: The store to read from and write to.
            cells: The work of each task.
            peak: Bytes of memory that one cell needs; it limits how many run at once within the memory
                budget.
            needs: Dask resource ("GPU") of which each task takes one, if any worker has it; "" for none.
        """
        if not cells:
            return
        progress = self.progress.task(job.name, total=sum(map(_n_cells, cells)), unit="cells")
        if self.has_workers:
            self._map_workers(work, job, store, cells, progress, peak, needs)
        else:
            self._map_threads(work, job, store, cells, progress, peak)

    def _map_threads(
        self,
        work: Work,
        job: Any,
        store: Store,
        cells: Sequence[Task],
        progress: Bar,
        peak: int,
    ) -> None:
        """Do the work of `map` in threads of this process."""
        from concurrent.futures import ThreadPoolExecutor

        from dask.threaded import get

        def run_numbered(number: int) -> None:
            run_one(work, job, store, cells[number])
            progress.advance(_n_cells(cells[number]))

        # A graph of independent tasks, in our own names: dask hashes nothing.
        graph = {_task_name(job, cell, number): (run_numbered, number) for number, cell in enumerate(cells)}
        # At least one cell runs; `Plan.check_memory` has refused cells beyond the budget before.
        most_in_memory = max(1, self.memory // peak) if self.memory and peak else self.threads
        width = max(1, min(self.threads, most_in_memory, len(cells)))
        # One BLAS thread per worker thread: nested threads cost more than they give. The pool is our own, so
        # that leaving it waits for cells under way; dask hands it no more than `width` cells at a time.
        with blas_threads(max(1, self.threads // width)), ThreadPoolExecutor(width) as pool:
            get(graph, list(graph), pool=pool)

    def _map_workers(
        self,
        work: Work,
        job: Any,
        store: Store,
        cells: Sequence[Task],
        progress: Bar,
        peak: int,
        needs: str,
    ) -> None:
        """Do the work of `map` on worker processes."""
        tasks = [
            Submitted(_task_name(job, cell, number), (run_one, work, job, store, cell))
            for number, cell in enumerate(cells)
        ]
        # Workers of a cluster have memory of their own; the budget is that of this machine.
        most_in_memory = max(1, self.memory // peak) if self.memory and peak and self.workers else 0
        client = self._connected()
        # Twice as many tasks as can run, so that no worker waits for the next one.
        max_submitted = min(most_in_memory, 2 * client.width(needs)) if most_in_memory else 0
        client.run(
            tasks,
            lambda number: progress.advance(_n_cells(cells[number])),
            needs=needs,
            max_submitted=max_submitted,
        )

    def _connected(self) -> ClusterClient:
        """Client of the workers, shared by all stages of a run; the first call connects, or starts
        workers."""
        if self._client is None:
            address = self.cluster
            if address is None:
                address = self._exit_stack.enter_context(local_workers(self.workers, self.progress.say))
            self._client = ClusterClient(address, self.progress.say)
            self._exit_stack.callback(self._client.close)
        return self._client

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client = None
        self._exit_stack.close()


@plain_torch()
def run_one(work: Work, job: Any, store: Store, cell: Task) -> None:
    """Compute one task, in a thread or on a worker; errors are raised with the names of job and cell.

    Arguments:
        work: Computes and publishes the cell.
        job: Object with a `name`, such as a node.
        store: The store to read from and write to.
        cell: The work of the task.

    Raises:
        StageError: `work` raised an error that is no MizarrError. A MizarrError keeps its type.
    """
    try:
        work(job, store, cell)
    except Exception as error:
        where = ", ".join(f"{axis} {label}" for axis, label in selection_of(cell).items())
        failure = f"stage {job.name!r}{f' at {where}' if where else ''} failed"
        # The same type, so that callers can catch e.g. ShapeError across threads and workers.
        if isinstance(error, MizarrError):
            raise type(error)(f"{failure}: {error}") from error
        raise StageError(f"{failure}: {in_one_line(error)}") from error


def _task_name(job: Any, cell: Task, number: int) -> str:
    """Name of a task: its key, so that clients of one cluster share the task; else a unique name."""
    return f"{job.name}-{cell.key.digest if isinstance(cell, Cell) else f'{number}-{uuid.uuid4().hex}'}"


def _n_cells(cell: Task) -> int:
    """Number of cells that a task computes."""
    return len(cell.cells) if isinstance(cell, Group) else 1


def selection_of(cell: Task) -> Selection:
    """Labels of the cell or cells that a task computes, for messages; of a group "first to last"."""
    if isinstance(cell, Cell):
        return cell.selection
    if not isinstance(cell, Group):
        return cell
    start, end = cell.cells[0], cell.cells[-1]
    return {axis: label if label == end[axis] else f"{label} to {end[axis]}" for axis, label in start.items()}


_lock = Lock()
_requested: dict[object, int] = {}
"""Thread limit of each `blas_threads` block in progress, by a token of that block."""
_original: list[Any] = []
"""At most one limiter of threadpoolctl, which remembers the number of threads before the first block."""


@contextmanager
def blas_threads(count: int) -> Iterator[None]:
    """Context manager: numpy uses at most `count` threads per matrix product.

    Of several blocks at once the lowest limit applies. The setting belongs to the whole process. The original
    number of threads is restored when the last block ends: if each block restored the number it found, the
    later of two overlapping blocks would leave the other's limit behind for good. The number also affects
    results: OpenBLAS splits products differently for more threads, and the last bits change (measured:
    float32, from some 400 rows on).
    """
    token = object()
    try:
        with _lock:
            if not _original:
                # limits=None changes nothing; the object remembers the current numbers of threads.
                _original.append(_libraries(len(sys.modules)).limit(limits=None, user_api="blas"))
            _requested[token] = count
            _limit_blas()
        yield
    finally:
        # In the `finally` itself and not in a helper: CPython delivers Ctrl-C where a function begins, so a
        # helper might be interrupted before it has done anything (tests/stages/test_interrupts.py).
        try:
            _release_limit(token)
        except BaseException:  # interrupted
            _release_limit(token)
            raise


def _release_limit(token: object) -> None:
    """End the limit of one `blas_threads` block; the last one restores the original number of threads."""
    with _lock:
        _requested.pop(token, None)
        if _requested:
            _limit_blas()
        elif _original:
            _original[0].restore_original_limits()
            _original.clear()


def _limit_blas() -> None:
    """Apply the lowest of all limits in progress."""
    _libraries(len(sys.modules)).limit(limits=min(_requested.values()), user_api="blas")


@lru_cache(maxsize=1)
def _libraries(modules: int) -> Any:
    """Controller of the BLAS libraries in this process.

    Cached by the number of loaded modules: a search of all libraries takes one to several milliseconds, too
    long for every step of a run, and only an import can add one.
    """
    from threadpoolctl import ThreadpoolController  # type: ignore[import-untyped]

    return ThreadpoolController()
