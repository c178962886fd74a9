"""A client of a Dask cluster: tasks handed over a few at a time, and what goes wrong with a cluster in words.

Border: tasks are calls with names; knows no cells and no store. Imports `distributed` when it connects.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

from ...store.errors import MizarrError, PlanError, StageError

__all__ = ["ClusterClient", "Submitted"]

PATIENCE = "MIZARR_PATIENCE"
"""Seconds to wait for workers where there are none."""
_PATIENCE = 600.0
_SAID_AFTER = 5.0  # seconds without a worker: one that is started anew in its place is back by then
_LOOK_EVERY = 1.0  # seconds between questions to a scheduler from whom nothing is heard

_LOGS = ("distributed.client", "distributed.core", "distributed.comm", "distributed.batched")
"""Loggers of the client's side, which tell a lost scheduler in tracebacks; we say it in a line."""


@dataclass(frozen=True)
class Submitted:
    """A call to be made on a worker. key: its name, the same for all who want the same done."""

    key: str
    call: tuple[Any, ...]
    """A function and its arguments."""


class ClusterClient:
    """Connected to the scheduler at an address; PlanError where there is none.

    say: told in a line when no worker is left, and when there are some again. How long they are waited for is
    said by MIZARR_PATIENCE, in seconds; PlanError for what is none.
    """

    def __init__(self, address: str, say: Callable[[str], None] = lambda line: None) -> None:
        from distributed import Client

        self.address, self._say, self._patience = address, say, patience()
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
        return max(1, self._able(needs)[0])

    def _able(self, needs: str, expected: bool = False) -> tuple[int, bool]:
        """Threads of the workers that tasks may go to, and whether these are those with the resource: where
        any has it, or is expected to."""
        if self._client.status != "running":
            raise self._gone()  # asking would try to connect for ten seconds
        with self._telling(OSError):
            having = self._having(needs)
            threads: dict[str, int] = self._client.nthreads()
        special = bool(having) or expected
        return sum(count for worker, count in threads.items() if not special or worker in having), special

    def run(
        self, tasks: Sequence[Submitted], done: Callable[[int], None], *, needs: str = "", most: int = 0
    ) -> None:
        """Make all calls; returns when they have ended. done: told the number of each that has.

        needs: name of a resource ("GPU"); tasks take one each from when the cluster has any. most: how many
        are handed over at once, 0 for twice as many as can run: workers never wait, and no scheduler holds a
        sweep of a million. Workers are counted whenever a task ends: those that come later get theirs. At
        the first error the rest is not started.
        Raises StageError where the scheduler goes away, a task takes its workers down with it, or there is no
        worker for as long as patience lasts.
        """
        from distributed import as_completed
        from distributed.comm.core import CommClosedError

        client = self._client
        ahead = iter(enumerate(tasks))
        under_way: dict[Any, int] = {}
        special = False

        def submit() -> list[Any]:
            """As many further calls as there is room for."""
            nonlocal special
            width, special = self._able(needs, special)
            room = (most or 2 * max(1, width)) - len(under_way)
            resources = {needs: 1} if special else None
            handed = {
                client.submit(*task.call, key=task.key, pure=False, resources=resources): number
                for number, task in islice(ahead, max(0, room))
            }
            under_way.update(handed)
            return list(handed)

        # Not any OSError: what is done with a result may meet a disk that is full.
        with self._telling(CommClosedError):
            try:
                completed = as_completed(submit(), loop=client.loop)
                while not completed.is_empty():
                    future = self._next(completed, lambda: self._able(needs, special)[0], needs * special)
                    # What ended well has published. Its result, which is nothing, lies on a worker that may
                    # be gone by now: who asked for it would wait for another one to do it all again.
                    if future.status in ("error", "cancelled"):
                        _result_of(future)
                    done(under_way.pop(future))
                    completed.update(submit())
            finally:
                if client.status == "running":
                    client.cancel(list(under_way))

    def _next(self, completed: Any, threads: Callable[[], int], needs: str) -> Any:
        """The next future that ends. threads: of the workers there are; StageError when there were none for
        as long as patience lasts, which is said when it begins."""
        looked, there, said = time.monotonic(), time.monotonic(), False
        while not completed.has_ready():
            with completed.thread_condition:
                completed.thread_condition.wait(0.1)
            if (now := time.monotonic()) - looked < _LOOK_EVERY:
                continue
            looked = now
            if threads():
                if said:
                    self._say(self._again)
                there, said = now, False
            elif now - there > self._patience:
                raise self._deserted(needs)
            elif now - there > min(_SAID_AFTER, self._patience / 2) and not said:
                said = True
                self._say(
                    f"{self._none(needs)}; what is to be computed waits for one: start some with "
                    f"`dask worker {self.address}`. This gives up in {self._patience - (now - there):.0f} "
                    f"seconds ({PATIENCE})"
                )
        future = next(completed)
        if said and future.status == "finished":
            self._say(self._again)
        return future

    @property
    def _again(self) -> str:
        return f"there are workers at {self.address} again; going on"

    def _none(self, needs: str) -> str:
        return f"no worker{f' with the resource {needs}' * bool(needs)} is left at {self.address}"

    def _deserted(self, needs: str) -> StageError:
        return StageError(
            f"{self._none(needs)}, and none came in {self._patience:g} seconds ({PATIENCE}); what was "
            "committed stays: start workers, and the same command goes on from there"
        )

    @contextmanager
    def _telling(self, lost: type[Exception]) -> Iterator[None]:
        """Says in words what goes wrong with a cluster. lost: a further sign that the scheduler is gone."""
        from asyncio import CancelledError
        from concurrent.futures import CancelledError as Cancelled

        from distributed.scheduler import KilledWorker, NoValidWorkerError, NoWorkerError

        try:
            yield
        except (NoWorkerError, NoValidWorkerError) as error:  # a scheduler may have a patience of its own
            raise StageError(
                f"no worker is left at {self.address}, whose scheduler waits no longer for one "
                "(distributed.scheduler.no-workers-timeout); what was committed stays: start workers, and "
                "the same command goes on from there"
            ) from error
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


def _result_of(future: Any) -> Any:
    """The result of a task, or what it was ended by. Raises StageError, in one line, for what a worker raised
    before or behind the task itself: a module it has not, an error that cannot be sent."""
    from concurrent.futures import CancelledError

    from distributed.comm.core import CommClosedError
    from distributed.scheduler import KilledWorker, NoValidWorkerError, NoWorkerError

    try:
        return future.result()
    except (MizarrError, CancelledError, CommClosedError, KilledWorker, NoValidWorkerError, NoWorkerError):
        raise
    except Exception as error:
        raise StageError(f"a worker failed: {in_one_line(error)}") from error


def in_one_line(error: BaseException) -> str:
    """The type of an error and its message; line breaks of the message become spaces."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def patience() -> float:
    """Seconds to wait for workers, as MIZARR_PATIENCE says; PlanError for what is none."""
    told = os.environ.get(PATIENCE) or _PATIENCE
    try:
        seconds = float(told)
    except ValueError:
        seconds = -1.0
    if not seconds >= 0:
        raise PlanError(
            f"expected seconds to wait for workers in {PATIENCE}, found {told!r}; set it to a number"
        )
    return seconds


@contextmanager
def _without_logs() -> Iterator[None]:
    """Within: what `distributed` would log of a connection is not shown."""
    loggers = [logging.getLogger(name) for name in _LOGS]
    levels = [logger.level for logger in loggers]

    def set_back() -> None:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)

    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        yield
    finally:
        try:
            set_back()
        except BaseException:  # interrupted
            set_back()
            raise
