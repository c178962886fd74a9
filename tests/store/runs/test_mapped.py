"""Shards of any number of runs are mapped within one bound of the process, and no oftener than before."""

import gc
import random
import resource
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from mizarr.store import PackedTokens, RunKey
from mizarr.store.files import LocalFolder
from mizarr.store.runs import mapped
from mizarr.store.runs.entries import ArraySpec, Entry
from tests.memory import printed

EMBED = ArraySpec("embed", "hook_embed", ("token", "hidden"), {"hidden": 2}, "float32", None)
SHARDS = 40


def stored(folder, number, shards=SHARDS):
    """A run of one token a shard, whose values are the number of the run and of the shard."""
    tokens = PackedTokens.from_lists([[number + 1] * shards])
    entry = Entry.create(folder, RunKey("m", tokens.digest, "none"), tokens, [EMBED], segment_tokens=1)
    for n in range(shards):
        entry.write_segment(n, {("embed", None): np.array([[number, n]], "f4")})
    return entry


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Ten runs, as stored: each reader opens its own."""
    folder = LocalFolder(tmp_path_factory.mktemp("runs"), "process")
    return [stored(folder, number) for number in range(10)]


def opened_anew(runs):
    return [Entry.load(entry.folder, entry.path, entry.tokens) for entry in runs]


@pytest.fixture
def opens(monkeypatch):
    """Names of the files that are mapped from now on."""
    names: list[str] = []
    plain = LocalFolder.mapped

    def told(self, name):
        names.append(name)
        return plain(self, name)

    monkeypatch.setattr(LocalFolder, "mapped", told)
    return names


def maps_of(runs):
    """What this process has mapped of their store."""
    root = str(runs[0].folder.root)
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if root in line]


MANY_RUNS = """
import resource, sys
from pathlib import Path

import numpy as np

from mizarr.store import PackedTokens
from mizarr.store.files import LocalFolder
from mizarr.store.runs.entries import Entry

folder = LocalFolder(Path(sys.argv[1]))
runs = [
    Entry.load(folder, path, PackedTokens.from_lists([[number + 1] * 40]))
    for number, path in enumerate(sys.argv[2:])
]
np.asarray(runs[0].shard("embed", None, 0))  # whatever is imported late
held = len(list(Path("/dev/fd").iterdir()))
# So few that a quarter of them is left of it.
resource.setrlimit(resource.RLIMIT_NOFILE, (2 * held + 32, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
total = sum(int(run.shard("embed", None, n)[0] @ [1000, 1]) for n in range(40) for run in runs)
print(total)
"""


def test_a_process_reads_more_shards_of_many_runs_than_files_may_be_open(runs):
    """400 shards with room for less than 100; the numbers are those of the arithmetic."""
    expected = sum(1000 * number + n for number in range(len(runs)) for n in range(SHARDS))
    assert printed(MANY_RUNS, str(runs[0].folder.root), *(entry.path for entry in runs)) == expected


def test_shards_within_the_bound_are_opened_once(runs, opens, monkeypatch):
    """Two runs, scanned in turns three times."""
    monkeypatch.setattr(mapped, "max_mapped", lambda: 2 * SHARDS)
    two = opened_anew(runs[:2])
    for _ in range(3):
        for n in range(SHARDS):
            for number, entry in enumerate(two):
                assert entry.shard("embed", None, n)[0].tolist() == [number, n]
    assert len(opens) == len(set(opens)) == 2 * SHARDS


def test_of_all_runs_those_read_lately_stay_mapped(runs, opens, monkeypatch):
    monkeypatch.setattr(mapped, "max_mapped", lambda: 50)
    some = opened_anew(runs)
    for entry in some:
        for n in range(SHARDS):
            entry.shard("embed", None, n)
    assert len(maps_of(runs)) == 50
    opens.clear()
    for entry, n in [(some[-1], 7), (some[-2], SHARDS - 1), (some[-2], SHARDS - 10)]:
        entry.shard("embed", None, n)
    assert opens == []
    some[-2].shard("embed", None, SHARDS - 11)  # the fifty-first
    assert len(opens) == 1
    assert len(maps_of(runs)) == 50


def test_rows_in_hand_outlive_their_place(runs, monkeypatch):
    monkeypatch.setattr(mapped, "max_mapped", lambda: 1)
    some = opened_anew(runs[:4])
    held = [entry.shard("embed", None, 3) for entry in some]
    assert [rows[:].tolist() for rows in held] == [[[number, 3]] for number in range(4)]
    assert len(maps_of(runs)) == 4
    del held
    assert len(maps_of(runs)) == 1


def test_runs_that_are_gone_take_no_room(runs, opens, monkeypatch):
    monkeypatch.setattr(mapped, "max_mapped", lambda: SHARDS + 5)
    gc.freeze()  # what other tests left behind is not looked through at every turn
    (kept,) = opened_anew(runs[:1])
    for n in range(SHARDS):
        kept.shard("embed", None, n)
    for run in runs[1:]:
        for entry in opened_anew([run]):
            entry.shard("embed", None, 0)[:]
        del entry
        gc.collect()
    opens.clear()
    for n in range(SHARDS):
        kept.shard("embed", None, n)
    assert opens == []


def test_threads_that_read_all_runs_at_once_read_what_is_stored(runs, monkeypatch):
    """Hardly any shard stays mapped between two reads of it."""
    monkeypatch.setattr(mapped, "max_mapped", lambda: 5)
    some = opened_anew(runs)
    switches = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)

    def read(seed):
        drawn = random.Random(seed)
        places = [(drawn.randrange(len(some)), drawn.randrange(SHARDS)) for _ in range(400)]
        return [
            place
            for place in places
            if some[place[0]].shard("embed", None, place[1])[0].tolist() != list(place)
        ]

    try:
        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(read, range(8))) == [[]] * 8
    finally:
        sys.setswitchinterval(switches)
    assert len(maps_of(runs)) <= 5


@pytest.mark.parametrize(("files", "most"), [(1024, 256), (40, 10), (2, 1), (1 << 20, 4096)])
def test_the_bound_is_a_quarter_of_the_files_a_process_may_have_open(files, most, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (files, 1 << 20))
    assert mapped.max_mapped() == most


def test_without_a_limit_of_files_there_still_is_a_bound(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY,) * 2)
    assert mapped.max_mapped() == mapped.MAX_MAPPED
