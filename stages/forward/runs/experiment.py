"""Experiments: stages made of runs of a model, divided into cells that are stored one by one.

An `Experiment` declares the runs of its cells, the measurement of each run, how the measurements of a cell
become a labelled dataset, and its output arrays. `ExperimentNode` is an experiment on a model in the graph of
a workflow: it finds stored cells, passes the runs of all missing cells to the planner as one list, so that
cells share computation, and publishes each cell when its last run is measured. A killed experiment continues
where it stopped; an experiment with one more layer computes one layer.

Planning imports no torch.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import MISSING, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ....pipeline.ambient import plain_torch
from ....pipeline.context import Group
from ....pipeline.declaration import REQUIRED, Declaration, Output, require_declared
from ....pipeline.memory import Took, measured
from ....pipeline.nodes import (
    Estimate,
    Node,
    ResultNode,
    Status,
    check_pinned,
    one_look,
    remembered,
    status_of,
)
from ....pipeline.plan import as_bytes
from ....pipeline.reasons import last_timed, missing_cells, scaled_seconds, why_not
from ....store.errors import SourceChanged
from ....store.keys import ResultKey
from ....store.runs.shards import DTYPES
from ..hooks.spec import HookSpec
from ..models.reference import ModelRef
from ..models.source import ModelSource
from ..passes.branches import Wanted
from ..passes.planner import MEMORY, SweepPlan, plan_runs
from ..text.prompts import tokenize
from .duration import PassWork, expected_duration
from .run import Run, stream

if TYPE_CHECKING:
    import xarray as xr

    from ....pipeline import Context
    from ....pipeline.pinned import Pinned
    from ....store import Store
    from ..architectures.architecture import Architecture
    from ..hooks.cache import HookCache
    from ..models.model import Model

__all__ = ["CellLabels", "Experiment", "ExperimentNode"]

TOGETHER = 4096
"""Runs planned together: enough to share computation, few enough that their payloads fit in memory."""
COMPUTING = {"prepare", "runs", "measure", "measure_run", "dataset", "joined"}
"""Methods of an experiment that compute with torch or numpy."""
CellLabels = Mapping[str, Any]
"""Labels of one cell of an experiment, JSON values: {"layer": 3}."""


class Experiment(ABC):
    """A stage that needs forward passes: which runs, what is measured of each, and the resulting arrays.

    A subclass is a frozen dataclass whose fields are the parameters, plain values.
    """

    name: ClassVar[str]
    """Experiment name, part of every result key."""
    version: ClassVar[int]
    """Increased whenever results change; part of its keys."""
    outputs: ClassVar[Mapping[str, Output]]
    """All arrays that the experiment can return; `outputs_on` selects those of given parameters."""
    resources: ClassVar[tuple[str, ...]] = ("model",)
    """Names of the resources that the experiment reads, besides its parameters."""
    reads_text: ClassVar[bool] = False
    """Whether results contain text of the tokenizer, which is then part of the key."""
    joins_lazily: ClassVar[bool] = False
    """Whether `joined` gets datasets that are not in memory yet, for cells too large to hold all of them."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Make the computing methods run under torch's default settings, whatever the caller has set."""
        super().__init_subclass__(**options)
        # Only methods of this class: those of a base class are wrapped already.
        for name in COMPUTING & vars(cls).keys():
            setattr(cls, name, plain_torch()(vars(cls)[name]))

    @property
    def registered(self) -> str:
        """Name under which `registry` lists the experiment.

        An experiment that repeats another one with random draws has the name of that one.
        """
        return self.name

    def params(self) -> dict[str, Any]:
        """Parameters as JSON values (token ids, seeds, metrics), which enter the key of every result."""
        return dict(vars(self))

    def outputs_on(self, config: Architecture) -> Mapping[str, Output]:
        """The arrays that the experiment returns with its parameters on a model; checked before storing.

        Arguments:
            config: architecture of the model.
        """
        return self.outputs

    @classmethod
    def declaration(cls) -> Declaration:
        """Name, version, parameters with defaults, and outputs of the experiment."""
        # Fields left out of comparison (memory, callbacks) change no result, and are no parameters.
        parameters = [f for f in fields(cls) if f.compare and f.name not in cls.resources]  # type: ignore[arg-type]
        return Declaration(
            "experiment",
            cls.name,
            cls.version,
            f"{cls.__module__}.{cls.__qualname__}",
            {},
            cls.resources,
            {item.name: REQUIRED if item.default is MISSING else item.default for item in parameters},
            cls.outputs,
        )

    @classmethod
    def describe(cls) -> str:
        """Name, version, parameters and outputs of the experiment as text to read."""
        return cls.declaration().describe()

    @abstractmethod
    def cells(self, config: Architecture) -> Sequence[CellLabels]:
        """Divide the experiment into parts (cells) that are computed and stored one by one.

        Arguments:
            config: architecture of the model.

        Returns:
            Labels of each part, e.g. {"layer": 3}, in the order in which `joined` gets their datasets.
        """

    @property
    def baseline(self) -> Hashable | None:
        """Everything except the model that the result of `prepare` depends on; None if unknown.

        Experiments of one class with an equal value share one result of `prepare`.
        """
        return None

    def prepare(self, model: Model) -> Any:
        """Compute once what all cells need for their runs and measurements, such as clean activations.

        Arguments:
            model: the loaded model.
        """
        return None

    @abstractmethod
    def runs(self, prepared: Any, cell: CellLabels) -> Sequence[Run]:
        """The forward passes of one cell.

        Arguments:
            prepared: result of `prepare`.
            cell: labels of the cell.
        """

    def sketch(self, config: Architecture, cell: CellLabels) -> Sequence[Run] | None:
        """Runs as costly as those of a cell, with arbitrary tensors, for planning without a loaded model.

        Arguments:
            config: architecture of the model.
            cell: labels of the cell.

        Returns:
            The runs; None if their number or shape depends on the result of `prepare`.
        """
        return None

    @abstractmethod
    def measure(self, prepared: Any, cell: CellLabels, result: HookCache) -> Any:
        """Measure one run, as numbers or numpy arrays; its activations are freed afterwards.

        Arguments:
            prepared: result of `prepare`.
            cell: labels of the cell.
            result: captures and logits of the run.
        """

    def measure_run(self, prepared: Any, cell: CellLabels, number: int, result: HookCache) -> Any:
        """Measure run `number` of a cell; by default with `measure`, overridden if runs differ.

        Arguments:
            prepared: result of `prepare`.
            cell: labels of the cell.
            number: index of the run in the cell.
            result: captures and logits of the run.
        """
        return self.measure(prepared, cell, result)

    @abstractmethod
    def dataset(self, prepared: Any, cell: CellLabels, measured: Sequence[Any]) -> xr.Dataset:
        """Make a labelled dataset with units of the measurements of one cell.

        Arguments:
            prepared: result of `prepare`.
            cell: labels of the cell.
            measured: measurement of each run, in order.
        """

    def joined(self, parts: Sequence[xr.Dataset]) -> xr.Dataset:
        """Join the datasets of all cells into the result; this default is for experiments of one cell.

        Arguments:
            parts: dataset of each cell, in the order of `cells`.
        """
        (dataset,) = parts
        return dataset

    @property
    def pinned(self) -> Sequence[Pinned]:
        """Resources besides the model that must not change while the experiment runs."""
        return ()

    def on(
        self,
        model: Model | ModelRef | ModelSource | str | Path,
        *,
        memory: int | str | None = None,
    ) -> ExperimentNode:
        """Make a pipeline node that runs the experiment on a model.

        Arguments:
            model: a loaded model, or a reference to one.
            memory: most bytes of activations, as a number or such as "2GiB"; None for 1 GiB.
        """
        return ExperimentNode(self, ModelSource.of(model), memory=memory)


