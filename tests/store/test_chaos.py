"""Everything goes wrong at once, and the store is the one nobody disturbed: kills, a full disk, clocks that
disagree, a server that fails, two harvests of one key, and a reader that looks on all the while.

How often each of it happened is counted and printed; what did not happen proves nothing.
"""

from __future__ import annotations

import collections
import json
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from crash_writer import CELLS, entry_in

from mizarr.store import open_store
from mizarr.store.files import open_folder

WRITER = Path(__file__).with_name("chaos_writer.py")
SKEW = 600  # seconds: many times as long as a claim lasts
LIMIT = 100_000  # bytes of a file: enough for records and patterns, too few for a shard of states


def start(address, seed, *, skew=0, limit=0, pause=0):
    command = [sys.executable, str(WRITER), str(address), seed, *map(str, (skew, limit, pause))]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def shards_of(entry):
    """Every visible shard: path relative to the entry -> (size, digest)."""
    names = [
        name
        for variable in sorted({variable for variable, _ in CELLS})
        for name in entry.folder.list(f"{entry.path}/{variable}/c")
    ]
    return {name.removeprefix(f"{entry.path}/"): entry.folder.measure(name) for name in names}


def recorded(entry):
    """What segment records say is committed: path of a shard -> (size, digest)."""
    names = [name for name in entry.folder.list(f"{entry.path}/seg") if name.endswith(".json")]
    return {
        path: tuple(file) for n in names for path, file in json.loads(entry.folder.get(n))["files"].items()
    }


class Reader:
    """Reads what is committed, again and again, while writers come and go."""

    def __init__(self, address, expected):
        self.address, self.expected = address, expected
        self.scans = self.shards = 0
        self.wrong: list[str] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)

    def _read(self):
        seen: dict[str, tuple[int, str]] = {}
        while not self._stop.is_set():
            entry = entry_in(open_folder(self.address))
            found = recorded(entry)
            if not seen.items() <= found.items():
                self.wrong.append(f"lost {sorted(seen.keys() - found.keys())}")
            if not found.items() <= self.expected.items():
                self.wrong.append("a record says what nobody wrote")
            for path in random.sample(sorted(found), min(8, len(found))):
                if entry.folder.measure(f"{entry.path}/{path}") != found[path]:
                    self.wrong.append(f"{path} is not what is recorded")
                self.shards += 1
            seen, self.scans = found, self.scans + 1
            time.sleep(0.02)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()


def claimed(address):
    """Whether anybody says that he computes a segment."""
    entry = entry_in(open_folder(address))
    return any(name.endswith(".claim") for name in entry.folder.children(f"{entry.path}/seg"))


def disturb(address, rng):
    """Twice two harvests at once, one with a fast clock, then one with too little room; killed, or left to
    fail.
    """
    counts: collections.Counter[str] = collections.Counter()
    for wrong in ({"skew": SKEW}, {"limit": LIMIT}):
        writers = [start(address, f"{rng.random()}", pause=30 if "skew" in wrong else 0)]
        while "skew" in wrong and not claimed(address):
            time.sleep(0.01)  # or the other one, if it is quicker, finds nothing to steal
        writers.append(start(address, f"{rng.random()}", **wrong))
        counts["two at once"] += 1
        counts["at unfinished work"] += bool(entry_in(open_folder(address)).missing(CELLS))
        if "limit" in wrong:
            counts["disk full"] += writers[1].wait(timeout=60) == 3
        else:
            for line in iter(writers[1].stdout.readline, ""):  # until it took what is not its own
                if line == "stole\n":
                    counts["claims stolen"] += 1
                    break
        for writer in writers:
            time.sleep(rng.random() * 0.05)
            counts["killed"] += writer.poll() is None
            writer.kill()
            counts["claims stolen"] += writer.communicate()[0].count("stole\n")
    return counts


def check_finished(address, undisturbed, committed):
    """A last harvest; then the store must be the undisturbed one."""
    last = start(address, "last")
    last.communicate(timeout=120)
    assert last.returncode == 0
    entry = entry_in(open_folder(address))
    expected = shards_of(undisturbed)
    assert committed.items() <= recorded(entry).items()
    assert shards_of(entry) == expected
    for cell in CELLS:
        assert entry.content(*cell) == undisturbed.content(*cell)
    assert open_store(address).verify() == []


def chaos(address, undisturbed, rng):
    """Of a new store, which is finished in the end: how often what happened to it."""
    open_store(address)  # makes it one
    with Reader(address, shards_of(undisturbed)) as reader:
        counts = disturb(address, rng)
        committed = recorded(entry_in(open_folder(address)))
        check_finished(address, undisturbed, committed)
    assert reader.wrong == []
    counts.update({"scans": reader.scans, "shards read": reader.shards, "stores finished": 1})
    counts["shards committed before the last harvest"] += len(committed)
    return counts


def tell(counts):
    """Print how often each of it happened; all of it must have."""
    print(", ".join(f"{name}: {count}" for name, count in counts.items()))
    assert all(counts.values()), counts


@pytest.mark.parametrize("rounds", [1, pytest.param(20, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_disturbed_folders_end_as_the_undisturbed_one(undisturbed, tmp_path, rounds):
    """A new store each round, so that no round finds its work done."""
    rng, counts = random.Random(5), collections.Counter()
    for number in range(rounds):
        counts.update(chaos(tmp_path / str(number), undisturbed, rng))
    tell(counts)
    assert counts["at unfinished work"] == counts["two at once"] == 2 * rounds
    assert counts["stores finished"] == counts["disk full"] == rounds


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["s3", "az", "gs"])
def test_a_disturbed_bucket_ends_as_the_undisturbed_folder(undisturbed, provider, speaks, scheme):
    """The same against a server that fails one request in twelve, in five ways."""
    server = provider(scheme)
    from object_servers import Proxy

    dice, lock = random.Random(7), threading.Lock()

    def fault(method, path):
        with lock:
            return dice.choice(["503", "lost", "before", "half"]) if dice.random() < 1 / 12 else None

    with Proxy(server.endpoint) as proxy:
        speaks(server, proxy.endpoint)
        address = server.new_address()
        open_store(address)
        proxy.fault = fault
        with Reader(address, shards_of(undisturbed)) as reader:
            counts: collections.Counter[str] = collections.Counter()
            for number in range(4):
                writers = [start(address, f"{number}.{i}", skew=i * SKEW, pause=2 - i) for i in range(2)]
                writers[1].stdout.readline()
                time.sleep(2 * dice.random())
                for writer in writers:
                    counts["killed"] += writer.poll() is None
                    writer.kill()
                    counts["claims stolen"] += writer.communicate()[0].count("stole\n")
            committed = recorded(entry_in(open_folder(address)))
            check_finished(address, undisturbed, committed)
        assert reader.wrong == []
        faults = collections.Counter(what for _, _, what in proxy.seen if what)
    tell(counts | faults | {"scans": reader.scans, "shards read": reader.shards, "requests": len(proxy.seen)})
