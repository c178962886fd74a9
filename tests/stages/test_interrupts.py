"""An interrupt at any line leaves no thread, lock, setting, claim or hidden file that a later call meets."""

from __future__ import annotations

import gc
import io
import logging
import random
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from threadpoolctl import threadpool_info

import mizarr
from mizarr.pipeline import ambient, context, memory, progress
from mizarr.pipeline.clusters import client
from mizarr.stages.features import export
from mizarr.stages.forward.capture import overlap, spool
from mizarr.stages.forward.models import download, source
from mizarr.stages.forward.models.model import Model
from mizarr.stages.graph.rows import threads
from mizarr.store import Store, open_store, repeated
from mizarr.store.files import LocalFolder, local
from mizarr.store.keys import ResultKey
from mizarr.store.upkeep import collect
from mizarr.workflows import build, holdings

from ..interrupts import AtLine, at_every_line, at_lines

KEY = ResultKey("stage", 1, {}, {})
RESULT = xr.Dataset({"x": ("i", np.arange(3.0))})


def no_thread_is_left(*names: str) -> None:
    """Within two seconds, as a thread may still be on its way out."""
    deadline = time.monotonic() + 2
    left: list[threading.Thread] = []
    while time.monotonic() < deadline:
        gc.collect()
        if not (left := [each for each in threading.enumerate() if each.name.startswith(names)]):
            return
        time.sleep(0.005)
    raise AssertionError(f"still there: {left}")


def each_interrupt(use: Callable[[], object], check: Callable[[], object], *modules: ModuleType) -> None:
    places = []
    for place in at_every_line(use, *modules, repeated):
        try:
            check()
        except BaseException as error:
            raise AssertionError(f"after an interrupt at {place}: {error}") from error
        places.append(place)
    assert len(places) >= 3
    use()
    check()


PACKAGE = Path(mizarr.__file__).parent
LOCKING = ("store", "pipeline", "stages/forward/capture", "stages/forward/runs")
"""Rooms that hold threads, locks, claims and files; a random line is drawn among theirs."""


def product(store: Store) -> None:
    """A capture and a workflow on top of it."""
    hooks = ["blocks.*.hook_resid_post", "blocks.1.attn.hook_pattern"]
    mizarr.capture("specimen", ["The capital of France is", "one two"], hooks, store=store, progress=False)
    build("logit_lens", model="specimen", prompts=("a b c",)).run(store, quiet=True)


def contents(store: Store) -> dict[str, str]:
    return {record.key: record.content for record in store.records()}


