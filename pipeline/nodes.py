"""Nodes: what a workflow's graph is made of.

A node gives a labelled dataset and knows how to say what it is (`status`), what it will cost (`estimate`),
how to make it (`run`) and how to read it (`open`, `part`). `StageNode` is a stage with its inputs;
`SourceNode` something made by a function of declared identity; `ConstantNode` a dataset in hand; capture,
in the forward room, is another. An edge is a `Port`: a node, or one of its variables.

Border: keys, parts and labels; knows no stage, no scheduler, no model.

Keys follow content: a stage's key is made of what its inputs *are* (content digests), never of how they
came about, so that an upstream which runs again and gives the same bytes leaves everything downstream
cached (early cutoff; Mokhov, Mitchell, Peyton Jones 2018, "Build Systems a la Carte").
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property, wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar, cast, runtime_checkable

from ..store.errors import SourceChanged, StageError, nearest
from ..store.keys import ResultKey
from .context import Selection

if TYPE_CHECKING:
    import xarray as xr

    from ..store import Store
    from ..store.records import Record
    from .context import Context
    from .pinned import Pinned

S = TypeVar("S")
T = TypeVar("T")
P = ParamSpec("P")


@dataclass(frozen=True)
class Status:
    """Whether a node's result is stored, and why not."""

    is_cached: bool
    reason: str = ""
    """Why it will run; empty when cached."""
    cells: int = 1
    cells_cached: int = 0
    warning: str = ""
    """Something a reader of a cached result should know."""


@dataclass(frozen=True)
class Estimate:
    """What a run would cost."""

    bytes_read: int = 0
    bytes_written: int = 0
    peak_bytes: int = 0
    """Largest memory that is held at once."""
    seconds: float | None = None
    """Wall time, `setup_seconds` included; None where nothing is known."""
    work: str = ""
    """Sentence on the runs and passes of an experiment; empty for other nodes."""
    setup_seconds: float = 0.0
    """Time to read the model, which the steps of a plan share."""


