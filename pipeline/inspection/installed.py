"""Tells installed code from the user's own: the first is identified by name in keys, the second by its code.

Installed are the standard library, packages in site-packages, and mizarr itself wherever it is. All other
code is the user's own: a script, a notebook, a folder on the path, an editable install.
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
    """Whether a module belongs to the standard library or an installed package, by its name; not imported."""
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
    """Whether the module with these globals belongs to the standard library or an installed package."""
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
    """Whether a file or folder lies in a folder of installed code."""
    # realpath: virtual environments link to the standard library of their base Python.
    return any(root in Path(os.path.realpath(place)).parents for root in _installed())


@cache
def _installed() -> frozenset[Path]:
    """Folders of the standard library and of installed packages."""
    paths = sysconfig.get_paths()
    roots = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    roots += [*site.getsitepackages(), site.getusersitepackages()]
    return frozenset(Path(os.path.realpath(root)) for root in roots)


def is_library_class(kind: type) -> bool:
    """Whether a class is built into Python, or an installed module defines it under its own name."""
    # Static types are compiled into Python or an extension; users cannot create them.
    return not kind.__flags__ & _HEAP_TYPE or _member_of(kind.__module__, kind.__qualname__) is kind


def _member_of(module: Any, name: Any) -> Any:
    """Member of a loaded library module by dotted name; `_NOTHING` if the module has no such member."""
    loaded = sys.modules.get(module) if isinstance(module, str) else None
    if loaded is None or not isinstance(name, str) or not is_library_namespace(vars(loaded)):
        return _NOTHING
    member: Any = loaded
    for part in name.split("."):
        member = vars(member).get(part, _NOTHING) if hasattr(member, "__dict__") else _NOTHING
    return member


def library_name(value: Any) -> str | None:
    """Dotted name by which an installed library exposes this very object; None if no library does."""
    owner = getattr(value, "__objclass__", None)
    if isinstance(owner, type) and is_library_class(owner):  # str.upper
        return f"{owner.__module__}.{value.__qualname__}"
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if _member_of(module, name) is value:
        return f"{module}.{name}"
    if isinstance(value, types.FunctionType | types.BuiltinFunctionType):
        return None
    if isinstance(value, np.ufunc):  # does not name its library, which may be numpy or scipy
        modules = [module for module in list(sys.modules) if _member_of(module, value.__name__) is value]
        # The shortest of several names, then the alphabetically first, so that the choice is always the same.
        shortest = min(modules, key=lambda module: (len(module), module), default=None)
        return None if shortest is None else f"{shortest}.{value.__name__}"
    home = type(value).__module__
    is_library_module = is_library_class(type(value)) and home in sys.modules
    members = vars(sys.modules[home]) if is_library_module else {}
    names = [name for name, member in members.items() if member is value]
    return f"{home}.{min(names)}" if names else None
