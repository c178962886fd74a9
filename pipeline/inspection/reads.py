"""Variables that code reads from outside: globals, closure cells, and imports.

They are found in the instructions of the code and of the functions, classes and comprehensions inside it.

Border: gives names; code.py finds the values.
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
"""Marks a variable that is not assigned yet."""
# Bookkeeping of the interpreter, which may stand between a load and the attributes read from it.
_BOOKKEEPING = frozenset(["CACHE", "EXTENDED_ARG", "NOP", "PRECALL", "PUSH_NULL", "RESUME"])
# Class bodies read with LOAD_NAME and, from Python 3.12 on, annotations with LOAD_FROM_DICT_OR_GLOBALS.
_READS_GLOBAL = frozenset(["LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"])


@dataclass(frozen=True, order=True)
class Read:
    """A variable from outside that a function's code reads or assigns, or a module that it imports."""

    kind: str
    """One of "global", "closure", "import"."""
    name: str
    """Name of the variable or module."""
    chain: tuple[str, ...] = ()
    """Attributes read from the variable at once (`name.a.b`), or names imported from the module."""
    level: int = 0
    """Number of leading dots of a relative import."""
    writes: bool = False
    """Whether the code assigns or deletes the variable."""


def reads_of(code: types.CodeType, outer: frozenset[str]) -> Iterator[Read]:
    """Find the variables from outside that code reads, assigns or imports, by looking at its instructions.

    Code of the functions, classes and comprehensions inside it is included.

    Arguments:
        code: The code object.
        outer: Names of the closure variables of the outermost function.
    """
    instructions = [
        instruction for instruction in dis.get_instructions(code) if instruction.opname not in _BOOKKEEPING
    ]
    for i, instruction in enumerate(instructions):
        if instruction.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            yield Read("global", instruction.argval, writes=True)
        elif instruction.opname in _READS_GLOBAL:
            yield Read("global", instruction.argval, _attributes_read(instructions[i + 1 :]))
        elif instruction.opname == "IMPORT_NAME":
            # IMPORT_NAME takes the level and the names from the two constants loaded before it.
            level, names = (argument.argval for argument in instructions[i - 2 : i])
            yield Read("import", instruction.argval, tuple(names or ()), level)
        elif instruction.opcode in dis.hasfree and instruction.argval in outer:
            if instruction.opname in ("STORE_DEREF", "DELETE_DEREF"):
                yield Read("closure", instruction.argval, writes=True)
            # LOAD_CLOSURE passes the cell to an inner function, whose own reads are listed below.
            elif instruction.opname != "LOAD_CLOSURE":
                yield Read("closure", instruction.argval, _attributes_read(instructions[i + 1 :]))
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from reads_of(inner, outer & frozenset(inner.co_freevars))


def _attributes_read(following: Sequence[dis.Instruction]) -> tuple[str, ...]:
    """Attributes that the instructions after the loading of an object read at once: ("a", "b") for
    `name.a.b`."""
    # Up to Python 3.11 `name.a()` loads `a` with LOAD_METHOD; later versions have a flag of LOAD_ATTR.
    attributes = itertools.takewhile(
        lambda instruction: instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"), following
    )
    return tuple(instruction.argval for instruction in attributes)


def global_of(function: types.FunctionType, name: str) -> Any:
    """Current value of a global or built-in that a function reads; `NOTHING` if it is not assigned.

    Arguments:
        function: The function.
        name: Name of the variable.
    """
    value = function.__globals__.get(name, NOTHING)
    untyped_function: Any = function  # mypy leaves the name __builtins__ out of its cache
    return untyped_function.__builtins__.get(name, NOTHING) if value is NOTHING else value


def cells_of(function: types.FunctionType) -> list[tuple[str, Any]]:
    """Closure variables of a function as (name, value); the value is `NOTHING` if not assigned yet."""
    cells = []
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            cells.append((name, cell.cell_contents))
        except ValueError:  # not assigned yet
            cells.append((name, NOTHING))
    return cells
