"""Measurement of some work: memory of this process before, during and after it; for provenance, seconds too.

    with mizarr.memory() as used:
        model.forward(prompt)
    print(used)                                  # resident 412 MB -> 640 MB, at most 811 MB
    used.peak.resident - used.before.resident

Resident memory is that of the whole process: work of other threads in the same time is counted too. Device
memory is what torch's tensors occupy on each accelerator; it is read only if torch is loaded, and torch is
never imported for it.

The kernel and torch remember the highest value since the process began. If the work exceeds that value, the
peak is exact; otherwise it is the highest of samples taken every `EVERY` seconds.

Border: reads numbers of the system. They are stored in provenance and shown on stderr, and are in no key.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from ..store.repeated import Repeated

__all__ = [
    "Memory",
    "MemoryUsed",
    "Took",
    "measured",
    "megabytes",
    "memory",
    "highest_peaks",
    "resident",
    "setting_up",
]

EVERY = 0.02
"""Seconds between two samples of memory."""
_STATUS = Path("/proc/self/status")
_PAGES = Path("/proc/self/statm")


@dataclass(frozen=True)
class Memory:
    """Memory use of this process and of its tensors on accelerators, current or peak, in bytes."""

    resident: int | None = None
    """Resident set size of the process; None if the system does not report it."""
    device: Mapping[str, int] = field(default_factory=dict)
    """Bytes of torch tensors by device, such as "cuda:0"."""

    @classmethod
    def now(cls) -> Memory:
        """Current memory; on accelerators that of tensors only, without the cache of torch's allocator."""
        return cls(resident(), _on_devices("memory_allocated"))

    @classmethod
    def ever(cls) -> Memory:
        """Highest memory since the process began, as the kernel and torch remember it."""
        return cls(_most_resident(), _on_devices("max_memory_allocated"))

    def or_more(self, memory: Memory) -> Memory:
        """The larger of two values, field by field and device by device."""
        sizes = [size for size in (self.resident, memory.resident) if size is not None]
        device = {
            name: max(self.device.get(name, 0), memory.device.get(name, 0))
            for name in {**self.device, **memory.device}
        }
        return Memory(max(sizes, default=None), device)


class MemoryUsed:
    """Memory use of this process around a computation: `before`, `after` and `peak`."""

    def __init__(self) -> None:
        self._highest_before = Memory.ever()
        self.before = self._peak = Memory.now()
        self._end: Memory | None = None

    @property
    def after(self) -> Memory:
        """Memory at the end of the work; the current memory while it runs."""
        return self._end or Memory.now()

    @property
    def peak(self) -> Memory:
        """Highest memory from the beginning of the work to its end, or until now."""
        if self._end is None:
            self.look()
        return self._peak

    def look(self, *, is_end: bool = False) -> None:
        """Take a sample: raise `peak` to the current memory, or to a new maximum of the process.

        Arguments:
            is_end: Whether the work ends now, so that `after` keeps the current memory.
        """
        now, ever = Memory.now(), Memory.ever()
        highest_before = self._highest_before
        # If the process's maximum rose during the work, it is the exact peak of the work.
        if ever.resident is not None and ever.resident > (highest_before.resident or 0):
            now = now.or_more(Memory(ever.resident))
        new_maxima = {
            name: most for name, most in ever.device.items() if most > highest_before.device.get(name, 0)
        }
        self._peak = self._peak.or_more(now).or_more(Memory(None, new_maxima))
        if is_end:
            self._end = Memory.now()

    def to_json(self) -> dict[str, Any]:
        """Bytes before, after and at the peak: {"resident": {…}, "device": {"cuda:0": {…}}}."""
        parts = {"before": self.before, "after": self.after, "peak": self.peak}
        devices = sorted({name for part in parts.values() for name in part.device})
        return {
            "resident": {name: part.resident for name, part in parts.items()},
            "device": {
                device: {name: part.device.get(device, 0) for name, part in parts.items()}
                for device in devices
            },
        }

    def __str__(self) -> str:
        usage = self.to_json()
        usage_by_kind = {"resident": usage["resident"], **usage["device"]}
        return "; ".join(
            f"{kind} {megabytes(sizes['before'])} -> {megabytes(sizes['after'])}, at most "
            f"{megabytes(sizes['peak'])}"
            for kind, sizes in usage_by_kind.items()
            if None not in sizes.values()
        )


