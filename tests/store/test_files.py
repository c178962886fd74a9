"""Files of a store on a local disk: the contract, and what can go wrong there."""

import errno
import os
from pathlib import Path

import pytest
from files_contract import FilesContract  # conftest.py says where

from mizarr.store.errors import ReadOnlyStore, StoreError, StoreFull
from mizarr.store.files import LocalFolder


class TestSynced(FilesContract):
    @pytest.fixture
    def files(self, tmp_path):
        return LocalFolder(tmp_path, "disk")


class TestUnsynced(FilesContract):
    @pytest.fixture
    def files(self, tmp_path):
        return LocalFolder(tmp_path, "process")


@pytest.fixture
def synced(monkeypatch):
    """Paths that were synced, in order."""
    paths = []
    real = os.fsync

    def fsync(handle):
        paths.append(str(Path(f"/proc/self/fd/{handle}").readlink()))
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    return paths


def test_a_file_is_synced_before_it_gets_its_name_and_then_its_folder(tmp_path, synced, monkeypatch):
    real = os.link
    monkeypatch.setattr(os, "link", lambda source, target: (synced.append("link"), real(source, target)))
    LocalFolder(tmp_path).put_new("a", b"one")
    before = synced[: synced.index("link")]
    assert [Path(path).name[:3] for path in before] == [".a."]
    assert synced[len(before) + 1 :] == [str(tmp_path)]


def test_new_folders_are_synced_up_to_the_root(tmp_path, synced):
    LocalFolder(tmp_path).put_new("x/y/a", b"one")
    assert {str(tmp_path / part) for part in ("", "x", "x/y")} <= set(synced)


def test_names_of_many_files_are_synced_together(tmp_path, synced):
    folder = LocalFolder(tmp_path)
    folder.put_all({"x/1/a": [b"one"], "x/2/a": [b"one"]})
    assert all("/.a." in path for path in synced[:2])
    assert sorted(synced[2:]) == sorted(str(tmp_path / part) for part in ("", "x", "x/1", "x/2"))
    synced.clear()
    folder.put_new("x/2/b", b"two")
    folder.put_new("x/3/a", b"three")
    folders = [path for path in synced if "/." not in path]
    assert folders[0] == str(tmp_path / "x/2")  # its own name lasts already
    assert sorted(folders[1:]) == sorted(str(tmp_path / part) for part in ("x", "x/3"))


def test_durability_process_never_syncs(tmp_path, synced):
    folder = LocalFolder(tmp_path, "process")
    folder.put_new("x/a", b"one")
    folder.put_all({"x/b": [b"two"]})
    folder.build("y", lambda place: (place / "a").write_bytes(b"one"))
    assert synced == []


def test_temporary_files_are_not_listed(tmp_path):
    (tmp_path / ".a.1.x").write_bytes(b"half")
    folder = LocalFolder(tmp_path)
    assert list(folder.list("")) == list(folder.children("")) == []
    assert folder.put_new("a", b"whole")


@pytest.mark.parametrize(
    ("code", "error", "says"),
    [
        (errno.ENOSPC, StoreFull, "run the command again, which resumes"),
        (errno.EDQUOT, StoreFull, "gc"),
        (errno.EROFS, ReadOnlyStore, "mode='r'"),
        (errno.EACCES, ReadOnlyStore, "mode='r'"),
        (errno.EMLINK, StoreError, "hard links"),
    ],
)
def test_what_the_system_refuses_is_told_by_name_and_leaves_nothing(tmp_path, monkeypatch, code, error, says):
    def refuse(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(error, match=says):
        LocalFolder(tmp_path).put_new("a", b"one")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_opened_for_reading_writes_nothing(tmp_path):
    folder = LocalFolder(tmp_path, read_only=True)
    for write in (
        lambda: folder.put_new("a", b""),
        lambda: folder.put_all({"a": [b""]}),
        lambda: folder.build("a", lambda place: None),
        lambda: folder.mark("a", b""),
        lambda: folder.delete("a"),
    ):
        with pytest.raises(ReadOnlyStore, match="mode='a'"):
            write()
    assert list(tmp_path.iterdir()) == []


def test_a_batch_is_synced_whole_before_its_first_name_and_named_in_order(tmp_path, synced, monkeypatch):
    real = os.link
    monkeypatch.setattr(
        os, "link", lambda source, target: (synced.append(Path(target)), real(source, target))
    )
    folder = LocalFolder(tmp_path)
    folder.put_new("x/taken", b"old")
    synced.clear()
    made = folder.put_all({"x/b": [b"one", b"two"], "x/taken": [b"new"], "y/a": [b"three"]})
    assert made == {"x/b", "y/a"}
    assert [folder.get(name) for name in ("x/b", "x/taken", "y/a")] == [b"onetwo", b"old", b"three"]
    names = [path for path in synced if isinstance(path, Path)]
    assert names == [tmp_path / "x/b", tmp_path / "y/a"]
    assert len(synced[: synced.index(names[0])]) == 2
    assert set(synced[synced.index(names[-1]) + 1 :]) == {str(tmp_path / part) for part in ("", "x", "y")}


def test_of_a_batch_that_fails_nothing_has_a_name(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    folder = LocalFolder(tmp_path)
    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", full)
        with pytest.raises(StoreFull, match="no space left"):
            folder.put_all({"x/a": [b"one"], "x/b": [b"two"]})
    assert not any(path.is_file() for path in tmp_path.rglob("*"))
    assert folder.put_all({"x/a": [b"one"], "x/b": [b"two"]}) == {"x/a", "x/b"}


@pytest.mark.parametrize("threads", [1, 3])
def test_a_file_that_cannot_be_written_takes_the_batch_along(tmp_path, monkeypatch, threads):
    real = os.writev

    def writev(handle, parts):
        if bytes(parts[0]) == b"two":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(handle, parts)

    folder, files = LocalFolder(tmp_path), {"x/a": [b"one"], "x/b": [b"two"], "x/c": [b"three"]}
    before = set(Path("/proc/self/fd").iterdir())
    with monkeypatch.context() as broken:
        broken.setattr(os, "writev", writev)
        with pytest.raises(StoreFull, match="no space left"):
            folder.put_all(files, threads=threads)
    assert set(Path("/proc/self/fd").iterdir()) == before
    assert not any(path.is_file() for path in tmp_path.rglob("*"))
    assert folder.put_all(files, threads=threads) == set(files)
    assert [folder.get(name) for name in files] == [b"one", b"two", b"three"]


def test_a_batch_of_many_bytes_gets_its_names_in_turns(tmp_path, synced, monkeypatch):
    real = os.link
    monkeypatch.setattr(
        os, "link", lambda source, target: (synced.append(f"link {Path(target).name}"), real(source, target))
    )
    monkeypatch.setattr("mizarr.store.files.local._MOST_UNNAMED_BYTES", 10)
    assert LocalFolder(tmp_path).put_all({"a": [b"12345"], "b": [b"12345"], "c": [b"1"]}) == {"a", "b", "c"}
    order = [each if each[:4] == "link" else Path(each).name[:3] for each in synced[:-1]]
    assert order == [".a.", ".b.", "link a", "link b", ".c.", "link c"]
    assert synced[-1] == str(tmp_path)


def test_a_batch_may_have_more_files_than_are_open_at_once(tmp_path):
    folder = LocalFolder(tmp_path)
    files = {f"many/{n}": [str(n).encode()] for n in range(300)}
    assert folder.put_all(files) == set(files)
    assert all(folder.get(name) == parts[0] for name, parts in files.items())
    assert folder.put_all(files) == set()
