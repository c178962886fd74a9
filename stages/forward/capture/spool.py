"""The spool: activations on disk between two groups of layers of a layer-by-layer harvest.

One file per segment and layer holds the input of that layer batch by batch: the residual stream, and further
tensors that some families pass from layer to layer, in the dtype they were computed in. Files lie in the
folder of the run (in the cache folder of this machine if the store is not a local folder), under hidden names
that readers do not list and gc treats as leftovers.

A file is renamed to its final name when complete. It ends with the digest of its batches, and every batch has
a crc32c; a truncated file, or one of other batches, counts as missing. Files are not synced: a power cut
costs the layers since the last complete spool.
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
_PREFIX = struct.Struct("<QI")
"""Prefix of each batch: bytes of its header, crc32c of header and tensors. A length of 0 ends the batches."""


@dataclass(frozen=True)
class Spool:
    """Files with the activations between two groups of layers, for one stored run."""

    folder: Folder
    """Root folder of the store."""
    path: str
    """Folder of these files, relative to the root."""

    def file(self, n: int, layer: int, batches_digest: str) -> SpoolFile:
        """The file with the input of one layer for one segment; it need not exist.

        Arguments:
            n: number of the segment.
            layer: layer that reads the file.
            batches_digest: digest of everything that the spooled activations depend on.
        """
        return SpoolFile(self.folder, self.path, f".{n}.{layer}.spool", batches_digest)

    def layers(self, n: int, batches_digest: str) -> list[int]:
        """Layers whose input for segment `n` is completely on disk, in ascending order.

        Arguments:
            n: number of the segment.
            batches_digest: digest that a file must end with.
        """
        layers = (int(path.name.split(".")[2]) for path in self._files(f".{n}.*.spool"))
        return sorted(layer for layer in layers if self.file(n, layer, batches_digest).is_whole())

    def clear(self, n: int) -> None:
        """Delete all files of segment `n`."""
        for path in self._files(f".{n}.*"):
            path.unlink(missing_ok=True)

    def _files(self, pattern: str) -> list[Path]:
        return list(self.folder.scratch(self.path).glob(pattern))


@dataclass(frozen=True)
class SpoolFile:
    """The input of one layer for one segment, on disk."""

    folder: Folder
    """Root folder of the store."""
    path: str
    """Folder of the file, relative to the root."""
    file: str
    """File name, `.<segment>.<layer>.spool`."""
    batches_digest: str
    """Digest of everything that the activations depend on; the last bytes of the file."""

    @property
    def name(self) -> str:
        """Path relative to the root folder, for errors."""
        return f"{self.path}/{self.file}"

    @property
    def place(self) -> Path:
        """Path of the file."""
        return self.folder.scratch(self.path) / self.file

    @contextlib.contextmanager
    def written(self) -> Iterator[SpoolWriter]:
        """Write batches in order in this block; the file gets its name when the block ends without an error.

        Raises:
            StoreFull: if the disk is full.
            ReadOnlyStore: if the folder cannot be written.
        """
        target = self.place
        # With the process id, so that a process whose claim has expired cannot write into the same file.
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
        """Create a file, and its folder if it is missing."""
        with self.folder.writing(self.name):
            path.parent.mkdir(parents=True, exist_ok=True)
            return path.open("wb")

    def batches(self) -> Iterator[dict[str, Tensor]]:
        """Yield the batches in write order, each as name -> CPU tensor.

        Raises:
            CorruptEntry: for damaged bytes.
        """
        with self.place.open("rb") as file:
            while (header := _read_header(file, self.name)) is not None:
                tensors, checksum = {}, google_crc32c.value(header.text)
                for name, dtype, shape in json.loads(header.text):
                    tensor = torch.empty(shape, dtype=DTYPES[dtype])
                    # As bytes: numpy has no bfloat16.
                    raw = tensor.reshape(-1).view(torch.uint8).numpy()
                    if file.readinto(raw.data) != raw.nbytes:
                        raise _damaged(self.name)
                    checksum = google_crc32c.extend(checksum, raw)
                    tensors[name] = tensor
                if checksum != header.crc:
                    raise _damaged(self.name)
                yield tensors

    def is_whole(self) -> bool:
        """Whether the file exists, is complete and undamaged, and has the activations of these batches."""
        try:
            # Reads everything once: a wrong batch found later would cost the layers computed since.
            for _ in self.batches():
                pass
            with self.place.open("rb") as file:
                file.seek(-len(self.batches_digest.encode()), os.SEEK_END)
                return file.read() == self.batches_digest.encode()
        except (OSError, ValueError, KeyError, CorruptEntry):
            return False

    def remove(self) -> None:
        """Delete the file if it exists."""
        self.place.unlink(missing_ok=True)


@dataclass(frozen=True)
class SpoolWriter:
    """Writes batches into a temporary file, which gets its final name when it is complete."""

    target: SpoolFile
    """The file with its final name."""
    file: BinaryIO
    """The open temporary file."""

    def put(self, carried: Mapping[str, Tensor]) -> None:
        """Write the tensors of one batch.

        Arguments:
            carried: name -> tensor that the next layer reads, such as the residual stream.
        """
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in carried.items()}
        about = [[name, dtype_name(tensor.dtype), list(tensor.shape)] for name, tensor in tensors.items()]
        header = json.dumps(about).encode()
        raw = [tensor.reshape(-1).view(torch.uint8).numpy() for tensor in tensors.values()]
        checksum = google_crc32c.value(header)
        for part in raw:
            checksum = google_crc32c.extend(checksum, part)
        self._write(_PREFIX.pack(len(header), checksum), header, *(part.data for part in raw))

    def end(self) -> None:
        """Write the end mark and the digest; a file without them counts as truncated."""
        self._write(_PREFIX.pack(0, 0), self.target.batches_digest.encode())
        with self.target.folder.writing(self.target.name):
            self.file.flush()

    def _write(self, *parts: Buffer) -> None:
        with self.target.folder.writing(self.target.name):
            for part in parts:
                self.file.write(part)


@dataclass(frozen=True)
class _Header:
    text: bytes
    """JSON list of (name, dtype, shape) of each tensor."""
    crc: int
    """crc32c of header and tensors."""


def _read_header(file: BinaryIO, name: str) -> _Header | None:
    """Read the header of the next batch; None after the last batch; CorruptEntry for a truncated file."""
    prefix = file.read(_PREFIX.size)
    if len(prefix) != _PREFIX.size:
        raise _damaged(name)
    header_bytes, crc = _PREFIX.unpack(prefix)
    return None if header_bytes == 0 else _Header(file.read(header_bytes), crc)


def _damaged(name: str) -> CorruptEntry:
    return CorruptEntry(
        f"expected the file {name} with activations between layers as it was written, found damaged bytes; "
        "run the capture again, which continues from its complete files"
    )
