"""Arrays of an .npz file, mapped from it where they lie there as they are.

Border: names and arrays. An .npz is a zip of .npy members: numpy reads a member whole, but one that is
stored, not deflated, lies in the file byte by byte and can be mapped like any other (zip: APPNOTE 4.3.7;
npy: NEP 1).
"""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ....store.errors import DictionaryError
from ....store.exchange.tensors import npy_header, seek_member

__all__ = ["npz_array", "npz_shapes"]

FLOATS = ("float32", "float64")


def npz_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Arrays of a file and their shapes, from their headers.

    Raises DictionaryError for a file that is not whole, or an array that is not float.
    """
    with _opened(path) as archive:
        return {name: _header(archive, name, path)[1] for name in _names(archive)}


def npz_array(path: Path, name: str) -> npt.NDArray[Any]:
    """One array: mapped where it is stored uncompressed, else read alone. Writing to it changes no file."""
    with _opened(path) as archive:
        dtype, shape, fortran, start = _header(archive, name, path)
        member = archive.getinfo(f"{name}.npy")
        if member.compress_type == zipfile.ZIP_STORED:
            with path.open("rb") as file:
                seek_member(file, member)
                offset = file.tell() + start
            order: Any = "F" if fortran else "C"
            if not shape:
                return np.fromfile(path, dtype, count=1, offset=offset).reshape(())
            return np.memmap(path, dtype, mode="c", offset=offset, shape=shape, order=order)
        with archive.open(member) as packed:
            found: npt.NDArray[Any] = np.lib.format.read_array(packed, allow_pickle=False)
            return found


@contextmanager
def _opened(path: Path) -> Iterator[zipfile.ZipFile]:
    try:
        with zipfile.ZipFile(path) as archive:
            yield archive
    except (zipfile.BadZipFile, EOFError, ValueError, struct.error) as error:
        if isinstance(error, DictionaryError):
            raise
        raise DictionaryError(f"{path} is no complete .npz file ({error}); fetch it again") from error


def _names(archive: zipfile.ZipFile) -> list[str]:
    return [name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy")]


def _header(
    archive: zipfile.ZipFile, name: str, path: Path
) -> tuple[np.dtype[Any], tuple[int, ...], bool, int]:
    """(dtype, shape, in Fortran order, bytes before the data) of a member."""
    with archive.open(f"{name}.npy") as file:
        dtype, shape, fortran = npy_header(file)
        if dtype.name not in FLOATS and shape:
            raise DictionaryError(
                f"expected {name!r} in {path} as one of {', '.join(FLOATS)}, found {dtype.name}"
            )
        return dtype, shape, fortran, file.tell()
