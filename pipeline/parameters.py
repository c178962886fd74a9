"""Stage parameters: their encoding in keys (the record), and the copies that the stage's function gets.

Any two values that Python code can distinguish have different records: a tuple and a list, `np.uint8(200)`
and 200, 0.0 and -0.0, an enum member and its name, mappings in another order. A function may compute
different results with each, so a shared record would return the result of one for the other. Values without
such a record (sets, arrays, instances of other classes, subclasses of the built-in types) are refused.

The fields of a user's intervention are recorded the same way (stages/forward/hooks).

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
"""Names of the numpy dtypes whose scalars a Python number represents exactly."""


def parameter_records(
    params: Mapping[str, Any], fallback: Callable[[Any], Any] | None = None
) -> dict[str, Any]:
    """Encode the parameters of a stage as JSON values for its key, by name.

    Arguments:
        params: Value of each parameter by name.
        fallback: Encodes a value of a type that has no encoding here; None refuses such values.

    Raises:
        TypeError: A value has a type that cannot be in a key; the message names the parameter.
        ValueError: NaN, infinity, an integer beyond 2**53, invalid text, or a value nested too deeply.
    """
    records = {}
    for name, value in params.items():
        try:
            records[name] = parameter_record(value, fallback or _refuse)
            # Lone surrogates are valid in str but not in UTF-8, which the digest uses.
            canonical_json(records[name]).encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{name}: text that cannot be encoded as UTF-8, {value!r:.80}") from error
        except RecursionError as error:
            raise ValueError(f"{name}: a value that contains itself or is nested too deeply") from error
        except (TypeError, ValueError) as error:
            raise type(error)(f"{name}: {error}") from error
    return records


def _refuse(value: Any) -> Any:
    """Raise TypeError for a value of a type that cannot be in a key."""
    raise TypeError(f"{_expectation(value)}, found {type(value).__name__} {value!r:.80}")


def parameter_record(value: Any, fallback: Callable[[Any], Any] = _refuse) -> Any:
    """Encode a value as JSON so that any two values of different type, content or order differ.

    Numbers, booleans, None, text and lists are recorded as themselves; other values as a mapping of one
    entry, whose name states the type: {"tuple": [0, 1]}, {"numpy": ["uint8", 200]}, {"dict": [["q_proj",
    1]]}.

    Arguments:
        value: None, bool, int, float, str, list, tuple, dict with names as keys, an enum member, a numpy
            number or numpy dtype of numbers.
        fallback: Encodes a value of another type; by default such a value is refused.

    Raises:
        TypeError: The value has another type; subclasses of the above are other types.
        ValueError: NaN, infinity, or an integer beyond 2**53.
    """
    kind = type(value)
    if value is None or kind is bool or kind is int:
        return value
    # NaN differs from itself, and JSON has no infinity.
    if kind is float and not math.isfinite(value):
        raise ValueError(f"expected a finite number, found {value}")
    # Text and floats that JSON would write alike get a tag.
    if kind is float or kind is str:
        return exact(value)
    if kind is list:
        return [parameter_record(item, fallback) for item in value]
    if kind is tuple:
        return {"tuple": [parameter_record(item, fallback) for item in value]}
    if kind is dict:
        return {"dict": [[_name(name), parameter_record(item, fallback)] for name, item in value.items()]}
    # The class is in the record: members of two enums may have equal names and values.
    if isinstance(value, enum.Enum):
        place = f"{kind.__module__}.{kind.__qualname__}.{value.name}"
        return {"enum": [place, parameter_record(_enum_value(value))]}
    if isinstance(value, np.generic) and value.dtype.name in NUMPY_NUMBERS:
        return {"numpy": [value.dtype.name, parameter_record(value.item())]}
    if isinstance(value, np.dtype) and value.name in NUMPY_NUMBERS:
        # `str` includes the byte order, which code can observe through views and files.
        return {"dtype": value.str}
    return fallback(value)


def parameter_copy(value: Any) -> Any:
    """Copy a parameter so that changes to the copy do not reach the original.

    No list or dict occurs twice within the copy.

    `copy.deepcopy` would keep a list that occurs twice as one object, and no record distinguishes that from
    two equal lists.

    Arguments:
        value: A value that `parameter_record` accepts.
    """
    kind = type(value)
    if kind is list or kind is tuple:
        return kind(parameter_copy(item) for item in value)
    if kind is dict:
        return {name: parameter_copy(item) for name, item in value.items()}
    return value


def _name(name: Any) -> Any:
    """Encode a dict key; TypeError unless the key is a str."""
    if type(name) is not str:
        raise TypeError(f"expected a dict with keys of type str, found {type(name).__name__} {name!r:.80}")
    return parameter_record(name)


def _enum_value(member: enum.Enum) -> Any:
    """The value of an enum member; TypeError for a list or dict, which could be changed."""
    value = member.value
    if isinstance(value, list | dict):
        raise TypeError(
            f"expected an enum member with a constant value, found {member!r:.80}, whose value can be "
            "changed; make its value a tuple"
        )
    return value


def _expectation(value: Any) -> str:
    """Start of an error message on a value unfit for keys: the expected types."""
    if isinstance(value, set | frozenset):
        return "expected a list or tuple, such as sorted(…), as the order of a set differs between processes"
    if isinstance(value, np.ndarray) or hasattr(value, "dims"):
        return "expected plain values (give an array as an input of the stage, a short one as .tolist())"
    if isinstance(value, bool | int | float | str | list | tuple | Mapping):
        return "expected a plain bool, int, float, str, list, tuple or dict, not an instance of a subclass"
    return "expected plain values (numbers, text, lists, tuples, dicts with names as keys)"
