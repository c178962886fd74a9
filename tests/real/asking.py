"""Workflows asked about a model, each in a process of its own, whose processor time and peak memory count.

A process is `mizarr compute WORKFLOW --model FILE --store STORE --json`, as a user types it. What became of
it is a record beside the store, from which an interrupted run goes on: a workflow is asked again if mizarr's
sources changed, if its results are no longer in the store, or if it failed, was interrupted, or was stopped
at a lower limit. Costs belong to the keys of the results: a process that finds them stored does not change
them.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import mizarr

ROOT = Path(mizarr.__file__).parent
ROOMS = ("store", "pipeline", "stages", "workflows")
PACKAGES = ("torch", "numpy", "zarr", "xarray")
WALL = 6
"""Seconds by the clock that a process may take per second of its limit, on a machine with other work."""
REFUSED = 2
"""Exit code of `mizarr` for a question that makes no sense for a model."""

Outcome = Literal["answered", "refused", "failed", "stopped", "interrupted"]
"""answered: results are stored; refused: exit code 2 and one line; failed: any other exit code; stopped: at
the limit; interrupted: the process began and its end was not seen."""


@dataclass(frozen=True)
class Process:
    """One process that asked a workflow."""

    outcome: Outcome
    """What became of it."""
    processor_seconds: float = 0.0
    """Processor time, user and system, of the process and its children; 0 if its end was not seen."""
    peak_bytes: int = 0
    """Largest resident memory; 0 if its end was not seen."""
    message: str = ""
    """Last line on stderr of a process that did not answer."""


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
    processes: tuple[Process, ...] = ()
    """Processes that it took to compute the results, oldest first."""
    keys: dict[str, str] = field(default_factory=dict)
    """Key of each result."""
    machine: str = ""
    """Processor, number of cores and memory."""
    versions: dict[str, str] = field(default_factory=dict)
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
        """The record of a file; None if there is none."""
        if not path.exists():
            return None
        fields = json.loads(path.read_text("utf-8"))
        return cls(**fields | {"processes": tuple(Process(**process) for process in fields["processes"])})

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
        """What became of a workflow; None if it was not asked."""
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
        goes_on = old is not None and old.outcome in ("failed", "stopped", "interrupted")
        earlier = old.processes if old is not None and goes_on else ()
        record = Record(workflow, self.name, sources(), self.limit, machine=machine(), versions=versions())
        # Written before the process starts: after a kill, the record says that costs are missing.
        replace(record, processes=(*earlier, Process("interrupted"))).write(path)
        process, keys = self._process(workflow)
        if process.outcome == "answered" and old is not None and is_stored and keys == old.keys:
            record = replace(old, sources=record.sources, limit=self.limit)
        else:
            record = replace(record, processes=(*earlier, process), keys=keys)
        record.write(path)
        return record

    def _is_stored(self, record: Record) -> bool:
        """Whether an answer and all its results are in the store."""
        store = mizarr.open_store(self.store)
        is_written = self.path("answers", record.workflow, ".json").exists()
        return is_written and bool(record.keys) and all(map(store.lookup, record.keys.values()))

    def _holds(self, record: Record, is_stored: bool) -> bool:
        """Whether a record still says what asking again would say."""
        if record.sources != sources():
            return False
        if record.outcome == "answered":
            return is_stored
        return record.outcome == "refused" or (record.outcome == "stopped" and record.limit >= self.limit)

    def _process(self, workflow: str) -> tuple[Process, dict[str, str]]:
        """Run a workflow in a process; with the keys of its results, if it answered."""
        output, log = self.path("answers", workflow, ".part"), self.path("logs", workflow, ".txt")
        words = ["compute", workflow, "--model", self.model, "--store", str(self.store), "--json", "--quiet"]
        process = measured(words, output, log, self.limit)
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
        drawn = next(folder.glob(f"{figure}*.png"), None)
        if drawn is not None and drawn.stat().st_mtime > asked_at:
            return drawn
        words = ["compute", workflow, "--model", self.model, "--store", str(self.store), "--json", "--quiet"]
        log = self.path("logs", workflow, ".figures.txt")
        measured([*words, "--figures", str(folder)], log.with_suffix(".json"), log, self.limit)
        return next(folder.glob(f"{figure}*.png"), None)


def measured(words: Sequence[str], output: Path, log: Path, limit: int) -> Process:
    """Run a command of mizarr in a process, and measure it.

    Arguments:
        words: arguments of `mizarr`.
        output: file for stdout.
        log: file for stderr.
        limit: largest processor time, in seconds.
    """
    for path in (output, log):
        path.parent.mkdir(parents=True, exist_ok=True)
    # Set by the process itself: a function between fork and exec is not safe beside threads.
    code = (
        "import resource\n"
        f"resource.setrlimit(resource.RLIMIT_CPU, ({limit}, resource.getrlimit(resource.RLIMIT_CPU)[1]))\n"
        "from mizarr.workflows.cli import main\nmain()"
    )
    with output.open("wb") as out, log.open("wb") as err:
        process = subprocess.Popen(
            [sys.executable, "-c", code, *words],
            stdout=out,
            stderr=err,
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
            start_new_session=True,  # a group of its own, which can be killed as a whole
        )
        is_late = threading.Event()

        def stop() -> None:
            is_late.set()
            os.killpg(process.pid, signal.SIGKILL)

        timer = threading.Timer(WALL * limit, stop)
        timer.start()
        try:
            _, status, usage = os.wait4(process.pid, 0)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        finally:
            timer.cancel()
    process.returncode = os.waitstatus_to_exitcode(status)  # `Popen` cannot find it after wait4
    seconds = round(usage.ru_utime + usage.ru_stime, 1)
    # Kibibytes on Linux, bytes on macOS.
    peak = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    if is_late.is_set():
        return Process("stopped", seconds, peak, f"stopped after {WALL * limit} s by the clock")
    if process.returncode == -signal.SIGXCPU:
        return Process("stopped", seconds, peak, f"stopped at its limit of {limit} s of processor time")
    if process.returncode == 0:
        return Process("answered", seconds, peak)
    lines = log.read_text("utf-8", errors="replace").splitlines()
    outcome: Outcome = "refused" if process.returncode == REFUSED else "failed"
    return Process(outcome, seconds, peak, lines[-1] if lines else f"exit code {process.returncode}")


@cache
def sources() -> str:
    """Digest of mizarr's sources: code and the data that it reads."""
    digest = hashlib.sha256()
    paths = (path for room in ROOMS for path in sorted((ROOT / room).rglob("*.*")))
    for path in (path for path in paths if path.suffix in (".py", ".json")):
        digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


@cache
def machine() -> str:
    """Processor, number of cores and memory of this machine."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.processor() or platform.machine()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return f"{name}, {os.cpu_count()} cores, {memory / 2**30:.0f} GiB, {platform.system()}"


@cache
def versions() -> dict[str, str]:
    """Versions of Python and of the packages that compute."""
    here = {"Python": platform.python_version(), "mizarr": mizarr.__version__}
    return here | {name: importlib.metadata.version(name) for name in PACKAGES}