@contextmanager
def memory() -> Iterator[MemoryUsed]:
    """Context manager: measure the memory that this process uses before, after and at the peak of a block.

    The peak is exact if it is the highest since the process began; otherwise it is the highest of samples
    taken every 0.02 seconds. Work of other threads in the same time is counted too.

    >>> with memory() as used:
    ...     block = bytearray(1 << 20)
    >>> sorted(used.to_json())
    ['device', 'resident']
    """
    used = MemoryUsed()
    try:
        _watch(used)
        yield used
    finally:
        # Twice instead of in a helper: see `blas_threads` in context.py.
        try:
            _unwatch(used)
        except BaseException:  # interrupted
            _unwatch(used)
            raise
        used.look(is_end=True)


def highest_peaks(notes: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Highest peak of memory in several provenance notes: "resident", or a device -> bytes."""
    peaks: dict[str, int] = {}
    for note in notes:
        usage = note.get("memory") or {}
        usage_by_kind = {"resident": usage.get("resident") or {}, **(usage.get("device") or {})}
        for kind, sizes in usage_by_kind.items():
            if sizes.get("peak") is not None:
                peaks[kind] = max(peaks.get(kind, 0), int(sizes["peak"]))
    return peaks


def megabytes(count: int) -> str:
    """Format a number of bytes as text: "1,234 MB"."""
    return f"{count / 1e6:,.0f} MB"


def resident() -> int | None:
    """Resident set size of this process in bytes; None if the system does not report it."""
    try:
        # Second field of /proc/self/statm: resident pages.
        return int(_PAGES.read_bytes().split()[1]) * _page()
    except OSError:
        return None


def _most_resident() -> int | None:
    """Highest resident set size of this process since it began, in bytes; None if the system does not
    tell."""
    try:
        # VmHWM, the peak resident size in KiB, exists only on Linux.
        return int(_STATUS.read_text().partition("VmHWM:")[2].split()[0]) << 10
    except OSError:
        pass
    try:
        import resource
    except ImportError:
        return None
    highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return highest if sys.platform == "darwin" else highest << 10  # bytes on macOS, KiB on Linux


@cache
def _page() -> int:
    """Bytes of a page of memory."""
    return os.sysconf("SC_PAGE_SIZE")


def _on_devices(function: str) -> dict[str, int]:
    """CUDA device -> result of a function of `torch.cuda`; empty if this process has not used CUDA."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    if cuda is None or not cuda.is_initialized():
        return {}
    return {f"cuda:{i}": int(getattr(cuda, function)(i)) for i in range(cuda.device_count())}


# One thread samples for all measurements in progress, and ends with the last of them.
_WATCHED: list[MemoryUsed] = []
_LOCK = threading.Lock()
_sampler: Repeated | None = None


def _watch(used: MemoryUsed) -> None:
    global _sampler
    with _LOCK:
        _WATCHED.append(used)
        if _sampler is None:
            sampler = Repeated(EVERY, _sample_all, "mizarr-memory")
            sampler.start()
            _sampler = sampler


def _unwatch(used: MemoryUsed) -> None:
    global _sampler
    with _LOCK:
        _WATCHED[:] = [usage for usage in _WATCHED if usage is not used]
        if not _WATCHED and _sampler is not None:
            _sampler.stop(wait=False)  # it may wait for this lock
            _sampler = None


def _sample_all() -> None:
    with _LOCK:
        for used in _WATCHED:
            used.look()


Took = Callable[[], dict[str, Any]]
"""Function that returns {"seconds": …, "setup_seconds": …, "memory": …} of the work so far, as plain values.
seconds: wall time, set-up included. setup_seconds: the part spent in `setting_up`."""


class _Setup:
    """Counter of the seconds of set-up (such as reading weights) within one measurement."""

    def __init__(self) -> None:
        self.seconds = 0.0


_SETUPS: list[_Setup] = []
"""One counter for each measurement in progress."""


@contextmanager
def measured() -> Iterator[Took]:
    """Context manager: measure wall time and memory of a block; gives a function that returns both so far."""
    started, setup = time.monotonic(), _Setup()

    def took() -> dict[str, Any]:
        times = {"seconds": time.monotonic() - started, "setup_seconds": setup.seconds}
        return {**{name: round(value, 6) for name, value in times.items()}, "memory": used.to_json()}

    with memory() as used:
        _SETUPS.append(setup)
        try:
            yield took
        finally:
            _SETUPS.remove(setup)


@contextmanager
def setting_up() -> Iterator[None]:
    """Context manager: count the time of a block as set-up in every measurement in progress.

    Set-up, such as reading the weights of a model, takes the same time for little and for much work, so
    estimates of later runs scale only the remaining time.
    """
    started = time.monotonic()
    try:
        yield
    finally:
        elapsed = time.monotonic() - started
        for setup in tuple(_SETUPS):
            setup.seconds += elapsed
