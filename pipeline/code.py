"""Digest of a function's code and of everything that code reads: the version, in keys, of a function that is
declared without one.

The digest is computed from the current state at every call: a global that changed in between gives another
digest. What is included and what is refused: DESIGN.md, "Functions without a version".

The bytecode is read instead of the source text, because the file may have been edited since it was loaded,
one line may hold two lambdas, and a console keeps no text. The names that a function reads are in its
instructions and in those of the functions inside it.

Border: functions, classes and plain values in, a digest out; knows no stage and no metric. Never imports
torch; imports a user's module only if the user's function itself imports it.
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


def code_version(label: str, *parts: Any) -> str:
    """Digest functions by their code and by the values that the code reads: "code:" and 16 hex digits.

    Two functions have equal digests only if their code is equal and reads equal values. Bytecode is part of
    the digest, so another minor version of Python gives another one.

    Arguments:
        label: Owner of the code, for error messages: "metric 'margin'".
        parts: Functions, classes or plain values, in order.

    Raises:
        StageError: The code reads a value without an identity; names the value and the function that reads
            it.
    """
    reader = _Reader(label)
    try:
        tree = [reader.identity(part) for part in parts]
        return f"code:{digest('code', sys.implementation.cache_tag, tree)[:16]}"
    except RecursionError:
        # Every `inside` has removed its place: leaving one needs no deeper stack than entering it did.
        reader.refuse("values or helpers nested too deep to be read,")
    except UnicodeEncodeError as error:
        reader.refuse(f"text without a canonical spelling ({error})")


# -- values


class _Reader:
    """Turns a function, and every value that its code reads, into nested lists that can be digested.

    Containers, functions and classes are numbered when first met, so that shared and circular references end.
    """

    def __init__(self, label: str) -> None:
        self.label = label
        self.trail: list[str] = []
        # By id: number and object; keeps the object alive, as a freed object's id may be reused.
        self.met: dict[int, tuple[int, Any]] = {}

    def refuse(self, problem: str) -> NoReturn:
        """Raise StageError for a value that has no identity.

        Arguments:
            problem: The value in words, such as "an open file".
        """
        where = " of ".join(reversed(self.trail[-2:])) or "its declaration"
        raise StageError(
            f"{self.label} has no version, so its key contains everything its code reads: plain values, "
            f"arrays, functions and classes can be keyed, found {problem} in {where}; declare version=… (a "
            "number that you raise when results change), or pass the value as an argument"
        )

    @contextmanager
    def inside(self, place: str) -> Iterator[None]:
        """Context manager in which error messages name a place in the code, such as "closure 'scale'"."""
        self.trail.append(place)
        try:
            yield
        finally:
            self.trail.pop()

    def identity(self, value: Any) -> Tree:
        """Convert a value to nested lists of text and numbers; the first item of each list names its kind."""
        # Compared by identity: equality of arrays and modules is not a bool, or is slow.
        for refused, reason in _REFUSED:
            if value is refused:
                self.refuse(reason)
        kind = type(value)
        if kind in _SCALARS:
            return _SCALARS[kind](value)
        if kind in _LEAVES:
            return _LEAVES[kind](self, value)
        # Numbered after scalars and leaves: whether two equal texts are one object differs between processes.
        if id(value) in self.met:
            # Shared or circular: a reference to the number keeps the tree finite.
            return ["met", self.met[id(value)][0]]
        self.met[id(value)] = (len(self.met), value)
        if kind in _NUMBERED:
            return _NUMBERED[kind](self, value)
        if isinstance(value, type):
            return self.klass(value)
        if isinstance(value, enum.Enum):
            return self.member(value)
        return self._library_object_or_instance(value)

    def _sorted(self, values: Any) -> Tree:
        """Identities of a set's members, in an order independent of hashes.

        Members may be scalars, tuples and frozensets only: other values get a number when first met, so the
        result would depend on the order of the set.
        """
        for value in values:
            if type(value) is not frozenset and type(value) is not tuple and type(value) not in _SCALARS:
                self.refuse(f"a set with a {type(value).__name__} in it")
        # The order of a set of strings differs between processes (hash randomisation).
        return sorted(map(self.identity, values), key=repr)

    def _library_object_or_instance(self, value: Any) -> Tree:
        """Identity of a value whose type is in no table: a library's named object or a user's instance."""
        kind = type(value)
        if not is_library_class(kind) and library_name(value) is None:
            return self._instance(value)
        if (read := _reader_of_xarray_or_torch(kind)) is not None:
            return read(self, value)
        if hasattr(kind, "code_parts"):
            return ["declared", *map(self.identity, value.code_parts())]
        if (name := library_name(value)) is not None:
            return ["library", name]
        return self.refuse(f"{_instance_label(kind)}, whose identity cannot be established,")

    # -- containers, arrays

    def pairs(self, entries: Mapping[Any, Any]) -> Tree:
        """Identities of keys and values of a mapping, in its own order, because code can observe that
        order."""
        return [[self.identity(key), self._named(f"{key!r:.40}", value)] for key, value in entries.items()]

    def _named(self, place: str, value: Any) -> Tree:
        """Identity of a value, with its place for error messages."""
        with self.inside(place):
            return self.identity(value)

    def mapping(self, value: Any) -> Tree:
        """Identity of a dictionary, plain or one of the standard library's."""
        # A defaultdict behaves differently with another factory.
        factory = self.identity(getattr(value, "default_factory", None))
        return [type(value).__name__, factory, self.pairs(value)]

    def sequence(self, value: Any) -> Tree:
        """Identity of a tuple, list or deque."""
        return [type(value).__name__, getattr(value, "maxlen", None), *map(self.identity, value)]

    def fields(self, value: Any) -> Tree:
        """Identity of an object by the attributes that `_FIELDS` lists for its type, such as a range's."""
        return [
            type(value).__name__,
            *(self._named(name, getattr(value, name)) for name in _FIELDS[type(value)]),
        ]

    def reduced(self, value: Any) -> Tree:
        """Identity of an `operator` getter or caller by its constructor arguments, taken from
        `__reduce__`."""
        return [type(value).__name__, *map(self.identity, value.__reduce__()[1])]

    def array(self, value: Any) -> Tree:
        """Identity of a numpy array by dtype, shape and content."""
        if value.dtype.kind in "OT":  # object and StringDType arrays: the buffer holds pointers
            return ["objects", list(value.shape), *map(self.identity, value.ravel().tolist())]
        # `repr` includes byte order and field names, which `name` omits.
        kind = repr(value.dtype)
        if value.dtype.hasobject:
            self.refuse(f"an array of dtype {kind}, whose buffer holds pointers,")
        if value.dtype.kind in "biufc":
            return ["array", kind, array_digest(np.asarray(value))]
        return ["array", kind, list(value.shape), _bytes(np.ascontiguousarray(value).tobytes())]

    def numpy_scalar(self, value: Any) -> Tree:
        """Identity of a numpy number with its dtype."""
        return ["scalar", *self.array(np.asarray(value))]

    def labelled(self, value: Any) -> Tree:
        """Identity of an xarray object by names, labels, attributes and values."""
        from ..store.content import content_of

        try:
            dataset = value if hasattr(value, "data_vars") else value.rename("values").to_dataset()
            for variable in dataset.variables.values():
                is_object = variable.dtype.kind == "O"
                if is_object and not all(isinstance(item, str) for item in variable.values.flat):
                    raise TypeError(f"objects along {', '.join(map(str, variable.dims))}")
            order = [str(name) for name in dataset.variables]
            name = self.identity(getattr(value, "name", None))
            return [type(value).__name__, name, order, content_of(dataset)]
        except (MizarrError, TypeError, ValueError) as error:
            self.refuse(f"a labelled array without a digest ({error})")

    def tensor(self, value: Any) -> Tree:
        """Identity of a torch tensor by dtype, shape and content; its device is part of no key."""
        torch = sys.modules["torch"]
        # Sparse and quantised tensors have no plain buffer to digest.
        if value.layout is not torch.strided or value.is_quantized:
            self.refuse(f"a tensor of layout {value.layout}, quantized: {value.is_quantized},")
        # Conjugate and negative views share memory with their base, so the lazy flags are resolved first.
        plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
        raw_bytes = plain.reshape(-1).view(torch.uint8).numpy()
        header = [type(value).__name__, value.requires_grad, str(value.dtype), list(value.shape)]
        return ["tensor", *header, array_digest(raw_bytes)]

    # -- functions

    def function(self, value: types.FunctionType) -> Tree:
        """Identity of a function: a user's by code, defaults, attributes, closure and globals, a library's by
        name.

        A wrapper made by a library's decorator has no importable name: its code is identified by module and
        qualified name, its closure by content, since that holds the user's function.
        """
        if (name := library_name(value)) is not None:
            return ["library", name]
        tree: Tree = ["function", value.__name__]
        with self.inside(f"function {value.__qualname__!r}"):
            with self.inside("defaults"):
                tree += [self.identity(value.__defaults__), self.identity(value.__kwdefaults__)]
            tree.append(self.pairs(vars(value)))
            if is_library_namespace(value.__globals__):
                tree.append([str(value.__globals__.get("__name__")), value.__code__.co_qualname])
                return [*tree, *[self._cell(*cell) for cell in cells_of(value)]]
            tree.append(self.code(value.__code__))
            return [*tree, *self._reads(value)]

    def code(self, value: types.CodeType) -> Tree:
        """Identity of a code object by instructions, constants and names, without file name and lines."""
        for name in value.co_names:
            if name in _INTROSPECTION:
                self.refuse(f"{name!r}, by which code reads variables that it does not name,")
        # `co_code` is the bytecode as compiled; the interpreter specialises a copy while it runs (PEP 659).
        return [
            "code",
            [value.co_argcount, value.co_posonlyargcount, value.co_kwonlyargcount, value.co_flags],
            [list(value.co_names), list(value.co_varnames), list(value.co_freevars), list(value.co_cellvars)],
            [_bytes(value.co_code), _bytes(value.co_exceptiontable)],
            [self.code(constant) if isinstance(constant, types.CodeType) else self.identity(constant)
             for constant in value.co_consts],
        ]  # fmt: skip

    def _reads(self, function: types.FunctionType) -> Tree:
        """Identities of every global and closure variable that a function reads, and of its imports."""
        cells = dict(cells_of(function))
        reads = set(reads_of(function.__code__, frozenset(cells)))
        unread = cells.keys() - {read.name for read in reads if read.kind == "closure"}
        # Cells that no instruction names are added: `super()` reads `__class__` without one.
        tree: Tree = []
        for read in sorted(reads | {Read("closure", name) for name in unread}):
            with self.inside(f"{read.kind} {read.name!r}"):
                if read.kind == "import":
                    tree.append(self._imported(function, read))
                elif read.writes:
                    self.refuse(
                        "a variable that the function assigns, so that a call depends on earlier calls,"
                    )
                else:
                    is_cell = read.kind == "closure"
                    value = cells[read.name] if is_cell else global_of(function, read.name)
                    tree.append([read.name, *read.chain, self._followed(value, read.chain)])
        return tree

    def _cell(self, name: str, value: Any) -> Tree:
        """Name and identity of a closure variable."""
        with self.inside(f"closure {name!r}"):
            return [name, self._followed(value, ())]

    def _followed(self, value: Any, chain: Sequence[str]) -> Tree:
        """Identity of what code reads as `name.a.b`: attributes of modules are followed, other objects enter
        whole.

        Arguments:
            value: Value of the variable `name`.
            chain: Names of the attributes, ("a", "b").
        """
        for attribute in chain:
            if not isinstance(value, types.ModuleType):
                break
            if is_library_namespace(vars(value)):
                # `vars` instead of `getattr`: a module's lazy `__getattr__` must not import anything here.
                member = vars(value).get(attribute, NOTHING)
                if not isinstance(member, types.ModuleType):
                    return self._library_member(member, f"{value.__name__}.{attribute}")
                value = member
            else:
                value = getattr(value, attribute, NOTHING)
        if value is NOTHING:
            return ["unbound"]
        if isinstance(value, types.ModuleType):
            if is_library_namespace(vars(value)):
                return ["module", value.__name__]
            self.refuse(f"the module {value.__name__!r} as a value, from which anything may be read,")
        return self.identity(value)

    def _library_member(self, value: Any, name: str) -> Tree:
        """Identity of a member of a library's module: its name, unless user code may have set the member."""
        is_refused = any(value is refused for refused, _ in _REFUSED)
        is_code = isinstance(value, type | types.FunctionType | types.MethodType | functools.partial)
        canonical_name = library_name(value)
        is_foreign = canonical_name is None and not is_library_class(type(value))
        has_own_identity = type(value) in _SCALARS or hasattr(type(value), "code_parts")
        if is_refused or is_code or is_foreign or has_own_identity:
            return self.identity(value)
        return ["library", canonical_name or name]

    def _imported(self, function: types.FunctionType, read: Read) -> Tree:
        """Identity of an import inside a function: a library's by name, of a user's module the imported
        names."""
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
        tree: Tree = ["from", name]
        for attribute in read.chain:
            # `from package import submodule` imports the submodule, so the walk does the same.
            if not hasattr(module, attribute) and hasattr(module, "__path__"):
                with suppress(ImportError):
                    importlib.import_module(f"{name}.{attribute}")
            tree.append([attribute, self._followed(getattr(module, attribute, NOTHING), ())])
        return tree

    def builtin(self, value: Any) -> Tree:
        """Identity of a function written in C: its name; of a bound method also the object it is bound to."""
        if (name := library_name(value)) is not None:
            return ["library", name]
        owner = getattr(value, "__self__", None)
        if owner is None or isinstance(owner, types.ModuleType):
            self.refuse(f"the compiled function {value.__name__!r}, whose code cannot be read,")
        return ["bound", value.__name__, self.identity(owner)]

    # -- classes and instances

    def klass(self, value: type) -> Tree:
        """Identity of a class: a user's by bases, metaclass and all members, a library's by name."""
        if is_library_class(value):
            return ["library", f"{value.__module__}.{value.__qualname__}"]
        # `__members__` includes aliases, which iteration over the class omits.
        members = dict(value.__members__) if issubclass(value, enum.Enum) else {}
        tree: Tree = ["class", value.__qualname__, self.identity(type(value))]
        with self.inside(f"class {value.__qualname__!r}"):
            tree.append([self.identity(base) for base in value.__bases__])
            tree.append([[name, self.identity(member)] for name, member in members.items()])
            tree.append(self.identity(value.__doc__))
            skipped = {*_CLASS_INTERNALS, *members, *(_ENUM_INTERNALS if members else ())}
            for name, attribute in vars(value).items():
                if name not in skipped:
                    with self.inside(f"attribute {name!r}"):
                        tree.append([name, self._attribute(attribute)])
        return tree

    def _attribute(self, attribute: Any) -> Tree:
        """Identity of an attribute of a class; slots and fields of named tuples have no content."""
        if isinstance(attribute, types.MemberDescriptorType | types.GetSetDescriptorType):
            return ["slot"]
        if type(attribute).__name__ == "_tuplegetter":  # a named tuple's field; its position is in `_fields`
            return ["field"]
        return self.identity(attribute)

    def _instance(self, value: Any) -> Tree:
        """Identity of an instance of a user's class: the class and all attributes, those in slots
        included."""
        kind = type(value)
        library_bases = [base for base in kind.__mro__ if is_library_class(base) and not _is_stateless(base)]
        for base in library_bases:
            if base not in _BUILTIN_VALUE:
                self.refuse(
                    f"{_instance_label(kind)}, which inherits from {base.__module__}.{base.__qualname__},"
                )
        # A subclass may override `__iter__` or `__eq__`; the built-in's own methods see the real content.
        content = [_BUILTIN_VALUE[base](value) for base in library_bases]
        attributes = dict(getattr(value, "__dict__", {}))
        for base in kind.__mro__:
            for name, slot in vars(base).items():
                if isinstance(slot, types.MemberDescriptorType) and hasattr(value, name):
                    attributes[name] = getattr(value, name)
        with self.inside(f"{_instance_label(kind)}"):
            return ["instance", self.identity(kind), [*map(self.identity, content)], self.pairs(attributes)]

    def member(self, value: enum.Enum) -> Tree:
        """Identity of a member of an enumeration: class, name, value and extra attributes."""
        attributes = {
            name: attribute for name, attribute in vars(value).items() if name not in _MEMBER_INTERNALS
        }
        return [
            "member",
            self.identity(type(value)),
            value._name_,
            self.identity(value._value_),
            self.pairs(attributes),
        ]

    def alias(self, value: Any) -> Tree:
        """Identity of a generic alias or union type, such as list[int] or int | None."""
        origin = typing.get_origin(value)
        return ["alias", self.identity(origin), *map(self.identity, typing.get_args(value))]


