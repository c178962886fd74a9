"""A client of a Dask cluster: tasks handed over a few at a time, and what goes wrong with a cluster in words.

Border: tasks are calls with names; knows no cells and no store. Imports `distributed` when it connects.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ...store.errors import PlanError, StageError

__all__ = ["ClusterClient", "Submitted"]


@dataclass(frozen=True)
class Submitted:
    """A call to be made on a worker. key: its name, the same for all who want the same done."""

    key: str
    call: tuple[Any, ...]
    """A function and its arguments."""


class ClusterClient:
    """Connected to the scheduler at an address; PlanError where there is none."""

    def __init__(self, address: str) -> None:
        from distributed import Client

        self.address = address
        try:
            self._client = Client(address, timeout="10s", set_as_default=False)
        except (OSError, ValueError) as error:
            raise PlanError(
                f"expected a Dask scheduler at {address!r}, found none ({error}); start one with "
                "`dask scheduler` and workers with `dask worker`"
            ) from error

    def width(self, needs: str = "") -> int:
        """Tasks that can run at once: threads of all workers; where some have the resource, of those."""
        having = self._having(needs)
        threads: dict[str, int] = self._client.nthreads()
        return max(1, sum(count for worker, count in threads.items() if not having or worker in having))

    def run(
        self, tasks: Sequence[Submitted], done: Callable[[int], None], *, needs: str = "", most: int = 0
    ) -> None:
        """Make all calls; returns when they have ended. done: told the number of each that has.

        needs: name of a resource ("GPU"); tasks take one each where the cluster has any. most: how many are
        handed over at once, 0 for twice as many as can run: workers never wait, and no scheduler holds a
        sweep of a million. At the first error the rest is not started. Workers that come later get theirs.
        Raises StageError where the scheduler goes away, or a task takes its workers down with it.
        """
        from asyncio import CancelledError
        from concurrent.futures import CancelledError as Cancelled

        from distributed import as_completed
        from distributed.scheduler import KilledWorker

        client = self._client
        resources = {needs: 1} if self._having(needs) else None
        ahead = iter(enumerate(tasks))
        under_way: dict[Any, int] = {}

        def submit() -> list[Any]:
            """The next call, if there is one."""
            for number, task in ahead:
                future = client.submit(*task.call, key=task.key, pure=False, resources=resources)
                under_way[future] = number
                return [future]
            return []

        first = [future for _ in range(most or 2 * self.width(needs)) for future in submit()]
        try:
            completed = as_completed(first, loop=client.loop)
            for future in completed:
                future.result()
                done(under_way.pop(future))
                completed.update(submit())
        except KilledWorker as error:
            raise StageError(
                f"expected a task to end, found that {error.allowed_failures + 1} workers died of it "
                "one after another, mostly for want of memory; give each more, or start fewer of them. What "
                "was committed stays"
            ) from error
        except (CancelledError, Cancelled) as error:
            raise StageError(
                f"the scheduler at {self.address} went away, or somebody cancelled the work; what was "
                "committed stays: the same command goes on from there"
            ) from error
        finally:
            if client.status == "running":
                client.cancel(list(under_way))

    def _having(self, needs: str) -> set[str]:
        """Workers with some of a resource."""
        if not needs:
            return set()
        workers = self._client.scheduler_info(n_workers=-1)["workers"]
        return {worker for worker, about in workers.items() if about.get("resources", {}).get(needs)}

    def close(self) -> None:
        """Let go of the cluster, which goes on."""
        self._client.close()
