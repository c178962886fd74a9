"""The caches remember, and forget without harm."""

import hashlib
import os
import pickle
import sqlite3
import subprocess
import sys
import time

import pytest

from mizarr.store.digest import file_digest
from mizarr.store.index import FileDigests, StoreIndex, file_digests, layout_verdicts


@pytest.fixture
def path(tmp_path):
    return tmp_path / "index.sqlite"


def test_prompts_are_found_by_family_with_their_rows(path):
    index = StoreIndex(path)
    index.add_prompts("f", "data/1", ["a", "b", "c"])
    index.add_prompts("f", "data/2", ["c"])
    index.add_prompts("other", "data/3", ["a"])
    assert index.find_prompts("f", ["c", "a", "x"]) == {"data/1": {"c": 2, "a": 0}, "data/2": {"c": 0}}
    index.forget("data/1")
    assert StoreIndex(path).find_prompts("f", ["c", "a"]) == {"data/2": {"c": 0}}


def test_thousands_of_prompts_are_asked_for_at_once(path):
    index = StoreIndex(path)
    names = [str(i) for i in range(2500)]
    index.add_prompts("f", "d", names)
    assert index.find_prompts("f", names)["d"] == {name: i for i, name in enumerate(names)}


def test_last_use_is_remembered(path):
    index = StoreIndex(path)
    before = time.time()
    index.touch("d")
    assert before <= StoreIndex(path).last_used()["d"] <= time.time()


def test_a_read_only_index_answers_and_writes_nothing(path):
    reader = StoreIndex(path, read_only=True)
    reader.touch("d")
    reader.add_prompts("f", "d", ["a"])
    assert reader.find_prompts("f", ["a"]) == {} and not path.exists()
    StoreIndex(path).add_prompts("f", "d", ["a"])
    assert reader.find_prompts("f", ["a"]) == {"d": {"a": 0}}
    assert [p.name for p in path.parent.iterdir()] == ["index.sqlite"]


def test_what_nobody_wrote_is_not_believed(path):
    """Rows of any kind, as SQLite keeps whatever it is given."""
    index = StoreIndex(path)
    index.add_prompts("f", "data/1", ["a"])
    index.touch("data/1")
    index.close()
    with sqlite3.connect(path) as db:
        for data, row in [(b"\xff", 0), ("data/\0", 0), ("data/2", "x"), ("data/3", b"x"), (None, 1.5)]:
            db.execute("INSERT INTO prompts VALUES ('f', 'a', ?, ?)", (data or "data/4", row))
        for data, at in [("data/2", "x"), ("data/3", b"x"), ("data/4", None), ("data/5", 1e300)]:
            db.execute("INSERT INTO uses VALUES (?, ?)", (data, at))
    db.close()
    assert index.find_prompts("f", ["a"]) == {"data/1": {"a": 0}}
    assert sorted(index.last_used()) == ["data/1", "data/5"]
    assert index.last_used()["data/5"] <= time.time()


def test_a_damaged_index_reads_as_empty_and_starts_afresh(path):
    path.write_bytes(b"this is not a database at all" * 100)
    index = StoreIndex(path)
    assert index.find_prompts("f", ["a"]) == {} and index.last_used() == {}
    index.add_prompts("f", "d", ["a"])
    assert StoreIndex(path).find_prompts("f", ["a"]) == {"d": {"a": 0}}


def test_an_index_that_cannot_be_written_is_no_error(tmp_path):
    index = StoreIndex(tmp_path / "missing" / "index.sqlite")
    index.touch("d")
    assert index.last_used() == {}


def test_a_deleted_index_is_made_anew(path):
    index = StoreIndex(path)
    index.add_prompts("f", "d", ["a"])
    index.close()
    path.unlink()
    index.add_prompts("f", "e", ["b"])
    assert index.find_prompts("f", ["a", "b"]) == {"e": {"b": 0}}


def test_an_index_travels_to_another_process_as_its_path(path):
    StoreIndex(path).add_prompts("f", "d", ["a"])
    assert pickle.loads(pickle.dumps(StoreIndex(path))).find_prompts("f", ["a"]) == {"d": {"a": 0}}


def test_an_index_works_on_after_a_fork(path):
    index = StoreIndex(path)
    index.add_prompts("f", "d", ["a"])
    script = f"""
import os
from pathlib import Path
from mizarr.store.index import StoreIndex
index = StoreIndex(Path({str(path)!r}))
index.add_prompts("f", "parent", ["p"])
child = os.fork()
if child == 0:
    index.add_prompts("f", "child", ["c"])
    os._exit(0)
os.waitpid(child, 0)
print(sorted(index.find_prompts("f", ["a", "c", "p"])))
"""
    out = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert out.stdout.strip() == "['child', 'd', 'parent']"


