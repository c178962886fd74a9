"""Experiments: stages made of runs of a model, cut into cells that are stored one by one.

An `Experiment` declares which runs its cells need, what is measured of each run, how the measurements of a
cell become a labelled dataset, and, as a stage does, which arrays it gives. `ExperimentNode` puts it into a
workflow's graph: it finds what is stored, hands the runs of all missing cells to the planner as one list, so
that cells share what they have in common, and publishes each cell when its last run is measured. A killed
experiment goes on where it was; one with one more layer computes one layer.

Border: knows the store's keys and a model by name; what is science is in the declaration, what is shared
between runs is in planner.py. Planning imports no torch.
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
"""Runs listed at once: enough to share what they share, few enough that what they carry fits in memory."""
COMPUTING = {"prepare", "runs", "measure", "measure_run", "dataset", "joined"}
"""Methods of an experiment that do arithmetic."""
CellLabels = Mapping[str, Any]
"""Labels of one piece of an experiment, plain values: {"layer": 3}."""


class Experiment(ABC):
    """What a stage made of runs declares. A frozen dataclass of plain values, which are its parameters."""

    name: ClassVar[str]
    version: ClassVar[int]
    """Moves when numbers move."""
    outputs: ClassVar[Mapping[str, Output]]
    """Every array it may give; `outputs_on` says which these parameters do."""
    resources: ClassVar[tuple[str, ...]] = ("model",)
    """What it reads."""
    reads_text: ClassVar[bool] = False
    """Whether words of the model's tokenizer are in what it gives: then the tokenizer is in its key."""

    def __init_subclass__(cls, **options: Any) -> None:
        """What computes does so as torch does where nobody changed a setting, whoever calls it."""
        super().__init_subclass__(**options)
        for name in COMPUTING & vars(cls).keys():
            setattr(cls, name, plain_torch()(vars(cls)[name]))

    @property
    def registered(self) -> str:
        """Name of its kind among all experiments; of many drawn side by side, that of what was drawn."""
        return self.name

    def params(self) -> dict[str, Any]:
        """Plain values that, with the cell, decide every number: prompts as token ids, seeds, metrics."""
        return dict(vars(self))

    def outputs_on(self, config: Architecture) -> Mapping[str, Output]:
        """The arrays that are given for these parameters, of a model; checked when the cells are joined."""
        return self.outputs

    @classmethod
    def declaration(cls) -> Declaration:
        """What it says of itself."""
        given = [f for f in fields(cls) if f.compare and f.name not in cls.resources]  # type: ignore[arg-type]
        return Declaration(
            "experiment",
            cls.name,
            cls.version,
            f"{cls.__module__}.{cls.__qualname__}",
            {},
            cls.resources,
            {each.name: REQUIRED if each.default is MISSING else each.default for each in given},
            cls.outputs,
        )

    @classmethod
    def describe(cls) -> str:
        """The declaration in a few lines."""
        return cls.declaration().describe()

    @abstractmethod
    def cells(self, config: Architecture) -> Sequence[CellLabels]:
        """The pieces, in the order in which they are joined."""

    @property
    def baseline(self) -> Hashable | None:
        """What `prepare` depends on: experiments of one kind that say the same share what it gives. None:
        nobody knows."""
        return None

    def prepare(self, model: Model) -> Any:
        """What all cells need to make their runs and to measure them: clean activations, a baseline."""
        return None

    @abstractmethod
    def runs(self, prepared: Any, cell: CellLabels) -> Sequence[Run]:
        """The runs of one cell."""

    def sketch(self, config: Architecture, cell: CellLabels) -> Sequence[Run] | None:
        """Runs that act where those of a cell will, with payloads of no meaning: what a plan can be made of
        without a model. None where nobody can say."""
        return None

    @abstractmethod
    def measure(self, prepared: Any, cell: CellLabels, result: HookCache) -> Any:
        """What is kept of one run, numbers or numpy arrays; its activations are gone afterwards."""

    def measure_run(self, prepared: Any, cell: CellLabels, number: int, result: HookCache) -> Any:
        """As `measure`, of run `number` of the cell; for cells whose runs are measured in several ways."""
        return self.measure(prepared, cell, result)

    @abstractmethod
    def dataset(self, prepared: Any, cell: CellLabels, measured: Sequence[Any]) -> xr.Dataset:
        """The measurements of a cell's runs, in their order, as a labelled dataset with units."""

    def joined(self, parts: Sequence[xr.Dataset]) -> xr.Dataset:
        """The datasets of all cells, in their order, as one: of an experiment of one cell, that cell."""
        (whole,) = parts
        return whole

    @property
    def pinned(self) -> Sequence[Pinned]:
        """What it reads besides the model, and what must not change while it runs."""
        return ()

    def on(
        self,
        model: Model | ModelRef | ModelSource | str | Path,
        *,
        memory: int | str | None = None,
    ) -> ExperimentNode:
        """This experiment on a model, as a node of a workflow's graph."""
        return ExperimentNode(self, ModelSource.of(model), memory=memory)


