"""Nodes of a workflow's graph.

A node stands for a labelled dataset. It reports whether the dataset is stored (`status`) and what computing
it would cost (`estimate`), computes it (`run`) and reads it (`open`, `part`). `StageNode` is a stage with its
inputs; `SourceNode` a dataset made by a function of declared identity; `ConstantNode` a dataset in memory;
`CaptureNode`, in stages/forward, a capture. An edge is a `Port`: a node, or one variable of its dataset.

Border: keys, parts and labels; knows no stage, no scheduler, no model.

Keys follow content: the key of a stage is made of the content digests of its inputs, never of how they were
computed. An upstream node that runs again and gives the same bytes therefore leaves everything downstream
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
    """Whether the result of a node of a workflow's graph is stored, and why not."""

    is_cached: bool
    """Whether the whole result is stored."""
    reason: str = ""
    """Why the node will run, such as "parameter k changed"; empty if it is cached."""
    cells: int = 1
    """Number of cells (parts computed and stored separately) of the node; 1 if it is not cut."""
    cells_cached: int = 0
    """Number of these cells that are stored."""
    warning: str = ""
    """Warning about a cached result, such as a changed source with an unchanged version."""


@dataclass(frozen=True)
class Estimate:
    """Expected cost of computing a node: bytes, memory and seconds."""

    bytes_read: int = 0
    """Bytes of the arrays that the missing cells read."""
    bytes_written: int = 0
    """Bytes that will be stored; 0 if unknown."""
    peak_bytes: int = 0
    """Largest memory of one cell, in bytes; 0 if unknown."""
    seconds: float | None = None
    """Wall time including `setup_seconds`; None if unknown."""
    work: str = ""
    """One sentence on the runs and forward passes of an experiment; empty for other nodes."""
    setup_seconds: float = 0.0
    """Seconds to read the model, which all steps of a plan do only once."""


class Part:
    """A piece of a node's result, such as one layer: its content digest, its size, and how to load it.

    Arguments:
        content: Digest of everything that `load` returns, labels included; or a function that computes the
            digest when it is first used. Two parts with equal content are interchangeable.
        load: Returns the piece as a dataset that is read lazily.
        nbytes: Bytes of its arrays, or a function that computes them.
        parents: Content digests of the stored results that the piece is cut from, for lineage.
        check: Raises SourceChanged if `load` no longer returns the digested content.
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
        """Content digest of the dataset that `load` returns."""
        return self._content if isinstance(self._content, str) else self._content()

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the piece in memory."""
        return self._nbytes if isinstance(self._nbytes, int) else self._nbytes()


@runtime_checkable
class Node(Protocol):
    """A step in the graph of a workflow: knows its inputs and cost, whether its result is stored, how to run.

    Planning (`status`, `estimate`, `labels`) computes nothing, loads no model and works on a read-only store.
    On a cluster, the task of a stage carries the nodes it reads from: a pickled node consists of names and
    digests, without arrays or a model (`__getstate__`), and workers call only its `part`.
    """

    name: str
    """Name of the node in keys and messages."""
    inputs: tuple[Node, ...]
    """Nodes whose results this node reads."""

    @property
    def pinned(self) -> Sequence[Pinned]:
        """Files or weights, beside the inputs, that must not change while the node runs."""
        ...

    def status(self, store: Store) -> Status:
        """Look up whether the result is stored; the store is read again at every call.

        Raises:
            SourceChanged: A resource in `pinned` no longer has the content that the key states.
        """
        ...

    def estimate(self, store: Store) -> Estimate:
        """Expected cost of computing the missing parts of the result; zeros for a cached result."""
        ...

    def labels(self, store: Store, axis: str) -> list[Any]:
        """Labels along an axis by which work is cut into cells.

        They are numbers for "layer" and "block", token ranges (start, stop) for "segment"; empty if the node
        has no such axis or does not know its labels yet.

        Arguments:
            store: The store that holds the result.
            axis: "layer", "segment" or "block".
        """
        ...

    def part(self, store: Store, variable: str | None, selection: Selection) -> Part:
        """Piece of the stored result, such as a single layer of a variable.

        Arguments:
            store: The store that holds the result.
            variable: Name of one variable of the dataset; None for all.
            selection: Labels by cell axis, such as {"layer": 3}; axes that the node lacks are ignored.
        """
        ...

    def require_workers(self, context: Context) -> None:
        """Raise PlanError if worker processes cannot compute this node; called before any node runs."""
        ...

    def run(self, store: Store, context: Context) -> None:
        """Compute and store the missing parts (cells) of the result, here or through `context.map`.

        All inputs must be stored. Each cell is stored as soon as it is computed, so a run that is killed can
        be resumed by another call.

        Arguments:
            store: The store to read inputs from and write results to.
            context: Threads or workers, memory budget and progress of the run.
        """
        ...

    def open(self, store: Store) -> xr.Dataset:
        """Open the stored result, labelled and lazy.

        Raises:
            StageError: The result is not stored.
            EntryNotFound: The captured run is not complete.
        """
        ...