class Part:
    """A piece of a node's result: what it is, how large, and how to get it.

    content: digest of everything `load` gives, labels included: two parts with one content are one part.
    load: the piece as a dataset, lazily labelled. nbytes: of its arrays. parents: R of the stored arrays it
    is cut from, for lineage. content and nbytes may be functions, called when first asked for. check:
    raises SourceChanged when `load` gives something else than it did when it was digested.
    """

    def __init__(
        self,
        content: str | Callable[[], str],
        load: Callable[[], xr.Dataset],
        nbytes: int | Callable[[], int] = 0,
        parents: Sequence[str] = (),
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._content, self._nbytes = content, nbytes
        self.load, self.check = load, check
        self.parents = tuple(parents)

    @cached_property
    def content(self) -> str:
        """Digest of what `load` gives."""
        return self._content if isinstance(self._content, str) else self._content()

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the piece when it is in memory."""
        return self._nbytes if isinstance(self._nbytes, int) else self._nbytes()


@runtime_checkable
class Node(Protocol):
    """What the graph of a workflow is made of.

    Planning (`status`, `estimate`, `labels`) computes nothing, loads no model and works on a read-only
    store. With a cluster, a stage's task carries the nodes it reads from: pickled, a node is names and
    digests, never arrays or a model (`__getstate__`), and only `part` is called there.
    """

    name: str
    inputs: tuple[Node, ...]

    @property
    def pinned(self) -> Sequence[Pinned]:
        """What it reads beside its inputs, and what must not change while it runs."""
        ...

    def status(self, store: Store) -> Status:
        """Whether the result is stored. Looks afresh at every call. Raises SourceChanged where something in
        `pinned` is no longer what the key says."""
        ...

    def estimate(self, store: Store) -> Estimate:
        """Cost of what is missing; nothing when cached."""
        ...

    def labels(self, store: Store, axis: str) -> list[Any]:
        """Labels along a cell axis ("layer", "block": indices; "segment": (start, stop) token ranges).

        Empty if the node has no such axis, or does not know it yet.
        """
        ...

    def part(self, store: Store, variable: str | None, selection: Selection) -> Part:
        """A piece of the stored result; variable None for all. Axes the node does not have are ignored."""
        ...

    def require_workers(self, context: Context) -> None:
        """Raise PlanError where other processes cannot compute this. Asked before anything starts."""
        ...

    def run(self, store: Store, context: Context) -> None:
        """Compute and store what is missing, in the calling thread or through `context.map`.

        Called when all inputs are stored. Whatever is finished is published at once, so that a kill at any
        moment leaves a store from which `run` goes on.
        """
        ...

    def open(self, store: Store) -> xr.Dataset:
        """The stored result, labelled and lazy. StageError, or of a run EntryNotFound, unless it is whole."""
        ...


# -- one look at the store

_MEMO: ContextVar[dict[Any, Any] | None] = ContextVar("mizarr-look", default=None)


@contextmanager
def one_look() -> Iterator[None]:
    """Within: each node is asked once whether it is stored, however many others read it.

    Without it a chain of n stages would look 2^n times: a status needs the keys of the inputs, a key their
    status.
    """
    if _MEMO.get() is not None:
        yield
        return
    token = _MEMO.set({})
    try:
        yield
    finally:
        _MEMO.reset(token)


def remembered(
    ask: Callable[Concatenate[S, Store, P], T],
) -> Callable[Concatenate[S, Store, P], T]:
    """A question to a node and a store, answered once per look."""

    @wraps(ask)
    def answer(node: S, store: Store, /, *args: P.args, **kwargs: P.kwargs) -> T:
        memo = _MEMO.get()
        if memo is None:
            return ask(node, store, *args, **kwargs)
        # The node itself is kept beside the answer, so that its id is not given to another one meanwhile.
        place = (ask.__qualname__, id(node), store, args)
        if place not in memo:
            memo[place] = (node, ask(node, store, *args, **kwargs))
        found: T = memo[place][1]
        return found

    return cast("Callable[Concatenate[S, Store, P], T]", answer)


@remembered
def status_of(node: Node, store: Store) -> Status:
    """`node.status(store)`, asked once within `one_look`."""
    return node.status(store)


@remembered
def estimate_of(node: Node, store: Store) -> Estimate:
    """`node.estimate(store)`, asked once within `one_look`."""
    return node.estimate(store)


def check_pinned(node: Node) -> None:
    """Raise SourceChanged unless all that a node reads beside its inputs is what its key says. Each resource
    is asked once within `one_look`."""
    memo = _MEMO.get()
    for resource in node.pinned:
        place = ("check", id(resource))
        if memo is None or place not in memo:
            resource.check()
            if memo is not None:
                memo[place] = resource


# -- edges


@dataclass(frozen=True)
class Port:
    """A node's dataset, or one variable of it, as the input of a stage."""

    node: Node
    variable: str | None = None

    def part(self, store: Store, selection: Selection) -> Part:
        """A piece of what comes through here."""
        return self.node.part(store, self.variable, selection)


class Ports:
    """What every kind of node has: `node["variable"]`, nothing pinned, and leave to be computed anywhere."""

    def __getitem__(self, variable: str) -> Port:
        return Port(self, variable)  # type: ignore[arg-type]  # every subclass is a Node

    @property
    def pinned(self) -> Sequence[Pinned]:
        """See `Node`."""
        return ()

    def require_workers(self, context: Context) -> None:
        """See `Node`."""


# -- nodes with one stored result


class ResultNode(Ports, ABC):
    """What nodes with one stored result share: finding it, reading it, whole or in part."""

    name: str
    inputs: tuple[Node, ...] = ()

    @abstractmethod
    def key(self, store: Store) -> ResultKey | None:
        """The result's key; None while an input is missing."""

    @abstractmethod
    def status(self, store: Store) -> Status:
        """See `Node`."""

    @abstractmethod
    def estimate(self, store: Store) -> Estimate:
        """See `Node`."""

    @abstractmethod
    def run(self, store: Store, context: Context) -> None:
        """See `Node`."""

    def labels(self, store: Store, axis: str) -> list[Any]:
        """Layers or blocks of the stored result; a result has no segments of its own."""
        if axis == "segment" or self.record(store) is None:
            return []
        return indices_along(self.open(store), axis)

    @remembered
    def record(self, store: Store) -> Record | None:
        """What is published under the key."""
        key = self.key(store)
        return None if key is None else store.lookup(key)

    def part(self, store: Store, variable: str | None, selection: Selection) -> Part:
        """A piece of the result, cut by layer and token range where it has those axes."""
        return cut(self._stored(store).content, lambda: self.open(store), variable, selection)

    def open(self, store: Store) -> xr.Dataset:
        """The stored result, lazy, in a dataset of the caller's own. StageError unless there is one."""
        return self._opened(store).copy(deep=False)

    @remembered
    def _opened(self, store: Store) -> xr.Dataset:
        # Asked for labels, for sizes and for values of each reader; never handed out itself, as it is shared.
        return store.open_result(self._stored(store))

    def publish(
        self,
        store: Store,
        key: ResultKey,
        dataset: xr.Dataset,
        note: Mapping[str, Any],
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Store a result under its key, unless something in `pinned` changed since it was opened, or `check`
        raises; note: its provenance. Raises SourceChanged, and then nothing is stored."""

        def unchanged() -> None:
            for resource in self.pinned:
                resource.check()
            check()

        store.put_result(key, dataset, provenance=note, confirm=unchanged)

    def _stored(self, store: Store) -> Record:
        record = self.record(store)
        if record is None:
            raise StageError(f"{self.name} is not stored in {store.address}; run the workflow first")
        return record


def cut(
    content: str,
    load: Callable[[], xr.Dataset],
    variable: str | None,
    selection: Selection,
    *,
    changes: bool = False,
) -> Part:
    """A piece of a dataset whose content is known; changes: somebody else may change what `load` reads.

    The whole is identified by its content; which variable is read, the key of the reader says. A real cut is
    identified by its own bytes, so that a result which grew by a layer leaves the pieces of its other layers
    what they were.
    """

    def read() -> xr.Dataset:
        dataset = load()
        if variable is not None:
            if variable not in dataset.data_vars:
                held = [str(name) for name in dataset.data_vars]
                near = nearest(variable, held)
                hint = f"; nearest is {near!r}" if near else ""
                raise StageError(f"expected a variable {variable!r}, found {', '.join(held)}{hint}")
            dataset = dataset[[variable]]
        for axis in ("layer", "block"):
            if axis in selection and axis in dataset.dims:
                place = _index(axis, dataset[axis].values.tolist(), selection[axis])
                dataset = dataset.isel({axis: [place]})
        if "segment" in selection and "token" in dataset.dims:
            dataset = dataset.isel(token=slice(*selection["segment"]))
        return dataset

    def size() -> int:
        return sum(int(array.nbytes) for array in read().data_vars.values())

    def own() -> str:
        from ..store.content import content_of

        return content_of(read())

    def check() -> None:
        found = own() if selection else content_of_whole()
        if found != part.content:
            raise SourceChanged(
                f"expected an array as it was when it was given ({part.content[:19]}), found it changed "
                f"({found[:19]}): what it reads lazily was written to; load it first, or start again"
            )

    def content_of_whole() -> str:
        from ..store.content import content_of

        return content_of(load())

    part = Part(own if selection else content, read, size, (content,), check if changes else lambda: None)
    return part


def indices_along(dataset: xr.Dataset, axis: str) -> list[int]:
    """Labels of the layers, or blocks, of a dataset; empty where it has none."""
    return [int(label) for label in dataset[axis].values] if axis in dataset.dims else []


def _index(axis: str, held: list[int], wanted: int) -> int:
    if wanted not in held:
        raise StageError(f"expected {axis} {wanted}, found {axis}s {', '.join(map(str, held))}")
    return held.index(wanted)