class ExperimentNode(ResultNode):
    """Pipeline node that runs an experiment on a model and stores its cells one by one."""

    inputs: tuple[Node, ...] = ()

    def __init__(
        self, experiment: Experiment, source: ModelSource, *, memory: int | str | None = None
    ) -> None:
        """Combine an experiment with a model; nothing is computed.

        Arguments:
            experiment: declares cells, runs and measurements.
            source: the model.
            memory: most bytes of activations, as a number or such as "2GiB"; None for 1 GiB.
        """
        self.experiment = experiment
        self.source = source
        self.memory = memory
        self.name = experiment.name
        # Taken now: later checks compare with what these resources were when the node was created.
        self._pinned = tuple(experiment.pinned)

    def __repr__(self) -> str:
        return f"ExperimentNode({self.experiment!r}, {self.source!r})"

    @property
    def pinned(self) -> Sequence[Pinned]:
        """Files that must stay unchanged until computation, except model files, which are checked on
        loading."""
        return self._pinned

    # -- identity

    def key(self, store: Store) -> ResultKey:
        """Key of the joined result; it contains the parameters, and the labels of all cells."""
        cells = [dict(cell) for cell in self.cells()]
        return self._key(self.name, {**self.experiment.params(), "cells": cells})

    def cells(self) -> Sequence[CellLabels]:
        """Labels of the cells, the parts of the experiment that are computed and stored one by one."""
        return self.experiment.cells(self.source.config)

    def cell_key(self, cell: CellLabels) -> ResultKey:
        """Key of the result of one cell; it does not depend on which other cells are computed.

        Arguments:
            cell: labels of the cell, e.g. {"layer": 3}.
        """
        return self._key(f"{self.name}/cell", {**self.experiment.params(), "cell": dict(cell)})

    def _key(self, label: str, params: Mapping[str, Any]) -> ResultKey:
        inputs = {"model": self.source.identity.digest}
        if self.experiment.reads_text:
            # Runs are keyed by token ids; only their texts depend on the tokenizer.
            inputs |= tokenizer_input(self.source)
        return ResultKey(label, self.experiment.version, params, inputs)

    @remembered
    def missing(self, store: Store) -> list[CellLabels]:
        """Labels of the cells whose results are not in the store."""
        return [cell for cell in self.cells() if store.lookup(self.cell_key(cell)) is None]

    # -- planning

    def status(self, store: Store) -> Status:
        """Whether the joined result is stored; if not, why, and how many of its cells are stored.

        Raises:
            SourceChanged: if the model or a resource has changed since this node was created.
        """
        with one_look():
            check_pinned(self)
            key = self.key(store)
            is_stored = store.lookup(key) is not None
            self.source.expect(served=is_stored)
            if is_stored:
                return Status(True, cells_cached=1)
            cells, missing = len(self.cells()), self.missing(store)
            if not missing:
                return Status(False, "its cells are stored, but not joined yet", cells, cells)
            reason = missing_cells(missing, cells) if len(missing) < cells else why_not(store, key)
            return Status(False, reason, cells, cells - len(missing))

    def estimate(self, store: Store) -> Estimate:
        """Estimate peak memory, planned work and seconds of the cells that are not stored.

        Seconds are scaled from the newest result of such an experiment on this model, by the number of runs,
        or of cells if runs cannot be planned.
        """
        if status_of(self, store).is_cached:
            return Estimate()
        planned = self.plan(store)
        work = "" if planned is None else planned.describe()
        if planned is not None and len(self.missing(store)) < len(self.cells()):
            n_runs = sum(len(self.experiment.sketch(self.source.config, cell) or ()) for cell in self.cells())
            work = f"{n_runs} runs requested, {n_runs - planned.runs} of them stored; {work}"
        return replace(self._duration(store, planned), peak_bytes=as_bytes(self.memory) or 0, work=work)

    def _duration(self, store: Store, planned: SweepPlan | None) -> Estimate:
        # As a provenance note read back from JSON has it: tuples are lists there.
        identity = json.loads(json.dumps(self.source.identity.request()))

        def is_same_model(note: Mapping[str, Any]) -> bool:
            return bool(note.get("identity") == identity and note.get("runs") and note.get("cells"))

        last = last_timed(self.name, store, is_same_model)
        if planned is not None:
            work = PassWork(planned.positions, planned.branches)
            return expected_duration(self.source, work, last, planned.runs / last["runs"] if last else 1.0)
        if last is None:
            return Estimate()
        seconds = scaled_seconds(last, len(self.missing(store)) / last["cells"])
        return Estimate(seconds=round(seconds, 3), setup_seconds=last.get("setup_seconds", 0.0))

    def plan(self, store: Store) -> SweepPlan | None:
        """Plan the runs of the cells that are not stored; None if the runs depend on a loaded model."""
        config = self.source.config
        resolved = []
        for cell in self.missing(store):
            sketched = self.experiment.sketch(config, cell)
            if sketched is None:
                return None
            for run in sketched:
                spec = (run.hooks or HookSpec()).bind(config.hook_points, self.source.name)
                tokens = self._tokens(run)
                want = None if run.want is None else run.want.read(config, len(tokens))
                resolved.append(Wanted(tokens, spec, want))
        itemsize = DTYPES[self.source.dtype].itemsize
        return plan_runs(resolved, config, itemsize, self._budget)

    @property
    def _budget(self) -> int:
        """Most bytes of activations."""
        budget = as_bytes(self.memory)
        return MEMORY if budget is None else budget

    def _tokens(self, run: Run) -> tuple[int, ...]:
        if not isinstance(run.prompt, str):
            return tuple(run.prompt)
        (tokens,) = tokenize(run.prompt, self.source.tokenizer, self.source.config, self.source.name)
        return tuple(tokens)

    # -- running

    def require_workers(self, context: Context) -> None:
        """Raise PlanError for a loaded model, which worker processes cannot load by name.

        Arguments:
            context: cluster or number of workers.
        """
        self.source.for_workers()

    def run(self, store: Store, context: Context) -> None:
        """Compute and store the missing cells, here or on workers; then store the joined result.

        Arguments:
            store: where to publish.
            context: progress, workers and cluster.
        """
        with measured() as took:
            runs = 0
            with one_look():
                whole, missing = self.key(store), list(self.missing(store))
            if missing and context.has_workers:
                needs = self.source.needs
                groups = [Group(tuple(cells)) for cells in self._worker_groups(missing, context.width(needs))]
                context.map(partial(compute_cells, expected=whole.digest), self, store, groups, needs=needs)
            elif missing:
                task = context.progress.task(self.name, total=len(missing), unit="cells")
                runs = self.compute(store, missing, task.advance)
            with one_look():
                self.require_unchanged(store, whole.digest)
                parts = [store.open_result(self.cell_key(cell)) for cell in self.cells()]
                if not self.experiment.joins_lazily:
                    parts = [part.load() for part in parts]
                joined = self.experiment.joined(parts)
                declared = self.experiment.outputs_on(self.source.config)
                require_declared(f"experiment {self.name!r}", declared, joined)
                counts = {"runs": runs, "cells": len(missing)}
                self._put(store, whole, joined, took, lambda: self.key(store), counts)

    def compute(self, store: Store, cells: Sequence[CellLabels], advance: Any = lambda: None) -> int:
        """Compute and store cells, with about `TOGETHER` runs planned at a time.

        Arguments:
            store: where to publish.
            cells: labels of the cells.
            advance: called after each published cell.

        Returns:
            Number of runs.
        """
        check_pinned(self)
        # Before computing: the key holds the code of metrics, which may change while they run.
        keys = [self.cell_key(cell) for cell in cells]
        model = self.source.load()
        prepared = self.experiment.prepare(model)
        waiting: list[tuple[CellLabels, ResultKey]] = []
        listed: list[Sequence[Run]] = []
        total = 0
        for cell, key in zip(cells, keys, strict=True):
            waiting.append((cell, key))
            listed.append(self.experiment.runs(prepared, cell))
            total += len(listed[-1])
            if sum(map(len, listed)) >= TOGETHER:
                self._sweep(store, model, prepared, waiting, listed, advance)
                waiting, listed = [], []
        self._sweep(store, model, prepared, waiting, listed, advance)
        return total

    def _worker_groups(self, cells: Sequence[CellLabels], width: int) -> list[Sequence[CellLabels]]:
        """Divide cells into tasks for `width` workers.

        Cells with the same prompts share `prepare` and the first layers of their runs, so they form one
        task, or several if there would be fewer tasks than workers.
        """
        config = self.source.config
        by_prompts: dict[Hashable, list[CellLabels]] = {}
        for cell in cells:
            runs = self.experiment.sketch(config, cell)
            prompts = None if runs is None else frozenset(map(self._tokens, runs))
            by_prompts.setdefault(prompts, []).append(cell)
        groups: list[Sequence[CellLabels]] = []
        for same_prompts in by_prompts.values():
            size = math.ceil(len(same_prompts) / math.ceil(width * len(same_prompts) / len(cells)))
            groups += [same_prompts[start : start + size] for start in range(0, len(same_prompts), size)]
        return groups

    def _sweep(
        self,
        store: Store,
        model: Model,
        prepared: Any,
        cells: Sequence[tuple[CellLabels, ResultKey]],
        listed: Sequence[Sequence[Run]],
        advance: Any,
    ) -> None:
        """Compute the runs of several cells together, and store each cell when its last run is measured."""
        experiment = self.experiment
        # For each run: (number of its cell, index of the run in the cell).
        place = [(number, i) for number, runs in enumerate(listed) for i in range(len(runs))]
        measurements: list[dict[int, Any]] = [{} for _ in cells]

        def finish(number: int) -> None:
            in_order = [measurements[number][i] for i in range(len(listed[number]))]
            # Measurements of finished cells would otherwise stay until the whole list is done.
            measurements[number].clear()
            cell, key = cells[number]
            dataset = experiment.dataset(prepared, cell, in_order)
            self._put(store, key, dataset, took, lambda: self.cell_key(cell))
            advance()

        with measured() as took:
            for number, runs in enumerate(listed):
                # A cell without runs has a dataset as well, which no run would finish.
                if not runs:
                    finish(number)
            all_runs = [run for runs in listed for run in runs]
            for index, result in stream(model, all_runs, memory=self.memory):
                number, i = place[index]
                measurements[number][i] = experiment.measure_run(prepared, cells[number][0], i, result)
                if len(measurements[number]) == len(listed[number]):
                    finish(number)

    def require_unchanged(self, store: Store, expected: str) -> None:
        """Raise SourceChanged unless the key still has the digest `expected`.

        The key contains the code of the metrics, which may have changed since, or differ on this worker.

        Arguments:
            store: store of the results.
            expected: digest of the key when the experiment was planned.
        """
        _require_same_key(self.name, expected, self.key(store))

    def _put(
        self,
        store: Store,
        key: ResultKey,
        dataset: xr.Dataset,
        took: Took,
        recompute_key: Callable[[], ResultKey],
        counts: Mapping[str, int] | None = None,
    ) -> None:
        note = {
            **self.source.provenance(),
            **(counts or {}),
            **took(),
            "bytes_written": int(dataset.nbytes),
        }
        self.publish(
            store,
            key,
            dataset,
            note,
            lambda: _require_same_key(self.name, key.digest, recompute_key()),
        )


def tokenizer_input(source: ModelSource) -> dict[str, str]:
    """Entry of a result key for results that contain text: {"tokenizer": digest}; {} without a tokenizer."""
    return {} if source.tokenizer_digest is None else {"tokenizer": source.tokenizer_digest}


def _require_same_key(name: str, expected: str, now: ResultKey) -> None:
    if now.digest != expected:
        raise SourceChanged(
            f"{name}: expected metrics with the same code as when the run was planned, found other code (key "
            f"{expected[:12]} became {now.short}), because a value that it reads changed, or differs on this "
            "worker; nothing was stored: make that value constant, and run again"
        )


def compute_cells(node: ExperimentNode, store: Store, group: Group, expected: str) -> None:
    """Compute and store some cells of an experiment on a worker.

    Arguments:
        node: the experiment on its model.
        store: store of the results.
        group: labels of the cells.
        expected: digest of the key of the joined result, as planned.

    Raises:
        SourceChanged: if the key has another digest on this worker.
    """
    # A worker may have imported other code of a metric than the process that planned.
    node.require_unchanged(store, expected)
    node.compute(store, group.cells)
