"""A client of a Dask cluster: submits tasks a few at a time, and turns failures of the cluster into clear
errors.

Border: tasks are named function calls; knows no cells and no store. Imports `distributed` when it connects.
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
"""Environment variable: seconds to wait for a worker before giving up."""
_DEFAULT_PATIENCE = 600.0
_REPORT_AFTER = 5.0  # seconds without a worker; a restarted worker is back by then
_CHECK_EVERY = 1.0  # seconds between counts of workers while no task ends

_LOGS = ("distributed.client", "distributed.core", "distributed.comm", "distributed.batched")
"""Client-side loggers that report a lost scheduler as tracebacks; ClusterClient reports it in one line."""


@dataclass(frozen=True)
class Submitted:
    """Function call submitted to a worker of a Dask cluster."""

    key: str
    """Name of the task; tasks with equal keys, also of different clients, are computed once."""
    call: tuple[Any, ...]
    """The function, followed by its positional arguments."""


class ClusterClient:
    """Client of a Dask cluster that submits function calls and waits for them.

    Arguments:
        address: Address such as "tcp://127.0.0.1:8786".
        say: Called with a line of text when no worker is left, and again when there are workers.

    Raises:
        PlanError: There is no scheduler, or MIZARR_PATIENCE (seconds to wait for workers) is no number.
    """

    def __init__(self, address: str, say: Callable[[str], None] = lambda line: None) -> None:
        from distributed import Client

        self.address, self._say, self._patience = address, say, patience()
        self._exit_stack = ExitStack()
        self._exit_stack.enter_context(_without_logs())
        try:
            # Not as default: then dask computations of the user's own code would go to this cluster, too.
            self._client = Client(address, timeout="10s", set_as_default=False)
        except (OSError, ValueError) as error:
            self._exit_stack.close()
            raise PlanError(
                f"there is no Dask scheduler at {address!r} ({error}); start one with `dask scheduler`, and "
                "workers with `dask worker`, or correct the address (--cluster)"
            ) from error
        self._exit_stack.callback(self._client.close)

    def width(self, needs: str = "") -> int:
        """Number of tasks that can run at once, at least 1.

        Arguments:
            needs: Name of a Dask resource ("GPU"); if any worker has it, only threads of such workers count.

        Raises:
            StageError: The scheduler is gone.
        """
        # At least 1, since a worker may join while tasks wait.
        return max(1, self._capacity(needs)[0])

    def _capacity(self, needs: str, expected: bool = False) -> tuple[int, bool]:
        """Count the threads of the workers that may take tasks.

        Arguments:
            needs: Name of a Dask resource ("GPU"); "" for none.
            expected: Whether some worker had the resource before.

        Returns:
            Number of threads, and whether tasks must request the resource: if any worker has or had it.
        """
        if self._client.status != "running":
            raise self._lost_error()  # a request would try to reconnect for ten seconds
        with self._translated_errors(OSError):
            workers = self._workers_with(needs)
            threads: dict[str, int] = self._client.nthreads()
        needs_resource = bool(workers) or expected
        suitable = [count for worker, count in threads.items() if not needs_resource or worker in workers]
        return sum(suitable), needs_resource

    def run(
        self,
        tasks: Sequence[Submitted],
        on_done: Callable[[int], None],
        *,
        needs: str = "",
        max_submitted: int = 0,
    ) -> None:
        """Make all calls on workers and wait for their end; after an error no further call is submitted.

        Workers are counted again whenever a task ends, so that workers that join later get tasks.

        Arguments:
            tasks: The calls.
            on_done: Called with the number of each task that ended.
            needs: Name of a Dask resource ("GPU"); each task takes one as soon as any worker has it.
            max_submitted: Number of tasks submitted at once. 0 for twice as many as can run, so that workers
                never wait and the scheduler does not hold a million tasks.

        Raises:
            StageError: The scheduler is gone, a task killed its workers, or there was no worker for
                MIZARR_PATIENCE seconds.
        """
        from distributed import as_completed
        from distributed.comm.core import CommClosedError

        client = self._client
        remaining_tasks = iter(enumerate(tasks))
        number_of_future: dict[Any, int] = {}
        needs_resource = False

        def submit() -> list[Any]:
            """Submit further calls up to the limit, and return their futures."""
            nonlocal needs_resource
            width, needs_resource = self._capacity(needs, needs_resource)
            # Counting workers takes 1 to 2 ms beside the 3 ms of a task.
            n_new = (max_submitted or 2 * max(1, width)) - len(number_of_future)
            resources = {needs: 1} if needs_resource else None
            # pure=False: the key is given, Dask need not hash the arguments.
            submitted = {
                client.submit(*task.call, key=task.key, pure=False, resources=resources): number
                for number, task in islice(remaining_tasks, max(0, n_new))
            }
            number_of_future.update(submitted)
            return list(submitted)

        # CommClosedError and not every OSError: `on_done` may raise an OSError of its own, e.g. a full disk.
        with self._translated_errors(CommClosedError):
            try:
                completed = as_completed(submit(), loop=client.loop)
                while not completed.is_empty():
                    future = self._wait_for_next(
                        completed, lambda: self._capacity(needs, needs_resource)[0], needs * needs_resource
                    )
                    # A finished task has published its cell. Its return value, None, is on a worker that may
                    # be gone by now: fetching it would make Dask compute the task again elsewhere.
                    if future.status in ("error", "cancelled"):
                        _raise_error_of(future)
                    on_done(number_of_future.pop(future))
                    completed.update(submit())
            finally:
                if client.status == "running":
                    # After an error, tasks that have not started are dropped; started ones end by themselves.
                    client.cancel(list(number_of_future))

    def _wait_for_next(self, completed: Any, threads: Callable[[], int], needs: str) -> Any:
        """Wait for the next task that ends and return its future.

        Arguments:
            completed: The `as_completed` iterator of submitted futures.
            threads: Returns the number of threads of suitable workers.
            needs: Name of the resource, for messages.

        Raises:
            StageError: There was no worker for as long as MIZARR_PATIENCE; a line was printed when the wait
                began.
        """
        last_check, last_worker, is_reported = time.monotonic(), time.monotonic(), False
        while not completed.has_ready():
            with completed.thread_condition:
                # Polled, because the loop also has to count workers.
                completed.thread_condition.wait(0.1)
            if (now := time.monotonic()) - last_check < _CHECK_EVERY:
                continue
            last_check = now
            if threads():
                if is_reported:
                    self._say(self._back_message)
                last_worker, is_reported = now, False
            elif now - last_worker > self._patience:
                raise self._no_workers_error(needs)
            elif now - last_worker > min(_REPORT_AFTER, self._patience / 2) and not is_reported:
                is_reported = True
                self._say(
                    f"{self._none_left(needs)}, and tasks wait for one; start workers with `dask worker "
                    f"{self.address}` within {self._patience - (now - last_worker):.0f} seconds, or the "
                    f"command gives up (environment variable {PATIENCE})"
                )
        future = next(completed)
        if is_reported and future.status == "finished":
            self._say(self._back_message)
        return future

    @property
    def _back_message(self) -> str:
        return f"there are workers at {self.address} again; the remaining tasks go on"

    def _none_left(self, needs: str) -> str:
        """Start of a message that no suitable worker is left."""
        return f"no worker{f' with the resource {needs}' * bool(needs)} is left at {self.address}"

    def _no_workers_error(self, needs: str) -> StageError:
        return StageError(
            f"{self._none_left(needs)}, and none came within {self._patience:g} seconds (environment "
            f"variable {PATIENCE}); start workers and run the same command again, which goes on from what "
            "was committed"
        )

    @contextmanager
    def _translated_errors(self, lost: type[Exception]) -> Iterator[None]:
        """Context manager: turn errors of `distributed`, and exceptions of type `lost`, into StageError."""
        from asyncio import CancelledError
        from concurrent.futures import CancelledError as Cancelled

        from distributed.scheduler import KilledWorker, NoValidWorkerError, NoWorkerError

        try:
            yield
        except (NoWorkerError, NoValidWorkerError) as error:  # a scheduler may have a time limit of its own
            raise StageError(
                f"no worker is left at {self.address}, and its scheduler stopped waiting for one "
                "(distributed.scheduler.no-workers-timeout); start workers and run the same command again, "
                "which goes on from what was committed"
            ) from error
        except KilledWorker as error:
            raise StageError(
                f"{error.allowed_failures + 1} workers at {self.address} died one after another while they "
                "computed the same task, usually because memory ran out; give each worker more memory, or "
                "start fewer workers, and run the same command again, which goes on from what was committed"
            ) from error
        # asyncio's and concurrent.futures' classes of the same name: distributed raises either.
        except (CancelledError, Cancelled, lost) as error:
            raise self._lost_error() from error

    def _lost_error(self) -> StageError:
        return StageError(
            f"the Dask scheduler at {self.address} stopped, or somebody cancelled the tasks; run the same "
            "command again, which goes on from what was committed"
        )

    def _workers_with(self, needs: str) -> set[str]:
        """Network addresses of the workers that offer a Dask resource; empty for no resource."""
        if not needs:
            return set()
        # -1 asks for all workers, whatever the default of the installed version is.
        workers = self._client.scheduler_info(n_workers=-1)["workers"]
        return {worker for worker, about in workers.items() if about.get("resources", {}).get(needs)}

    def close(self) -> None:
        """Disconnect; the cluster keeps running."""
        self._exit_stack.close()


def _raise_error_of(future: Any) -> None:
    """Raise the error with which a task ended.

    Raises:
        StageError: The worker failed outside of the task: a module is missing there, or an error cannot be
            pickled.
    """
    from concurrent.futures import CancelledError

    from distributed.comm.core import CommClosedError
    from distributed.scheduler import KilledWorker, NoValidWorkerError, NoWorkerError

    try:
        future.result()
    except (MizarrError, CancelledError, CommClosedError, KilledWorker, NoValidWorkerError, NoWorkerError):
        raise
    except Exception as error:
        raise StageError(f"a worker of the cluster failed: {in_one_line(error)}") from error


def in_one_line(error: BaseException) -> str:
    """Type of an error and its message in one line; line breaks become spaces."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def patience() -> float:
    """Seconds to wait for workers of a cluster: $MIZARR_PATIENCE, or 600. PlanError if it is no number."""
    value = os.environ.get(PATIENCE) or _DEFAULT_PATIENCE
    try:
        seconds = float(value)
    except ValueError:
        seconds = -1.0
    if not seconds >= 0:
        raise PlanError(
            f"expected the environment variable {PATIENCE} to be a number of seconds to wait for workers, "
            f"found {value!r}"
        )
    return seconds


@contextmanager
def _without_logs() -> Iterator[None]:
    """Context manager in which `distributed` logs nothing about its connections."""
    loggers = [logging.getLogger(name) for name in _LOGS]
    levels = [logger.level for logger in loggers]

    def restore_levels() -> None:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)

    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        yield
    finally:
        try:
            restore_levels()
        except BaseException:  # interrupted
            restore_levels()
            raise