class ExperimentNode(ResultNode):
    """An experiment on a model, in a graph.

    memory: bytes the passes may take, or "2GiB".
    """

    inputs: tuple[Node, ...] = ()

    def __init__(
        self, experiment: Experiment, source: ModelSource, *, memory: int | str | None = None
    ) -> None:
        self.experiment = experiment
        self.source = source
        self.memory = memory
        self.name = experiment.name
        self._pinned = tuple(experiment.pinned)

    def __repr__(self) -> str:
        return f"ExperimentNode({self.experiment!r}, {self.source!r})"

    @property
    def pinned(self) -> Sequence[Pinned]:
        """What the experiment reads besides the model, which is looked at when it is loaded."""
        return self._pinned

    # -- identity

    def key(self, store: Store) -> ResultKey:
        """Of the whole: the parameters and every cell's labels."""
        cells = [dict(cell) for cell in self.cells()]
        return self._key(self.name, {**self.experiment.params(), "cells": cells})

    def cells(self) -> Sequence[CellLabels]:
        """The labels of every cell."""
        return self.experiment.cells(self.source.config)

    def cell_key(self, cell: CellLabels) -> ResultKey:
        """Of one cell: which others are asked for does not matter to it."""
        return self._key(f"{self.name}/cell", {**self.experiment.params(), "cell": dict(cell)})

    def _key(self, label: str, params: Mapping[str, Any]) -> ResultKey:
        inputs = {"model": self.source.identity.digest}
        if self.experiment.reads_text:
            inputs |= tokenizer_input(self.source)
        return ResultKey(label, self.experiment.version, params, inputs)

    @remembered
    def missing(self, store: Store) -> list[CellLabels]:
        """Cells that are not stored."""
        return [cell for cell in self.cells() if store.lookup(self.cell_key(cell)) is None]

    # -- planning

    def status(self, store: Store) -> Status:
        """Cached, or why it will run and how much of it stands already. Raises SourceChanged when the model
        is no longer the one this node was made for."""
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
        """Memory as given, and the work as planned; seconds in proportion to the runs (cells, where those are
        not known) of the newest result of such an experiment on this model."""
        if status_of(self, store).is_cached:
            return Estimate()
        planned = self.plan(store)
        work = "" if planned is None else planned.describe()
        if planned is not None and len(self.missing(store)) < len(self.cells()):
            asked = sum(len(self.experiment.sketch(self.source.config, cell) or ()) for cell in self.cells())
            work = f"{asked} runs asked, {asked - planned.runs} of them stored; {work}"
        return replace(self._duration(store, planned), peak_bytes=as_bytes(self.memory) or 0, work=work)

    def _duration(self, store: Store, planned: SweepPlan | None) -> Estimate:
        own = json.loads(json.dumps(self.source.identity.request()))

        def fits(note: Mapping[str, Any]) -> bool:
            return bool(note.get("identity") == own and note.get("runs") and note.get("cells"))

        last = last_timed(self.name, store, fits)
        if planned is not None:
            work = PassWork(planned.positions, planned.branches)
            return expected_duration(self.source, work, last, planned.runs / last["runs"] if last else 1.0)
        if last is None:
            return Estimate()
        seconds = scaled_seconds(last, len(self.missing(store)) / last["cells"])
        return Estimate(seconds=round(seconds, 3), setup_seconds=last.get("setup_seconds", 0.0))

    def plan(self, store: Store) -> SweepPlan | None:
        """How the runs of the missing cells would be computed; None where that takes the model to say."""
        config = self.source.config
        wanted = []
        for cell in self.missing(store):
            sketched = self.experiment.sketch(config, cell)
            if sketched is None:
                return None
            for run in sketched:
                spec = (run.hooks or HookSpec()).bind(config.hook_points, self.source.name)
                wanted.append(Wanted(self._tokens(run), spec, run.want))
        itemsize = DTYPES[self.source.dtype].itemsize
        return plan_runs(wanted, config, itemsize, self._budget)

    @property
    def _budget(self) -> int:
        """Bytes that the passes may take."""
        budget = as_bytes(self.memory)
        return MEMORY if budget is None else budget

    def _tokens(self, run: Run) -> tuple[int, ...]:
        if not isinstance(run.prompt, str):
            return tuple(run.prompt)
        (tokens,) = tokenize(run.prompt, self.source.tokenizer, self.source.config, self.source.name)
        return tuple(tokens)

    # -- running

    def require_workers(self, context: Context) -> None:
        """PlanError for a model that other processes cannot load."""
        self.source.for_workers()

    def run(self, store: Store, context: Context) -> None:
        """Runs of the missing cells; each cell published when its last run is measured; then the whole."""
        with measured() as took:
            runs = 0
            with one_look():
                whole, missing = self.key(store), list(self.missing(store))
            if missing and context.has_workers:
                needs = self.source.needs
                groups = [Group(tuple(cells)) for cells in self._shared(missing, context.width(needs))]
                context.map(partial(compute_cells, expected=whole.digest), self, store, groups, needs=needs)
            elif missing:
                task = context.progress.task(self.name, total=len(missing), unit="cells")
                runs = self.compute(store, missing, task.advance)
            with one_look():
                self.require_unchanged(store, whole.digest)
                parts = [store.open_result(self.cell_key(cell)).load() for cell in self.cells()]
                joined = self.experiment.joined(parts)
                declared = self.experiment.outputs_on(self.source.config)
                require_declared(f"experiment {self.name!r}", declared, joined)
                did = {"runs": runs, "cells": len(missing)}
                self._put(store, whole, joined, took, lambda: self.key(store), did)

    def compute(self, store: Store, cells: Sequence[CellLabels], advance: Any = lambda: None) -> int:
        """Compute and publish some cells, as many together as make `TOGETHER` runs; returns how many."""
        check_pinned(self)
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

    def _shared(self, cells: Sequence[CellLabels], width: int) -> list[Sequence[CellLabels]]:
        """Cells as tasks for `width` workers: those of the same prompts are one, as they share a preparation
        and the beginnings of their runs, or, where there are fewer of these than workers, several."""
        config = self.source.config
        alike: dict[Hashable, list[CellLabels]] = {}
        for cell in cells:
            runs = self.experiment.sketch(config, cell)
            prompts = None if runs is None else frozenset(map(self._tokens, runs))
            alike.setdefault(prompts, []).append(cell)
        found: list[Sequence[CellLabels]] = []
        for some in alike.values():
            size = math.ceil(len(some) / math.ceil(width * len(some) / len(cells)))
            found += [some[start : start + size] for start in range(0, len(some), size)]
        return found

    def _sweep(
        self,
        store: Store,
        model: Model,
        prepared: Any,
        cells: Sequence[tuple[CellLabels, ResultKey]],
        listed: Sequence[Sequence[Run]],
        advance: Any,
    ) -> None:
        """Compute the runs of some cells together, and publish each under its key when it is complete."""
        experiment = self.experiment
        place = [(number, i) for number, runs in enumerate(listed) for i in range(len(runs))]
        found: list[dict[int, Any]] = [{} for _ in cells]

        def finish(number: int) -> None:
            kept = [found[number][i] for i in range(len(listed[number]))]
            found[number].clear()
            cell, key = cells[number]
            given = experiment.dataset(prepared, cell, kept)
            self._put(store, key, given, took, lambda: self.cell_key(cell))
            advance()

        with measured() as took:
            for number, runs in enumerate(listed):
                if not runs:
                    finish(number)
            every = [run for runs in listed for run in runs]
            for index, result in stream(model, every, memory=self.memory):
                number, i = place[index]
                found[number][i] = experiment.measure_run(prepared, cells[number][0], i, result)
                if len(found[number]) == len(listed[number]):
                    finish(number)

    def require_unchanged(self, store: Store, expected: str) -> None:
        """SourceChanged unless the code of its metrics is still, and here, what the key was made of."""
        _require(self.name, expected, self.key(store))

    def _put(
        self,
        store: Store,
        key: ResultKey,
        given: xr.Dataset,
        took: Took,
        again: Callable[[], ResultKey],
        did: Mapping[str, int] | None = None,
    ) -> None:
        note = {
            **self.source.provenance(),
            **(did or {}),
            **took(),
            "bytes_written": int(given.nbytes),
        }
        self.publish(store, key, given, note, lambda: _require(self.name, key.digest, again()))


def tokenizer_input(source: ModelSource) -> dict[str, str]:
    """The tokenizer of a model as an input of what holds its words; nothing for a model without one."""
    return {} if source.tokenizer_digest is None else {"tokenizer": source.tokenizer_digest}


def _require(name: str, expected: str, now: ResultKey) -> None:
    if now.digest != expected:
        raise SourceChanged(
            f"{name}: expected the metrics it was planned with, found others (key {expected[:12]} -> "
            f"{now.short}): something their code reads changed meanwhile, is changed by the code itself, or "
            "is another one on this worker; nothing was stored, make it constant and run again"
        )


def compute_cells(node: ExperimentNode, store: Store, group: Group, expected: str) -> None:
    """Compute and publish some cells; a task of its own on a worker elsewhere.

    expected: digest of the key of the whole, as planned.
    """
    node.require_unchanged(store, expected)
    node.compute(store, group.cells)
