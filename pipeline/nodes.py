"""Nodes: what a workflow's graph is made of.

A node gives a labelled dataset and knows how to say what it is (`status`), what it will cost (`estimate`), how to make it (`run`) and how
to read it (`open`). `StageNode` is a stage with its inputs; `SourceNode` something made by a function of declared identity;
`ConstantNode` a dataset the user has in hand; capture (in the forward room) is another. An edge is a `Port`: a node, or one of its
variables.

Keys follow content: a stage's key is made of what its inputs *are* (their content digests), so an upstream that runs again and gives
the same bytes leaves everything downstream cached.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from ..store.digest import digest
from ..store.errors import StageError, nearest
from ..store.keys import ResultKey
from .stage import AXES, Stage

if TYPE_CHECKING:
    import xarray as xr

    from ..store import Store
    from .execute import Context

Selection = Mapping[str, Any]
"""Part of a node: layer -> index, segment -> (first token, end)."""


@dataclass(frozen=True)
class Status:
    """Whether a node's result is stored, and why not."""

    is_cached: bool
    reason: str = ""
    """Why it will run; empty when cached."""
    cells: int = 1
    cells_cached: int = 0


@dataclass(frozen=True)
class Estimate:
    """What a run would cost. Bytes; peak of memory; seconds None where nothing is known."""

    bytes_read: int = 0
    bytes_written: int = 0
    peak_bytes: int = 0
    seconds: float | None = None


@dataclass(frozen=True)
class Part:
    """A piece of a node's result: what it is, and how to get it, lazily labelled."""

    content: str
    load: Callable[[], xr.Dataset]
    nbytes: int = 0


@runtime_checkable
class Node(Protocol):
    """What the graph of a workflow is made of."""

    name: str
    inputs: tuple[Node, ...]

    def status(self, store: Store) -> Status:
        """Whether the result is stored; must not compute anything."""
        ...

    def estimate(self, store: Store) -> Estimate:
        """Cost of what is missing."""
        ...

    def labels(self, store: Store, axis: str) -> list[Any]:
        """Labels along a cell axis ("layer": indices; "segment": (start, stop) token ranges); empty if it has none, or not yet."""
        ...

    def part(self, store: Store, variable: str | None, selection: Selection) -> Part:
        """A piece of the stored result; variable None for all of them. Axes it does not have are ignored."""
        ...

    def run(self, store: Store, context: Context) -> None:
        """Compute and store what is missing; inputs are stored."""
        ...

    def open(self, store: Store) -> xr.Dataset:
        """The stored result, lazy."""
        ...


@dataclass(frozen=True)
class Port:
    """A node's dataset, or one variable of it, as the input of a stage."""

    node: Node
    variable: str | None = None

    def part(self, store: Store, selection: Selection) -> Part:
        return self.node.part(store, self.variable, selection)


class _Ports:
    """`node["variable"]` for every kind of node."""

    def __getitem__(self, variable: str) -> Port:
        return Port(self, variable)  # type: ignore[arg-type]  # every subclass is a Node


def as_port(given: Any, name: str) -> Port:
    """Whatever may be given as a stage's input, as a port; StageError for what has no identity."""
    import xarray as xr

    if isinstance(given, Port):
        return given
    if isinstance(given, xr.DataArray):
        label = str(given.name or name)
        return Port(ConstantNode(given.to_dataset(name=label)), label)
    if isinstance(given, xr.Dataset):
        return Port(ConstantNode(given))
    if isinstance(given, Node):
        return Port(given)
    raise StageError(f"input {name!r}: expected a node, node['variable'] or a labelled array, found {type(given).__name__}")


class ResultNode(_Ports):
    """What nodes with one stored result share: reading it, whole or in part."""

    name: str
    inputs: tuple[Node, ...] = ()

    def key(self, store: Store) -> ResultKey | None:
        """The result's key; None while an input is missing."""
        raise NotImplementedError

    def labels(self, store: Store, axis: str) -> list[Any]:
        """Layers of the stored result; a result has no segments of its own."""
        if axis != "layer" or not self.status(store).is_cached:
            return []
        dataset = self.open(store)
        return [int(layer) for layer in dataset["layer"].values] if "layer" in dataset.dims else []

    def status(self, store: Store) -> Status:
        raise NotImplementedError

    def part(self, store: Store, variable: str | None, selection: Selection) -> Part:
        """A piece of the result, cut by layer and token range where it has those axes."""
        key = self.key(store)
        record = None if key is None else store.lookup(key)
        if record is None:
            raise StageError(f"{self.name} is not stored yet; run it before what reads it")
        return cut(record.content, lambda: store.open_result(record), variable, selection)

    def open(self, store: Store) -> xr.Dataset:
        """The stored result."""
        key = self.key(store)
        if key is None:
            raise StageError(f"{self.name} is not stored yet; run the workflow first")
        return store.open_result(key)


