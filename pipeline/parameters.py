"""Stage parameters: the record that enters a key, and the copies that the stage's function gets.

Two values that Python code can tell apart have two records: a tuple and a list, `np.uint8(200)` and 200, 0.0
and -0.0, an enum member and its name, mappings in another order. A function may compute something else with
each, so a record that folded them would serve one's result for the other's. What has no such record (sets,
arrays, instances of other classes, subclasses of the built-in types) is refused.

The fields of an intervention that a user wrote are recorded the same way (stages/forward/hooks).

Border: Python values in, JSON values or Python values out; knows no stage and no key.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..store.digest import canonical_json, exact

__all__ = ["parameter_copy", "parameter_record", "parameter_records"]

NUMPY_NUMBERS = ("bool", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
                 "float16", "float32", "float64")  # fmt: skip
"""Names of the dtypes whose scalars a Python number holds exactly."""


def parameter_records(params: Mapping[str, Any], other: Callable[[Any], Any] | None = None) -> dict[str, Any]:
    """The record of each parameter by its name.

    Args:
        params: name of a parameter -> its value.
        other: as for `parameter_record`.

    Raises:
        TypeError, ValueError: as `parameter_record`, naming the parameter.
    """
    records = {}
    for name, value in params.items():
        try:
            records[name] = parameter_record(value, other or _refuse)
            canonical_json(records[name]).encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{name}: expected text that UTF-8 can hold, found {value!r:.80}") from error
        except RecursionError as error:
            raise ValueError(f"{name}: expected a value that ends, found one nested too deep") from error
        except (TypeError, ValueError) as error:
            raise type(error)(f"{name}: {error}") from error
    return records


def _refuse(value: Any) -> Any:
    """TypeError: there is no record of such a value."""
    raise TypeError(f"{_remedy(value)}, found {type(value).__name__} {value!r:.80}")


def parameter_record(value: Any, other: Callable[[Any], Any] = _refuse) -> Any:
    """JSON values that differ for any two values that differ in type, content or order.

    Numbers, booleans, None, text and lists are themselves; everything else is a mapping of one entry, whose
    name says what it is: {"tuple": [0, 1]}, {"numpy": ["uint8", 200]}, {"dict": [["q_proj", 1]]}.

    Args:
        value: None, bool, int, float, str, list, tuple, dict with names as keys, an enum member, a numpy
            number or numpy dtype of numbers.
        other: makes the record of any other value; by default it is refused.

    Raises:
        TypeError: for every other type, subclasses of the above included.
        ValueError: for NaN, infinity and integers beyond 2**53.
    """
    kind = type(value)
    if value is None or kind is bool or kind is int:
        return value
    if kind is float and not math.isfinite(value):
        raise ValueError(f"expected a finite number, found {value}")
    if kind is float or kind is str:
        return exact(value)
    if kind is list:
        return [parameter_record(item, other) for item in value]
    if kind is tuple:
        return {"tuple": [parameter_record(item, other) for item in value]}
    if kind is dict:
        return {"dict": [[_name(name), parameter_record(item, other)] for name, item in value.items()]}
    if isinstance(value, enum.Enum):
        place = f"{kind.__module__}.{kind.__qualname__}.{value.name}"
        return {"enum": [place, parameter_record(_enum_value(value))]}
    if isinstance(value, np.generic) and value.dtype.name in NUMPY_NUMBERS:
        return {"numpy": [value.dtype.name, parameter_record(value.item())]}
    if isinstance(value, np.dtype) and value.name in NUMPY_NUMBERS:
        return {"dtype": value.str}  # with its byte order, which views and files show
    return other(value)


def parameter_copy(value: Any) -> Any:
    """A copy that shares nothing that can be changed, neither with `value` nor within itself.

    `copy.deepcopy` keeps one list in two places one list, which no record tells from two equal ones.

    Args:
        value: a value that has a record.
    """
    kind = type(value)
    if kind is list or kind is tuple:
        return kind(parameter_copy(item) for item in value)
    if kind is dict:
        return {name: parameter_copy(item) for name, item in value.items()}
    return value


def _name(name: Any) -> Any:
    if type(name) is not str:
        raise TypeError(f"expected str as keys of a dict, found {type(name).__name__} {name!r:.80}")
    return parameter_record(name)


def _enum_value(member: enum.Enum) -> Any:
    """The value of an enum member as a built-in type: that of a StrEnum is a str already."""
    value = member.value
    if isinstance(value, list | dict):
        raise TypeError(f"expected an enum of constant values, found {member!r:.80}; make its value a tuple")
    return value


def _remedy(value: Any) -> str:
    """What to give in place of a value without a record."""
    if isinstance(value, set | frozenset):
        return "expected a list or tuple (the order of a set differs between processes: sorted(…))"
    if isinstance(value, np.ndarray) or hasattr(value, "dims"):
        return "expected plain values (an array is an input of the stage, or .tolist() where it is short)"
    if isinstance(value, bool | int | float | str | list | tuple | Mapping):
        return "expected a plain bool, int, float, str, list, tuple or dict, not a class made from one"
    return "expected plain values (numbers, text, lists, tuples, dicts with names as keys)"
