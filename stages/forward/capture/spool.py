"""The spool: what a harvest that goes through a corpus layer by layer carries from one layer to the next.

A file for each segment and layer holds what comes out of that layer (the stream, and whatever a family
passes along beside it), batch by batch, in the dtype it was computed in. It lies beside what the run has
committed (in this machine's cache folder where a store is no folder), under a hidden name that readers do not
list and gc takes for a leftover; it gets this name when it is whole, ends in what it is of, and every batch
carries its crc32c. What is torn, or of other batches, is not there. Nothing is synced: a power cut costs the
layers since the last one that stands.

Border: tensors by name; which layers and batches these are is known to layer_major.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import google_crc32c
import torch
from torch import Tensor

from ....store.digest import Buffer
from ....store.errors import CorruptEntry
from ....store.files import Folder
from ..models.model import DTYPES, dtype_name

__all__ = ["Spool", "SpoolFile"]

VERSION = 1
_BEFORE = struct.Struct("<QI")
"""Before each batch: bytes of its header, and the crc32c of header and tensors; at the end 0 bytes."""


@dataclass(frozen=True)
class Spool:
    """The files of one run. path: the folder they lie in, relative to the store's."""

    folder: Folder
    path: str

    def file(self, n: int, layer: int, of: str) -> SpoolFile:
        """What enters a layer, of a segment. of: digest of everything its batches depend on."""
        return SpoolFile(self.folder, self.path, f".{n}.{layer}.spool", of)

    def layers(self, n: int, of: str) -> list[int]:
        """Into which layers a segment is spooled, whole, in order."""
        found = (int(path.name.split(".")[2]) for path in self._files(f".{n}.*.spool"))
        return sorted(layer for layer in found if self.file(n, layer, of).is_whole())

    def clear(self, n: int) -> None:
        """Remove what is spooled of a segment."""
        for path in self._files(f".{n}.*"):
            path.unlink(missing_ok=True)

    def _files(self, pattern: str) -> list[Path]:
        return list(self.folder.scratch(self.path).glob(pattern))


@dataclass(frozen=True)
class SpoolFile:
    """What enters one layer, of one segment."""

    folder: Folder
    path: str
    file: str
    of: str

    @property
    def name(self) -> str:
        """Where it lies among what is scratch, as errors tell it."""
        return f"{self.path}/{self.file}"

    @property
    def place(self) -> Path:
        """The folder that what was spooled lies in."""
        return self.folder.scratch(self.path) / self.file

    @contextlib.contextmanager
    def written(self) -> Iterator[SpoolWriter]:
        """Takes batches in order; the file is there when the block ends. Raises StoreFull, ReadOnlyStore."""
        target = self.place
        temporary = target.with_name(f"{target.name}.{os.getpid()}")
        try:
            with self._opened(temporary) as file:
                writer = SpoolWriter(self, file)
                yield writer
                writer.end()
            with self.folder.writing(self.name):
                temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)

    def _opened(self, path: Path) -> BinaryIO:
        """A new file."""
        with self.folder.writing(self.name):
            path.parent.mkdir(parents=True, exist_ok=True)
            return path.open("wb")

    def batches(self) -> Iterator[dict[str, Tensor]]:
        """What was put, in order, in memory. Raises CorruptEntry for bytes that are not those that were
        written."""
        with self.place.open("rb") as file:
            while (header := _taken(file, self.name)) is not None:
                tensors, whole = {}, google_crc32c.value(header.text)
                for name, dtype, shape in json.loads(header.text):
                    tensor = torch.empty(shape, dtype=DTYPES[dtype])
                    raw = tensor.reshape(-1).view(torch.uint8).numpy()
                    if file.readinto(raw.data) != raw.nbytes:
                        raise _torn(self.name)
                    whole = google_crc32c.extend(whole, raw)
                    tensors[name] = tensor
                if whole != header.crc:
                    raise _torn(self.name)
                yield tensors

    def is_whole(self) -> bool:
        """Whether it is there, of this, and to the last byte what was written."""
        try:
            for _ in self.batches():
                pass
            with self.place.open("rb") as file:
                file.seek(-len(self.of.encode()), os.SEEK_END)
                return file.read() == self.of.encode()
        except (OSError, ValueError, KeyError, CorruptEntry):
            return False

    def remove(self) -> None:
        """It is needed no more."""
        self.place.unlink(missing_ok=True)


@dataclass(frozen=True)
class SpoolWriter:
    """Writes batches into an open file, which will be this one."""

    target: SpoolFile
    file: BinaryIO

    def put(self, carried: Mapping[str, Tensor]) -> None:
        """Tensors of a batch, by name."""
        held = {name: tensor.detach().cpu().contiguous() for name, tensor in carried.items()}
        about = [[name, dtype_name(tensor.dtype), list(tensor.shape)] for name, tensor in held.items()]
        header = json.dumps(about).encode()
        raw = [tensor.reshape(-1).view(torch.uint8).numpy() for tensor in held.values()]
        whole = google_crc32c.value(header)
        for part in raw:
            whole = google_crc32c.extend(whole, part)
        self._write(_BEFORE.pack(len(header), whole), header, *(part.data for part in raw))

    def end(self) -> None:
        """Writes what ends the file: no further batch, and of what it is. Without it, it is torn."""
        self._write(_BEFORE.pack(0, 0), self.target.of.encode())
        with self.target.folder.writing(self.target.name):
            self.file.flush()

    def _write(self, *parts: Buffer) -> None:
        with self.target.folder.writing(self.target.name):
            for part in parts:
                self.file.write(part)


@dataclass(frozen=True)
class _Header:
    text: bytes
    crc: int


def _taken(file: BinaryIO, name: str) -> _Header | None:
    """The header of the next batch; None at the end."""
    before = file.read(_BEFORE.size)
    if len(before) != _BEFORE.size:
        raise _torn(name)
    header, crc = _BEFORE.unpack(before)
    return None if header == 0 else _Header(file.read(header), crc)


def _torn(name: str) -> CorruptEntry:
    return CorruptEntry(
        f"expected what was spooled in {name} as it was written, found other bytes; start the capture again: "
        "it goes on from what stands"
    )