# -- one look at the store

# A ContextVar: each thread that computes cells takes looks of its own.
_MEMO: ContextVar[dict[Any, Any] | None] = ContextVar("mizarr-look", default=None)
"""Results of functions decorated with `remembered` within the current `one_look` block; None outside."""


@contextmanager
def one_look() -> Iterator[None]:
    """Context manager in which each node is looked up in the store once, however many other nodes read it.

    Without it a chain of n stages would need 2^n lookups: a status needs the keys of the inputs, and a key
    needs their status.
    """
    # Nested: the outer look keeps its results, so that one status is consistent throughout.
    if _MEMO.get() is not None:
        yield
        return
    token = _MEMO.set({})
    try:
        yield
    finally:
        _MEMO.reset(token)


def remembered(
    function: Callable[Concatenate[S, Store, P], T],
) -> Callable[Concatenate[S, Store, P], T]:
    """Decorator of a function of (node, store, ...): within a `one_look` block its result is cached."""

    @wraps(function)
    def cached(node: S, store: Store, /, *args: P.args, **kwargs: P.kwargs) -> T:
        memo = _MEMO.get()
        if memo is None:
            return function(node, store, *args, **kwargs)
        # By id: nodes have no equality. The node is stored beside the result, so that its id is not reused.
        key = (function.__qualname__, id(node), store, args)
        if key not in memo:
            memo[key] = (node, function(node, store, *args, **kwargs))
        result: T = memo[key][1]
        return result

    return cast("Callable[Concatenate[S, Store, P], T]", cached)


@remembered
def status_of(node: Node, store: Store) -> Status:
    """Whether a node's result is stored; looked up only once within a `one_look` block."""
    return node.status(store)


@remembered
def estimate_of(node: Node, store: Store) -> Estimate:
    """Expected cost of a node's missing work; computed only once within a `one_look` block."""
    return node.estimate(store)


def check_pinned(node: Node) -> None:
    """Check that the files and weights that a node reads are unchanged; each only once in a `one_look` block.

    Raises:
        SourceChanged: A resource no longer has the content that the key states.
    """
    memo = _MEMO.get()
    for resource in node.pinned:
        key = ("check", id(resource))
        if memo is None or key not in memo:
            resource.check()
            if memo is not None:
                memo[key] = resource


# -- edges


@dataclass(frozen=True)
class Port:
    """Input of a stage: a node's dataset, or a single variable of this dataset."""

    node: Node
    """Node whose result is read."""
    variable: str | None = None
    """Name of the variable that is read; None for the whole dataset."""

    def part(self, store: Store, selection: Selection) -> Part:
        """A piece of the dataset or variable.

        Arguments:
            store: The store that holds the result.
            selection: Labels by cell axis, such as {"layer": 3}; axes that the node lacks are ignored.
        """
        return self.node.part(store, self.variable, selection)


class Ports:
    """Base class of nodes: `node["variable"]` gives one variable as an input of a stage.

    By default a node reads no pinned files, and worker processes may compute it.
    """

    def __getitem__(self, variable: str) -> Port:
        return Port(self, variable)  # type: ignore[arg-type]  # every subclass is a Node

    @property
    def pinned(self) -> Sequence[Pinned]:
        """Files or weights that must not change while the node runs: none."""
        return ()

    def require_workers(self, context: Context) -> None:
        """Raise PlanError if worker processes cannot compute this node; by default they can."""


# -- nodes with one stored result


