"""An interrupt at any line of a claim leaves nothing that others wait for, and no thread that goes on."""

from __future__ import annotations

import gc
import threading
import time

import pytest

from mizarr.store import repeated
from mizarr.store.files.local import LocalFolder
from mizarr.store.runs import claims
from mizarr.store.runs.claims import SegmentClaim

from ..interrupts import at_every_line


def use(claim: SegmentClaim) -> None:
    with claim as mine:
        assert mine


def test_an_interrupt_at_any_line_leaves_the_claim_to_others(tmp_path):
    folder = LocalFolder(tmp_path, durability="process")
    places = []
    for place in at_every_line(
        lambda: use(SegmentClaim(folder, "run/seg/0.claim", ttl=0.3)), claims, repeated
    ):
        places.append(place)
        gc.collect()
        deadline = time.monotonic() + 2
        mine = False
        while not mine and time.monotonic() < deadline:
            other = SegmentClaim(folder, "run/seg/0.claim", ttl=0.3)
            mine = other.acquire()
            time.sleep(0 if mine else 0.05)
        assert mine, f"others wait after an interrupt at {place}"
        other.release()
        deadline = time.monotonic() + 2
        while time.monotonic() < deadline and any(t.name == "mizarr-claim" for t in threading.enumerate()):
            time.sleep(0.02)
        left = [thread for thread in threading.enumerate() if thread.name == "mizarr-claim"]
        assert not left, f"a thread goes on after an interrupt at {place}"
    functions = {place.split(":")[1] for place in places}
    assert functions >= {"acquire", "release", "__enter__", "__exit__"}


@pytest.mark.parametrize("times", [1, 2])
def test_a_claim_is_released_once_however_often_it_is_asked(tmp_path, times):
    folder = LocalFolder(tmp_path, durability="process")
    claim = SegmentClaim(folder, "a/0.claim")
    assert claim.acquire()
    for _ in range(times):
        claim.release()
    assert SegmentClaim(folder, "a/0.claim").acquire()
