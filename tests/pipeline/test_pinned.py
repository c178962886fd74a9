"""Pinned resources: opened once, and never taken for what they were once their files have changed."""

from __future__ import annotations

import os
import pickle
from dataclasses import dataclass
from pathlib import Path

import pytest

from mizarr.pipeline.pinned import FileResource, OpenResource, PinnedFiles
from mizarr.store.errors import SourceChanged


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(b"one")
    return path


def write_over(path: Path, content: bytes) -> None:
    """Other bytes, at the same time."""
    before = path.stat()
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("is_settled", [True, False])
def test_files_that_were_written_over_restored_or_removed_are_noticed(is_settled, path, monkeypatch):
    monkeypatch.setattr("mizarr.store.files.stamps._SETTLED_SECONDS", -1.0 if is_settled else 100.0)
    files = PinnedFiles("the model", "start again")
    digest = files.digest(path)
    assert files.are_settled == is_settled
    files.check()
    write_over(path, b"two")
    with pytest.raises(
        SourceChanged, match="the file weights of the model changed while the command ran; start again"
    ):
        files.check()
    write_over(path, b"one")
    with pytest.raises(SourceChanged):
        files.check()
    assert PinnedFiles("the model").digest(path) == digest == files.digest(path)
    path.unlink()
    assert files.have_changed


@dataclass(frozen=True)
class Bytes(FileResource):
    """The bytes of a file."""

    path: str
    expected: bytes

    def identity(self):
        return {"bytes": self.expected.hex()}

    def opened_anew(self):
        files = PinnedFiles("bytes")
        content = bytearray(files.note(Path(self.path)).read_bytes())
        if content != self.expected:
            raise SourceChanged(f"expected {self.expected!r}, found {content!r}")
        return OpenResource(content, files)


def test_equal_resources_share_one_object_until_its_file_moves(path):
    one, other = Bytes(str(path), b"one"), Bytes(str(path), b"one")
    with one.open() as first, other.open() as second, pickle.loads(pickle.dumps(one)).open() as third:
        assert first is second is third
    write_over(path, b"one")
    with pytest.raises(SourceChanged), one.open():
        raise AssertionError("never reached")
    with Bytes(str(path), b"one").open() as anew:
        assert anew is not first
    with pytest.raises(SourceChanged), Bytes(str(path), b"one").open():
        write_over(path, b"two")
    with pytest.raises(SourceChanged, match="expected b'one', found"):
        Bytes(str(path), b"one").check()
