"""Arrays: names for signatures (what is in them, not their shapes, which docstrings say), and the reader of
indices into them: positions, layers, heads and whatever else is chosen by number, read exactly or refused.

One reader for all of them, so that none is rounded, and neither a mask nor a text is taken for numbers.

Border: Python, numpy and torch values; knows no axes. Never imports torch.
"""

from __future__ import annotations

import operator
import reprlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import ConfigError, MizarrError

__all__ = ["Array", "Bools", "Floats", "Ints", "as_index", "as_indices", "shown"]

Array = npt.NDArray[Any]
Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def as_index(value: Any, what: str, error: type[MizarrError] = ConfigError) -> int:
    """A whole number of Python, numpy or torch as an int.

    value: 3, np.int64(3), torch.tensor(3). what: where the number stands, as the message begins: "Zero:
    positions". error: class of the error.
    Raises `error` for anything else: floats, even whole ones, booleans, texts, slices.
    """
    if type(value) is int:
        return value
    is_bool = isinstance(value, bool) or "bool" in str(getattr(value, "dtype", ""))
    if not is_bool and getattr(value, "ndim", 0) == 0:
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise error(f"{what}: expected whole numbers, found {shown(value)}{_remedy(value)}")


def as_indices(values: Any, what: str, error: type[MizarrError] = ConfigError) -> tuple[int, ...]:
    """One whole number or several, in their order; of a set, ascending.

    values: 3, [0, -1], range(4), an integer array or tensor of one axis. what, error: see `as_index`.
    Raises `error` for anything else, a slice or a mask of booleans among them.
    """
    if type(values) is tuple and all(type(value) is int for value in values):
        return values
    is_one = isinstance(values, str | bytes | Mapping | slice) or not hasattr(values, "__iter__")
    if is_one or getattr(values, "ndim", 1) == 0:
        return (as_index(values, what, error),)
    if "bool" in str(getattr(values, "dtype", "")):
        raise error(f"{what}: expected whole numbers, found {shown(values)}{_remedy(values)}")
    indices = tuple(as_index(value, what, error) for value in values)
    return tuple(sorted(indices)) if isinstance(values, set | frozenset) else indices


def shown(value: Any) -> str:
    """A value in one short line; of an array its dtype and shape."""
    shape = getattr(value, "shape", ())
    if isinstance(shape, tuple) and shape and hasattr(value, "dtype"):
        return f"{type(value).__name__} of {str(value.dtype).removeprefix('torch.')} of shape {list(shape)}"
    return " ".join(reprlib.repr(value).split())


def _remedy(value: Any) -> str:
    """What to write instead."""
    if isinstance(value, slice):
        ends = [part for part in (value.start or 0, value.stop, value.step) if part is not None]
        is_known = value.stop is not None and all(type(part) is int and part >= 0 for part in ends)
        return f"; write range({', '.join(map(str, ends))})" if is_known else "; write a range, or a list"
    if isinstance(value, bool) or "bool" in str(getattr(value, "dtype", "")):
        return "; write the numbers that are meant, of a mask np.flatnonzero(mask)"
    if isinstance(value, str | bytes):
        return "; write a list such as [0, -1]"
    return "; write ints, or a list of them"
