"""Workers, schedulers and drivers of a real harvest are killed: what was committed stays, and the end is the
store that nobody disturbed, file for file and bit for bit."""

from __future__ import annotations

import asyncio
import collections
import json
import os
import random
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress

import numpy as np
import psutil
import pytest

import mizarr
from mizarr.pipeline.clusters import client
from mizarr.stages.forward.capture import harvest as harvests
from mizarr.store.digest import file_digest
from mizarr.store.errors import StoreFormatError
from mizarr.workflows.cli import run

from .forward.random_models import save_random_model

pytestmark = pytest.mark.wide

HOOKS = "blocks.*.hook_resid_post"
SIZED = ["--memory", "128KB"]
"""Segments of 64 tokens, about a hundred of them."""
MIZARR = "import sys; from mizarr.workflows.cli import main; main(sys.argv[1:])"
SCHEDULER = """
import asyncio
from distributed import Scheduler

async def main():
    async with Scheduler(host="127.0.0.1", port=0, dashboard=False, dashboard_address="127.0.0.1:0") as one:
        print(one.address, flush=True)
        await one.finished()

asyncio.run(main())
"""
WORKER = """
import asyncio, sys
from distributed import Worker

async def main():
    async with Worker(sys.argv[1], nthreads=1, host="127.0.0.1", dashboard=False) as one:
        print(one.address, flush=True)
        await one.finished()

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    """The command of the harvest, all but where its store lies."""
    at = tmp_path_factory.mktemp("asked")
    save_random_model(at / "model", "llama", 3)
    drawn = np.random.default_rng(7)
    prompts = [drawn.integers(1, 250, size).tolist() for size in drawn.integers(3, 40, 300)]
    (at / "prompts.jsonl").write_text("".join(json.dumps({"ids": ids}) + "\n" for ids in prompts))
    names = [str(at / "model"), str(at / "prompts.jsonl")]
    return ["capture", *names, "--hooks", HOOKS, *SIZED, "--quiet", "--store"]


@pytest.fixture(scope="module")
def undisturbed(asked, tmp_path_factory):
    """What one process leaves behind."""
    root = tmp_path_factory.mktemp("undisturbed")
    assert run([*asked, str(root)]) == 0
    return left_in(root)


def left_in(root):
    """Of a store: content of every key, digest of every shard, and what segment records say."""
    store = mizarr.open_store(root, mode="r")
    assert store.verify() == []
    shards = {
        str(path.relative_to(root)): file_digest(path)
        for path in root.glob("data/*/*/resid_post/c/**/*")
        if path.is_file() and not path.name.startswith(".")
    }
    return {record.key: record.content for record in store.records()}, shards, recorded(root)


def recorded(root):
    """Shards of committed segments -> size and digest, as their records say."""
    files = [json.loads(path.read_bytes())["files"] for path in root.glob("data/*/*/seg/[0-9]*.json")]
    return {name: tuple(told) for some in files for name, told in some.items()}


def committed(root):
    """How many segments are."""
    return sum(1 for _ in root.glob("data/*/*/seg/[0-9]*.json"))


def wait_for(segments, root):
    """Until so many are committed."""
    end = time.monotonic() + 120
    while committed(root) < segments:
        assert time.monotonic() < end, f"{committed(root)} segments in two minutes"
        time.sleep(0.005)


@contextmanager
def started(*command, **environment):
    """A process that prints where it listens, and is no more afterwards."""
    process = subprocess.Popen(
        [sys.executable, "-c", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, **environment},
    )
    try:
        yield process, process.stdout.readline().strip()
    finally:
        kill(process)


def kill(process):
    """At once, and nothing is left of it to wait for."""
    process.kill()
    process.wait()
    process.stdout.close()


@contextmanager
def worker_here(address):
    """A worker in a thread of this process: there at once, and gone afterwards, or with its scheduler."""
    from distributed import Worker

    async def work():
        async with Worker(address, nthreads=1, host="127.0.0.1", dashboard=False) as worker:
            enough = asyncio.Event()
            known.append((asyncio.get_running_loop(), enough))
            there.set()
            ends = [asyncio.ensure_future(end) for end in (worker.finished(), enough.wait())]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)

    known: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
    there = threading.Event()
    thread = threading.Thread(target=asyncio.run, args=(work(),), daemon=True)
    thread.start()
    assert there.wait(60)
    yield
    loop, enough = known[0]
    with suppress(RuntimeError):  # its loop is closed: it is gone already
        loop.call_soon_threadsafe(enough.set)
    thread.join(60)
    assert not thread.is_alive()


@pytest.fixture
def computed(monkeypatch):
    """Segments that are computed in this process from now on."""
    numbers: list[int] = []
    fill = harvests.fill

    def told(model, entry, n, *others):
        numbers.append(n)
        fill(model, entry, n, *others)

    monkeypatch.setattr(harvests, "fill", told)
    return numbers


def test_a_worker_that_is_killed_costs_its_tasks_and_one_that_comes_late_does_the_rest(
    asked, undisturbed, tmp_path, computed, capfd, monkeypatch
):
    """The only one: that nobody is left is said, and so is that somebody has come."""
    monkeypatch.setenv("MIZARR_PATIENCE", "60")
    monkeypatch.setattr(client, "_REPORT_AFTER", 1.0)
    command = [word for word in asked if word != "--quiet"]
    with (
        started(SCHEDULER) as (_, address),
        started(WORKER, address) as (first, _),
        ThreadPoolExecutor(1) as pool,
    ):
        driver = pool.submit(run, [*command, str(tmp_path), "--cluster", address])
        wait_for(5, tmp_path)
        kill(first)
        told = said(capfd, "no worker is left")
        assert f"no worker is left at {address}" in told
        assert f"start workers with `dask worker {address}`" in told
        there = committed(tmp_path)
        with worker_here(address):
            assert driver.result(120) == 0
    assert f"there are workers at {address} again" in capfd.readouterr().err
    assert left_in(tmp_path) == undisturbed
    assert len(computed) == len(set(computed)) == committed(tmp_path) - there


def said(capfd, words):
    """The line on stderr with these words, as soon as it is there."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        for line in capfd.readouterr().err.splitlines():
            if words in line:
                return line
        time.sleep(0.05)
    raise AssertionError(f"nobody said {words!r}")


