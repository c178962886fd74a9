"""Memory: what some work takes beside what the kernel says, whoever else looks; and that it is in no key."""

from __future__ import annotations

import mmap
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

import mizarr
from mizarr.pipeline import memory as module
from mizarr.pipeline.memory import Memory, highest_peaks, memory
from mizarr.pipeline.progress import Progress
from tests.memory import PEAK

MB = 1 << 20


def mapped(size: int) -> mmap.mmap:
    """Memory that nobody held before: what an allocator hands out may be resident from an earlier test."""
    block = mmap.mmap(-1, size)
    block.write(b"x" * size)
    return block


pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


def printed(script: str) -> list[int]:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [int(number) for number in done.stdout.split()]


def test_the_peak_is_the_kernels_where_nothing_before_held_more():
    before, after, peak, kernel = printed(f"""
import mizarr
held = bytearray(b"x" * {50 * MB})
with mizarr.memory() as used:
    more = b"x" * {200 * MB}
    del more
    kept = b"x" * {20 * MB}
print(used.before.resident, used.after.resident, used.peak.resident, {PEAK})
""")
    assert abs(peak - kernel) < MB, "not sampled, but known"
    assert 199 * MB < peak - before < 215 * MB
    assert 19 * MB < after - before < 35 * MB


def test_the_peak_is_what_was_seen_where_something_before_held_more():
    before, peak, kernel = printed(f"""
import time, mizarr
larger = b"x" * {300 * MB}
del larger
with mizarr.memory() as used:
    more = b"x" * {100 * MB}
    time.sleep(0.3)
    del more
print(used.before.resident, used.peak.resident, {PEAK})
""")
    assert 99 * MB < peak - before < 115 * MB
    assert kernel - before > 250 * MB


def test_nothing_is_imported_to_be_asked():
    (found,) = printed("""
import sys, mizarr
with mizarr.memory() as used:
    pass
assert used.to_json()["device"] == {}
print(int("torch" in sys.modules))
""")
    assert found == 0


def looking() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "mizarr-memory"]


def ended() -> bool:
    deadline = time.monotonic() + 5
    while looking() and time.monotonic() < deadline:
        time.sleep(0.01)
    return not looking()


def test_one_thread_looks_for_all_and_ends_with_the_last():
    assert ended()
    with memory() as outer:
        with memory() as inner:
            assert len(looking()) == 1
        assert len(looking()) == 1
        block = mapped(30 * MB)
        time.sleep(3 * module.EVERY)
        assert outer.peak.resident is not None and inner.peak.resident is not None
        assert outer.peak.resident - inner.peak.resident > 25 * MB, "the inner one had ended"
        block.close()
    assert ended()
    with pytest.raises(ZeroDivisionError), memory():
        raise ZeroDivisionError
    assert ended()


