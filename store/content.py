"""The logical digest R of a labelled result: what was computed, not how it lies on disk.

Border: values and labels in, a digest out. Chunks, compression, file names, string widths and byte order do
not matter; a value, a name, a dim, a coordinate, an attribute or a dtype does.

Arrays are read a slab at a time along their first axis, so that a result larger than memory is digested in a
few chunks' worth of it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .attributes import attribute_record, plain
from .digest import canonical_json
from .errors import ShapeError

if TYPE_CHECKING:
    import xarray as xr

NUMBERS = {np.dtype(code).name for code in "?bBhHiIqQefdFD"}
"""Names of the dtypes of numbers that can be stored: those that numpy and zarr both know."""
TEXT = np.dtypes.StringDType()
_SLAB = 16 << 20  # bytes of an array in memory at once while it is digested


def content_of(dataset: xr.Dataset) -> str:
    """`sha256:…` of a dataset: its attributes, and of every variable name, role, dims, dtype, shape, bytes,
    attributes.

    Integers, floats, complex and bool arrays enter by their C-order little-endian bytes, strings by length
    and UTF-8. Orders of variables and attributes do not enter: `as_digested` gives the one order.

    Args:
        dataset: of variables and dims whose names are text.

    Raises:
        ShapeError: for other names and dtypes, for objects that are no text, and for attributes that are not
            plain values.
    """
    _require_names(dataset)
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
                attribute_record(plain(variable.attrs)),
                _bytes(name, variable),
            ]
        )
    text = canonical_json(["mizarr-result/1", attribute_record(plain(dataset.attrs)), parts])
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def as_digested(dataset: xr.Dataset) -> xr.Dataset:
    """The dataset as `content_of` describes it and nothing else, for code whose result is keyed by that.

    Variables and attributes in one order; attributes as plain values; text as numpy's StringDType, numbers in
    native byte order and C order; default indexes; an encoding that says only where it was opened from. What
    is in memory is copied, so that whoever gets it may change it; what is lazy stays lazy.

    Args:
        dataset: as `content_of` takes it.

    Raises:
        ShapeError: as `content_of`.
    """
    import xarray as xr

    _require_names(dataset)
    variables = {
        name: _as_digested(name, dataset.variables[name]) for name in sorted(map(str, dataset.variables))
    }
    labels = {name: variable for name, variable in variables.items() if name in dataset.coords}
    arrays = {name: variable for name, variable in variables.items() if name not in labels}
    ordered = xr.Dataset(arrays, labels, plain(dataset.attrs))
    ordered.encoding = _origin(dataset.encoding)
    return ordered


def as_text(name: str, variable: xr.Variable) -> Any:
    """A variable's text as numpy's StringDType; lazy where dask is to compute it.

    Args:
        name: of the variable, for messages.
        variable: of dtype "U", "O" or StringDType.

    Raises:
        ShapeError: for objects that are no str, when they are read.
    """
    if variable.chunks is not None:
        return variable.data.map_blocks(_text_block, variable=name, dtype=TEXT, meta=np.empty(0, TEXT))
    return _text_block(np.asarray(variable.values), name)


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


def _require_names(dataset: xr.Dataset) -> None:
    """ShapeError for names that are no text: 1 and "1" are two variables here and one in a store."""
    for what, names in (("variables", dataset.variables), ("dims", dataset.dims)):
        for name in names:
            if not isinstance(name, str):
                raise ShapeError(f"expected text as names of {what}, found {name!r:.80}; rename it")


def _as_digested(name: str, variable: xr.Variable) -> xr.Variable:
    import xarray as xr

    data: Any = variable._data
    if storable_dtype(name, variable.dtype) == "string":
        data = as_text(name, variable) if variable._in_memory or variable.chunks is not None else data
    elif variable._in_memory:
        data = np.array(variable.values, variable.dtype.newbyteorder("="), order="C")
    elif not variable.dtype.isnative:
        data = variable.astype(variable.dtype.newbyteorder("=")).data
    return xr.Variable(variable.dims, data, plain(variable.attrs), _origin(variable.encoding))


def _origin(encoding: Mapping[Any, Any]) -> dict[Any, Any]:
    return {name: encoding[name] for name in ("source", "run") if name in encoding}


def _text_block(values: npt.NDArray[Any], variable: str) -> npt.NDArray[Any]:
    # As text, numpy would quietly take 1 for "1".
    is_object = values.dtype.kind == "O"
    if wrong := [value for value in values.ravel() if is_object and not isinstance(value, str)]:
        kind = type(wrong[0]).__name__
        raise ShapeError(
            f"variable {variable!r} holds {wrong[0]!r} ({kind}) among its text; expected str only"
        )
    return values.astype(TEXT)


def _bytes(name: str, variable: xr.Variable) -> str:
    state = hashlib.sha256()
    itemsize = 16 if variable.dtype.kind in "OT" else variable.dtype.itemsize
    chunk = (variable.encoding.get("chunks") or variable.shape or (1,))[0]
    for at in slabs(variable.shape, itemsize, chunk):
        block = np.asarray(variable[at].values)
        if variable.dtype.kind in "UTO":
            for text in _text_block(block, name).ravel():
                raw = str(text).encode()
                state.update(len(raw).to_bytes(8, "little"))
                state.update(raw)
        else:
            little = np.ascontiguousarray(block, block.dtype.newbyteorder("<"))
            state.update(little.reshape(-1).view(np.uint8).data)
    return state.hexdigest()
