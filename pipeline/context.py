"""Where nodes run: the cells of one stage, on threads here or on the workers of a cluster.

Each task computes one cell and publishes it before it ends; what moves between processes is where the store
is and which cell is meant, never an array. So Ctrl-C, an error or a kill loses the cells under way and
nothing else.

Border: runs what it is given; asks no node and knows no key but as a name. We do not write schedulers: Dask's
threaded one runs here, `dask.distributed` elsewhere. Neither is imported before the first cell runs.
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
"""Part of a node: "layer", "block" -> index, "segment" -> (first token, end)."""


@dataclass(frozen=True)
class Cell:
    """One piece of a stage's work: which part of its inputs, and the key its result gets."""

    selection: Selection
    key: ResultKey


@dataclass(frozen=True)
class Group:
    """Pieces that are computed together, as they share work."""

    cells: tuple[Selection, ...]


Task = Selection | Cell | Group
"""What one task computes."""
Work = Callable[[Any, Any, Any], None]
"""work(job, store, cell): compute and publish one cell. Job and cell travel to workers: names, no arrays."""


@dataclass
class Context:
    """How nodes run: where, how wide, and under whose eyes.

    threads: of this process. cluster: address of a Dask scheduler, or None. memory: budget in bytes, or None.
    workers: processes of this machine that are started when the first cell runs; fewer than 2 are none.
    """

    threads: int = 1
    cluster: str | None = None
    memory: int | None = None
    progress: Progress = field(default_factory=lambda: Progress(quiet=True))
    workers: int = 0
    _client: ClusterClient | None = None
    _held: ExitStack = field(default_factory=ExitStack)

    @property
    def has_workers(self) -> bool:
        """Whether cells are computed by other processes, which read what they need from the store."""
        return self.cluster is not None or self.workers > 1

    def require_shared(self, store: Store) -> None:
        """Raise PlanError for a cluster beside workers of this machine, or a store no other process sees."""
        if self.cluster is not None and self.workers > 1:
            raise PlanError(
                f"expected a cluster or workers of this machine, found {self.cluster!r} and {self.workers} "
                "workers; leave out one of them"
            )
        if store.address.startswith("memory://"):
            raise PlanError(
                f"expected a store that other processes see, found {store.address}; name a folder or a "
                "bucket, or run without workers"
            )

    def width(self, needs: str = "") -> int:
        """Cells that can run at once. needs: see `map`."""
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
        """`work(job, store, cell)` for every cell, in any order; returns when all have ended.

        job: anything with a name. peak: bytes one cell needs; no more run at once than fit the budget. needs:
        a resource of workers ("GPU") that each takes one of, where any worker has it.
        At the first error no further cell is started, those under way end, and the error is raised with the
        names of job and cell; cells that ended stay stored.
        """
        if not cells:
            return
        progress = self.progress.task(job.name, total=sum(map(_size, cells)), unit="cells")
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
        from concurrent.futures import ThreadPoolExecutor

        from dask.threaded import get

        def one(number: int) -> None:
            run_one(work, job, store, cells[number])
            progress.advance(_size(cells[number]))

        # A graph of independent tasks, in our own names: dask hashes nothing.
        graph = {_task_name(job, cell, number): (one, number) for number, cell in enumerate(cells)}
        affordable = max(1, self.memory // peak) if self.memory and peak else self.threads
        width = max(1, min(self.threads, affordable, len(cells)))
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
        tasks = [
            Submitted(_task_name(job, cell, number), (run_one, work, job, store, cell))
            for number, cell in enumerate(cells)
        ]
        affordable = max(1, self.memory // peak) if self.memory and peak and self.workers else 0
        client = self._connected()
        most = min(affordable, 2 * client.width(needs)) if affordable else 0
        client.run(tasks, lambda number: progress.advance(_size(cells[number])), needs=needs, most=most)

    def _connected(self) -> ClusterClient:
        """A client of the cluster, one for all nodes of a run; workers of this machine start here."""
        if self._client is None:
            address = self.cluster
            if address is None:
                address = self._held.enter_context(local_workers(self.workers, self.progress.say))
            self._client = ClusterClient(address, self.progress.say)
            self._held.callback(self._client.close)
        return self._client

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client = None
        self._held.close()


@plain_torch()
def run_one(work: Work, job: Any, store: Store, cell: Task) -> None:
    """One cell; whatever goes wrong is told with the names of job and cell."""
    try:
        work(job, store, cell)
    except Exception as error:
        where = ", ".join(f"{axis} {label}" for axis, label in selection_of(cell).items())
        told = f"stage {job.name!r}{f' at {where}' if where else ''} failed"
        if isinstance(error, MizarrError):
            raise type(error)(f"{told}: {error}") from error
        raise StageError(f"{told}: {in_one_line(error)}") from error


def _task_name(job: Any, cell: Task, number: int) -> str:
    """Name of a task: by its key, so that two clients of one cluster share it; else one of a kind."""
    return f"{job.name}-{cell.key.digest if isinstance(cell, Cell) else f'{number}-{uuid.uuid4().hex}'}"


def _size(cell: Task) -> int:
    """How many cells a task computes."""
    return len(cell.cells) if isinstance(cell, Group) else 1


def selection_of(cell: Task) -> Selection:
    """The labels of a cell, for messages; of a group those of its first and last."""
    if isinstance(cell, Cell):
        return cell.selection
    if not isinstance(cell, Group):
        return cell
    first, last = cell.cells[0], cell.cells[-1]
    return {
        axis: label if label == last[axis] else f"{label} to {last[axis]}" for axis, label in first.items()
    }


_lock = Lock()
_asked: dict[object, int] = {}
_before: list[Any] = []
"""What knows the number of threads before the first of those asked for; at most one."""


@contextmanager
def blas_threads(count: int) -> Iterator[None]:
    """At most `count` threads per product of numpy in the whole process, the least of what is asked at once.

    When the last of those who asked has ended, the number before the first is back. With a limit per run, of
    two that overlap the one that ends last would leave the other's number behind, for good - and other last
    bits, as OpenBLAS cuts a product otherwise for more threads (measured: float32, from some 400 rows on).
    """
    asking = object()
    try:
        with _lock:
            if not _before:
                # Limits nothing: only remembers what there was.
                _before.append(_libraries(len(sys.modules)).limit(limits=None, user_api="blas"))
            _asked[asking] = count
            _limit_blas()
        yield
    finally:
        try:
            _ask_no_more(asking)
        except BaseException:  # interrupted
            _ask_no_more(asking)
            raise


def _ask_no_more(asking: object) -> None:
    with _lock:
        _asked.pop(asking, None)
        if _asked:
            _limit_blas()
        elif _before:
            _before[0].restore_original_limits()
            _before.clear()


def _limit_blas() -> None:
    _libraries(len(sys.modules)).limit(limits=min(_asked.values()), user_api="blas")


@lru_cache(maxsize=1)
def _libraries(modules: int) -> Any:
    """The libraries of this process that have threads, looked for anew when something was imported: a look
    walks all that is loaded, a millisecond or several, at every step of a run."""
    from threadpoolctl import ThreadpoolController  # type: ignore[import-untyped]

    return ThreadpoolController()
