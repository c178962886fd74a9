"""Content digest of a labelled result: covers what was computed, not how it is stored.

Chunks, compression, file names, string widths and byte order do not change it; a value, name, dimension,
coordinate, attribute or dtype does. So downstream results stay cached when an input is merely rechunked.

Arrays are read in slabs along their first axis, so a result larger than memory needs only a few chunks at a
time.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .attributes import attribute_record, plain
from .digest import canonical_json, raw_bytes
from .errors import ShapeError

if TYPE_CHECKING:
    import xarray as xr

NUMBERS = {np.dtype(code).name for code in "?bBhHiIqQefdFD"}
"""Names of the numeric dtypes that can be stored: those known to both numpy and zarr."""
TEXT = np.dtypes.StringDType()
"""Numpy dtype of text in memory and in results."""
_SLAB = 16 << 20  # bytes of an array in memory at once while it is digested


def content_of(dataset: xr.Dataset) -> str:
    """Content digest `sha256:…` of a dataset: its values, names, dimensions, dtypes, shapes and attributes.

    Numbers enter as C-order little-endian bytes, strings by length and UTF-8. The order of variables and
    attributes, chunks and encodings do not matter.

    Arguments:
        dataset: A dataset whose variables and dimensions have text names.

    Raises:
        ShapeError: Other names, unsupported dtypes, objects that are no text, or attributes without a JSON
            form.
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
                _values_digest(name, variable),
            ]
        )
    # The tag is part of every content digest: a change of this format must get a new one.
    text = canonical_json(["mizarr-result/1", attribute_record(plain(dataset.attrs)), parts])
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def as_digested(dataset: xr.Dataset) -> xr.Dataset:
    """Copy a dataset without anything that its content digest does not cover, such as the order of variables.

    A function that gets this copy cannot depend on more than the digest in the key of its result. Variables
    and attributes are sorted, attributes are plain values, text is numpy's StringDType, numbers are in native
    byte order and C order, indexes are the default ones, and the encoding keeps only the origin. Arrays in
    memory are copied, so the caller may modify them; lazy arrays stay lazy.

    Arguments:
        dataset: A dataset whose variables and dimensions have text names.

    Raises:
        ShapeError: Other names, unsupported dtypes, objects that are no text, or attributes without a JSON
            form.
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
    """Convert a text variable to numpy's StringDType; a dask array stays lazy.

    Arguments:
        name: Name of the variable, for messages.
        variable: Variable of dtype "U", "O" or StringDType.

    Raises:
        ShapeError: An object is no str; for dask arrays raised when they are computed.
    """
    if variable.chunks is not None:
        return variable.data.map_blocks(_text_block, variable=name, dtype=TEXT, meta=np.empty(0, TEXT))
    return _text_block(np.asarray(variable.values), name)


def storable_dtype(name: str, dtype: np.dtype[Any]) -> str:
    """Name of a dtype in digests and files: numpy's name, or "string" for any kind of text.

    Arguments:
        name: Name of the variable, for messages.
        dtype: Its dtype.

    Raises:
        ShapeError: The dtype cannot be stored.
    """
    if dtype.kind in "UTO":  # objects are checked to be str when they are written
        return "string"
    if dtype.name in NUMBERS:
        return dtype.name
    raise ShapeError(
        f"variable {name!r} has dtype {dtype}, which results cannot store; convert it to integers, floats, "
        "complex, bool or text (bfloat16: .astype('float32'); times: numbers with their unit in "
        "attrs['units'])"
    )


def slabs(
    shape: tuple[int, ...], itemsize: int, chunk: int, limit: int = _SLAB
) -> Iterator[tuple[slice, ...]]:
    """Yield indices that cut an array into slabs, consecutive in C order and of limited size.

    Arguments:
        shape: Shape of the array.
        itemsize: Bytes of one element.
        chunk: Length of a stored chunk along the first axis; slabs consist of whole chunks if they fit.
        limit: Maximum bytes of a slab; a row larger than that is cut along the next axes.
    """
    if not shape or math.prod(shape) == 0:
        yield ()
        return
    row_bytes = itemsize * math.prod(shape[1:])
    if row_bytes > limit and len(shape) > 1:
        for i in range(shape[0]):
            for inner in slabs(shape[1:], itemsize, shape[1], limit):
                yield (slice(i, i + 1), *inner)
        return
    step = max(1, limit // row_bytes)
    # Whole stored chunks: a slab that ends inside a chunk would make the next slab read it again.
    if step > chunk:
        step -= step % chunk
    for start in range(0, shape[0], step):
        yield (slice(start, min(start + step, shape[0])),)


def _require_names(dataset: xr.Dataset) -> None:
    """Raise ShapeError for non-text names: variables 1 and "1" would become a single folder."""
    for kind, names in (("variables", dataset.variables), ("dims", dataset.dims)):
        for name in names:
            if not isinstance(name, str):
                raise ShapeError(f"names of {kind} must be text, found {name!r:.80}; rename it")


def _as_digested(name: str, variable: xr.Variable) -> xr.Variable:
    """Copy of a variable in the form that `as_digested` describes."""
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
    """Encoding fields that identify a variable's origin."""
    return {name: encoding[name] for name in ("source", "run") if name in encoding}


def _text_block(values: npt.NDArray[Any], variable: str) -> npt.NDArray[Any]:
    """Convert an array of text or objects to numpy's StringDType; ShapeError if an object is no str."""
    # astype to text would silently turn the number 1 into "1", so objects are checked first.
    is_object = values.dtype.kind == "O"
    if wrong := [value for value in values.ravel() if is_object and not isinstance(value, str)]:
        kind = type(wrong[0]).__name__
        raise ShapeError(
            f"variable {variable!r} of text contains {wrong[0]!r} ({kind}), expected str only; convert its "
            "values"
        )
    return values.astype(TEXT)


def _values_digest(name: str, variable: xr.Variable) -> str:
    """sha256 (hex) of a variable's values, read slab by slab."""
    state = hashlib.sha256()
    # Of texts the size is only known after reading; 16 bytes is what numpy's StringDType keeps per item.
    itemsize = 16 if variable.dtype.kind in "OT" else variable.dtype.itemsize
    chunk = (variable.encoding.get("chunks") or variable.shape or (1,))[0]
    for slab in slabs(variable.shape, itemsize, chunk):
        block = np.asarray(variable[slab].values)
        if variable.dtype.kind in "UTO":
            for text in _text_block(block, name).ravel():
                raw = str(text).encode()
                # Length-prefixed, so that ["ab", "c"] and ["a", "bc"] differ.
                state.update(len(raw).to_bytes(8, "little"))
                state.update(raw)
        else:
            state.update(raw_bytes(np.ascontiguousarray(block, block.dtype.newbyteorder("<"))))
    return state.hexdigest()
