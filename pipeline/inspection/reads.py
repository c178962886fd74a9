"""Which variables code reads from outside: globals, cells of its closure, and what it imports.

Read from the instructions, and from those of the functions, classes and comprehensions inside.

Border: says which names; what they stand for is the business of code.py.
"""

from __future__ import annotations

import dis
import itertools
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["NOTHING", "Read", "cells_of", "global_of", "reads_of"]

NOTHING = object()
"""Stands for a variable that is not assigned yet."""
_SILENT = frozenset(["CACHE", "EXTENDED_ARG", "NOP", "PRECALL", "PUSH_NULL", "RESUME"])
_READS_GLOBAL = frozenset(["LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"])


@dataclass(frozen=True, order=True)
class Read:
    """A variable that code reads from outside, or a module it imports.

    kind: "global", "closure" or "import". chain: attributes asked of it at once, or names imported from it.
    """

    kind: str
    name: str
    chain: tuple[str, ...] = ()
    level: int = 0
    writes: bool = False


def reads_of(code: types.CodeType, outer: frozenset[str]) -> Iterator[Read]:
    """What code and the functions, classes and comprehensions inside it read from outside.

    outer: its variables that belong to what surrounds the outermost function.
    """
    listed = [each for each in dis.get_instructions(code) if each.opname not in _SILENT]
    for i, each in enumerate(listed):
        if each.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            yield Read("global", each.argval, writes=True)
        elif each.opname in _READS_GLOBAL:
            yield Read("global", each.argval, _chain(listed[i + 1 :]))
        elif each.opname == "IMPORT_NAME":
            level, names = (before.argval for before in listed[i - 2 : i])
            yield Read("import", each.argval, tuple(names or ()), level)
        elif each.opcode in dis.hasfree and each.argval in outer:
            if each.opname in ("STORE_DEREF", "DELETE_DEREF"):
                yield Read("closure", each.argval, writes=True)
            elif each.opname != "LOAD_CLOSURE":
                yield Read("closure", each.argval, _chain(listed[i + 1 :]))
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from reads_of(inner, outer & frozenset(inner.co_freevars))


def _chain(following: Sequence[dis.Instruction]) -> tuple[str, ...]:
    """Attributes asked of what was just loaded."""
    asked = itertools.takewhile(lambda each: each.opname in ("LOAD_ATTR", "LOAD_METHOD"), following)
    return tuple(each.argval for each in asked)


def global_of(function: types.FunctionType, name: str) -> Any:
    """What a global of a function, or a built-in, stands for now."""
    found = function.__globals__.get(name, NOTHING)
    untyped: Any = function  # mypy leaves the name __builtins__ out of its cache
    return untyped.__builtins__.get(name, NOTHING) if found is NOTHING else found


def cells_of(function: types.FunctionType) -> list[tuple[str, Any]]:
    """The variables a function closes over, and what they hold now."""
    held = []
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            held.append((name, cell.cell_contents))
        except ValueError:  # not assigned yet
            held.append((name, NOTHING))
    return held
