"""A labelled dataset as a NetCDF file (version 4, through h5netcdf), written a chunk at a time.

Border: a dataset in, one file out; file names and provenance are exports.py's.

HDF5 does not survive a disk that fills up: it keeps what it could not write, tries again when the file is
closed, and once more when the process ends, which then crashes. So it writes through a file that keeps the
system's first refusal to itself and takes the rest for written; the refusal is raised when HDF5 is done.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..attributes import shielded
from ..errors import MissingExtra, ShapeError

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["write_netcdf"]

ESCAPED = "\\0 stands for NUL, \\\\ for \\"
"""How to read texts of a variable that holds a NUL."""


def write_netcdf(dataset: xr.Dataset, path: Path, note: Mapping[str, str]) -> None:
    """Write a new NetCDF file; float16, which NetCDF has not, becomes float32.

    A text ends at its first NUL in HDF5. A variable with such texts (token strings of bytes, say) is escaped
    as a whole, and says so in its attribute `escaped`.

    Args:
        dataset: labelled, in any encoding.
        path: of a file that is not there yet.
        note: attributes of the file beside those of the dataset.

    Raises:
        ShapeError: for complex numbers.
        MissingExtra: without h5netcdf or h5py.
        OSError: as the system says.
    """
    try:
        import h5netcdf  # noqa: F401 - xarray's engine
        import h5py  # noqa: F401 - what that writes with, and does not require
    except ImportError as error:
        raise MissingExtra("NetCDF needs h5netcdf and h5py: pip install 'mizarr[netcdf]'") from error
    ready = shielded(dataset.drop_encoding())
    changed = {}
    for name, variable in ready.variables.items():
        variable.attrs = _attributes(variable.attrs)
        if variable.dtype.kind in "UTO":
            texts = np.asarray(variable.values, object)
            if any("\0" in str(text) for text in texts.flat):
                texts, variable.attrs = _escaped(texts), {**variable.attrs, "escaped": ESCAPED}
            changed[name] = (variable.dims, texts, variable.attrs)
        elif variable.dtype == np.float16:
            changed[name] = (variable.dims, variable.astype(np.float32).data, variable.attrs)
        elif variable.dtype.kind == "c":
            raise ShapeError(f"{name!r} is complex, which NetCDF has not; export to zarr or npz")
    labels = {name: value for name, value in changed.items() if name in ready.coords}
    ready = ready.assign_coords(labels).assign({n: v for n, v in changed.items() if n not in labels})
    ready.attrs = {**_attributes(ready.attrs), **note}
    encoding = {name: {"_FillValue": None} for name, v in ready.variables.items() if v.dtype.kind == "f"}
    with _PatientFile(path) as file:
        ready.to_netcdf(file, engine="h5netcdf", encoding=encoding)
    if file.refusal is not None:
        raise file.refusal


def _attributes(attrs: Mapping[Any, Any]) -> dict[str, Any]:
    """Attributes as NetCDF has them, numbers and texts; others as JSON, and none for None."""
    values = {name: value for name, value in attrs.items() if value is not None}
    return {name: value if _is_attribute(value) else json.dumps(value) for name, value in values.items()}


def _is_attribute(value: Any) -> bool:
    return "\0" not in value if isinstance(value, str) else isinstance(value, float) or type(value) is int


def _escaped(texts: npt.NDArray[np.object_]) -> npt.NDArray[np.object_]:
    """Texts without a NUL, as ESCAPED says."""
    escaped = np.empty_like(texts)
    for at, text in np.ndenumerate(texts):
        escaped[at] = str(text).replace("\\", r"\\").replace("\0", r"\0")
    return escaped


class _PatientFile(io.RawIOBase):
    """A new file that takes every write; the first one the system refused is in `refusal`."""

    def __init__(self, path: Path) -> None:
        self.refusal: OSError | None = None
        self._file = path.open("x+b", buffering=0)

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def readinto(self, buffer: Any) -> int:
        return self._file.readinto(buffer) or 0

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        done = 0
        while done < len(view) and self.refusal is None:
            try:
                done += self._file.write(view[done:])
            except OSError as error:
                self.refusal = error
        if self.refusal is not None:
            self._file.seek(len(view) - done, io.SEEK_CUR)
        return len(view)

    def truncate(self, size: int | None = None) -> int:
        try:
            return self._file.truncate(size)
        except OSError as error:
            self.refusal = self.refusal or error
            return self._file.tell() if size is None else size

    def close(self) -> None:
        self._file.close()
        super().close()
