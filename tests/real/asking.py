"""Workflows asked about a model, each in a process of its own, with a record of what became of it.

A process is `mizarr compute WORKFLOW --model FILE --store STORE --json`, as a user types it. Its record lies
beside the store, and an interrupted run goes on from there: a workflow is asked again if mizarr's sources
changed, if its results are no longer in the store, or if it failed, was interrupted, or was stopped at a
lower limit than the present one. Costs belong to the keys of the results: a process that finds them stored
leaves the costs as they are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import mizarr
from tests.real.processes import Outcome, Process, machine, measured, sources, versions


@dataclass(frozen=True)
class Record:
    """What became of a workflow that was asked about a model."""

    workflow: str
    """Name of the workflow."""
    model: str
    """Name of the model's file."""
    sources: str
    """Digest of mizarr's sources."""
    limit: int
    """Largest processor time of the process, in seconds."""
    processes: tuple[Process, ...]
    """Processes that it took to compute the results, oldest first."""
    keys: dict[str, str]
    """Key of each result."""
    settings: tuple[str, ...] = ()
    """Settings other than the defaults, as NAME=VALUE."""
    machine: str = field(default_factory=machine)
    """Processor, number of cores and memory."""
    versions: dict[str, str] = field(default_factory=versions)
    """Versions of Python and of packages."""

    @property
    def outcome(self) -> Outcome:
        """What became of the last process."""
        return self.processes[-1].outcome

    @property
    def message(self) -> str:
        """Why there is no answer, in one line."""
        return self.processes[-1].message

    @property
    def processor_seconds(self) -> float:
        """Processor time of all processes, as far as their end was seen."""
        return sum(process.processor_seconds for process in self.processes)

    @property
    def peak_bytes(self) -> int:
        """Largest resident memory of all processes."""
        return max(process.peak_bytes for process in self.processes)

    @property
    def is_lower_bound(self) -> bool:
        """Whether the costs of some process are not known."""
        return any(process.outcome == "interrupted" for process in self.processes)

    @classmethod
    def read(cls, path: Path) -> Record | None:
        """Record read from a file; None without a file."""
        if not path.exists():
            return None
        fields = json.loads(path.read_text("utf-8"))
        processes = tuple(Process(**process) for process in fields["processes"])
        return cls(**fields | {"processes": processes, "settings": tuple(fields.get("settings", ()))})

    def write(self, path: Path) -> None:
        """Write the record into a file, which is whole at any time."""
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".part")
        unfinished.write_text(json.dumps(asdict(self), indent=1) + "\n", "utf-8")
        unfinished.replace(path)


@dataclass(frozen=True)
class Asked:
    """A model, and the folder in which it is asked: store, records, answers, figures."""

    folder: Path
    """Folder of the store and of all that lies beside it."""
    model: str
    """Path of the model's file, or the name of a built-in model."""
    limit: int
    """Largest processor time of a process, in seconds."""
    settings: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Settings other than the defaults, as NAME=VALUE, by workflow."""

    @property
    def name(self) -> str:
        """Name of the model's file."""
        return Path(self.model).name

    @property
    def store(self) -> Path:
        """Path of the store, which all models share."""
        return self.folder / "store"

    def path(self, kind: str, workflow: str, ending: str) -> Path:
        """Path of a file of one workflow."""
        return self.folder / kind / self.name / f"{workflow}{ending}"

    def record(self, workflow: str) -> Record | None:
        """Record of the processes that asked a workflow; None before the first."""
        return Record.read(self.path("records", workflow, ".json"))

    def answer(self, workflow: str) -> dict[str, Any]:
        """JSON document of a workflow that answered."""
        document: dict[str, Any] = json.loads(self.path("answers", workflow, ".json").read_text("utf-8"))
        return document

    def ask(self, workflow: str) -> Record:
        """Ask a workflow, unless its record still holds; returns the record."""
        old, path = self.record(workflow), self.path("records", workflow, ".json")
        is_stored = old is not None and self._is_stored(old)
        if old is not None and self._holds(old, is_stored):
            return old
        goes_on = old is not None and old.outcome in ("failed", "stopped")
        earlier = old.processes if old is not None and goes_on else ()
        # There while the process runs; one that is found was left by a program that was killed.
        mark = path.with_suffix(".started")
        if mark.exists():
            earlier = (*earlier, Process("interrupted"))
        path.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
        process, keys = self._process(workflow)
        if process.outcome == "answered" and old is not None and is_stored and keys == old.keys:
            record = replace(old, sources=sources(), limit=self.limit)
        else:
            settings = self.settings.get(workflow, ())
            record = Record(
                workflow, self.name, sources(), self.limit, (*earlier, process), keys, settings=settings
            )
        record.write(path)
        mark.unlink()
        return record

    def _is_stored(self, record: Record) -> bool:
        """Whether an answer and all its results are in the store."""
        store = mizarr.open_store(self.store)
        is_written = self.path("answers", record.workflow, ".json").exists()
        return is_written and bool(record.keys) and all(map(store.lookup, record.keys.values()))

    def _holds(self, record: Record, is_stored: bool) -> bool:
        """Whether a record still says what asking again would say."""
        if record.sources != sources() or record.settings != self.settings.get(record.workflow, ()):
            return False
        if record.outcome == "answered":
            return is_stored
        return record.outcome == "refused" or (record.outcome == "stopped" and record.limit >= self.limit)

    def _words(self, workflow: str) -> list[str]:
        """Arguments of `mizarr` that ask a workflow."""
        words = ["compute", workflow, "--model", self.model, "--store", str(self.store), "--json", "--quiet"]
        return words + [word for text in self.settings.get(workflow, ()) for word in ("--set", text)]

    def _process(self, workflow: str) -> tuple[Process, dict[str, str]]:
        """Run a workflow in a process; with the keys of its results, if it answered."""
        output, log = self.path("answers", workflow, ".part"), self.path("logs", workflow, ".txt")
        process = measured(self._words(workflow), output, log, self.limit)
        if process.outcome != "answered":
            output.unlink()
            said = process.message.removeprefix("mizarr: error: ").replace(self.model, self.name)
            return replace(process, message=said), {}
        output.replace(output.with_suffix(".json"))
        return process, self.answer(workflow)["provenance"]["keys"]

    def draw(self, workflow: str, figure: str) -> Path | None:
        """PNG of a figure of a workflow that answered, drawn from stored results; None without such a
        figure."""
        record = self.record(workflow)
        if record is None or record.outcome != "answered":
            return None
        folder = self.path("figures", workflow, "")
        asked_at = self.path("records", workflow, ".json").stat().st_mtime
        paths = sorted(folder.glob(f"{figure}*.png"))
        if paths and paths[0].stat().st_mtime > asked_at:
            return paths[0]
        # Other sources might compute other results, whose costs nobody measures.
        if record.sources != sources():
            return None
        log = self.path("logs", workflow, ".figures.txt")
        measured(
            [*self._words(workflow), "--figures", str(folder)], log.with_suffix(".json"), log, self.limit
        )
        return min(folder.glob(f"{figure}*.png"), default=None)
