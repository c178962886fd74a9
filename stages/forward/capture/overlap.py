"""Segment buffers handed from the forward pass to writer threads, with back-pressure.

A fixed pool of buffers bounds the memory of a harvest of any size: `OverlappedWriter.buffer` waits until
one is free. A writer's error surfaces in the forward loop at its next call, so that a full disk stops the
run at a segment boundary. Knows buffers and a function that writes one; knows no models, and of the store
only that function.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from ....store.runs.committed import VariableLayer


class SegmentBuffer:
    """Arrays of one segment, allocated once and reused: page faults of fresh memory cost more than the copy.

    An array that one pass gives whole is kept as it is, and nothing is copied. What a GPU computes comes by
    copies that nobody waits for while it goes on with the pass: `filled`, when the last one is begun, and
    `wait`, before anything is read.
    """

    def __init__(
        self,
        shapes: Mapping[VariableLayer, tuple[int, ...]],
        dtypes: Mapping[VariableLayer, torch.dtype],
        device: torch.device,
    ) -> None:
        """device: where what comes here is computed."""
        self._shapes, self._dtypes, self._device = shapes, dtypes, device
        self._whole: dict[VariableLayer, Tensor] = {}
        self._taken: dict[VariableLayer, Tensor] = {}
        self._arrived: torch.cuda.Event | None = None

    def view(self, cell: VariableLayer, rows: int) -> Tensor:
        """The first `rows` rows of a cell's array."""
        if cell in self._taken:
            return self._taken[cell]
        if cell not in self._whole:
            self._whole[cell] = _memory(self._shapes[cell], self._dtypes[cell], self._device)
        return self._whole[cell][:rows]

    def take(self, cell: VariableLayer, rows: Tensor) -> None:
        """Use these rows, which nobody will change, as the cell's array until the segment is written."""
        self._taken[cell] = rows

    def clear(self) -> None:
        """Let go of arrays that were taken."""
        self._taken.clear()

    def filled(self) -> None:
        """All that comes here is on its way."""
        if self._device.type == "cuda":
            self._arrived = torch.cuda.Event(blocking=True)
            self._arrived.record(torch.cuda.current_stream(self._device))

    def wait(self) -> None:
        """Until it is here; on any thread."""
        if self._arrived is not None:
            self._arrived.synchronize()


def send(value: Tensor, place: Tensor) -> None:
    """Copy to a part of a buffer; what comes from a GPU is there when `SegmentBuffer.wait` returns."""
    place.copy_(value, non_blocking=place.is_pinned())


def _memory(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """An array for what a device computes: pinned for a GPU, which copies to no other memory by itself."""
    if device.type == "cuda":
        # As much as the system lets be pinned. Copies to the rest are waited for, each.
        with suppress(RuntimeError):
            return torch.empty(shape, dtype=dtype, pin_memory=True)
    return torch.empty(shape, dtype=dtype)


class OverlappedWriter:
    """Writes filled buffers on threads of its own while the next segment is computed.

    make: creates one buffer; write: stores the segment a job names; drop: told of jobs that an earlier
    error leaves unwritten. Use as a context manager: leaving it waits for what is under way, and raises the
    first error of a writer.
    """

    def __init__(
        self,
        make: Callable[[], SegmentBuffer],
        write: Callable[[SegmentBuffer, Any], None],
        drop: Callable[[Any], None] = lambda job: None,
        *,
        buffers: int = 2,
        threads: int = 1,
    ) -> None:
        self._make, self._write, self._drop = make, write, drop
        self._unmade = buffers
        self._free: queue.Queue[SegmentBuffer] = queue.Queue()
        self._jobs: queue.Queue[tuple[SegmentBuffer, Any] | None] = queue.Queue()
        self._error: BaseException | None = None
        self._threads = [
            threading.Thread(target=self._work, name=f"mizarr-writer-{n}", daemon=True)
            for n in range(threads)
        ]

    def __enter__(self) -> OverlappedWriter:
        try:
            for thread in self._threads:
                thread.start()
            return self
        except BaseException:
            self._jobs.put(None)
            raise

    def buffer(self) -> SegmentBuffer:
        """A free buffer; waits for a writer when all are in use."""
        self._raise()
        if self._free.empty() and self._unmade:
            self._unmade -= 1
            return self._make()
        buffer = self._free.get()
        self._raise()
        return buffer

    def submit(self, buffer: SegmentBuffer, job: Any) -> None:
        """Hand over a filled buffer; it comes back to `buffer` when written."""
        self._jobs.put((buffer, job))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._jobs.put(None)
            for thread in self._threads:
                thread.join()
        except BaseException:
            self._jobs.put(None)  # whoever interrupts twice does not wait, and the threads end by themselves
            raise
        if error is None:
            self._raise()

    def _work(self) -> None:
        while (task := self._jobs.get()) is not None:
            buffer, job = task
            try:
                if self._error is None:
                    self._write(buffer, job)
                else:
                    self._drop(job)
            except BaseException as error:  # noqa: BLE001  # carried to the forward loop, which raises it
                self._error = error
            finally:
                buffer.clear()
                self._free.put(buffer)
        self._jobs.put(None)  # for the next thread

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error