def cut(content: str, load: Callable[[], xr.Dataset], variable: str | None, selection: Selection) -> Part:
    """A piece of a dataset whose content is known.

    A real cut is identified by its own content, so that a result which grew by a layer leaves the pieces of its other layers what they
    were.
    """

    def read() -> xr.Dataset:
        dataset = load()
        if variable is not None:
            if variable not in dataset:
                near = nearest(variable, map(str, dataset.data_vars))
                raise StageError(f"expected a variable {variable!r}, found {', '.join(map(str, dataset.data_vars))}" + (f"; nearest is {near!r}" if near else ""))
            dataset = dataset[[variable]]
        if "layer" in selection and "layer" in dataset.dims:
            dataset = dataset.sel(layer=[selection["layer"]])
        if "segment" in selection and "token" in dataset.dims:
            dataset = dataset.isel(token=slice(*selection["segment"]))
        return dataset

    if not selection:
        return Part(digest("part", content, variable), read)
    from ..store.content import content_of

    return Part(content_of(read()), read)


class StageNode(ResultNode):
    """A stage with its inputs and parameters, in a graph."""

    def __init__(self, stage: Stage, ports: Mapping[str, Port], params: Mapping[str, Any]) -> None:
        self.stage = stage
        self.ports = dict(ports)
        self.params = dict(params)
        self.name = stage.name
        self.inputs = tuple(dict.fromkeys(port.node for port in ports.values()))

    def __repr__(self) -> str:
        return f"StageNode({self.name}, {self.params})"

    # -- identity ------------------------------------------------------------------------------------------------

    def key(self, store: Store) -> ResultKey | None:
        """Made of the content of all inputs; None while one of them is not stored."""
        if not all(node.status(store).is_cached for node in self.inputs):
            return None
        return self._key(self.name, {name: port.part(store, {}).content for name, port in self.ports.items()})

    def cell_key(self, store: Store, selection: Selection) -> ResultKey:
        """The key of one cell: made of the content of just the pieces it reads."""
        return self._key(f"{self.name}/cell", {name: port.part(store, self._cut_for(name, selection)).content for name, port in self.ports.items()})

    def _key(self, stage: str, inputs: Mapping[str, str]) -> ResultKey:
        return ResultKey(stage, self.stage.version, self.params, inputs)

    def cells(self, store: Store) -> list[dict[str, Any]]:
        """The selections that together are the whole, layers outermost; one empty selection for an uncut stage."""
        axes = []
        for axis in self.stage.cells:
            mapped = [port for name, port in self.ports.items() if self._is_cut(name, axis)]
            labels = next((found for port in mapped if (found := port.node.labels(store, axis))), [None])
            axes.append([(axis, label) for label in labels])
        return [{axis: label for axis, label in chosen if label is not None} for chosen in itertools.product(*axes)]

    def _is_cut(self, name: str, axis: str) -> bool:
        return any(dim in AXES[axis] for dim in self.stage.inputs[name] or ())

    def _cut_for(self, name: str, selection: Selection) -> dict[str, Any]:
        return {axis: label for axis, label in selection.items() if self._is_cut(name, axis)}

    # -- planning ------------------------------------------------------------------------------------------------

    def status(self, store: Store) -> Status:
        """Cached, or why it will run and how much of it stands already."""
        waiting = [node.name for node in self.inputs if not node.status(store).is_cached]
        if waiting:
            return Status(False, f"input {waiting[0]} will run")
        key = self.key(store)
        if key is not None and store.lookup(key) is not None:
            return Status(True)
        if not self.stage.cells:
            return Status(False, why_not(store, key))
        cells = self.cells(store)
        done = sum(store.lookup(self.cell_key(store, cell)) is not None for cell in cells)
        return Status(False, f"{len(cells) - done} of {len(cells)} cells missing" if done else why_not(store, key), len(cells), done)

    def estimate(self, store: Store) -> Estimate:
        """Bytes of the inputs that missing cells read; memory for one cell's inputs and as much again for work."""
        if self.status(store).is_cached or not all(node.status(store).is_cached for node in self.inputs):
            return Estimate()
        read = peak = 0
        for cell in self.missing(store):
            size = sum(port.part(store, self._cut_for(name, cell)).nbytes for name, port in self.ports.items())
            read, peak = read + size, max(peak, 2 * size)
        return Estimate(read, 0, peak)

    def missing(self, store: Store) -> list[dict[str, Any]]:
        """Cells that are not stored."""
        if not self.stage.cells:
            return [{}]
        return [cell for cell in self.cells(store) if store.lookup(self.cell_key(store, cell)) is None]

    # -- running -------------------------------------------------------------------------------------------------

    def run(self, store: Store, context: Context) -> None:
        """Missing cells as Dask tasks, each published when done; then the whole."""
        if not self.stage.cells:
            context.map(run_whole, self, store, [{}])
            return
        context.map(run_cell, self, store, self.missing(store))
        parts = (store.open_result(self.cell_key(store, cell)) for cell in self.cells(store))
        self._put(store, self.key(store), self.stage.labelled(self.stage.joined(list(parts))))

    def compute(self, store: Store, selection: Selection) -> xr.Dataset:
        """The stage's function on a piece of its inputs."""
        loaded = {name: port.part(store, self._cut_for(name, selection)).load() for name, port in self.ports.items()}
        arrays = {name: dataset if self.stage.inputs[name] is None else _only(dataset, self.ports[name]) for name, dataset in loaded.items()}
        return self.stage.compute(arrays, self.params)

    def _put(self, store: Store, key: ResultKey | None, dataset: xr.Dataset) -> None:
        if key is None:
            raise StageError(f"{self.name}: an input vanished while it ran; run again")
        store.put_result(key, dataset, provenance={"source": self.stage.source})