@pytest.mark.parametrize("number", [3, pytest.param(60, marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.timeout(600)
def test_a_run_interrupted_anywhere_goes_on_to_the_same_results(number, tmp_path):
    """Lines are drawn at random, anew each time; the message of a failure names the one."""
    files = {str(path) for room in LOCKING for path in (PACKAGE / room).rglob("*.py")}
    whole = open_store(tmp_path / "whole")
    product(whole)
    counted = AtLine(files, sys.maxsize)
    at_lines(counted, lambda: product(open_store(tmp_path / "counted")))
    lines = sys.maxsize - counted.left
    for trial in range(number):
        root = tmp_path / str(trial)
        tracer = AtLine(files, random.SystemRandom().randrange(1, lines))
        at_lines(tracer, lambda root=root: product(open_store(root)))
        no_thread_is_left("mizarr")
        again = threading.Thread(target=lambda root=root: product(open_store(root)), daemon=True)
        again.start()
        again.join(60)
        assert not again.is_alive(), f"the next call waits after an interrupt at {tracer.place}"
        store = open_store(root, mode="r")
        assert contents(store) == contents(whole), tracer.place
        assert store.verify() == [], tracer.place
        left = [path for path in root.rglob("*") if path.suffix == ".claim" or path.name.startswith(".")]
        assert not left and not list(root.glob("leases/*")), f"{left} after an interrupt at {tracer.place}"
        shutil.rmtree(root)


def test_of_a_lease(tmp_path, monkeypatch):
    monkeypatch.setattr(collect, "_LEASE_SECONDS", 0.04)
    store = open_store(tmp_path, durability="process")
    record = store.put_result(KEY, RESULT)

    def use() -> None:
        with store.lease(KEY):
            pass

    def check() -> None:
        no_thread_is_left("mizarr-lease")
        assert not list(store.files.list("leases")), "gc would leave the data alone"

    assert record.key == KEY.digest
    each_interrupt(use, check, collect)


def test_of_measuring_memory(monkeypatch):
    monkeypatch.setattr(memory, "EVERY", 0.01)

    def use() -> None:
        with memory.memory() as outer, memory.memory():
            time.sleep(0.02)
        assert outer.peak.resident

    def check() -> None:
        assert memory._WATCHED == [] and not memory._LOCK.locked()
        no_thread_is_left("mizarr-memory")

    each_interrupt(use, check, memory)


def test_of_threads_of_blas():
    before = [(each["filepath"], each["num_threads"]) for each in threadpool_info()]

    def use() -> None:
        with context.blas_threads(1), context.blas_threads(2):
            np.ones((8, 8)) @ np.ones((8, 8))

    def check() -> None:
        assert not context._requested and not context._original and not context._lock.locked()
        assert [(each["filepath"], each["num_threads"]) for each in threadpool_info()] == before

    each_interrupt(use, check, context)


def test_of_threads_of_torch():
    before = torch.get_num_threads()

    def use() -> None:
        with threads.one_thread_each():
            assert torch.get_num_threads() == 1

    def check() -> None:
        assert torch.get_num_threads() == before and not threads._LOCK.locked()

    each_interrupt(use, check, threads)


def test_of_settings_of_torch():
    kernels, products = torch.backends.cuda, torch.backends.cuda.matmul

    @ambient.plain_torch()
    def computed() -> None:
        assert torch.get_default_dtype() is torch.float32 and not torch.is_autocast_enabled("cpu")
        assert kernels.math_sdp_enabled() and products.allow_fp16_reduced_precision_reduction

    def use() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            computed()

    def check() -> None:
        assert torch.get_default_dtype() is torch.float64, "the caller's own"
        assert not kernels.math_sdp_enabled() and not products.allow_fp16_reduced_precision_reduction
        assert not torch.is_autocast_enabled("cpu")
        assert not getattr(ambient._inside, "is_plain", False)
        assert not ambient._process._inside and not ambient._process._lock.locked()

    try:
        torch.set_default_dtype(torch.float64)
        kernels.enable_math_sdp(False)
        products.allow_fp16_reduced_precision_reduction = False
        each_interrupt(use, check, ambient)
    finally:
        torch.set_default_dtype(torch.float32)
        kernels.enable_math_sdp(True)
        products.allow_fp16_reduced_precision_reduction = True


def test_of_weights_that_are_not_looked_at_again():
    found = source.ModelSource(Model.from_pretrained("specimen"))

    def use() -> None:
        with found.just_identified():
            pass

    def check() -> None:
        assert not found._is_just_identified, "an edit of the weights would go unnoticed"

    each_interrupt(use, check, source)


def test_of_bars(monkeypatch):
    screen = io.StringIO()
    screen.isatty = lambda: True
    monkeypatch.setenv("TERM", "xterm")
    out, err = sys.stdout, screen
    monkeypatch.setattr(sys, "stderr", screen)
    count = threading.active_count()

    def use() -> None:
        with progress.Progress() as bars:
            bars.task("reading", total=2).advance()

    def check() -> None:
        assert sys.stderr is err and sys.stdout is out
        deadline = time.monotonic() + 2
        while threading.active_count() > count and time.monotonic() < deadline:
            time.sleep(0.005)
        assert threading.active_count() == count
        assert screen.getvalue().count("\x1b[?25l") <= screen.getvalue().count("\x1b[?25h"), "the cursor"

    each_interrupt(use, check, progress)


def test_of_writers_of_segments():
    def use() -> None:
        writer = overlap.OverlappedWriter(
            lambda: SimpleNamespace(clear=lambda: None), lambda *_: None, buffers=2, threads=3
        )
        with writer:
            for job in range(4):
                writer.submit(writer.buffer(), job)

    each_interrupt(use, lambda: no_thread_is_left("mizarr-writer"), overlap)


def test_of_watching_a_download(tmp_path, monkeypatch):
    monkeypatch.setattr(download, "LOOK_EVERY", 0.01)
    bar = progress.Progress(quiet=True).task("fetching", total=1)

    def use() -> None:
        with download._progress_from_disk(tmp_path, bar):
            time.sleep(0.02)

    each_interrupt(use, lambda: no_thread_is_left("mizarr-fetch"), download)


def test_of_bars_of_the_hub_that_are_off():
    hub = pytest.importorskip("huggingface_hub.utils")

    def use() -> None:
        with download._quiet_hub():
            assert hub.are_progress_bars_disabled()

    def check() -> None:
        assert not hub.are_progress_bars_disabled()

    if not hub.are_progress_bars_disabled():
        each_interrupt(use, check, download)


def test_of_logs_that_are_off():
    loggers = [logging.getLogger(name) for name in client._LOGS]
    before = [logger.level for logger in loggers]

    def use() -> None:
        with client._without_logs():
            pass

    def check() -> None:
        assert [logger.level for logger in loggers] == before

    each_interrupt(use, check, client)


def test_of_warnings_of_transformers_that_are_off():
    pytest.importorskip("transformers")
    from transformers.utils import logging as told

    from mizarr.stages.forward.networks.bridge import reference

    before = told.get_verbosity(), told.is_progress_bar_enabled()

    def use() -> None:
        with reference.quiet():
            pass

    def check() -> None:
        assert (told.get_verbosity(), told.is_progress_bar_enabled()) == before

    each_interrupt(use, check, reference)


def test_of_a_new_folder(tmp_path):
    def use() -> None:
        with export._new_folder(tmp_path / "made") as place:
            (place / "file").write_text("a")
        (tmp_path / "made" / "file").unlink()
        (tmp_path / "made").rmdir()

    def check() -> None:
        for path in (tmp_path / "made").glob("*"):
            path.unlink()
        assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []

    each_interrupt(use, check, export)


@pytest.mark.filterwarnings(
    "ignore:unclosed file:ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)
def test_of_a_spool(tmp_path):
    spooled = spool.Spool(LocalFolder(tmp_path), "seg")

    def use() -> None:
        with spooled.file(0, 1, "these").written() as file:
            file.put({"a": torch.zeros(3)})

    def check() -> None:
        names = (
            {path.name for path in (tmp_path / "seg").glob(".*")} if (tmp_path / "seg").is_dir() else set()
        )
        assert names <= {".0.1.spool"} and not any(path.suffix.isdigit() for path in tmp_path.rglob("*"))

    each_interrupt(use, check, spool)


@pytest.mark.parametrize("durability", ["process", "disk"])
def test_of_files_of_a_store(durability, tmp_path):
    numbers = iter(range(10_000))
    store = open_store(tmp_path, durability=durability)

    def use() -> None:
        n = next(numbers)
        store.files.put_all({f"a/{n}.json": [b"one"], f"a/{n}": [b"two"]}, threads=2)
        store.put_result(ResultKey("stage", n, {}, {}), RESULT)

    def check() -> None:
        hidden = [path for path in tmp_path.rglob(".*") if path.is_file()]
        assert not hidden and store.verify() == []

    each_interrupt(use, check, local)


@pytest.mark.filterwarnings("ignore:Implicitly cleaning up:ResourceWarning")
def test_of_files_of_an_object_store(monkeypatch, tmp_path):
    pytest.importorskip("obstore")
    from mizarr.store.files import objects

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    store, numbers = open_store("memory://interrupted"), iter(range(10_000))

    def use() -> None:
        store.put_result(ResultKey("stage", next(numbers), {}, {}), RESULT)

    def check() -> None:
        assert list(tmp_path.iterdir()) == [] and store.verify() == []
        assert not store.files._lock.locked()

    each_interrupt(use, check, objects)


def test_of_looking_at_a_store(tmp_path):
    store = open_store(tmp_path, durability="process")
    store.put_result(KEY, RESULT)
    found: list[Any] = []

    def use() -> None:
        found[:] = [holdings.Holdings(store, refresh=0)]
        found[0].look()

    def check() -> None:
        if found:
            assert len(found[0].look(5).results) == 1
        no_thread_is_left("mizarr-look")

    each_interrupt(use, check, holdings)
