"""Claims that nobody can hold any more make nobody wait; those of the living do."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mizarr.store.files import LocalFolder
from mizarr.store.runs.claims import SegmentClaim

NAME = "runs/x/seg/0.claim"


@pytest.fixture
def folder(tmp_path: Path) -> LocalFolder:
    return LocalFolder(tmp_path, "process")


@pytest.fixture
def zombie() -> Iterator[int]:
    """A process that has ended and whose end nobody has asked for."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    until = time.monotonic() + 30
    while not is_ended(process.pid) and time.monotonic() < until:
        time.sleep(0.02)
    yield process.pid
    process.wait()


def is_ended(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def test_a_claim_is_taken_once_and_another_process_waits_for_it(folder):
    first, second = SegmentClaim(folder, NAME), SegmentClaim(folder, NAME)
    assert first.acquire() and not second.acquire() and not first.acquire()
    first.release()
    with second as mine:
        assert mine and not first.acquire()
    assert folder.get(NAME) is None


def test_that_of_a_living_process_is_waited_for(folder):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        folder.mark(NAME, f"{platform.node()} {process.pid} abcd".encode())
        assert not SegmentClaim(folder, NAME).acquire()
        process.kill()
    with SegmentClaim(folder, NAME) as mine:
        assert mine


def test_that_of_this_process_interrupted_before_it_knew_is_not(folder):
    folder.mark(NAME, f"{platform.node()} {os.getpid()} abcd".encode())
    with SegmentClaim(folder, NAME) as mine:
        assert mine


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_that_of_a_process_whose_end_nobody_asked_for_is_not(folder, zombie: int):
    folder.mark(NAME, f"{platform.node()} {zombie} abcd".encode())
    with SegmentClaim(folder, NAME) as mine:
        assert mine


def test_one_without_a_name_is_waited_for_a_moment(folder):
    folder.mark(NAME, b"")
    assert not SegmentClaim(folder, NAME).acquire()
    before = time.time() - 3
    os.utime(folder.path(NAME), (before, before))
    with SegmentClaim(folder, NAME) as mine:
        assert mine


@pytest.mark.parametrize("process", [1, None], ids=["elsewhere", "here"])
def test_a_name_that_says_nothing_of_this_machine_is_waited_for(folder, process: int | None):
    folder.mark(NAME, f"elsewhere {process or os.getpid()} abcd".encode())
    assert not SegmentClaim(folder, NAME).acquire()
    before = time.time() - 61
    os.utime(folder.path(NAME), (before, before))
    with SegmentClaim(folder, NAME) as mine:
        assert mine