class ResultNode(Ports, ABC):
    """Base class of nodes with one stored result: looks it up, reads and publishes it."""

    name: str
    """Name of the result in keys and messages."""
    inputs: tuple[Node, ...] = ()
    """Nodes whose results are in the key."""

    @abstractmethod
    def key(self, store: Store) -> ResultKey | None:
        """Key of the result; None while an input is not stored."""

    @abstractmethod
    def status(self, store: Store) -> Status:
        """Look up whether the result is stored."""

    @abstractmethod
    def estimate(self, store: Store) -> Estimate:
        """Expected cost of computing the result; zeros if it is stored."""

    @abstractmethod
    def run(self, store: Store, context: Context) -> None:
        """Compute and store the result; all inputs must be stored."""

    def labels(self, store: Store, axis: str) -> list[Any]:
        """Numbers along the axis "layer" or "block" of the stored result; empty for "segment", by which
        results are not stored."""
        if axis == "segment" or self.record(store) is None:
            return []
        return indices_along(self.open(store), axis)

    @remembered
    def record(self, store: Store) -> Record | None:
        """Record of the stored result; None while it is not stored."""
        key = self.key(store)
        return None if key is None else store.lookup(key)

    def part(self, store: Store, variable: str | None, selection: Selection) -> Part:
        """A piece of the stored result: of one variable (None: of all), cut by layer, block and token
        range."""
        return cut(self._stored(store).content, lambda: self.open(store), variable, selection)

    def open(self, store: Store) -> xr.Dataset:
        """Open the stored result, lazy; a shallow copy that the caller may change. StageError if missing."""
        return self._opened(store).copy(deep=False)

    @remembered
    def _opened(self, store: Store) -> xr.Dataset:
        # Opened once per look, for labels, sizes and values. Shared, so callers get copies of it.
        return store.open_result(self._stored(store))

    def publish(
        self,
        store: Store,
        key: ResultKey,
        dataset: xr.Dataset,
        note: Mapping[str, Any],
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Store a result under its key, if the files of its pinned resources are unchanged.

        Arguments:
            store: The store to write to.
            key: Key of the result.
            dataset: The result.
            note: Provenance of the result, as plain values.
            check: Further check before publication; raises if the result must not be published.

        Raises:
            SourceChanged: A resource in `pinned` changed since it was opened; nothing is stored.
        """

        def require_unchanged() -> None:
            for resource in self.pinned:
                resource.check()
            check()

        store.put_result(key, dataset, provenance=note, confirm=require_unchanged)

    def _stored(self, store: Store) -> Record:
        """Record of the stored result; StageError if it is not stored."""
        record = self.record(store)
        if record is None:
            raise StageError(
                f"the result of {self.name} is not stored in {store.address}; run the workflow first"
            )
        return record


def cut(
    content: str,
    load: Callable[[], xr.Dataset],
    variable: str | None,
    selection: Selection,
    *,
    changes: bool = False,
) -> Part:
    """Cut a `Part` out of a dataset, identified by a content digest.

    The whole dataset is identified by its content, and the reader's key names the variable that is read. A
    piece cut along an axis is identified by its own bytes: a result that grows by one layer leaves the
    digests of its other layers unchanged.

    Arguments:
        content: Content digest of the whole dataset.
        load: Returns the whole dataset.
        variable: Name of one variable; None for all.
        selection: Labels by cell axis, such as {"layer": 3}; axes that the dataset lacks are ignored.
        changes: Whether the data that `load` reads may change, so that the part must be digested again before
            publication.
    """

    def read() -> xr.Dataset:
        dataset = load()
        if variable is not None:
            if variable not in dataset.data_vars:
                names = [str(name) for name in dataset.data_vars]
                near = nearest(variable, names)
                hint = f"; did you mean {near!r}?" if near else ""
                raise StageError(f"the dataset has no variable {variable!r}, only {', '.join(names)}{hint}")
            dataset = dataset[[variable]]
        # A one-element list keeps the dim, which the declaration of the stage requires.
        for axis in ("layer", "block"):
            if axis in selection and axis in dataset.dims:
                position = _index(axis, dataset[axis].values.tolist(), selection[axis])
                dataset = dataset.isel({axis: [position]})
        # Inputs without tokens (e.g. weights) enter every cell whole.
        if "segment" in selection and "token" in dataset.dims:
            dataset = dataset.isel(token=slice(*selection["segment"]))
        return dataset

    def size() -> int:
        return sum(int(array.nbytes) for array in read().data_vars.values())

    def current_content() -> str:
        from ..store.content import content_of

        return content_of(read() if selection else load())

    def check() -> None:
        if changes and (current := current_content()) != part.content:
            raise SourceChanged(
                f"an input array changed while the workflow ran (content {part.content[:19]}, now "
                f"{current[:19]}), because the file that it is lazily read from was overwritten; call "
                ".load() on the array first, or start again"
            )

    part = Part(current_content if selection else content, read, size, (content,), check)
    return part


def indices_along(dataset: xr.Dataset, axis: str) -> list[int]:
    """Numbers along the axis "layer" or "block" of a dataset; empty if it has no such axis.

    Arguments:
        dataset: The dataset.
        axis: "layer" or "block".
    """
    return [int(label) for label in dataset[axis].values] if axis in dataset.dims else []


def _index(axis: str, indices: list[int], index: int) -> int:
    """Position of a layer or block number among the numbers that an input has; StageError if it lacks it."""
    if index not in indices:
        raise StageError(
            f"an input has no {axis} {index}, only the {axis}s {', '.join(map(str, indices))}; run the "
            "workflow again"
        )
    return indices.index(index)