# -- tables


def _instance_label(kind: type) -> str:
    return f"an instance of {kind.__module__}.{kind.__qualname__}"


def _bytes(value: bytes) -> str:
    return hashlib.sha256(value).hexdigest()


def _is_stateless(base: type) -> bool:
    """Whether a library's class adds no content to instances of its subclasses."""
    return base is object or base.__module__ in ("abc", "collections.abc", "typing")


def _reader_of_xarray_or_torch(kind: type) -> Callable[[_Reader, Any], Tree] | None:
    """The method that identifies xarray or torch objects of a type; None for other types.

    Never imports a library: without xarray or torch there are no such objects.
    """
    if (xarray := sys.modules.get("xarray")) and kind in (xarray.DataArray, xarray.Dataset):
        return _Reader.labelled
    if (torch := sys.modules.get("torch")) and kind in (torch.Tensor, torch.nn.Parameter):
        return _Reader.tensor
    if torch and kind in (torch.dtype, torch.device, torch.Size):
        return lambda reader, value: [kind.__name__, str(value)]
    return None


# Names by which code inspects code; what it then reads is in no instruction.
_INTROSPECTION = frozenset(
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
_OUTSIDE = "input from outside of the program"
_REFUSED: list[tuple[Any, str]] = [
    *(
        (reader, f"{reader.__name__}(), which reads variables that the code does not name,")
        for reader in (eval, exec, globals)
    ),
    *((importer, "an import by a computed name") for importer in (__import__, importlib.import_module)),
    *((source, _OUTSIDE) for source in (builtins.open, builtins.input, os.environ, os.getenv)),
    *((state, "the interpreter's own state") for state in (sys.modules, sys._getframe, inspect.currentframe)),
]
"""(object, reason) for objects whose result cannot be identified; compared by `is`."""
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
"""Identity of plain values by type. Floats are written in hex: -0.0 and NaN differ from all other values."""
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
"""Names of the attributes that identify an object, by its type."""
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
"""Identity by type of values that are written out at every occurrence, without a number."""
_NUMBERED: dict[type, Callable[[_Reader, Any], Tree]] = {
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
"""Types that can be shared or circular; a second occurrence is written as ["met", number]."""
_BUILTIN_VALUE: dict[type, Callable[[Any], Any]] = {
    dict: lambda value: list(dict.items(value)),
    list: lambda value: list.__getitem__(value, slice(None)),
    tuple: lambda value: tuple.__getitem__(value, slice(None)),
    str: lambda value: str.__getitem__(value, slice(None)),
    int: lambda value: int.__add__(value, 0),
    float: float.__pos__,
}
"""Content of an instance of a subclass of a built-in type, read without overridden methods."""
_CLASS_INTERNALS = frozenset(
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
"""Members that Python adds to every class; they identify nothing or differ between Python versions."""
_ENUM_INTERNALS = frozenset(
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
"""Members that `enum` adds to every enumeration."""
_MEMBER_INTERNALS = frozenset(["_name_", "_value_", "__objclass__", "_sort_order_"])
"""Attributes that `enum` sets on every member."""
