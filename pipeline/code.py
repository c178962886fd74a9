"""What a function is, for keys: its code, and everything that code reads, as it is now.

Asked where no `version` is declared. The answer holds for the moment of asking: ask again, and a global that
was changed meanwhile gives another one. What is, and is not, in it: DESIGN.md, "Functions without a version".

Border: functions, classes and plain values in, a digest out; knows no stage and no metric. Never imports
torch, and a module of a user only where his function itself imports it.

Read from the code object, not from the source: the file may have been edited since it was loaded, a line may
hold two lambdas, a console keeps no text. Which names a function reads is in its instructions and in those of
the functions inside it.
"""

from __future__ import annotations

import builtins
import collections
import dataclasses
import decimal
import enum
import fractions
import functools
import hashlib
import importlib
import importlib.util
import inspect
import logging
import operator
import os
import re
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path, PurePath
from typing import Any, NoReturn

import numpy as np

from ..store.digest import array_digest, digest
from ..store.errors import MizarrError, StageError
from .inspection.installed import is_library, is_library_class, is_library_namespace, library_name
from .inspection.reads import NOTHING, Read, cells_of, global_of, reads_of

__all__ = ["code_version"]

Tree = list[Any]


def code_version(what: str, *parts: Any) -> str:
    """`code:…` of functions and plain values: equal only where the same code reads the same things.

    what: who asks, for messages: "metric 'margin'". Bytecode counts, so another minor version of Python gives
    another digest. Raises StageError for what has no identity, naming it and the function that reads it.
    """
    reader = _Reader(what)
    try:
        tree = [reader.identity(part) for part in parts]
        return f"code:{digest('code', sys.implementation.cache_tag, tree)[:16]}"
    except RecursionError:
        reader.trail.clear()
        reader.refuse("values or helpers nested too deep to be read,")
    except UnicodeEncodeError as error:
        reader.refuse(f"text without a canonical spelling ({error})")


# -- values


