"""A stage in a graph: its key, its cells, why it will run, and running it.

Border: asks the store what is there and hands missing cells to the context; what a cell computes is the
stage's business, where it runs the executor's.

Cells: a stage may be cut along layers, segments (token ranges) or both. Each cell is a stored result of its
own, keyed by the content of just the pieces it reads, so a killed sweep goes on where it was, and one more
layer costs one layer. Inputs without the cut axis enter every cell whole. When all cells stand,
`Stage.joined` makes the result, stored under the key of the whole.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from ..store.content import as_digested
from ..store.errors import ShapeError, SourceChanged, StageError
from ..store.keys import ResultKey
from .context import Cell, Selection
from .function import AXES, StageFunction
from .memory import Took, measured
from .nodes import (
    Estimate,
    Node,
    Part,
    Port,
    ResultNode,
    Status,
    check_pinned,
    estimate_of,
    one_look,
    remembered,
    status_of,
)
from .parameters import parameter_copy, parameter_records
from .pinned import PinnedResource
from .reasons import missing_cells, notes, scaled_seconds, why_not
from .sources import ConstantNode

if TYPE_CHECKING:
    import xarray as xr

    from ..store import Store
    from .context import Context


class StageNode(ResultNode):
    """A stage with its inputs and parameters, in a graph."""

    def __init__(
        self,
        stage: StageFunction,
        ports: Mapping[str, Port],
        params: Mapping[str, Any],
        resources: Mapping[str, PinnedResource] | None = None,
    ) -> None:
        self.stage = stage
        self.ports = dict(ports)
        self._key_params = self._records(params)
        self._params = {name: parameter_copy(value) for name, value in params.items()}
        self.resources = dict(resources or {})
        self.name = stage.name
        self.inputs = tuple(dict.fromkeys(port.node for port in ports.values()))
        for name, resource in self.resources.items():
            identity = self._records(resource.identity())
            if both := sorted(identity.keys() & self._key_params.keys()):
                raise StageError(
                    f"{self.name}: expected a parameter of another name than what identifies {name}, found "
                    f"{', '.join(both)}; one would stand for both in the key, so rename it"
                )
            self._key_params |= identity

    def _records(self, params: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return parameter_records(params)
        except (TypeError, ValueError) as error:
            raise StageError(f"stage {self.stage.name!r}: parameters enter the key: {error}") from error

    def __repr__(self) -> str:
        return f"StageNode({self.name}, {self.params})"

    @property
    def params(self) -> dict[str, Any]:
        """The parameters, defaults included: a copy for every caller.

        The function may change what it gets; the next cell must not see that, nor a node that is planned.
        """
        return {name: parameter_copy(value) for name, value in self._params.items()}

    @property
    def pinned(self) -> Sequence[PinnedResource]:
        """Its resources."""
        return tuple(self.resources.values())

    # -- identity

    @remembered
    def key(self, store: Store) -> ResultKey | None:
        """Made of the content of all inputs; None while one of them is not stored."""
        if self._waiting(store):
            return None
        return self._key_of(store, self.name, self._parts(store, {}))

    def _key_of(self, store: Store, label: str, parts: Mapping[str, Part]) -> ResultKey:
        inputs = {self._input_name(name): part.content for name, part in parts.items()}
        return ResultKey(label, self._version(store), self._key_params, inputs)

    @remembered
    def _version(self, store: Store) -> int | str:
        return self.stage.key_version

    def _input_name(self, name: str) -> str:
        # The content is that of the whole dataset, so lineage finds it; the name says what is read of it.
        variable = self.ports[name].variable
        return name if variable is None else f"{name}[{variable}]"

    def _waiting(self, store: Store) -> list[Node]:
        return [node for node in self.inputs if not status_of(node, store).is_cached]

    def _parts(self, store: Store, selection: Selection) -> dict[str, Part]:
        """What a cell reads: of each input the axes it is cut along."""
        found = {}
        for name, port in self.ports.items():
            own = {axis: label for axis, label in selection.items() if self._is_cut(name, axis)}
            found[name] = port.part(store, own)
        return found

    # -- cells

    @property
    def _cell_label(self) -> str:
        return f"{self.name}/cell"

    def selections(self, store: Store) -> list[Selection]:
        """What together is the whole, layers outermost; one empty selection for what is not cut."""
        axes = [[(axis, label) for label in self._labels(store, axis)] for axis in self.stage.cells]
        return [dict(chosen) for chosen in itertools.product(*(axis for axis in axes if axis))]

    @remembered
    def cells(self, store: Store) -> list[Cell]:
        """Every cell with its key; the inputs must be stored."""
        label = self._cell_label if self.stage.cells else self.name
        return [
            Cell(cut, self._key_of(store, label, self._parts(store, cut))) for cut in self.selections(store)
        ]

    @remembered
    def missing(self, store: Store) -> list[Cell]:
        """Cells that are not stored, each once, though pieces with equal content share one."""
        return [cell for cell in self.cells(store) if store.lookup(cell.key) is None]

    @remembered
    def _labels(self, store: Store, axis: str) -> list[Any]:
        cut = {name: port.node for name, port in self.ports.items() if self._is_cut(name, axis)}
        given = {name: node.labels(store, axis) for name, node in cut.items()}
        found = [labels for labels in given.values() if labels]
        if axis == "layer" and any(sorted(labels) != sorted(found[0]) for labels in found):
            told = ", ".join(f"{name} has {labels}" for name, labels in given.items())
            raise ShapeError(f"stage {self.name!r}: expected inputs with the same layers, found {told}")
        return max(found, key=len, default=[])

    def _is_cut(self, name: str, axis: str) -> bool:
        return any(dim in AXES[axis] for dim in self.stage.inputs[name] or ())

    # -- planning

    def status(self, store: Store) -> Status:
        """Cached, or why it will run and how much of it stands already."""
        check_pinned(self)
        with one_look():
            if waiting := self._waiting(store):
                cells = max(1, len(self.selections(store)))
                return Status(False, f"input {waiting[0].name} will run", cells)
            key = self.key(store)
            record = None if key is None else store.lookup(key)
            if record is not None:
                return Status(True, cells_cached=1, warning=self._source_changed(store))
            if not self.stage.cells:
                return Status(False, why_not(store, key))
            cells, missing = len(self.cells(store)), self.missing(store)
            if not missing:
                return Status(False, "its cells are stored, but not joined yet", cells, cells)
            cuts = [cell.selection for cell in missing]
            reason = missing_cells(cuts, cells) if len(missing) < cells else why_not(store, key)
            return Status(False, reason, cells, cells - len(missing))

    def _source_changed(self, store: Store) -> str:
        record = self.record(store)
        told = [] if record is None else store.provenance(record)
        before = next((note["source"] for note in told if note.get("source")), self.stage.source)
        if before == self.stage.source or self.stage.version is None:  # then the code is in the key
            return ""
        return f"the source of {self.name} changed, its version {self.stage.version} did not"

    def estimate(self, store: Store) -> Estimate:
        """Bytes that missing cells read, memory by `Stage.memory`; written bytes and seconds as last time."""
        with one_look():
            if status_of(self, store).is_cached:
                return Estimate()
            sizes = self._sizes_ahead(store) if self._waiting(store) else self._sizes(store)
            read, largest = sum(sizes), max(sizes, default=0)
            seconds, written = self._last_time(store, read)
            return Estimate(read, written, int(self.stage.memory * largest), seconds)

    def _sizes(self, store: Store) -> list[int]:
        """Bytes read by each missing cell."""
        cuts = [cell.selection for cell in self.missing(store)]
        return [sum(part.nbytes for part in self._parts(store, cut).values()) for cut in cuts]

    def _sizes_ahead(self, store: Store) -> list[int]:
        """The same while inputs have yet to run: from what they say they will write."""
        selections = self.selections(store) or [{}]
        total = 0
        for name, port in self.ports.items():
            cached = status_of(port.node, store).is_cached
            size = port.part(store, {}).nbytes if cached else estimate_of(port.node, store).bytes_written
            is_cut = any(self._is_cut(name, axis) for axis in self.stage.cells)
            total += size // len(selections) if is_cut else size
        return [total] * len(selections)

    def _last_time(self, store: Store, read: int) -> tuple[float | None, int]:
        """Seconds and bytes written, in proportion to the bytes read, after the newest stored result."""
        told = notes(self._cell_label if self.stage.cells else self.name, store)
        last = next((note for note in told if note.get("bytes_read") and "seconds" in note), None)
        if last is None:
            return None, 0
        share = read / last["bytes_read"]
        return round(scaled_seconds(last, share), 3), int(last["bytes_written"] * share)

    # -- running

    def run(self, store: Store, context: Context) -> None:
        """Missing cells as Dask tasks, each published when done; then the whole."""
        with one_look():
            missing = list({cell.key: cell for cell in self.missing(store)}.values())
            if missing:
                if context.has_workers:
                    for node in self.inputs:
                        if isinstance(node, ConstantNode):
                            node.keep(store)
                context.map(run_cell, self, store, missing, peak=estimate_of(self, store).peak_bytes)
            if self.stage.cells:
                self._join(store)

    def _join(self, store: Store) -> None:
        key = self.key(store)
        if key is None:
            raise StageError(f"{self.name}: an input vanished from {store.address} while it ran; run again")
        with measured() as took:
            pieces = [store.open_result(cell.key) for cell in self.cells(store)]
            joined = self.stage.labelled(self.stage.joined(pieces))
            self._put(store, key, joined, self._parts(store, {}), took)

    def compute(self, store: Store, cell: Cell) -> None:
        """Run the stage's function on the pieces of one cell, and publish what it gives."""
        with measured() as took, ExitStack() as stack:
            self._check_code(cell.key)
            parts = self._parts(store, cell.selection)
            # What the key says of an input and no more, in copies that the function may write to.
            arrays = {name: self._given(name, as_digested(part.load())) for name, part in parts.items()}
            opened = {name: stack.enter_context(each.open()) for name, each in self.resources.items()}
            given = self.stage.compute(arrays, self.params | opened)
            self._put(store, cell.key, given, parts, took)

    def _given(self, name: str, dataset: xr.Dataset) -> Any:
        """An input as the function takes it: the whole dataset, or the one array."""
        if self.stage.inputs[name] is None:
            return dataset
        variable, held = self.ports[name].variable, [str(each) for each in dataset.data_vars]
        if variable is None and len(held) != 1:
            raise StageError(f"input {name!r} gives {', '.join(held)}; say which: {name}=node['{held[0]}']")
        return dataset[variable or held[0]]

    def _put(
        self, store: Store, key: ResultKey, given: xr.Dataset, parts: Mapping[str, Part], took: Took
    ) -> None:
        # A lazy result is computed while it is written; loading it here puts that into the measured time.
        given = given.load() if given.nbytes <= LOADED else given
        note = {
            "source": self.stage.source,
            **took(),
            "bytes_read": sum(part.nbytes for part in parts.values()),
            "bytes_written": int(given.nbytes),
            "parents": {name: list(part.parents) for name, part in parts.items()},
        }

        def check() -> None:
            self._check_code(key)
            for part in parts.values():
                part.check()

        self.publish(store, key, given, note, check)

    def _check_code(self, key: ResultKey) -> None:
        """SourceChanged unless the code is still, and here, what the key was made of."""
        if (now := self.stage.key_version) != key.version:
            raise SourceChanged(
                f"stage {self.name!r}: expected the code it was planned with ({key.version}), found {now}: "
                "something its function reads changed meanwhile, is changed by the function itself, or is "
                "another one on this worker; nothing was stored, make it constant and run again"
            )


LOADED = 64 << 20
"""Bytes up to which a lazy result is computed before it is written, not chunk by chunk."""


def run_cell(node: StageNode, store: Store, cell: Cell) -> None:
    """Compute and publish one cell; a task of its own, here or on a worker elsewhere."""
    with one_look():
        node.compute(store, cell)
