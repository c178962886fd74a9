"""Array type aliases, and validation of arguments: indices, counts, numbers, flags, paths.

All functions and commands use these validators, so that no value is rounded silently, and neither a mask nor
a text is mistaken for numbers. They accept Python, numpy and torch values; torch is never imported.
"""

from __future__ import annotations

import math
import operator
import reprlib
from collections.abc import Iterable, Mapping
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
    "ranges",
    "require_flag",
    "require_kind",
    "shown",
]

Array = npt.NDArray[Any]
Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def as_index(value: Any, name: str, error: type[MizarrError] = ConfigError) -> int:
    """Validate an integer of Python, numpy or torch and return it as an int.

    Arguments:
        value: Such as 3, np.int64(3) or torch.tensor(3).
        name: Names the argument at the start of the message, such as "Zero: positions".
        error: Class of the error to raise.

    Raises:
        error: For anything else, including whole floats, booleans, texts and slices.
    """
    if type(value) is int:
        return value
    # By name of the dtype, so that torch need not be imported to recognise its booleans.
    is_bool = isinstance(value, bool) or "bool" in str(getattr(value, "dtype", ""))
    if not is_bool and getattr(value, "ndim", 0) == 0:
        try:
            # operator.index accepts exact integers of numpy and torch, but no floats.
            return operator.index(value)
        except TypeError:
            pass
    raise error(f"{name}: expected whole numbers, found {shown(value)}{_remedy(value)}")


def as_indices(values: Any, name: str, error: type[MizarrError] = ConfigError) -> tuple[int, ...]:
    """Validate one or several integers and return them as a tuple, in order; those of a set ascending.

    Arguments:
        values: Such as 3, [0, -1], range(4), or a one-dimensional integer array or tensor.
        name: Names the argument at the start of the message, such as "Zero: positions".
        error: Class of the error to raise.

    Raises:
        error: For anything else, including slices and boolean masks.
    """
    if type(values) is tuple and all(type(value) is int for value in values):
        return values
    if not is_several(values):
        return (as_index(values, name, error),)
    if "bool" in str(getattr(values, "dtype", "")):
        raise error(f"{name}: expected whole numbers, found {shown(values)}{_remedy(values)}")
    indices = tuple(as_index(value, name, error) for value in values)
    return tuple(sorted(indices)) if isinstance(values, set | frozenset) else indices


def is_several(value: Any) -> bool:
    """Whether an argument is a collection of values: iterable, but no text, bytes, mapping or scalar
    array."""
    is_one = isinstance(value, str | bytes | bytearray | Mapping) or not hasattr(value, "__iter__")
    return not is_one and getattr(value, "ndim", 1) > 0


def as_list(value: Any) -> list[Any]:
    """Return one value or a collection of values as a list; numbers of numpy and torch become Python's.

    >>> as_list("a"), as_list(("a", b"b")), as_list(np.arange(2)), as_list(np.int64(2))
    (['a'], ['a', b'b'], [0, 1], [2])
    """
    items = value.tolist() if hasattr(value, "tolist") else value
    return list(items) if is_several(items) else [items]


def shown(value: Any) -> str:
    """Describe a value in one short line for messages; an array by dtype and shape."""
    shape = getattr(value, "shape", ())
    if isinstance(shape, tuple) and shape and hasattr(value, "dtype"):
        return f"{type(value).__name__} of {str(value.dtype).removeprefix('torch.')} of shape {list(shape)}"
    return " ".join(reprlib.repr(value).split())


def ranges(numbers: Iterable[int]) -> str:
    """Format numbers as text, with consecutive ones as a range.

    >>> ranges([0, 1, 2, 5])
    '0-2, 5'
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _remedy(value: Any) -> str:
    """Advice for the end of an error message: valid indices in place of an invalid value."""
    if isinstance(value, slice):
        bounds = [bound for bound in (value.start or 0, value.stop, value.step) if bound is not None]
        has_range = value.stop is not None and all(type(bound) is int and bound >= 0 for bound in bounds)
        return f"; write range({', '.join(map(str, bounds))})" if has_range else "; write a range, or a list"
    if isinstance(value, bool) or "bool" in str(getattr(value, "dtype", "")):
        return "; write the numbers of the selected items, for a mask np.flatnonzero(mask)"
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
    """Validate the type of an argument.

    Arguments:
        value: The argument.
        kinds: Allowed classes.
        expected: The argument and what it should be, as the message continues after "expected": "hooks as a
            HookSpec".
        remedy: What to write instead, the end of the message.
        error: Class of the error to raise.

    Raises:
        error: The value is no instance of these classes.
    """
    if not isinstance(value, kinds):
        raise error(f"expected {expected}, found {shown(value)}; {remedy}")


def as_count(
    value: Any, name: str, least: int = 1, most: int | None = None, error: type[MizarrError] = ConfigError
) -> int:
    """Validate an integer within bounds and return it as an int.

    Arguments:
        value: The argument.
        name: Name of the argument, for messages.
        least: Smallest allowed value.
        most: Largest allowed value; None for no limit.
        error: Class of the error to raise.

    Raises:
        error: For anything else, including booleans and whole floats.
    """
    try:
        number = as_index(value, name)
    except ConfigError:
        raise error(
            f"expected {name} to be a whole number, found {shown(value)}; write {name}={max(least, 1)}"
        ) from None
    if number < least:
        raise error(f"expected {name} of at least {least}, found {number}")
    if most is not None and number > most:
        raise error(f"expected {name} of at most {most}, found {number}")
    return number


def require_flag(value: Any, name: str, *, optional: bool = False) -> None:
    """Validate a boolean flag.

    Arguments:
        value: The argument.
        name: Name of the argument, for messages.
        optional: Whether None is allowed as well.

    Raises:
        ConfigError: The value is neither True nor False.
    """
    if not (isinstance(value, bool) or (optional and value is None)):
        raise ConfigError(f"expected {name}=True or {name}=False, found {shown(value)}")


def as_number(value: Any, name: str, error: type[MizarrError] = ConfigError) -> float:
    """Validate a real number of Python, numpy or torch and return it as a float.

    NaN and infinity are allowed; an integer too large for a float becomes infinity.

    Arguments:
        value: The argument.
        name: Name of the argument, for messages.
        error: Class of the error to raise.

    Raises:
        error: For anything else, including booleans and texts.
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
    raise error(f"expected {name} to be a number, found {shown(value)}; write a float")


def as_path(value: Any, name: str, error: type[MizarrError] = ConfigError) -> Path:
    """Validate a path given as a text or Path and return it as a Path; expands `~`.

    Arguments:
        value: The argument.
        name: Name of the argument, for messages.
        error: Class of the error to raise.

    Raises:
        error: For an empty text and anything else.
    """
    if not isinstance(value, str | PathLike) or not str(value):
        raise error(
            f"expected {name} to be the path of a file or folder, as a text or a Path, found {shown(value)}"
        )
    return Path(value).expanduser()