def test_without_workers_a_harvest_ends_when_patience_does_and_the_next_one_goes_on(
    asked, undisturbed, tmp_path, capfd, monkeypatch
):
    monkeypatch.setenv("MIZARR_PATIENCE", "1.5")
    with (
        started(SCHEDULER) as (_, address),
        started(WORKER, address) as (only, _),
        ThreadPoolExecutor(1) as pool,
    ):
        driver = pool.submit(run, [*asked, str(tmp_path), "--cluster", address])
        wait_for(5, tmp_path)
        kill(only)
        killed, before = time.monotonic(), recorded(tmp_path)
        assert driver.result(60) == 2
        assert time.monotonic() - killed < 30
    told = capfd.readouterr().err
    assert told.startswith(f"mizarr: error: no worker is left at {address}, and none came within 1.5 seconds")
    assert "run the same command again, which goes on from what was committed" in told
    assert len(told.splitlines()) == 1
    assert list(mizarr.open_store(tmp_path, mode="r").records()) == []
    assert before.items() <= recorded(tmp_path).items()
    assert run([*asked, str(tmp_path)]) == 0
    assert before.items() <= recorded(tmp_path).items()
    assert left_in(tmp_path) == undisturbed


def test_without_its_scheduler_a_harvest_says_so_in_a_line_and_the_next_one_goes_on(
    asked, undisturbed, tmp_path, computed, capfd
):
    with started(SCHEDULER) as (scheduler, address), worker_here(address), ThreadPoolExecutor(1) as pool:
        driver = pool.submit(run, [*asked, str(tmp_path), "--cluster", address])
        wait_for(5, tmp_path)
        kill(scheduler)
        assert driver.result(120) == 2
    told = (
        f"mizarr: error: the Dask scheduler at {address} stopped, or somebody cancelled the tasks; run the "
    )
    told += "same command again, which goes on from what was committed"
    assert told in capfd.readouterr().err.splitlines()
    there, before = committed(tmp_path), recorded(tmp_path)
    assert list(mizarr.open_store(tmp_path, mode="r").records()) == []  # nothing is half published
    computed.clear()
    assert run([*asked, str(tmp_path)]) == 0
    assert len(computed) == len(set(computed)) == committed(tmp_path) - there > 0
    assert before.items() <= recorded(tmp_path).items()
    assert left_in(tmp_path) == undisturbed


def test_workers_of_this_machine_end_with_a_driver_that_is_killed(asked, undisturbed, tmp_path):
    """First a worker, in whose place another one is started, then the driver: no process is left."""
    command = [*asked, str(tmp_path), "--workers", "2"]
    driver = subprocess.Popen([sys.executable, "-c", MIZARR, *command], stderr=subprocess.PIPE, text=True)
    try:
        wait_for(3, tmp_path)
        workers = workers_of(driver)
        assert len(workers) == 2
        workers[0].kill()
        wait_for(committed(tmp_path) + 5, tmp_path)
        assert driver.poll() is None
        workers += workers_of(driver)
    finally:
        driver.kill()
        said = driver.communicate()[1]
    assert "distributed" not in said
    assert "Traceback" not in said
    assert psutil.wait_procs(workers, timeout=30)[1] == []
    before = recorded(tmp_path)
    assert list(mizarr.open_store(tmp_path, mode="r").records()) == []
    assert run([*asked, str(tmp_path)]) == 0
    assert before.items() <= recorded(tmp_path).items()
    assert left_in(tmp_path) == undisturbed