def test_many_at_once_are_told_apart():
    found = []

    def work(size: int) -> None:
        with memory() as used:
            block = mapped(size * MB)
            time.sleep(0.1)
            block.close()
        found.append(used)

    threads = [threading.Thread(target=work, args=(size,)) for size in (5, 10, 20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3 and ended()
    for used in found:
        assert used.peak.resident >= max(used.before.resident, used.after.resident) - 4 * MB


def test_devices_are_told_as_torch_tells_them(monkeypatch):
    held = {"now": [100, 7], "most": [900, 7]}
    cuda = SimpleNamespace(
        is_initialized=lambda: True,
        device_count=lambda: 2,
        memory_allocated=lambda i: held["now"][i],
        max_memory_allocated=lambda i: held["most"][i],
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    with memory() as used:
        held["now"] = [400, 7]  # more than before, less than ever: seen, not known
        time.sleep(5 * module.EVERY)
        held["now"] = [150, 7]
    assert used.to_json()["device"] == {
        "cuda:0": {"before": 100, "after": 150, "peak": 400},
        "cuda:1": {"before": 7, "after": 7, "peak": 7},
    }
    with memory() as used:
        held["most"] = [5000, 7]  # for less long than anybody looks
    assert used.peak.device == {"cuda:0": 5000, "cuda:1": 7}
    cuda.is_initialized = lambda: False
    with memory() as used:
        pass
    assert used.peak.device == {}


def test_a_system_that_says_nothing_is_told_as_that(monkeypatch):
    monkeypatch.setattr(module, "resident", lambda: None)
    monkeypatch.setattr(module, "_most_resident", lambda: None)
    with memory() as used:
        pass
    assert used.to_json()["resident"] == {"before": None, "after": None, "peak": None}
    assert str(used) == "" and highest_peaks([{"memory": used.to_json()}]) == {}


def test_notes_tell_the_most_of_all():
    def note(peak: int, device: dict[str, int]) -> dict:
        told = {name: {"before": 0, "after": 0, "peak": most} for name, most in device.items()}
        return {"memory": {"resident": {"before": 1, "after": 1, "peak": peak}, "device": told}}

    notes = [note(5, {"cuda:0": 9}), {}, {"memory": None}, note(7, {"cuda:0": 3, "cuda:1": 1})]
    assert highest_peaks(notes) == {"resident": 7, "cuda:0": 9, "cuda:1": 1}
    assert highest_peaks([{"seconds": 1.0}]) == {}


def test_both_is_the_larger_of_each():
    one, other = Memory(5, {"a": 1, "b": 4}), Memory(None, {"a": 3})
    assert one.or_more(other) == Memory(5, {"a": 3, "b": 4}) == other.or_more(one)


def test_progress_says_what_is_held():
    task = Progress(quiet=True).task("capture", total=10, unit="tokens")
    task.advance(5)
    number = task.describe().rpartition(", ")[2].removesuffix(" MB").replace(",", "")
    now = Memory.now().resident
    assert now is not None and abs(float(number) * 1e6 - now) < 50e6


# -- in provenance, and in no key


def notes_of(store: mizarr.store.Store) -> list[dict]:
    return [note for record in store.records() for note in store.provenance(record)]


def test_every_computed_thing_notes_its_memory_and_no_key_or_content_knows(tmp_path):
    def computed(name: str) -> mizarr.store.Store:
        store = mizarr.open_store(tmp_path / name)
        done = mizarr.compute(
            "logit_lens", store=store, model="specimen", prompts=["The mother tongue of Euler is"]
        )
        mizarr.compute("generate", store=store, model="specimen", prompts=["The"], max_tokens=2)
        assert done.to_json()["peak_memory_bytes"]["resident"] > 10 * MB
        return store

    one = computed("one")
    ballast = mapped(100 * MB)  # another peak
    other = computed("other")
    ballast.close()
    for store in (one, other):
        noted = [note for note in notes_of(store) if "seconds" in note]
        assert noted
        for note in noted:
            told = note["memory"]["resident"]
            assert 0 < told["before"] <= told["peak"] and told["after"] <= told["peak"]
    assert highest_peaks(notes_of(other))["resident"] > highest_peaks(notes_of(one))["resident"] + 50 * MB
    kept = [
        sorted((record.key, record.content, record.label) for record in s.records()) for s in (one, other)
    ]
    assert kept[0] == kept[1]


def test_stored_runs_note_their_memory_and_read_ones_note_nothing_more(tmp_path):
    store, model = mizarr.open_store(tmp_path / "store"), mizarr.Model.from_pretrained("specimen")
    runs = [mizarr.Run("The mother tongue of Euler is"), mizarr.Run("The")]
    mizarr.run(model, runs, store=store)
    notes = notes_of(store)
    assert len(notes) == 2, "a group each, as their prompts differ in length"
    for note in notes:
        told = note["memory"]["resident"]
        assert 0 < told["before"] <= told["peak"] and note["seconds"] >= 0 and note["bytes_written"] > 0
    assert highest_peaks(notes)["resident"] > 10 * MB
    mizarr.run(model, runs, store=store)
    assert notes_of(store) == notes
