"""`StageNode`, a stage in a graph: makes keys, cuts the work into cells, reports the status, runs the cells.

Border: looks up results in the store and hands missing cells to the context. What a cell computes is defined
by the stage; where it runs is decided by the context.

A stage may be cut along layers, segments (token ranges) or both. Each cell is a stored result of its own,
keyed by the content of just the pieces it reads: a killed sweep resumes, and one more layer costs one layer.
Inputs without the cut axis enter every cell whole. When all cells are stored, `Stage.joined` makes the
result, which is stored under the key of the whole.
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

LOADED = 64 << 20
"""Bytes up to which a lazy result is computed as a whole before it is written; larger ones chunk by chunk."""


class StageNode(ResultNode):
    """A stage (cached analysis) with its inputs, parameters and resources, as a node of a workflow's
    graph."""

    def __init__(
        self,
        stage: StageFunction,
        ports: Mapping[str, Port],
        params: Mapping[str, Any],
        resources: Mapping[str, PinnedResource] | None = None,
    ) -> None:
        self.stage = stage
        self.ports = dict(ports)
        # Recorded and copied now: the caller may change a list after planning.
        self._key_params = self._records(params)
        self._params = {name: parameter_copy(value) for name, value in params.items()}
        self.resources = dict(resources or {})
        self.name = stage.name
        # Each node once: several inputs may be variables of one dataset.
        self.inputs = tuple(dict.fromkeys(port.node for port in ports.values()))
        for name, resource in self.resources.items():
            identity = self._records(resource.identity())
            # Identity and parameters share one namespace in the key.
            if shared := sorted(identity.keys() & self._key_params.keys()):
                raise StageError(
                    f"stage {self.name!r}: the parameter {', '.join(shared)} has the name of a value that "
                    f"identifies the resource {name} in the key; rename the parameter"
                )
            self._key_params |= identity

    def _records(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Encode parameters for the key; StageError, with the name of the stage, for one that cannot be."""
        try:
            return parameter_records(params)
        except (TypeError, ValueError) as error:
            raise StageError(
                f"stage {self.stage.name!r}: a parameter cannot be part of the key: {error}"
            ) from error

    def __repr__(self) -> str:
        return f"StageNode({self.name}, {self.params})"

    @property
    def params(self) -> dict[str, Any]:
        """Value of each parameter, defaults included; a new copy at each call.

        The stage's function may modify its arguments, and no later call may see the change.
        """
        return {name: parameter_copy(value) for name, value in self._params.items()}

    @property
    def pinned(self) -> Sequence[PinnedResource]:
        """Resources that the stage's function reads beside its inputs."""
        return tuple(self.resources.values())

    # -- identity

    @remembered
    def key(self, store: Store) -> ResultKey | None:
        """Result key, from the content digests of all inputs; None while an input is not stored."""
        if self._missing_inputs(store):
            return None
        return self._key_of(store, self.name, self._parts(store, {}))

    def _key_of(self, store: Store, label: str, parts: Mapping[str, Part]) -> ResultKey:
        """Key of the whole result or of a cell, computed from digests of its input pieces."""
        inputs = {self._input_name(name): part.content for name, part in parts.items()}
        return ResultKey(label, self._version(store), self._key_params, inputs)

    @remembered
    def _version(self, store: Store) -> int | str:
        return self.stage.key_version

    def _input_name(self, name: str) -> str:
        """Name of an input in the key, such as "states[resid_post]"."""
        # The digest is that of the whole dataset, so that `lineage` finds it; the variable is in the name.
        variable = self.ports[name].variable
        return name if variable is None else f"{name}[{variable}]"

    def _missing_inputs(self, store: Store) -> list[Node]:
        """Input nodes whose results are not stored."""
        return [node for node in self.inputs if not status_of(node, store).is_cached]

    def _parts(self, store: Store, selection: Selection) -> dict[str, Part]:
        """The piece of each input that a cell reads, cut along the axes that the input has."""
        parts = {}
        for name, port in self.ports.items():
            input_selection = {axis: label for axis, label in selection.items() if self._is_cut(name, axis)}
            parts[name] = port.part(store, input_selection)
        return parts

    # -- cells

    @property
    def _cell_label(self) -> str:
        """Name of the stage's cells in keys, "<stage>/cell"; the stage's own name if it is not cut."""
        return f"{self.name}/cell" if self.stage.cells else self.name

    def selections(self, store: Store) -> list[Selection]:
        """Labels of each cell, such as {"layer": 3}; a single empty mapping if the stage is not cut."""
        labels_of_axis = [[(axis, label) for label in self._labels(store, axis)] for axis in self.stage.cells]
        cut_axes = [labels for labels in labels_of_axis if labels]
        return [dict(labels) for labels in itertools.product(*cut_axes)]

    @remembered
    def cells(self, store: Store) -> list[Cell]:
        """Every cell of the stage (part computed and stored by itself) with its key; inputs must be
        stored."""
        return [
            Cell(selection, self._key_of(store, self._cell_label, self._parts(store, selection)))
            for selection in self.selections(store)
        ]

    @remembered
    def missing(self, store: Store) -> list[Cell]:
        """Cells without a stored result, such as single layers; cells with equal keys are all listed."""
        return [cell for cell in self.cells(store) if store.lookup(cell.key) is None]

    @remembered
    def _labels(self, store: Store, axis: str) -> list[Any]:
        """Labels of the cells along one axis, as the inputs that have this axis state them."""
        cut_nodes = {name: port.node for name, port in self.ports.items() if self._is_cut(name, axis)}
        labels_by_input = {name: node.labels(store, axis) for name, node in cut_nodes.items()}
        nonempty = [labels for labels in labels_by_input.values() if labels]
        if axis == "layer" and any(sorted(labels) != sorted(nonempty[0]) for labels in nonempty):
            listing = ", ".join(f"{name} has {labels}" for name, labels in labels_by_input.items())
            raise ShapeError(
                f"stage {self.name!r}: inputs must have the same layers, found {listing}; capture the "
                "missing ones, or select common layers"
            )
        # A dataset in memory is one segment, a capture several: the finest division is used.
        return max(nonempty, key=len, default=[])

    def _is_cut(self, name: str, axis: str) -> bool:
        """Whether an input has an axis and is therefore cut along it; other inputs enter every cell whole."""
        return any(dim in AXES[axis] for dim in self.stage.inputs[name] or ())

    # -- planning

    def status(self, store: Store) -> Status:
        """Look up whether the result is stored; else why it will run, and how many cells are stored."""
        check_pinned(self)
        with one_look():
            if missing_inputs := self._missing_inputs(store):
                cells = max(1, len(self.selections(store)))
                return Status(False, f"input {missing_inputs[0].name} will run", cells)
            key = self.key(store)
            record = None if key is None else store.lookup(key)
            if record is not None:
                return Status(True, cells_cached=1, warning=self._source_warning(store))
            if not self.stage.cells:
                return Status(False, why_not(store, key))
            cells, missing = len(self.cells(store)), self.missing(store)
            if not missing:
                return Status(False, "its cells are stored, but not joined yet", cells, cells)
            selections = [cell.selection for cell in missing]
            reason = missing_cells(selections, cells) if len(missing) < cells else why_not(store, key)
            return Status(False, reason, cells, cells - len(missing))

    def _source_warning(self, store: Store) -> str:
        """Warning if the stored result was computed from another source text of the function, else ""."""
        record = self.record(store)
        provenance = [] if record is None else store.provenance(record)
        stored_source = next((note["source"] for note in provenance if note.get("source")), self.stage.source)
        # Without a version the code is in the key, so a change of the source is a change of the key.
        if stored_source == self.stage.source or self.stage.version is None:
            return ""
        return (
            f"the source code of {self.name} changed since this result was computed, its version "
            f"{self.stage.version} did not"
        )

    def estimate(self, store: Store) -> Estimate:
        """Expected cost of computing the cells that are not stored.

        Bytes read come from the inputs, peak memory is a declared multiple of them, and seconds and bytes
        written are scaled from the newest stored result.
        """
        with one_look():
            if status_of(self, store).is_cached:
                return Estimate()
            has_inputs = not self._missing_inputs(store)
            sizes = self._sizes(store) if has_inputs else self._expected_sizes(store)
            bytes_read, largest = sum(sizes), max(sizes, default=0)
            seconds, bytes_written = self._scaled_from_last(store, bytes_read)
            return Estimate(bytes_read, bytes_written, int(self.stage.memory * largest), seconds)

    def _sizes(self, store: Store) -> list[int]:
        """Bytes read by each missing cell; the inputs must be stored."""
        selections = [cell.selection for cell in self.missing(store)]
        return [
            sum(part.nbytes for part in self._parts(store, selection).values()) for selection in selections
        ]

    def _expected_sizes(self, store: Store) -> list[int]:
        """Bytes read by each cell while inputs are missing, from the estimates of their nodes."""
        selections = self.selections(store) or [{}]
        cell_bytes = 0
        for name, port in self.ports.items():
            is_stored = status_of(port.node, store).is_cached
            size = port.part(store, {}).nbytes if is_stored else estimate_of(port.node, store).bytes_written
            is_cut = any(self._is_cut(name, axis) for axis in self.stage.cells)
            # An input without the cut axis is read whole by every cell.
            cell_bytes += size // len(selections) if is_cut else size
        return [cell_bytes] * len(selections)

    def _scaled_from_last(self, store: Store, bytes_read: int) -> tuple[float | None, int]:
        """Expected seconds (None: unknown) and bytes written, scaled from the newest result by bytes read."""
        provenance = notes(self._cell_label, store)
        last = next((note for note in provenance if note.get("bytes_read") and "seconds" in note), None)
        if last is None:
            return None, 0
        share = bytes_read / last["bytes_read"]
        return round(scaled_seconds(last, share), 3), int(last["bytes_written"] * share)

    # -- running

    def run(self, store: Store, context: Context) -> None:
        """Compute and store the missing parts of the result (cells) as Dask tasks, then join all parts."""
        with one_look():
            # Cells with equal inputs share a key and are computed once.
            missing = list({cell.key: cell for cell in self.missing(store)}.values())
            if missing:
                if context.has_workers:
                    for node in self.inputs:
                        if isinstance(node, ConstantNode):
                            node.keep(store)  # workers cannot see a dataset in this process
                context.map(run_cell, self, store, missing, peak=estimate_of(self, store).peak_bytes)
            # The whole result has a key of its own: later runs look up one file instead of every cell.
            if self.stage.cells:
                self._join(store)

    def _join(self, store: Store) -> None:
        """Join the stored cells into the whole result, and store it under its own key."""
        key = self.key(store)
        if key is None:
            raise StageError(
                f"an input of stage {self.name!r} was removed from {store.address} while the stage ran; run "
                "the workflow again"
            )
        with measured() as took:
            pieces = [store.open_result(cell.key) for cell in self.cells(store)]
            joined = self.stage.labelled(self.stage.joined(pieces))
            self._put(store, key, joined, self._parts(store, {}), took)

    def compute(self, store: Store, cell: Cell) -> None:
        """Run the stage's function on its part of the inputs for one cell (such as a layer), and store the
        result.

        Arguments:
            store: The store to read inputs from and write the result to.
            cell: The cell, with the key that it had when the run was planned.

        Raises:
            SourceChanged: The code or an input changed since then; nothing is stored.
        """
        with measured() as took, ExitStack() as stack:
            self._check_code(cell.key)
            parts = self._parts(store, cell.selection)
            # Copies in the canonical form that the content digest describes; the function may write to them.
            arrays = {name: self._argument(name, as_digested(part.load())) for name, part in parts.items()}
            opened = {name: stack.enter_context(resource.open()) for name, resource in self.resources.items()}
            result = self.stage.compute(arrays, self.params | opened)
            self._put(store, cell.key, result, parts, took)

    def _argument(self, name: str, dataset: xr.Dataset) -> Any:
        """An input in the form that the function takes: the whole dataset, or one array."""
        if self.stage.inputs[name] is None:
            return dataset
        variable, names = self.ports[name].variable, [str(variable) for variable in dataset.data_vars]
        if variable is None and len(names) != 1:
            raise StageError(
                f"input {name!r} of stage {self.name!r} is one array, and the given dataset has the "
                f"variables {', '.join(names)}; choose one: {name}=node['{names[0]}']"
            )
        return dataset[variable or names[0]]

    def _put(
        self, store: Store, key: ResultKey, dataset: xr.Dataset, parts: Mapping[str, Part], took: Took
    ) -> None:
        """Store the result of a cell, or the whole result, with provenance, after checking code and inputs.

        Arguments:
            store: The store to write to.
            key: Key of the result.
            dataset: The result.
            parts: Pieces of the inputs that it was computed from, by name.
            took: Returns seconds and memory of the computation so far.
        """
        # A lazy result is computed while it is written; loading it here puts that into the measured time.
        dataset = dataset.load() if dataset.nbytes <= LOADED else dataset
        note = {
            "source": self.stage.source,
            **took(),
            "bytes_read": sum(part.nbytes for part in parts.values()),
            "bytes_written": int(dataset.nbytes),
            "parents": {name: list(part.parents) for name, part in parts.items()},
        }

        def check() -> None:
            self._check_code(key)
            for part in parts.values():
                part.check()

        self.publish(store, key, dataset, note, check)

    def _check_code(self, key: ResultKey) -> None:
        """Raise SourceChanged unless the function's code has, in this process, the digest in the key."""
        # A worker may have imported another version of the user's module.
        if (current := self.stage.key_version) != key.version:
            raise SourceChanged(
                f"the code of stage {self.name!r}, or a value that it reads, changed since the run was "
                f"planned ({key.version}, now {current}), is changed by the function itself, or differs on "
                "this worker; nothing was stored; make it constant and run again"
            )


def run_cell(node: StageNode, store: Store, cell: Cell) -> None:
    """Compute and store one cell of a stage: the work of a Dask task, in a thread or on a worker.

    Arguments:
        node: The stage with its inputs; pickled for workers.
        store: The store to read inputs from and write the result to.
        cell: The part to compute, with its key.
    """
    with one_look():
        node.compute(store, cell)