def run_cell(node: StageNode, store: Store, cell: Selection) -> None:
    """Compute and publish one cell; a task of its own, also on a worker elsewhere."""
    given = node.compute(store, cell)
    node._put(store, node.cell_key(store, cell), given)


def run_whole(node: StageNode, store: Store, cell: Selection) -> None:
    """Compute and publish an uncut stage."""
    node._put(store, node.key(store), node.compute(store, cell))


class SourceNode(ResultNode):
    """A dataset made by a function from declared parameters, e.g. a model's readout from its files.

    params must identify the result: digests of files, not their names. make runs at most once.
    """

    def __init__(self, name: str, version: int, params: Mapping[str, Any], make: Callable[[], xr.Dataset], estimate: Estimate = Estimate()) -> None:
        self.name, self.version, self.params, self._make, self._estimate = name, version, dict(params), make, estimate

    def key(self, store: Store) -> ResultKey:
        """Made of the parameters alone."""
        return ResultKey(self.name, self.version, self.params, {})

    def status(self, store: Store) -> Status:
        """Cached, or why not."""
        key = self.key(store)
        return Status(True) if store.lookup(key) is not None else Status(False, why_not(store, key))

    def estimate(self, store: Store) -> Estimate:
        """As declared, while it is missing."""
        return Estimate() if self.status(store).is_cached else self._estimate

    def run(self, store: Store, context: Context) -> None:
        """Make and publish it, in the calling thread."""
        store.put_result(self.key(store), self._make(), provenance={})


class ConstantNode(_Ports):
    """A dataset in hand as an input: identified by its content, stored nowhere."""

    inputs: tuple[Node, ...] = ()

    def __init__(self, dataset: xr.Dataset, name: str = "constant") -> None:
        self.name, self.dataset = name, dataset
        self._content = ""

    def status(self, store: Store) -> Status:
        """Always there."""
        return Status(True)

    def estimate(self, store: Store) -> Estimate:
        """Nothing."""
        return Estimate()

    def labels(self, store: Store, axis: str) -> list[Any]:
        """Its layers; all tokens are one segment."""
        if axis == "layer" and "layer" in self.dataset.dims:
            return [int(layer) for layer in self.dataset["layer"].values]
        return [(0, self.dataset.sizes["token"])] if axis == "segment" and "token" in self.dataset.dims else []

    def part(self, store: Store, variable: str | None, selection: Selection) -> Part:
        """A piece of it."""
        from ..store.content import content_of

        self._content = self._content or content_of(self.dataset)
        return cut(self._content, lambda: self.dataset, variable, selection)

    def run(self, store: Store, context: Context) -> None:
        """Nothing to do."""

    def open(self, store: Store) -> xr.Dataset:
        """The dataset."""
        return self.dataset


def why_not(store: Store, key: ResultKey | None) -> str:
    """Why a result is not stored: what differs from the nearest stored result of the same stage."""
    if key is None:
        return "no result yet"
    wanted = key.request()
    stored = list(_requests(store, key.stage))
    if not stored:
        return "no result yet"
    return min((_differences(wanted, other) for other in stored), key=len)[0]


def _requests(store: Store, stage: str) -> Iterator[dict[str, Any]]:
    for record in store.records():
        if record.label.rpartition("/")[0] == stage:
            yield from (note["request"] for note in store.provenance(record) if "request" in note)


def _differences(wanted: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    found = []
    if wanted["version"] != other["version"]:
        found.append(f"version {other['version']} -> {wanted['version']}")
    names = [*wanted["params"], *(name for name in other["params"] if name not in wanted["params"])]
    for name in names:
        old, new = (params.get(name, "unset") for params in (other["params"], wanted["params"]))
        if old != new:
            found.append(f"{name} changed {old} -> {new}")
    found += [f"input {name} changed" for name in wanted["inputs"] if wanted["inputs"][name] != other["inputs"].get(name)]
    return found or ["its stored result was removed"]


def _only(dataset: xr.Dataset, port: Port) -> xr.DataArray:
    """The array of a port that names a variable, or the only one there is."""
    names = list(dataset.data_vars)
    if port.variable is None and len(names) != 1:
        raise StageError(f"{port.node.name} gives {', '.join(map(str, names))}; say which with node['name']")
    return dataset[port.variable or names[0]]
