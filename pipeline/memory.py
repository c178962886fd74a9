"""Memory of this process: before, after, and at most during some work; and for provenance its seconds, too.

    with mizarr.memory() as used:
        model.forward(prompt)
    print(used)                                  # resident 412 MB -> 640 MB, at most 811 MB
    used.peak.resident - used.before.resident

Resident is what the process holds of the machine's memory, whoever in it asked for that: work of other
threads meanwhile is counted too. Device is what torch's tensors take on each accelerator; torch is asked
where it is loaded already, and never loaded to be asked.

The kernel and torch remember the most a process ever held. Where the work exceeds that, the peak is exact;
where something before held more, it is the most that was seen, looking every `EVERY` seconds.

Border: reads numbers of the system; what is told here stands in provenance and on stderr, and is in no key.
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
    "most_held",
    "resident",
    "setting_up",
]

EVERY = 0.02
_STATUS = Path("/proc/self/status")
_PAGES = Path("/proc/self/statm")


@dataclass(frozen=True)
class Memory:
    """Bytes held at one moment, or at most.

    resident: of the machine's memory; None where the system does not say. device: of tensors, by device.
    """

    resident: int | None = None
    device: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def now(cls) -> Memory:
        """What this process holds at this moment; of tensors, without what torch keeps for later ones."""
        return cls(resident(), _on_devices("memory_allocated"))

    @classmethod
    def ever(cls) -> Memory:
        """The most this process has held since it began."""
        return cls(_most_resident(), _on_devices("max_memory_allocated"))

    def or_more(self, other: Memory) -> Memory:
        """The larger of both, each for itself."""
        known = [each for each in (self.resident, other.resident) if each is not None]
        device = {
            name: max(self.device.get(name, 0), other.device.get(name, 0))
            for name in {**self.device, **other.device}
        }
        return Memory(max(known, default=None), device)


class MemoryUsed:
    """What some work takes: `before`, `peak` so far, and `after`, which is now until it has ended."""

    def __init__(self) -> None:
        self._record = Memory.ever()
        self.before = self._seen = Memory.now()
        self._end: Memory | None = None

    @property
    def after(self) -> Memory:
        """At the end of the work, or now."""
        return self._end or Memory.now()

    @property
    def peak(self) -> Memory:
        """At most, from the beginning to the end, or to now."""
        if self._end is None:
            self.look()
        return self._seen

    def look(self, *, is_end: bool = False) -> None:
        """Take notice of what is held now, and of what this process has held."""
        now, ever = Memory.now(), Memory.ever()
        record = self._record
        if ever.resident is not None and ever.resident > (record.resident or 0):
            now = now.or_more(Memory(ever.resident))
        beyond = {name: most for name, most in ever.device.items() if most > record.device.get(name, 0)}
        self._seen = self._seen.or_more(now).or_more(Memory(None, beyond))
        if is_end:
            self._end = Memory.now()

    def to_json(self) -> dict[str, Any]:
        """Plain values: bytes before, after and at most, resident and by device."""
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
        told = self.to_json()
        rooms = {"resident": told["resident"], **told["device"]}
        return "; ".join(
            f"{room} {megabytes(each['before'])} -> {megabytes(each['after'])}, at most "
            f"{megabytes(each['peak'])}"
            for room, each in rooms.items()
            if None not in each.values()
        )


@contextmanager
def memory() -> Iterator[MemoryUsed]:
    """Within: `before`, `after` and `peak` of what is done, of the whole process; see the first lines above.

    >>> with memory() as used:
    ...     held = bytearray(1 << 20)
    >>> sorted(used.to_json())
    ['device', 'resident']
    """
    used = MemoryUsed()
    try:
        _watch(used)
        yield used
    finally:
        try:
            _unwatch(used)
        except BaseException:  # interrupted
            _unwatch(used)
            raise
        used.look(is_end=True)


def most_held(notes: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """The most that any of some notes of provenance tells, in bytes: "resident", and by device."""
    found: dict[str, int] = {}
    for note in notes:
        told = note.get("memory") or {}
        rooms = {"resident": told.get("resident") or {}, **(told.get("device") or {})}
        for room, each in rooms.items():
            if each.get("peak") is not None:
                found[room] = max(found.get(room, 0), int(each["peak"]))
    return found


def megabytes(count: int) -> str:
    """Bytes for people: 1,234 MB."""
    return f"{count / 1e6:,.0f} MB"


def resident() -> int | None:
    """Bytes of the machine's memory that this process holds now; None where the system does not say."""
    try:
        return int(_PAGES.read_bytes().split()[1]) * _page()
    except OSError:
        return None


def _most_resident() -> int | None:
    try:
        return int(_STATUS.read_text().partition("VmHWM:")[2].split()[0]) << 10
    except OSError:
        pass
    try:
        import resource
    except ImportError:
        return None
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most << 10


@cache
def _page() -> int:
    return os.sysconf("SC_PAGE_SIZE")


def _on_devices(question: str) -> dict[str, int]:
    """What torch says of each CUDA device that this process has used; nothing where it has used none."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    if cuda is None or not cuda.is_initialized():
        return {}
    return {f"cuda:{i}": int(getattr(cuda, question)(i)) for i in range(cuda.device_count())}


# One thread looks for all that are watched, and ends with the last of them.
_WATCHED: list[MemoryUsed] = []
_LOCK = threading.Lock()
_looking: Repeated | None = None


def _watch(used: MemoryUsed) -> None:
    global _looking
    with _LOCK:
        _WATCHED.append(used)
        if _looking is None:
            looking = Repeated(EVERY, _look_at_all, "mizarr-memory")
            looking.start()
            _looking = looking


def _unwatch(used: MemoryUsed) -> None:
    global _looking
    with _LOCK:
        _WATCHED[:] = [usage for usage in _WATCHED if usage is not used]
        if not _WATCHED and _looking is not None:
            _looking.stop(wait=False)  # it may wait for this lock
            _looking = None


def _look_at_all() -> None:
    with _LOCK:
        for used in _WATCHED:
            used.look()


Took = Callable[[], dict[str, Any]]
"""What the work has taken so far: {"seconds": …, "setup_seconds": …, "memory": …}, plain values. seconds:
wall time, set-up included. setup_seconds: the part spent in `setting_up`."""


class _Setup:
    """Seconds of set-up within one measurement."""

    def __init__(self) -> None:
        self.seconds = 0.0


_SETUPS: list[_Setup] = []
"""One for each measurement in progress."""


@contextmanager
def measured() -> Iterator[Took]:
    """Measure the wall time and the memory of this process, before, now and at most."""
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
    """Count the time within as set-up of every measurement in progress.

    Set-up (reading the weights of a model) is the same for little and much work: estimates scale the rest.
    """
    started = time.monotonic()
    try:
        yield
    finally:
        elapsed = time.monotonic() - started
        for setup in tuple(_SETUPS):
            setup.seconds += elapsed
