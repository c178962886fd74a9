"""Where nodes run: the cells of one stage, on threads here or on the workers of a cluster.

Each task computes one cell and publishes it before it ends; what moves between processes is where the store
is and which cell is meant, never an array. So Ctrl-C, an error or a kill loses the cells under way and
nothing else.

Border: runs what it is given; asks no node and knows no key but as a name. We do not write schedulers: Dask's
threaded one runs here, `dask.distributed` elsewhere. Neither is imported before the first cell runs.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from ..store.errors import MizarrError, PlanError, StageError
from .progress import Progress, Task

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


Work = Callable[[Any, Any, Any], None]
"""work(job, store, cell): compute and publish one cell. Job and cell travel to workers: names, no arrays."""


@dataclass
class Context:
    """How nodes run: where, how wide, and under whose eyes.

    threads: of this process. cluster: address of a Dask scheduler, or None. memory: budget in bytes, or None.
    """

    threads: int = 1
    cluster: str | None = None
    memory: int | None = None
    progress: Progress = field(default_factory=lambda: Progress(quiet=True))
    _client: Any = None

    def map(
        self, work: Work, job: Any, store: Store, cells: Sequence[Selection | Cell], *, peak: int = 0
    ) -> None:
        """`work(job, store, cell)` for every cell, in any order; returns when all have ended.

        job: anything with a name. peak: bytes one cell needs; no more run at once than fit the budget.
        At the first error no further cell is started, those under way end, and the error is raised with the
        names of job and cell; cells that ended stay stored.
        """
        if not cells:
            return
        task = self.progress.task(job.name, total=len(cells), unit="cells")
        if self.cluster is None:
            self._map_threads(work, job, store, cells, task, peak)
        else:
            self._map_cluster(work, job, store, cells, task)

    def _map_threads(
        self, work: Work, job: Any, store: Store, cells: Sequence[Selection | Cell], task: Task, peak: int
    ) -> None:
        from concurrent.futures import ThreadPoolExecutor

        from dask.threaded import get
        from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

        def one(number: int) -> None:
            run_one(work, job, store, cells[number])
            task.advance()

        # A graph of independent tasks, in our own names: dask hashes nothing.
        graph = {_task_name(job, cell, number): (one, number) for number, cell in enumerate(cells)}
        affordable = max(1, self.memory // peak) if self.memory and peak else self.threads
        width = max(1, min(self.threads, affordable, len(cells)))
        # One BLAS thread per worker thread: nested threads cost more than they give. The pool is our own, so
        # that leaving it waits for cells under way; dask hands it no more than `width` cells at a time.
        with threadpool_limits(max(1, self.threads // width), "blas"), ThreadPoolExecutor(width) as pool:
            get(graph, list(graph), pool=pool)

    def _map_cluster(
        self, work: Work, job: Any, store: Store, cells: Sequence[Selection | Cell], task: Task
    ) -> None:
        from distributed import as_completed

        client = self._connected()

        ahead = iter(range(len(cells)))
        under_way: set[Any] = set()

        def submit() -> list[Any]:
            """The next cell, if there is one."""
            for number in ahead:
                name = _task_name(job, cells[number], number)
                future = client.submit(run_one, work, job, store, cells[number], key=name, pure=False)
                under_way.add(future)
                return [future]
            return []

        # Twice as many as can run: workers never wait, and no scheduler holds a sweep of a million cells.
        width = max(1, sum(client.nthreads().values()))
        first = [future for _ in range(2 * width) for future in submit()]
        try:
            completed = as_completed(first, loop=client.loop)
            for future in completed:
                future.result()
                under_way.remove(future)
                task.advance()
                completed.update(submit())
        finally:
            client.cancel(list(under_way))

    def _connected(self) -> Any:
        """A client of the cluster, one for all nodes of a run."""
        if self._client is None:
            from distributed import Client

            try:
                self._client = Client(self.cluster, timeout="10s", set_as_default=False)
            except (OSError, ValueError) as error:
                raise PlanError(
                    f"expected a Dask scheduler at {self.cluster!r}, found none ({error}); start one with "
                    "`dask scheduler` and workers with `dask worker`"
                ) from error
        return self._client

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None


def run_one(work: Work, job: Any, store: Store, cell: Selection | Cell) -> None:
    """One cell; whatever goes wrong is told with the names of job and cell."""
    try:
        work(job, store, cell)
    except Exception as error:
        where = ", ".join(f"{axis} {label}" for axis, label in selection_of(cell).items())
        told = f"stage {job.name!r}{f' at {where}' if where else ''} failed"
        if isinstance(error, MizarrError):
            raise type(error)(f"{told}: {error}") from error
        raise StageError(f"{told}: {type(error).__name__}: {error}") from error


def _task_name(job: Any, cell: Selection | Cell, number: int) -> str:
    """Name of a task: by its key, so that two clients of one cluster share it; else one of a kind."""
    return f"{job.name}-{cell.key.digest if isinstance(cell, Cell) else f'{number}-{uuid.uuid4().hex}'}"


def selection_of(cell: Selection | Cell) -> Selection:
    """The labels of a cell, for messages."""
    return cell.selection if isinstance(cell, Cell) else cell
