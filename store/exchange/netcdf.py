"""Export a dataset as a NetCDF 4 file through h5netcdf, chunk by chunk.

HDF5 cannot handle a full disk: it keeps data that it could not write, tries again on closing the file, and
once more at the end of the process, which then crashes. So it writes through a file object that reports
success to HDF5, keeps the system's first error and discards later writes; the error is raised when HDF5 has
finished.
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
from ..results import with_variables

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["write_netcdf"]

ESCAPED = "\\0 stands for NUL, \\\\ for \\"
"""Value of the attribute `escaped`: how to decode the texts of a variable with a NUL."""


def write_netcdf(dataset: xr.Dataset, path: Path, note: Mapping[str, str]) -> None:
    """Write a dataset as a new NetCDF file. float16, which NetCDF lacks, becomes float32.

    HDF5 ends a text at its first NUL character. So where a variable has a text with NUL (such as the token
    string of a zero byte), all its texts are escaped, and its attribute `escaped` says how to read them.

    Arguments:
        dataset: Labelled dataset, in any encoding.
        path: The new file.
        note: Further attributes of the file, besides those of the dataset.

    Raises:
        ShapeError: A variable is complex.
        MissingExtra: h5netcdf or h5py is not installed.
        OSError: The file cannot be written.
    """
    try:
        import h5netcdf  # noqa: F401 - xarray's engine
        import h5py  # noqa: F401 - what that writes with, and does not require
    except ImportError as error:
        raise MissingExtra(
            "export as NetCDF needs h5netcdf and h5py: pip install 'mizarr[netcdf]'"
        ) from error
    ready = shielded(dataset.drop_encoding())
    changed = {}
    for name, variable in ready.variables.items():
        variable.attrs = _netcdf_attributes(variable.attrs)
        if variable.dtype.kind in "UTO":
            # h5netcdf writes objects as variable-length strings; numpy's StringDType it does not know.
            texts = np.asarray(variable.values, object)
            if any("\0" in str(text) for text in texts.flat):
                texts, variable.attrs = _escaped(texts), {**variable.attrs, "escaped": ESCAPED}
            changed[name] = (variable.dims, texts, variable.attrs)
        elif variable.dtype == np.float16:
            changed[name] = (variable.dims, variable.astype(np.float32).data, variable.attrs)
        elif variable.dtype.kind == "c":
            raise ShapeError(
                f"variable {name!r} is complex, which NetCDF cannot hold; export with --format zarr"
            )
    ready = with_variables(ready, changed)
    ready.attrs = {**_netcdf_attributes(ready.attrs), **note}
    # Otherwise xarray writes NaN as fill value, and readers mask NaN activations.
    encoding = {name: {"_FillValue": None} for name, v in ready.variables.items() if v.dtype.kind == "f"}
    with _ErrorKeepingFile(path) as file:
        ready.to_netcdf(file, engine="h5netcdf", encoding=encoding)
    if file.first_error is not None:
        raise file.first_error


def _netcdf_attributes(attrs: Mapping[Any, Any]) -> dict[str, Any]:
    """Convert attributes for NetCDF: numbers and texts unchanged, other values as JSON text, None dropped."""
    values = {name: value for name, value in attrs.items() if value is not None}
    return {
        name: value if _is_plain_attribute(value) else json.dumps(value) for name, value in values.items()
    }


def _is_plain_attribute(value: Any) -> bool:
    """Whether NetCDF holds a value as it is: a number, or a text without NUL."""
    return "\0" not in value if isinstance(value, str) else isinstance(value, float) or type(value) is int


def _escaped(texts: npt.NDArray[np.object_]) -> npt.NDArray[np.object_]:
    """Escape NUL and backslash in texts, as described by ESCAPED."""
    escaped = np.empty_like(texts)
    for index, text in np.ndenumerate(texts):
        escaped[index] = str(text).replace("\\", r"\\").replace("\0", r"\0")
    return escaped


class _ErrorKeepingFile(io.RawIOBase):
    """File object that reports success for every write and keeps the system's first error."""

    def __init__(self, path: Path) -> None:
        self.first_error: OSError | None = None
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
        written = 0
        while written < len(view) and self.first_error is None:
            try:
                written += self._file.write(view[written:])
            except OSError as error:
                self.first_error = error
        if self.first_error is not None:
            # HDF5 tracks positions itself, so they must advance as if the write had succeeded.
            self._file.seek(len(view) - written, io.SEEK_CUR)
        return len(view)

    def truncate(self, size: int | None = None) -> int:
        try:
            return self._file.truncate(size)
        except OSError as error:
            self.first_error = self.first_error or error
            return self._file.tell() if size is None else size

    def close(self) -> None:
        self._file.close()
        super().close()
