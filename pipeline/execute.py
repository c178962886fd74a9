"""Execution of a plan, node by node; before each node the store is looked up again.

Every finished cell is published at once, so that a second run after Ctrl-C, an error or a kill resumes.

Border: runs nodes and reads their status; knows no key and no label.
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
    """Compute and store the results of nodes that are not stored yet, and of all nodes they read from.

    May be interrupted at any time and called again.

    Arguments:
        nodes: One or several nodes.
        store: The store to read from and write to.
        cluster: Address of a Dask scheduler, e.g. "tcp://127.0.0.1:8786", whose workers see the store under
            the same path; None computes in threads of this process.
        workers: Number of processes of this machine, started for this call and stopped at its end; 0 or 1 for
            none. A script must call it under `if __name__ == "__main__":`, because each worker imports the
            script.
        threads: Number of threads of this process that compute; None for one per core.
        memory: Memory budget in bytes or as text such as "2GiB"; None for no limit.
        quiet: Whether to show no progress on stderr.
        log: File to which a line of JSON is appended for each step of progress.

    Raises:
        PlanError: The budget is too small or the nodes cannot run as configured; nothing was started.
        ReadOnlyStore: Results are missing and the store is read-only.
        StageError: A stage failed; the message names stage and cell.
    """
    require_store(store)
    require_flag(quiet, "quiet")
    as_count(workers, "workers", least=0)
    if threads is not None:
        as_count(threads, "threads")
    if cluster is not None:
        require_kind(
            cluster, str, "cluster as an address", "write for example tcp://127.0.0.1:8786", PlanError
        )
    store.files.require_store()
    # The whole plan is checked before anything runs, and each step again when sizes are better known.
    ordered, budget = in_order(nodes), as_bytes(memory)
    cores = threads or os.cpu_count() or 1
    planned = plan(ordered, store, Context(cores, cluster, budget, workers=workers))
    if planned.is_cached:
        return
    if store.read_only:
        waiting = [step.name for step in planned.steps if not step.status.is_cached]
        raise ReadOnlyStore(
            f"results of {', '.join(waiting)} are not stored yet, and the store {store.address} was opened "
            "with mode='r'; open it with mode='a'"
        )
    planned.check_memory(budget)
    with (
        Progress(quiet, log) as progress,
        Context(cores, cluster, budget, progress, workers) as context,
    ):
        if cluster is not None:
            context.width()  # connects now, so that a wrong address fails before anything is written
        remaining = iter(ordered)
        while True:
            # Status is read again after each node: if an upstream node gave the same bytes as before, the
            # nodes below it are cached (early cutoff).
            with one_look():
                node = next((node for node in remaining if not status_of(node, store).is_cached), None)
                if node is None:
                    return
                plan([node], store).check_memory(budget)
                node.run(store, context)
