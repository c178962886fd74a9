"""Arrays: names for signatures (what is in them, not their shapes, which docstrings say), and the readers of
arguments: indices into arrays (positions, layers, heads and whatever else is chosen by number), counts,
numbers, paths and objects, read exactly or refused in one line.

One reader for all of them, so that none is rounded, and neither a mask nor a text is taken for numbers.

Border: Python, numpy and torch values; knows no axes. Never imports torch.
"""

from __future__ import annotations

import math
import operator
import reprlib
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import ConfigError, MizarrError

__all__ = [
    "Array",
    "Bools",
    "Floats",
    "Ints",
    "as_count",
    "as_index",
    "as_indices",
    "as_list",
    "as_number",
    "as_path",
    "is_several",
    "require_flag",
    "require_kind",
    "shown",
]

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
    if not is_several(values):
        return (as_index(values, what, error),)
    if "bool" in str(getattr(values, "dtype", "")):
        raise error(f"{what}: expected whole numbers, found {shown(values)}{_remedy(values)}")
    indices = tuple(as_index(value, what, error) for value in values)
    return tuple(sorted(indices)) if isinstance(values, set | frozenset) else indices


def is_several(value: Any) -> bool:
    """Whether a value is several ones: iterable, but no text, bytes, mapping, and no array without axes."""
    is_one = isinstance(value, str | bytes | bytearray | Mapping) or not hasattr(value, "__iter__")
    return not is_one and getattr(value, "ndim", 1) > 0


def as_list(value: Any) -> list[Any]:
    """One value or several, as a list; numbers of an array or a tensor as numbers of Python.

    >>> as_list("a"), as_list(("a", b"b")), as_list(np.arange(2)), as_list(np.int64(2))
    (['a'], ['a', b'b'], [0, 1], [2])
    """
    items = value.tolist() if hasattr(value, "tolist") else value
    return list(items) if is_several(items) else [items]


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


def require_kind(
    value: Any,
    kinds: type | tuple[type, ...],
    expected: str,
    remedy: str,
    error: type[MizarrError] = ConfigError,
) -> None:
    """Raise `error` unless a value is an instance of one of these classes.

    Arguments:
        expected: the argument and what it holds, as the message begins: "hooks as a HookSpec".
        remedy: what to write instead.
    """
    if not isinstance(value, kinds):
        raise error(f"expected {expected}, found {shown(value)}; {remedy}")


def as_count(
    value: Any, what: str, least: int = 1, most: int | None = None, error: type[MizarrError] = ConfigError
) -> int:
    """A whole number in [least, most] of Python, numpy or torch as an int.

    what: name of the argument. Raises `error` for anything else, booleans and whole floats among them.
    """
    try:
        number = as_index(value, what)
    except ConfigError:
        raise error(
            f"expected {what} to be a whole number, found {shown(value)}; write {what}={max(least, 1)}"
        ) from None
    if number < least:
        raise error(f"expected {what} of at least {least}, found {number}")
    if most is not None and number > most:
        raise error(f"expected {what} of at most {most}, found {number}")
    return number


def require_flag(value: Any, what: str, *, optional: bool = False) -> None:
    """Raise ConfigError unless a value is True or False, or None where that is allowed.

    Arguments:
        what: name of the argument.
        optional: whether None is a value, too.
    """
    if not (isinstance(value, bool) or (optional and value is None)):
        raise ConfigError(f"expected {what} as True or False, found {shown(value)}; leave it out")


def as_number(value: Any, what: str, error: type[MizarrError] = ConfigError) -> float:
    """A real number of Python, numpy or torch as a float; NaN and infinities are left to the caller.

    what: name of the argument. Raises `error` for anything else, booleans and texts among them.
    """
    is_number = isinstance(value, int | float | np.integer | np.floating) or (
        getattr(value, "ndim", None) == 0 and "bool" not in str(getattr(value, "dtype", "bool"))
    )
    if is_number and not isinstance(value, bool):
        try:
            return float(value)
        except (TypeError, ValueError):
            pass
        except OverflowError:
            return math.inf
    raise error(f"expected {what} to be a number, found {shown(value)}; write a float")


def as_path(value: Any, what: str, error: type[MizarrError] = ConfigError) -> Path:
    """A path from a text or a Path, with `~` expanded. what: name of the argument."""
    if not isinstance(value, str | PathLike) or not str(value):
        raise error(f"expected {what} as a text or a Path, found {shown(value)}; name a file or folder")
    return Path(value).expanduser()
