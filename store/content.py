"""The logical digest R of a labelled result: what was computed, not how it lies on disk.

Border: values and labels in, a digest out. Chunks, compression, file names, string widths and byte order do
not matter; a value, a name, a dim, a coordinate, an attribute or a dtype does.

Arrays are read a slab at a time along their first axis, so that a result larger than memory is digested in a
few chunks' worth of it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Hashable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from .digest import canonical_json
from .errors import ShapeError

if TYPE_CHECKING:
    import xarray as xr

NUMBERS = {np.dtype(code).name for code in "?bBhHiIqQefdFD"}
"""Names of the dtypes of numbers that can be stored: those that numpy and zarr both know."""
_SLAB = 16 << 20  # bytes of an array in memory at once while it is digested


def content_of(dataset: xr.Dataset) -> str:
    """`sha256:…` of a dataset: its attributes, and of every variable name, role, dims, dtype, shape, bytes,
    attributes.

    Integers, floats, complex and bool arrays enter by their C-order little-endian bytes, strings by length
    and UTF-8. ShapeError for other dtypes, and for attributes that are not plain values.
    """
    parts = []
    for name in sorted(map(str, dataset.variables)):
        variable = dataset.variables[name]
        role = "coord" if name in dataset.coords else "data"
        kind = storable_dtype(name, variable.dtype)
        parts.append(
            [
                name,
                role,
                list(map(str, variable.dims)),
                kind,
                list(variable.shape),
                plain(variable.attrs),
                _bytes(variable),
            ]
        )
    text = canonical_json(["mizarr-result/1", plain(dataset.attrs), parts])
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def storable_dtype(name: str, dtype: np.dtype[Any]) -> str:
    """Name under which a dtype is digested and stored: numpy's own, or "string" for any kind of text."""
    if dtype.kind in "UTO":  # objects are checked to be str when they are written
        return "string"
    if dtype.name in NUMBERS:
        return dtype.name
    raise ShapeError(
        f"variable {name!r} has dtype {dtype}; expected integers, floats, complex, bool or text. "
        "Convert it first (bfloat16: .astype('float32'); times: numbers with their unit in attrs['units'])"
    )


def plain(attrs: Mapping[Hashable, Any]) -> dict[str, Any]:
    """Attributes as plain JSON values, numpy scalars and arrays unpacked."""
    return {str(name): _plain(value) for name, value in attrs.items()}


def slabs(
    shape: tuple[int, ...], itemsize: int, chunk: int, limit: int = _SLAB
) -> Iterator[tuple[slice, ...]]:
    """Cut an array into C-ordered slabs of at most `limit` bytes, whole chunks of the first axis where they
    fit.

    chunk: length of a stored chunk along the first axis.  A row larger than the limit is cut along the next
    axes.
    """
    if not shape or math.prod(shape) == 0:
        yield ()
        return
    row = itemsize * math.prod(shape[1:])
    if row > limit and len(shape) > 1:
        for i in range(shape[0]):
            for inner in slabs(shape[1:], itemsize, shape[1], limit):
                yield (slice(i, i + 1), *inner)
        return
    step = max(1, limit // row)
    if step > chunk:
        step -= step % chunk
    for start in range(0, shape[0], step):
        yield (slice(start, min(start + step, shape[0])),)


def _bytes(variable: xr.Variable) -> str:
    state = hashlib.sha256()
    itemsize = 16 if variable.dtype.kind in "OT" else variable.dtype.itemsize
    chunk = (variable.encoding.get("chunks") or variable.shape or (1,))[0]
    for at in slabs(variable.shape, itemsize, chunk):
        block = np.asarray(variable[at].values)
        if variable.dtype.kind in "UTO":
            for text in block.ravel():
                raw = str(text).encode()
                state.update(len(raw).to_bytes(8, "little"))
                state.update(raw)
        else:
            little = np.ascontiguousarray(block, block.dtype.newbyteorder("<"))
            state.update(little.reshape(-1).view(np.uint8).data)
    return state.hexdigest()


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist())
    if isinstance(value, Mapping):
        return plain(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
