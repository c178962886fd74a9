"""What is installed, and what is the user's own: of the first the name counts, of the second the code.

Installed is what lies where the standard library and packages do, and mizarr itself, wherever it lies. All
else is the user's own: a script, a notebook, a folder on the path, a package installed as editable.
"""

from __future__ import annotations

import importlib.util
import os
import site
import sys
import sysconfig
import types
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["is_library", "is_library_class", "is_library_namespace", "library_name"]

_NOTHING = object()
_OWN = __name__.partition(".")[0]
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: made while Python runs


def is_library(name: str) -> bool:
    """Whether a module is installed, by its name; one that is not loaded yet is not loaded here."""
    top = name.partition(".")[0]
    if top == _OWN:
        return True
    if (module := sys.modules.get(name, sys.modules.get(top))) is not None:
        return is_library_namespace(vars(module))
    try:
        spec = importlib.util.find_spec(top)
    except ValueError:
        return False
    if spec is None:
        return True  # an extra that is not installed: there is nothing to read
    places = [spec.origin] if spec.has_location else list(spec.submodule_search_locations or ())
    return spec.origin in ("built-in", "frozen") or (bool(places) and all(map(_is_installed, places)))


def is_library_namespace(namespace: Mapping[str, Any]) -> bool:
    """Whether the globals of some code are those of the standard library or of something installed."""
    name = namespace.get("__name__")
    if not isinstance(name, str) or name == "__main__":
        return False
    if name.partition(".")[0] == _OWN:
        return True
    file = namespace.get("__file__")
    if places := [file] if file else list(namespace.get("__path__") or ()):
        return all(map(_is_installed, places))
    return getattr(namespace.get("__spec__"), "origin", None) in ("built-in", "frozen")


@cache
def _is_installed(place: Any) -> bool:
    return any(root in Path(os.path.realpath(place)).parents for root in _installed())


@cache
def _installed() -> frozenset[Path]:
    """Where the standard library and installed packages lie."""
    paths = sysconfig.get_paths()
    roots = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    roots += [*site.getsitepackages(), site.getusersitepackages()]
    return frozenset(Path(os.path.realpath(root)) for root in roots)


def is_library_class(kind: type) -> bool:
    """Whether a class is one of Python's own, or one that an installed module holds under its name."""
    return not kind.__flags__ & _HEAP_TYPE or _found(kind.__module__, kind.__qualname__) is kind


def _found(module: Any, name: Any) -> Any:
    """What a loaded module of a library holds under a dotted name."""
    held = sys.modules.get(module) if isinstance(module, str) else None
    if held is None or not isinstance(name, str) or not is_library_namespace(vars(held)):
        return _NOTHING
    found: Any = held
    for part in name.split("."):
        found = vars(found).get(part, _NOTHING) if hasattr(found, "__dict__") else _NOTHING
    return found


def library_name(value: Any) -> str | None:
    """The name under which a library holds this very object; None where it does not."""
    owner = getattr(value, "__objclass__", None)
    if isinstance(owner, type) and is_library_class(owner):  # str.upper
        return f"{owner.__module__}.{value.__qualname__}"
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if _found(module, name) is value:
        return f"{module}.{name}"
    if isinstance(value, types.FunctionType | types.BuiltinFunctionType):
        return None
    if isinstance(value, np.ufunc):  # from any library, and none says which
        holders = [each for each in list(sys.modules) if _found(each, value.__name__) is value]
        return f"{min(holders, key=lambda each: (len(each), each))}.{value.__name__}" if holders else None
    home = type(value).__module__
    held = vars(sys.modules[home]) if is_library_class(type(value)) and home in sys.modules else {}
    names = [each for each, other in held.items() if other is value]
    return f"{home}.{min(names)}" if names else None