class _Reader:
    """One walk through all that some code reads. What may be met twice, or in a circle, is numbered."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.trail: list[str] = []
        self.met: dict[int, tuple[int, Any]] = {}  # the object is kept, lest its id be given to another

    def refuse(self, found: str) -> NoReturn:
        """StageError: who asked, what was found and where."""
        where = " of ".join(reversed(self.trail[-2:])) or "its declaration"
        raise StageError(
            f"{self.what} has no version, so all its code reads is part of its key; expected plain values, "
            f"arrays, functions and classes, found {found} in {where}; declare version=…, to be moved when "
            "numbers move, or pass it in"
        )

    @contextmanager
    def inside(self, place: str) -> Iterator[None]:
        """Within: messages name this place."""
        self.trail.append(place)
        try:
            yield
        finally:
            self.trail.pop()

    def identity(self, value: Any) -> Tree:
        """A value as nested lists of text and numbers, each headed by what it is."""
        for refused, why in _REFUSED:
            if value is refused:
                self.refuse(why)
        kind = type(value)
        if kind in _SCALARS:
            return _SCALARS[kind](value)
        if kind in _LEAVES:
            return _LEAVES[kind](self, value)
        if id(value) in self.met:
            return ["met", self.met[id(value)][0]]
        self.met[id(value)] = (len(self.met), value)
        if kind in _KINDS:
            return _KINDS[kind](self, value)
        if isinstance(value, type):
            return self.klass(value)
        if isinstance(value, enum.Enum):
            return self.member(value)
        return self._other(value)

    def _sorted(self, values: Any) -> Tree:
        """Members of a set in an order that does not depend on hashes; only what has no place in the walk."""
        for value in values:
            if type(value) is not frozenset and type(value) is not tuple and type(value) not in _SCALARS:
                self.refuse(f"a set with a {type(value).__name__} in it")
        return sorted(map(self.identity, values), key=repr)

    def _other(self, value: Any) -> Tree:
        """What no table names: something a library has a name for, or an instance of a user's class."""
        kind = type(value)
        if not is_library_class(kind) and library_name(value) is None:
            return self._instance(value)
        if (read := _of_loaded(kind)) is not None:
            return read(self, value)
        if hasattr(kind, "code_parts"):
            return ["declared", *map(self.identity, value.code_parts())]
        if (name := library_name(value)) is not None:
            return ["library", name]
        return self.refuse(f"{_a(kind)}, whose identity cannot be established,")

    # -- containers, arrays

    def pairs(self, given: Mapping[Any, Any]) -> Tree:
        """Names and values of a mapping, in its order, which code may see."""
        return [[self.identity(key), self._named(f"{key!r:.40}", value)] for key, value in given.items()]

    def _named(self, place: str, value: Any) -> Tree:
        with self.inside(place):
            return self.identity(value)

    def mapping(self, value: Any) -> Tree:
        """A dictionary, plain or one of the standard library's."""
        factory = self.identity(getattr(value, "default_factory", None))
        return [type(value).__name__, factory, self.pairs(value)]

    def sequence(self, value: Any) -> Tree:
        """A tuple, a list or a deque."""
        return [type(value).__name__, getattr(value, "maxlen", None), *map(self.identity, value)]

    def fields(self, value: Any) -> Tree:
        """The parts of a value that a table names, in its order."""
        return [
            type(value).__name__,
            *(self._named(name, getattr(value, name)) for name in _FIELDS[type(value)]),
        ]

    def reduced(self, value: Any) -> Tree:
        """What the value itself says it is made of."""
        return [type(value).__name__, *map(self.identity, value.__reduce__()[1])]

    def array(self, value: Any) -> Tree:
        """A numpy array by dtype, shape and content."""
        if value.dtype.kind in "OT":  # its bytes are addresses
            return ["objects", list(value.shape), *map(self.identity, value.ravel().tolist())]
        kind = repr(value.dtype)
        if value.dtype.hasobject:
            self.refuse(f"an array of dtype {kind}, whose bytes are addresses,")
        if value.dtype.kind in "biufc":
            return ["array", kind, array_digest(np.asarray(value))]
        return ["array", kind, list(value.shape), _bytes(np.ascontiguousarray(value).tobytes())]

    def numpy_scalar(self, value: Any) -> Tree:
        """A numpy number with its dtype."""
        return ["scalar", *self.array(np.asarray(value))]

    def labelled(self, value: Any) -> Tree:
        """An xarray object by names, labels, attributes and values."""
        from ..store.content import content_of

        try:
            whole = value if hasattr(value, "data_vars") else value.rename("values").to_dataset()
            for variable in whole.variables.values():
                if variable.dtype.kind == "O" and not all(
                    isinstance(each, str) for each in variable.values.flat
                ):
                    raise TypeError(f"objects along {', '.join(map(str, variable.dims))}")
            order = [str(name) for name in whole.variables]
            name = self.identity(getattr(value, "name", None))
            return [type(value).__name__, name, order, content_of(whole)]
        except (MizarrError, TypeError, ValueError) as error:
            self.refuse(f"a labelled array without a digest ({error})")

    def tensor(self, value: Any) -> Tree:
        """A torch tensor by dtype, shape and content; where it lies is in no key."""
        torch = sys.modules["torch"]
        if value.layout is not torch.strided or value.is_quantized:
            self.refuse(f"a tensor of layout {value.layout}, quantized: {value.is_quantized},")
        plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
        held = plain.reshape(-1).view(torch.uint8).numpy()
        told = [type(value).__name__, value.requires_grad, str(value.dtype), list(value.shape)]
        return ["tensor", *told, array_digest(held)]

    # -- functions

    def function(self, value: types.FunctionType) -> Tree:
        """Code, defaults, attributes, closure and globals; of a library's function its name.

        What a library's decorator made has no name: the code is the library's, what it closes over is not.
        """
        if (name := library_name(value)) is not None:
            return ["library", name]
        told: Tree = ["function", value.__name__]
        module = value.__globals__.get("__name__")
        library = is_library_namespace(value.__globals__)
        with self.inside(f"function {value.__qualname__!r}"):
            for part, given in (("defaults", value.__defaults__), ("defaults", value.__kwdefaults__)):
                with self.inside(part):
                    told.append(self.identity(given))
            told.append(self.pairs(vars(value)))
            if library:
                told.append([str(module), value.__code__.co_qualname])
                return [*told, *[self._cell(*each) for each in cells_of(value)]]
            told.append(self.code(value.__code__))
            return [*told, *self._reads(value)]

    def code(self, value: types.CodeType) -> Tree:
        """What runs; no file, no line numbers."""
        for name in value.co_names:
            if name in _LOOKS_AT_ITSELF:
                self.refuse(f"{name!r}, by which code reads what its text does not name,")
        return [
            "code",
            [value.co_argcount, value.co_posonlyargcount, value.co_kwonlyargcount, value.co_flags],
            [list(value.co_names), list(value.co_varnames), list(value.co_freevars), list(value.co_cellvars)],
            [_bytes(value.co_code), _bytes(value.co_exceptiontable)],
            [self.code(each) if isinstance(each, types.CodeType) else self.identity(each)
             for each in value.co_consts],
        ]  # fmt: skip

    def _reads(self, function: types.FunctionType) -> Tree:
        """Every global and every cell a function reads, with the attributes asked of a module."""
        cells = dict(cells_of(function))
        found = set(reads_of(function.__code__, frozenset(cells)))
        unread = cells.keys() - {read.name for read in found if read.kind == "closure"}
        told: Tree = []
        for read in sorted(found | {Read("closure", name) for name in unread}):
            with self.inside(f"{read.kind} {read.name!r}"):
                if read.kind == "import":
                    told.append(self._imported(function, read))
                elif read.writes:
                    self.refuse(
                        "a variable that is written from inside, so that a call depends on those before,"
                    )
                elif read.kind == "closure":
                    told.append([read.name, *read.chain, self._followed(cells[read.name], read.chain)])
                else:
                    value = global_of(function, read.name)
                    told.append([read.name, *read.chain, self._followed(value, read.chain)])
        return told

    def _cell(self, name: str, value: Any) -> Tree:
        with self.inside(f"closure {name!r}"):
            return [name, self._followed(value, ())]

    def _followed(self, value: Any, chain: Sequence[str]) -> Tree:
        """What `name.a.b` is: attributes are followed through modules, values count as a whole."""
        for attribute in chain:
            if not isinstance(value, types.ModuleType):
                break
            if is_library_namespace(vars(value)):
                found = vars(value).get(attribute, NOTHING)  # never loads what is loaded when first used
                if not isinstance(found, types.ModuleType):
                    return self._of_library(found, f"{value.__name__}.{attribute}")
                value = found
            else:
                value = getattr(value, attribute, NOTHING)
        if value is NOTHING:
            return ["unbound"]
        if isinstance(value, types.ModuleType):
            if is_library_namespace(vars(value)):
                return ["module", value.__name__]
            self.refuse(f"the module {value.__name__!r} as a value, of which anything may be read,")
        return self.identity(value)

    def _of_library(self, value: Any, name: str) -> Tree:
        """An attribute of a library's module: by name, but for numbers, texts and what was put there from
        outside."""
        refused = any(value is each for each, _ in _REFUSED)
        recursed = isinstance(value, type | types.FunctionType | types.MethodType | functools.partial)
        held = library_name(value)
        foreign = held is None and not is_library_class(type(value))
        if refused or recursed or foreign or type(value) in _SCALARS or hasattr(type(value), "code_parts"):
            return self.identity(value)
        return ["library", held or name]

    def _imported(self, function: types.FunctionType, read: Read) -> Tree:
        """What a function imports when it runs: a library's by name, a user's followed."""
        package = function.__globals__.get("__package__") or ""
        name = importlib.util.resolve_name("." * read.level + read.name, package) if read.level else read.name
        if is_library(name):
            return ["module", name, *read.chain]
        if not read.chain:
            self.refuse(f"an import of the module {name!r} as a whole (write `from {name} import …`),")
        try:
            module = importlib.import_module(name)
        except ImportError:
            return ["unbound", name]
        told: Tree = ["from", name]
        for wanted in read.chain:
            if not hasattr(module, wanted) and hasattr(module, "__path__"):
                with suppress(ImportError):
                    importlib.import_module(f"{name}.{wanted}")
            told.append([wanted, self._followed(getattr(module, wanted, NOTHING), ())])
        return told

    def builtin(self, value: Any) -> Tree:
        """A function written in C: by name, with what it is bound to."""
        if (name := library_name(value)) is not None:
            return ["library", name]
        owner = getattr(value, "__self__", None)
        if owner is None or isinstance(owner, types.ModuleType):
            self.refuse(f"the compiled function {value.__name__!r}, whose code cannot be read,")
        return ["bound", value.__name__, self.identity(owner)]

    # -- classes and instances

    def klass(self, value: type) -> Tree:
        """A user's class: bases, metaclass and all it defines; a library's by name."""
        if is_library_class(value):
            return ["library", f"{value.__module__}.{value.__qualname__}"]
        members = dict(value.__members__) if issubclass(value, enum.Enum) else {}
        told: Tree = ["class", value.__qualname__, self.identity(type(value))]
        with self.inside(f"class {value.__qualname__!r}"):
            told.append([self.identity(base) for base in value.__bases__])
            told.append([[name, self.identity(member)] for name, member in members.items()])
            told.append(self.identity(value.__doc__))
            skipped = {*_OF_EVERY_CLASS, *members, *(_OF_EVERY_ENUM if members else ())}
            for name, held in vars(value).items():
                if name not in skipped:
                    with self.inside(f"attribute {name!r}"):
                        told.append([name, self._attribute(held)])
        return told

    def _attribute(self, held: Any) -> Tree:
        if isinstance(held, types.MemberDescriptorType | types.GetSetDescriptorType):
            return ["slot"]
        if type(held).__name__ == "_tuplegetter":  # a field of a named tuple, whose place `_fields` tells
            return ["field"]
        return self.identity(held)

    def _instance(self, value: Any) -> Tree:
        """An instance of a user's class: the class, and every attribute it holds."""
        kind = type(value)
        foreign = [base for base in kind.__mro__ if is_library_class(base) and not _is_stateless(base)]
        for base in foreign:
            if base not in _CONTENT:
                self.refuse(f"{_a(kind)}, which inherits from {base.__module__}.{base.__qualname__},")
        content = [_CONTENT[base](value) for base in foreign]
        held = dict(getattr(value, "__dict__", {}))
        for base in kind.__mro__:
            for name, slot in vars(base).items():
                if isinstance(slot, types.MemberDescriptorType) and hasattr(value, name):
                    held[name] = getattr(value, name)
        with self.inside(f"{_a(kind)}"):
            return ["instance", self.identity(kind), [*map(self.identity, content)], self.pairs(held)]

    def member(self, value: enum.Enum) -> Tree:
        """A member of an enumeration: which, and what was put on it."""
        held = {name: each for name, each in vars(value).items() if name not in _OF_EVERY_MEMBER}
        return [
            "member",
            self.identity(type(value)),
            value._name_,
            self.identity(value._value_),
            self.pairs(held),
        ]

    def alias(self, value: Any) -> Tree:
        """list[int], int | None and their kin."""
        origin = typing.get_origin(value)
        return ["alias", self.identity(origin), *map(self.identity, typing.get_args(value))]


