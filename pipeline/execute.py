"""Execution: a plan as Dask tasks, on threads here or on the workers of a cluster.

Each task computes one cell and publishes it before it ends; what moves between processes is where the store is and which cell is
meant, never an array. So Ctrl-C, an error or a kill loses the cells under way and nothing else, and running again goes on from there.
We do not write schedulers: Dask's threaded one runs here, `dask.distributed` elsewhere.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..store.errors import MizarrError, PlanError, StageError
from .nodes import Node, Selection
from .plan import in_order, plan
from .progress import Progress, Task

if TYPE_CHECKING:
    from ..store import Store

Work = Callable[[Any, Any, Selection], None]


@dataclass
class Context:
    """How nodes run: where, how wide, and under whose eyes."""

    threads: int
    cluster: str | None = None
    memory: int | None = None
    progress: Progress = field(default_factory=lambda: Progress(quiet=True))

    def map(self, work: Work, node: Node, store: Store, cells: Sequence[Selection]) -> None:
        """`work(node, store, cell)` for every cell, in any order; the first error is raised when the others have ended.

        An error that is not one of ours is raised as StageError naming node and cell; cells that ended stay stored.
        """
        if not cells:
            return
        task = self.progress.task(node.name, total=len(cells), unit="cells")
        if self.cluster is None:
            self._map_threads(work, node, store, cells, task)
        else:
            self._map_cluster(work, node, store, cells, task)

    def _map_threads(self, work: Work, node: Node, store: Store, cells: Sequence[Selection], task: Task) -> None:
        from dask.threaded import get
        from threadpoolctl import threadpool_limits

        def one(number: int) -> None:
            _run_one(work, node, store, cells[number])
            task.advance()

        # Dask's graph of independent tasks; names are ours, as arrays are never hashed by it.
        graph = {f"{node.name}-{number}": (one, number) for number in range(len(cells))}
        width = min(self.threads, len(cells))
        with threadpool_limits(limits=max(1, self.threads // width), user_api="blas"):
            get(graph, list(graph), num_workers=width)

    def _map_cluster(self, work: Work, node: Node, store: Store, cells: Sequence[Selection], task: Task) -> None:
        from distributed import as_completed

        with _client(self.cluster) as client:
            futures = [client.submit(_run_one, work, node, store, cell, key=f"{node.name}-{os.getpid()}-{n}", pure=False) for n, cell in enumerate(cells)]
            try:
                for future in as_completed(futures):
                    future.result()
                    task.advance()
            except BaseException:
                client.cancel(futures)
                raise


def run(
    nodes: Node | Iterable[Node],
    store: Store,
    *,
    cluster: str | None = None,
    threads: int | None = None,
    memory: int | None = None,
    quiet: bool = True,
) -> None:
    """Compute and store whatever of these nodes, and of what they read, is not stored yet.

    cluster: address of a Dask scheduler, e.g. "tcp://127.0.0.1:8786"; None runs on threads here (default: one per core). memory:
    budget in bytes; PlanError if a node needs more. Nothing is imported or opened for what is cached.
    """
    ordered = in_order(nodes)
    if plan(ordered, store).is_cached:
        return
    with Progress(quiet=quiet) as progress:
        context = Context(threads or os.cpu_count() or 1, cluster, memory, progress)
        for node in ordered:
            # Asked again after each step: an upstream that gave the bytes it gave before ends the work here.
            if not node.status(store).is_cached:
                plan([node], store).check_memory(memory)
                node.run(store, context)


def _run_one(work: Work, node: Node, store: Store, cell: Selection) -> None:
    try:
        work(node, store, cell)
    except MizarrError:
        raise
    except Exception as error:
        where = ", ".join(f"{axis} {label}" for axis, label in cell.items())
        raise StageError(f"stage {node.name!r}{f' at {where}' if where else ''} failed: {type(error).__name__}: {error}") from error


def _client(address: str | None) -> Any:
    from distributed import Client

    try:
        return Client(address, timeout="10s", set_as_default=False)
    except (OSError, ValueError) as error:
        raise PlanError(f"expected a Dask scheduler at {address!r}, found none ({error}); start one with `dask scheduler`") from error
