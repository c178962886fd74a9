"""Execution: a plan, node by node, each asked again what it still misses.

Whatever is finished is published at once, so running again after Ctrl-C, an error or a kill goes on from
there.

Border: runs what it is given, asks nodes what is missing; knows no key and no label.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from ..store.arrays import as_count, require_flag, require_kind
from ..store.errors import PlanError, ReadOnlyStore
from ..store.store import require_store
from .ambient import plain_torch
from .context import Context
from .nodes import Node, one_look, status_of
from .plan import as_bytes, in_order, plan
from .progress import Progress

if TYPE_CHECKING:
    from ..store import Store


@plain_torch()
def run(
    nodes: Node | Iterable[Node],
    store: Store,
    *,
    cluster: str | None = None,
    workers: int = 0,
    threads: int | None = None,
    memory: int | str | None = None,
    quiet: bool = True,
    log: str | Path | None = None,
) -> None:
    """Compute and store whatever of these nodes, and of what they read, is not stored yet.

    cluster: address of a Dask scheduler, e.g. "tcp://127.0.0.1:8786", whose workers see the store under the
    same path; None runs on threads here (default: one per core). workers: so many processes of this machine,
    started for this call and stopped with it (0 and 1: none); from a script, call it under
    `if __name__ == "__main__":`, as each worker imports that. memory: budget, in bytes or as "2GiB".
    log: a file that gets a JSON line for each step of progress.
    Raises PlanError before anything starts if the budget is too small, ReadOnlyStore, and StageError naming
    stage and cell when one fails. May be interrupted at any time and called again.
    """
    require_store(store)
    require_flag(quiet, "quiet")
    as_count(workers, "workers", least=0)
    if threads is not None:
        as_count(threads, "threads")
    if cluster is not None:
        require_kind(
            cluster, str, "cluster as an address", "write it such as tcp://127.0.0.1:8786", PlanError
        )
    store.files.require_store()
    ordered, budget = in_order(nodes), as_bytes(memory)
    cores = threads or os.cpu_count() or 1
    planned = plan(ordered, store, Context(cores, cluster, budget, workers=workers))
    if planned.is_cached:
        return
    if store.read_only:
        waiting = [step.name for step in planned.steps if not step.status.is_cached]
        raise ReadOnlyStore(
            f"{', '.join(waiting)} must run, but {store.address} is open for reading only; "
            "open it with mode='a'"
        )
    planned.check_memory(budget)
    with (
        Progress(quiet, log) as progress,
        Context(cores, cluster, budget, progress, workers) as context,
    ):
        if cluster is not None:
            context.width()  # connects: an address that is wrong is told before anything is written
        left = iter(ordered)
        while True:
            # Asked again whenever one has run: an upstream that gave the bytes it gave before ends the work
            # here.
            with one_look():
                node = next((node for node in left if not status_of(node, store).is_cached), None)
                if node is None:
                    return
                plan([node], store).check_memory(budget)
                node.run(store, context)