# -- tables


def _a(kind: type) -> str:
    return f"an instance of {kind.__module__}.{kind.__qualname__}"


def _bytes(value: bytes) -> str:
    return hashlib.sha256(value).hexdigest()


def _is_stateless(base: type) -> bool:
    return base is object or base.__module__ in ("abc", "collections.abc", "typing")


def _of_loaded(kind: type) -> Callable[[_Reader, Any], Tree] | None:
    """How to read arrays of libraries that need not be loaded."""
    if (xarray := sys.modules.get("xarray")) and kind in (xarray.DataArray, xarray.Dataset):
        return _Reader.labelled
    if (torch := sys.modules.get("torch")) and kind in (torch.Tensor, torch.nn.Parameter):
        return _Reader.tensor
    if torch and kind in (torch.dtype, torch.device, torch.Size):
        return lambda reader, value: [kind.__name__, str(value)]
    return None


_LOOKS_AT_ITSELF = frozenset(
    (
        "__annotations__",
        "__builtins__",
        "__closure__",
        "__code__",
        "__globals__",
        "__subclasses__",
        "f_back",
        "f_builtins",
        "f_globals",
        "f_locals",
    )
)
_OUTSIDE = "what lies outside of the program"
_REFUSED: list[tuple[Any, str]] = [
    *(
        (each, f"{each.__name__}(), which reads what the code does not name,")
        for each in (eval, exec, globals)
    ),
    *((each, "an import by a computed name") for each in (__import__, importlib.import_module)),
    *((each, _OUTSIDE) for each in (builtins.open, builtins.input, os.environ, os.getenv)),
    *((each, "the interpreter's own state") for each in (sys.modules, sys._getframe, inspect.currentframe)),
]
_SCALARS: dict[type, Callable[[Any], Tree]] = {
    type(None): lambda _: ["none"],
    type(...): lambda _: ["ellipsis"],
    type(NotImplemented): lambda _: ["not implemented"],
    bool: lambda value: ["bool", value],
    int: lambda value: ["int", hex(value)],
    float: lambda value: ["float", value.hex()],
    complex: lambda value: ["complex", value.real.hex(), value.imag.hex()],
    str: lambda value: ["str", value],
    bytes: lambda value: ["bytes", _bytes(value)],
}
_FIELDS: dict[type, tuple[str, ...]] = {
    range: ("start", "stop", "step"),
    slice: ("start", "stop", "step"),
    re.Pattern: ("pattern", "flags"),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    property: ("fget", "fset", "fdel"),
    functools.cached_property: ("func", "attrname"),
    functools.partial: ("func", "args", "keywords", "__dict__"),
    functools.partialmethod: ("func", "args", "keywords"),
    types.MethodType: ("__func__", "__self__"),
    dataclasses.Field: tuple(name for name in dataclasses.Field.__slots__ if name != "type"),
    dataclasses._DataclassParams: (  # type: ignore[attr-defined]  # part of every dataclass
        "init",
        "repr",
        "eq",
        "order",
        "frozen",
    ),
}
_LEAVES: dict[type, Callable[[_Reader, Any], Tree]] = {
    tuple: _Reader.sequence,
    set: lambda reader, value: ["set", *reader._sorted(value)],
    frozenset: lambda reader, value: ["frozenset", *reader._sorted(value)],
    np.ndarray: _Reader.array,
    np.memmap: _Reader.array,
    bytearray: lambda _, value: ["bytearray", _bytes(value)],
    logging.Logger: lambda _, value: ["logger", value.name],
    **dict.fromkeys((range, slice, re.Pattern), _Reader.fields),
    **dict.fromkeys(
        (decimal.Decimal, fractions.Fraction), lambda _, value: [type(value).__name__, str(value)]
    ),
    **dict.fromkeys((type(Path()), PurePath), lambda _, value: ["path", str(value)]),
    **dict.fromkeys(
        {type(np.dtype(code)) for code in np.typecodes["All"]}, lambda _, value: ["dtype", repr(value)]
    ),
    **dict.fromkeys({np.dtype(code).type for code in np.typecodes["All"]}, _Reader.numpy_scalar),
}
_KINDS: dict[type, Callable[[_Reader, Any], Tree]] = {
    **dict.fromkeys((list, collections.deque), _Reader.sequence),
    **dict.fromkeys(
        (dict, types.MappingProxyType, collections.OrderedDict, collections.defaultdict, collections.Counter),
        _Reader.mapping,
    ),
    types.FunctionType: _Reader.function,
    types.ModuleType: lambda reader, value: reader._followed(value, ()),
    types.BuiltinFunctionType: _Reader.builtin,
    **dict.fromkeys((operator.itemgetter, operator.attrgetter, operator.methodcaller), _Reader.reduced),
    **dict.fromkeys((types.GenericAlias, types.UnionType), _Reader.alias),
    **dict.fromkeys(set(_FIELDS) - set(_LEAVES), _Reader.fields),
}
_CONTENT: dict[type, Callable[[Any], Any]] = {
    dict: lambda value: list(dict.items(value)),
    list: lambda value: list.__getitem__(value, slice(None)),
    tuple: lambda value: tuple.__getitem__(value, slice(None)),
    str: lambda value: str.__getitem__(value, slice(None)),
    int: lambda value: int.__add__(value, 0),
    float: float.__pos__,
}
"""What an instance of a user's class holds as the built-in type it inherits from, whatever it overrides."""
_OF_EVERY_CLASS = frozenset(
    (
        "__dict__",
        "__weakref__",
        "__module__",
        "__qualname__",
        "__doc__",
        "__annotations__",
        "__annotate__",
        "__annotate_func__",
        "__annotations_cache__",
        "__firstlineno__",
        "__static_attributes__",
        "__orig_bases__",
        "__parameters__",
        "__type_params__",
        "_abc_impl",
    )
)
_OF_EVERY_ENUM = frozenset(
    (
        "_member_names_",
        "_member_map_",
        "_value2member_map_",
        "_unhashable_values_",
        "_hashable_values_",
        "_unhashable_values_map_",
        "_member_type_",
        "_use_args_",
        "_value_repr_",
        "_new_member_",
        "_flag_mask_",
        "_singles_mask_",
        "_all_bits_",
        "_boundary_",
        "_inverted_",
    )
)
_OF_EVERY_MEMBER = frozenset(["_name_", "_value_", "__objclass__", "_sort_order_"])
