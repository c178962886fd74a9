"""Arguments of public functions: objects, counts and numbers, read exactly or refused in one line.

Border: plain checks; imports neither torch nor xarray.
"""

from __future__ import annotations

import math
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from .arrays import as_index, shown
from .errors import ConfigError, MizarrError

__all__ = ["as_count", "as_number", "as_path", "require_kind", "require_store"]


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


def require_store(value: Any) -> None:
    """Raise ConfigError unless a value is a store that was opened."""
    from .store import Store

    require_kind(
        value,
        Store,
        "an open store",
        "write store=mizarr.open_store('activations'), with the folder it lies in",
    )
