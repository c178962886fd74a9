"""Kill writers at random, again and again: nothing committed is lost, nothing is torn, the end is the same.

Two processes harvest one entry through the public API, under claims that expire so soon that they often do
the same work twice. They are killed (SIGKILL: no clean-up of any kind) and started again until nothing is
missing; the store must then be, file for file and byte for byte, that of a harvest nobody disturbed.
"""

import json
import random
import subprocess
import sys
import time
from pathlib import Path

from crash_writer import CELLS, open_entry, values

from mizarr.store.digest import file_digest

WRITER = Path(__file__).with_name("crash_writer.py")
KILLS = 20


def start(root, seed):
    return subprocess.Popen([sys.executable, str(WRITER), str(root), seed], stdout=subprocess.PIPE)


def shards_of(entry):
    """Every visible shard of an entry: path relative to it -> size and digest."""
    paths = {}
    for variable in sorted({variable for variable, _ in CELLS}):
        for name in entry.folder.list(f"{entry.path}/{variable}/c"):
            file = entry.folder.path(name)
            paths[name.removeprefix(f"{entry.path}/")] = (file.stat().st_size, file_digest(file))
    return paths


def recorded(entry):
    """What the segment records on disk say: path of a shard -> its size and digest."""
    names = [name for name in entry.folder.list(f"{entry.path}/seg") if name.endswith(".json")]
    return {
        path: tuple(file) for n in names for path, file in json.loads(entry.folder.get(n))["files"].items()
    }


def manifests_of(entry):
    names = entry.folder.list(f"{entry.path}/manifest")
    return {Path(name).name: json.loads(entry.folder.get(name)) for name in names}


def kill_two_writers(root, rng, label):
    """Start two writers, kill both within a few commits; returns how many were still at it."""
    writers = [start(root, f"{label}.{i}") for i in range(2)]
    for writer in writers:
        if rng.random() < 0.8:  # mostly wait for a first commit, else there is little to tear
            writer.stdout.readline()
    killed = 0
    for writer in rng.sample(writers, 2):
        time.sleep(rng.random() * 0.03)
        killed += writer.poll() is None
        writer.kill()
    for writer in writers:
        writer.communicate()
    return killed


def check_finished(entry, undisturbed):
    """Finish the harvest of an entry; it must be the undisturbed one."""
    last = start(entry.folder.root, "last")
    last.communicate(timeout=60)
    assert last.returncode == 0
    assert entry.missing(CELLS) == {}
    assert shards_of(entry) == shards_of(undisturbed)
    assert manifests_of(entry) == manifests_of(undisturbed)
    assert len(manifests_of(entry)) == len(CELLS)
    for variable, layer in CELLS:
        assert entry.content(variable, layer) == undisturbed.content(variable, layer)
        for n in range(len(entry.segments)):
            assert (entry.shard(variable, layer, n) == values(entry, (variable, layer), n)).all()


def test_killed_writers_lose_nothing_and_end_where_undisturbed_ones_do(undisturbed, tmp_path):
    rng, expected = random.Random(0), shards_of(undisturbed)
    kills = stores = rounds = 0
    committed = {}
    while kills < KILLS:
        root = tmp_path / str(stores)
        kills += kill_two_writers(root, rng, rounds)
        rounds += 1
        entry = open_entry(root)
        found = recorded(entry)
        assert committed.items() <= found.items()  # what was committed is neither lost nor changed
        assert found.items() <= expected.items()
        committed = found
        assert shards_of(entry).items() <= expected.items()  # whole, recorded or not
        if not entry.missing(CELLS):  # done in spite of it all: kill another
            check_finished(entry, undisturbed)
            stores, committed = stores + 1, {}
        else:
            assert [entry.record(*cell) for cell in CELLS] == [None] * len(CELLS)
    check_finished(open_entry(tmp_path / str(stores)), undisturbed)
    left = [path for path in tmp_path.rglob(".*") if path.is_file()]  # of the dead; for gc
    print(f"{kills} kills in {rounds} rounds, {stores + 1} stores, {len(left)} temporary files left")


def test_two_undisturbed_writers_share_the_work_and_agree(undisturbed, tmp_path):
    writers = [start(tmp_path, f"both.{i}") for i in range(2)]
    done = [writer.communicate(timeout=60)[0].split() for writer in writers]
    assert [writer.returncode for writer in writers] == [0, 0]
    assert set(map(int, done[0] + done[1])) == set(range(len(undisturbed.segments)))
    assert shards_of(open_entry(tmp_path)) == shards_of(undisturbed)
    assert manifests_of(open_entry(tmp_path)) == manifests_of(undisturbed)
