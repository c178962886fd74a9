"""A client of a Dask cluster: tasks handed over a few at a time, and what goes wrong with a cluster in words.

Border: tasks are calls with names; knows no cells and no store. Imports `distributed` when it connects.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

from ...store.errors import PlanError, StageError

__all__ = ["ClusterClient", "Submitted"]

_LOGS = ("distributed.client", "distributed.core", "distributed.comm", "distributed.batched")
"""Loggers of the client's side, which tell a lost scheduler in tracebacks; we say it in a line."""


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
        self._held = ExitStack()
        self._held.enter_context(_without_logs())
        try:
            self._client = Client(address, timeout="10s", set_as_default=False)
        except (OSError, ValueError) as error:
            self._held.close()
            raise PlanError(
                f"expected a Dask scheduler at {address!r}, found none ({error}); start one with "
                "`dask scheduler` and workers with `dask worker`"
            ) from error
        self._held.callback(self._client.close)

    def width(self, needs: str = "") -> int:
        """Tasks that can run at once: threads of all workers; where some have the resource, of those.

        Raises StageError where the scheduler went away.
        """
        if self._client.status != "running":
            raise self._gone()  # asking would try to connect for ten seconds
        with self._telling(OSError):
            having = self._having(needs)
            threads: dict[str, int] = self._client.nthreads()
        return max(1, sum(count for worker, count in threads.items() if not having or worker in having))

    def run(
        self, tasks: Sequence[Submitted], done: Callable[[int], None], *, needs: str = "", most: int = 0
    ) -> None:
        """Make all calls; returns when they have ended. done: told the number of each that has.

        needs: name of a resource ("GPU"); tasks take one each where the cluster has any. most: how many are
        handed over at once, 0 for twice as many as can run: workers never wait, and no scheduler holds a
        sweep of a million. Workers are counted whenever a task ends: those that come later get theirs. At
        the first error the rest is not started.
        Raises StageError where the scheduler goes away, or a task takes its workers down with it.
        """
        from distributed import as_completed
        from distributed.comm.core import CommClosedError

        client = self._client
        ahead = iter(enumerate(tasks))
        under_way: dict[Any, int] = {}

        def submit() -> list[Any]:
            """As many further calls as there is room for."""
            room = (most or 2 * self.width(needs)) - len(under_way)
            handed = {
                client.submit(*task.call, key=task.key, pure=False, resources=resources): number
                for number, task in islice(ahead, max(0, room))
            }
            under_way.update(handed)
            return list(handed)

        with self._telling(OSError):
            resources = {needs: 1} if self._having(needs) else None
        # Not any OSError: what is done with a result may meet a disk that is full.
        with self._telling(CommClosedError):
            try:
                completed = as_completed(submit(), loop=client.loop)
                for future in completed:
                    future.result()
                    done(under_way.pop(future))
                    completed.update(submit())
            finally:
                if client.status == "running":
                    client.cancel(list(under_way))

    @contextmanager
    def _telling(self, lost: type[Exception]) -> Iterator[None]:
        """Says in words what goes wrong with a cluster. lost: a further sign that the scheduler is gone."""
        from asyncio import CancelledError
        from concurrent.futures import CancelledError as Cancelled

        from distributed.scheduler import KilledWorker

        try:
            yield
        except KilledWorker as error:
            raise StageError(
                f"expected a task to end, found that {error.allowed_failures + 1} workers died of it "
                "one after another, mostly for want of memory; give each more, or start fewer of them. What "
                "was committed stays"
            ) from error
        except (CancelledError, Cancelled) as error:
            raise self._gone() from error
        except lost as error:
            raise self._gone() from error

    def _gone(self) -> StageError:
        return StageError(
            f"the scheduler at {self.address} went away, or somebody cancelled the work; what was committed "
            "stays: the same command goes on from there"
        )

    def _having(self, needs: str) -> set[str]:
        """Workers with some of a resource."""
        if not needs:
            return set()
        workers = self._client.scheduler_info(n_workers=-1)["workers"]
        return {worker for worker, about in workers.items() if about.get("resources", {}).get(needs)}

    def close(self) -> None:
        """Let go of the cluster, which goes on."""
        self._held.close()


@contextmanager
def _without_logs() -> Iterator[None]:
    """Within: what `distributed` would log of a connection is not shown."""
    loggers = [logging.getLogger(name) for name in _LOGS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