def workers_of(driver):
    """Its processes that compute."""
    children = psutil.Process(driver.pid).children()
    return [child for child in children if "spawn_main" in " ".join(child.cmdline())]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_whatever_is_killed_at_random_the_end_is_the_undisturbed_store(asked, undisturbed, tmp_path):
    """Three minutes of harvests by two workers, of which one, the driver or the scheduler is killed after
    every few segments; whatever store is finished in spite of it is compared, and another one begun."""
    drawn, counts = random.Random(3), collections.Counter()
    committed_before: dict[str, tuple[int, str]] = {}
    end = time.monotonic() + 180
    while time.monotonic() < end:
        root = tmp_path / str(counts["stores finished"])
        with ExitStack() as held:
            scheduler, address = held.enter_context(started(SCHEDULER))
            workers = [held.enter_context(started(WORKER, address))[0] for _ in range(2)]
            while scheduler.poll() is None and time.monotonic() < end:
                driver = held.enter_context(driven(*asked, str(root), "--cluster", address))
                while goes_on(driver, root, drawn.randrange(1, 20)):
                    what = drawn.choice(["worker", "worker", "driver", "scheduler"])
                    counts[f"{what} killed"] += 1
                    number = drawn.randrange(2)
                    kill({"worker": workers[number], "driver": driver, "scheduler": scheduler}[what])
                    if what != "worker":
                        break
                    workers[number] = held.enter_context(started(WORKER, address))[0]
                code = driver.wait(120)
                counts[f"exit code {code}"] += 1
                assert code in (0, 2, -9)
                found = recorded(root)
                assert committed_before.items() <= found.items() <= undisturbed[2].items()
                committed_before = found
                if code == 0:
                    assert left_in(root) == undisturbed
                    counts["stores finished"] += 1
                    root, committed_before = tmp_path / str(counts["stores finished"]), {}
    assert run([*asked, str(root)]) == 0
    assert left_in(root) == undisturbed
    print(", ".join(f"{name}: {count}" for name, count in sorted(counts.items())))
    happened = ("worker killed", "driver killed", "scheduler killed", "stores finished", "exit code 2")
    assert all(counts[name] for name in happened), counts


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("which", [(0, 1), (0, 2), (1, 2)], ids=["batch-layer", "batch-other", "layer-other"])
def test_two_harvests_at_once_of_one_run_end_as_if_one_had_followed_the_other(asked, tmp_path, which):
    """Of other hook points, batches, memory and order; killed now and then, and started again. Whoever reads
    meanwhile finds what is published whole."""
    said = [
        ["--hooks", HOOKS, *SIZED, "--order", "batch"],
        ["--hooks", "blocks.*.hook_mlp_out", "--hooks", HOOKS, "--memory", "300KB", "--order", "layer"],
        ["--hooks", "blocks.1.attn.hook_pattern", "--hooks", HOOKS, *SIZED, "--batch-tokens", "40"],
    ]
    commands = [[*asked[:3], *said[n], "--quiet", "--store"] for n in which]
    for command in commands:
        assert run([*command, str(tmp_path / "calm")]) == 0
    calm, root = left_in(tmp_path / "calm"), tmp_path / "rough"
    drawn, killed, over = random.Random(str(which)), 0, threading.Event()
    with ExitStack() as held, ThreadPoolExecutor(1) as pool:
        reader = pool.submit(published_while, over, root, calm[0])
        held.callback(over.set)
        running = {n: held.enter_context(driven(*command, str(root))) for n, command in enumerate(commands)}
        while running:
            for n, process in list(running.items()):
                if process.poll() is not None:
                    assert process.returncode == 0
                    del running[n]
                elif killed < 6 and goes_on(process, root, drawn.randrange(1, 30)):
                    kill(process)
                    killed += 1
                    running[n] = held.enter_context(driven(*commands[n], str(root)))
            time.sleep(0.01)
        over.set()
        assert reader.result(60) > 0
    assert killed > 2
    assert left_in(root) == calm


def published_while(over, root, contents):
    """Reads all that is published until it is over, comparing it with what it should be; how much it read."""
    seen: dict[str, bytes] = {}
    while not over.is_set():
        with suppress(StoreFormatError):  # not made yet
            store = mizarr.open_store(root, mode="r")
            for record in store.records():
                assert record.content == contents[record.key]
                values = store[record.key][record.label.partition("/")[0]].values.tobytes()
                assert seen.setdefault(record.key, values) == values
        time.sleep(0.05)
    return len(seen)


@contextmanager
def driven(*command):
    """A process of the command line, and no more of it afterwards."""
    process = subprocess.Popen(
        [sys.executable, "-c", MIZARR, *command], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        yield process
    finally:
        kill(process)


def goes_on(driver, root, segments):
    """Whether it is still at work when so many more segments are committed."""
    wanted = committed(root) + segments
    while driver.poll() is None and committed(root) < wanted:
        time.sleep(0.01)
    return driver.poll() is None
