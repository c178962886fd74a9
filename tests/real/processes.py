"""Processes of `mizarr` that are measured: exit code, processor time, peak memory; and what they ran on."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import mizarr

ROOT = Path(mizarr.__file__).parent
ROOMS = ("store", "pipeline", "stages", "workflows")
PACKAGES = ("torch", "numpy", "zarr", "xarray")
WALL = 20
"""Seconds by the clock that a process may take per second of its limit, on a machine with other work."""
PROGRAM = """import resource, sys
from pathlib import Path
limit, peak = int(sys.argv.pop(1)), Path(sys.argv.pop(1))
resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.getrlimit(resource.RLIMIT_CPU)[1]))
from mizarr.workflows.cli import main
try:
    main()
finally:
    status = Path("/proc/self/status")
    if status.exists():
        peak.write_text(next(row for row in status.read_text().splitlines() if row.startswith("VmHWM")))
"""
"""Code of a process. It sets its limit itself: a function between fork and exec is unsafe beside threads. On
Linux it writes its peak memory down, as that of `wait4` begins at the peak of the process that forked it."""
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
    own_peak = log.with_suffix(".peak")
    own_peak.unlink(missing_ok=True)
    with output.open("wb") as out, log.open("wb") as err:
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(limit), str(own_peak.absolute()), *words],
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
    if own_peak.exists():
        peak = 1024 * int(own_peak.read_text().split()[1])
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