def test_processes_write_one_index_at_once(path):
    script = """
import sys
from pathlib import Path
from mizarr.store.index import StoreIndex
index = StoreIndex(Path(sys.argv[1]))
for i in range(50):
    index.add_prompts("f", f"{sys.argv[2]}-{i}", ["a"])
"""
    runs = [subprocess.Popen([sys.executable, "-c", script, str(path), str(n)]) for n in range(3)]
    assert [run.wait() for run in runs] == [0, 0, 0]
    assert len(StoreIndex(path).find_prompts("f", ["a"])) == 150


def test_a_file_is_digested_once_and_again_when_it_changes(tmp_path, monkeypatch):
    file, memo = tmp_path / "w.safetensors", FileDigests(tmp_path / "memo.sqlite")
    calls = []
    real = hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", lambda *a: calls.append(1) or real(*a))
    file.write_bytes(b"weights")
    fresh = memo.digest(file)
    assert fresh == "sha256:" + hashlib.sha256(b"weights").hexdigest()
    monkeypatch.setattr("mizarr.store.index.time.time", lambda real=time.time: real() + 10)
    assert memo.digest(file) == memo.digest(file) == fresh
    assert len(calls) == 2  # the first was too fresh to be remembered
    link = tmp_path / "link"
    link.symlink_to(file)
    assert memo.digest(link) == fresh and len(calls) == 2
    file.write_bytes(b"weightz")
    assert memo.digest(file) == "sha256:" + hashlib.sha256(b"weightz").hexdigest()


def test_a_file_replaced_with_its_old_times_is_noticed(tmp_path, monkeypatch):
    file, memo = tmp_path / "w", FileDigests(tmp_path / "memo.sqlite")
    file.write_bytes(b"aaaa")
    monkeypatch.setattr("mizarr.store.index.time.time", lambda real=time.time: real() + 10)
    first = memo.digest(file)
    stat = file.stat()
    time.sleep(0.02)
    file.write_bytes(b"bbbb")
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert memo.digest(file) != first


def test_the_users_memo_lies_where_mizarr_cache_says(tmp_path, monkeypatch):
    monkeypatch.setenv("MIZARR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("mizarr.store.index.time.time", lambda real=time.time: real() + 10)
    (tmp_path / "w").write_bytes(b"x")
    file_digests().digest(tmp_path / "w")
    assert (tmp_path / "cache" / "digests.sqlite").exists()


def test_a_verdict_is_kept_by_case_and_witness(tmp_path, monkeypatch):
    monkeypatch.setenv("MIZARR_CACHE", str(tmp_path))
    held = layout_verdicts()
    held.add("case", "one", "yes")
    held.add("case", "two", "no")
    held.add("case", "one", "maybe")
    assert layout_verdicts().find("case") == {"one": "maybe", "two": "no"}
    assert layout_verdicts().find("other") == {}


def test_a_file_written_over_with_its_old_stamp_is_digested_again(tmp_path, monkeypatch):
    """As on a file system whose ctime is the time of creation, or after a copy that keeps the times."""
    path = tmp_path / "weights"
    path.write_bytes(bytes(1 << 20))
    digests = FileDigests(None)
    monkeypatch.setattr("mizarr.store.files.stamps._SETTLED_SECONDS", -1)
    monkeypatch.setattr("mizarr.store.index.stamp", lambda stat: (1, 2, stat.st_size, 4, 5))
    first = digests.digest(path)
    assert digests.digest(path) == first == file_digest(path)
    path.write_bytes(bytes(1 << 19) + b"\1" * (1 << 19))
    assert digests.digest(path) == file_digest(path) != first


def test_a_file_from_the_future_is_never_remembered(tmp_path, monkeypatch):
    path = tmp_path / "weights"
    path.write_bytes(b"abc")
    future = time.time() + 3600
    os.utime(path, (future, future))
    digests = FileDigests(None)
    digests.digest(path)
    read = []
    monkeypatch.setattr("mizarr.store.index.file_digest", lambda path: read.append(path) or "sha256:1")
    assert digests.digest(path) == "sha256:1" and read == [path]


LATE = """
import atexit, sys
kept = []

def last():  # registered first, it runs last: what a module held is gone before what it made
    vars(sys.modules["mizarr.store.index"]).update(sqlite3=None, os=None, suppress=None)
    kept.clear()

atexit.register(last)
from pathlib import Path
from mizarr.store.index import FileDigests
kept.append(FileDigests(Path(sys.argv[1])))
assert kept[0]._connect() is not None
"""


def test_a_script_that_ends_says_nothing_of_what_it_left_open(path):
    given = [sys.executable, "-c", LATE, str(path)]
    done = subprocess.run(given, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_cache_that_nobody_holds_closes_its_file(path):
    cache = FileDigests(path)
    db = cache._connect()
    del cache
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        db.execute("SELECT 1")
    again = FileDigests(path)
    again._connect()
    again.close()
    assert again._connect() is not None
