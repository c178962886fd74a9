"""Tasks on a cluster: workers that come late get theirs, and a lost scheduler is told in a line."""

from __future__ import annotations

import json
import logging
import threading
import time
import warnings

import pytest
from distributed import LocalCluster

from mizarr.pipeline.clusters import ClusterClient, client as client_module, local_workers
from mizarr.pipeline.clusters.client import Submitted
from mizarr.store.errors import PlanError, StageError

HERE = {"processes": False, "protocol": "tcp", "host": "127.0.0.1", "dashboard_address": None}
"""Workers in this process: tasks travel as they would, and find the variables of this module."""
MEETING: dict[str, threading.Barrier] = {}
LATE = 4


def meet(cluster):
    """A task that ends when `LATE` of its kind run at once."""
    MEETING[cluster].wait(timeout=30)


def test_workers_that_come_late_get_work():
    """One worker at first, which is handed two tasks; the rest needs four that run side by side."""
    name = "late"
    MEETING[name] = threading.Barrier(LATE)
    done: list[int] = []
    with LocalCluster(n_workers=1, threads_per_worker=1, **HERE) as cluster:
        client = ClusterClient(cluster.scheduler_address)

        def noted(number):
            done.append(number)
            if number == 0:
                cluster.scale(LATE)
                cluster.wait_for_workers(LATE, timeout=30)

        tasks = [Submitted("first", (abs, -1)), *(Submitted(f"meet-{n}", (meet, name)) for n in range(8))]
        client.run(tasks, noted)
        client.close()
    assert done[0] == 0
    assert sorted(done) == list(range(9))


def test_a_task_that_has_ended_counts_though_its_worker_is_gone_with_its_result(monkeypatch):
    """The only worker goes between the end of the last task and the question how it ended."""
    monkeypatch.setenv("MIZARR_PATIENCE", "1")
    ended: list[str] = []
    look = ClusterClient._wait_for_next

    def deserted(self, *given):
        future = look(self, *given)
        cluster.scale(0)
        until = time.monotonic() + 30
        while future.status == "finished" and time.monotonic() < until:
            time.sleep(0.01)
        ended.append(future.status)
        return future

    monkeypatch.setattr(ClusterClient, "_wait_for_next", deserted)
    done: list[int] = []
    with LocalCluster(n_workers=1, threads_per_worker=1, **HERE) as cluster:
        client = ClusterClient(cluster.scheduler_address)
        client.run([Submitted("only", (abs, -1))], done.append)
        client.close()
    assert (done, len(ended)) == ([0], 1)
    assert ended != ["finished"]


def gone(client, cluster):
    """Its scheduler is no more, and the client has seen it."""
    cluster.close()
    while client._client.status == "running":
        time.sleep(0.01)


def test_a_scheduler_that_goes_away_is_told_in_words_and_not_in_logs(caplog):
    """Between two tasks, while it is asked how many workers there are."""
    caplog.set_level(logging.ERROR)
    loggers = [logging.getLogger(f"distributed.{name}") for name in ("client", "core", "comm")]
    levels = [logger.level for logger in loggers]
    with LocalCluster(n_workers=1, threads_per_worker=1, **HERE) as cluster:
        client = ClusterClient(cluster.scheduler_address)
        tasks = [Submitted(f"task-{n}", (abs, -n)) for n in range(50)]
        with pytest.raises(StageError, match=f"scheduler at {cluster.scheduler_address} stopped"):
            client.run(tasks, lambda number: gone(client, cluster))
        client.close()
    assert [line for line in caplog.messages if "Traceback" in line] == []
    assert [logger.level for logger in loggers] == levels


def test_an_address_where_no_scheduler_is_leaves_logs_as_they_were():
    level = logging.getLogger("distributed.client").level
    with pytest.raises(PlanError, match="there is no Dask scheduler at 'nonsense"):
        ClusterClient("nonsense://127.0.0.1:1")
    assert logging.getLogger("distributed.client").level == level


def test_tasks_for_a_gpu_wait_for_one_where_there_was_one_and_not_for_ever(monkeypatch):
    """The only worker with the resource goes away; the one that is left takes none of its tasks."""
    from distributed import Scheduler, SpecCluster, Worker

    monkeypatch.setenv("MIZARR_PATIENCE", "1")
    monkeypatch.setattr(client_module, "_CHECK_EVERY", 0.1)
    place = {"host": "127.0.0.1", "dashboard": False}
    workers = {
        name: {"cls": Worker, "options": {**place, "nthreads": 1, "resources": resources}}
        for name, resources in {"plain": {}, "card": {"GPU": 1}}.items()
    }
    lines, done = [], []
    scheduler = {"cls": Scheduler, "options": {**place, "port": 0}}
    with SpecCluster(workers, scheduler, silence_logs=40) as cluster:
        client = ClusterClient(cluster.scheduler_address, lines.append)

        def noted(number):
            done.append(number)
            if number == 0:
                cluster.sync(cluster.scheduler_comm.retire_workers, names=["card"], close_workers=True)

        tasks = [Submitted(f"card-{n}", (abs, -n)) for n in range(9)]
        with pytest.raises(
            StageError, match=r"no worker with the resource GPU is left at .* within 1 seconds"
        ):
            client.run(tasks, noted, needs="GPU")
        client.run([Submitted("plain", (abs, -1))], noted)
        client.close()
    assert len(done) < 9
    assert len(lines) == 1


@pytest.mark.parametrize("told", ["soon", "-1", "nan"])
def test_a_patience_that_is_no_number_of_seconds_is_refused(told, monkeypatch):
    monkeypatch.setenv("MIZARR_PATIENCE", told)
    with pytest.raises(
        PlanError, match=f"MIZARR_PATIENCE to be a number of seconds to wait for workers, found {told!r}"
    ):
        ClusterClient("tcp://127.0.0.1:1")


CLEARING = "a name \x1b[2J of a file"


def test_what_a_worker_reports_is_escaped_and_what_ends_it_is_one_line(capfd):
    """Workers share the terminal of whoever starts them; names of files must not steer it."""
    noisy = (
        Submitted("warning", (warnings.warn, CLEARING)),
        Submitted("log", (logging.getLogger("mizarr.of.a.worker").warning, CLEARING)),
    )
    with local_workers(1) as address:
        client = ClusterClient(address)
        client.run(noisy, lambda number: None)
        with pytest.raises(
            StageError, match=r"^a worker of the cluster failed: JSONDecodeError: Expecting value: .*$"
        ) as told:
            client.run([Submitted("failing", (json.loads, "[1,\n oops"))], lambda number: None)
        client.close()
    assert "\n" not in str(told.value)
    shown = capfd.readouterr().err
    assert shown.count("a name \\x1b[2J of a file") == 2 and "\x1b" not in shown
    assert "Traceback" not in shown
