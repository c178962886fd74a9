"""An interrupt at any line of a claim leaves nothing that others wait for, and no thread that goes on."""

from __future__ import annotations

import gc
import sys
import threading
import time
from types import FrameType
from typing import Any

import pytest

from mizarr.store.files.local import LocalFolder
from mizarr.store.runs import claims
from mizarr.store.runs.claims import Claim

LINES = 400
"""More lines than a claim runs through."""


class AtLine:
    """Raises KeyboardInterrupt at the n-th line that a module runs."""

    def __init__(self, file: str, number: int) -> None:
        self.file, self.left = file, number
        self.place = ""

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename != self.file:
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                self.place = f"{frame.f_code.co_name}:{frame.f_lineno}"
                sys.settrace(None)
                raise KeyboardInterrupt
        return self


def use(claim: Claim) -> None:
    with claim as mine:
        assert mine


def interrupted(folder: LocalFolder, number: int) -> str:
    """Where the interrupt came; "" where the claim was over before."""
    tracer = AtLine(claims.__file__, number)
    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        use(Claim(folder, "run/seg/0.claim", ttl=0.3))
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return tracer.place


def test_an_interrupt_at_any_line_leaves_the_claim_to_others(tmp_path):
    folder = LocalFolder(tmp_path, durability="process")
    places = []
    for number in range(1, LINES):
        place = interrupted(folder, number)
        if not place:
            break
        places.append(place)
        gc.collect()
        deadline = time.monotonic() + 2
        mine = False
        while not mine and time.monotonic() < deadline:
            other = Claim(folder, "run/seg/0.claim", ttl=0.3)
            mine = other.acquire()
            time.sleep(0 if mine else 0.05)
        assert mine, f"others wait after an interrupt at {place}"
        other.release()
        deadline = time.monotonic() + 2
        while time.monotonic() < deadline and any(t.name == "mizarr-claim" for t in threading.enumerate()):
            time.sleep(0.02)
        left = [thread for thread in threading.enumerate() if thread.name == "mizarr-claim"]
        assert not left, f"a thread goes on after an interrupt at {place}"
    assert len({place.partition(":")[0] for place in places}) >= 4 and not place


@pytest.mark.parametrize("times", [1, 2])
def test_a_claim_is_released_once_however_often_it_is_asked(tmp_path, times):
    folder = LocalFolder(tmp_path, durability="process")
    claim = Claim(folder, "a/0.claim")
    assert claim.acquire()
    for _ in range(times):
        claim.release()
    assert Claim(folder, "a/0.claim").acquire()
