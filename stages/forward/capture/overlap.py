"""Segment buffers, handed from the forward pass to writer threads with back-pressure.

A fixed pool of buffers bounds the memory of a harvest of any size: `OverlappedWriter.buffer` waits until
one is free. An error of a writer is raised in the forward loop at its next call, so that a full disk stops
the run at a segment boundary. This module knows neither models nor the store; it is passed a function that
writes a buffer.
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
    """Arrays of one segment, one per captured (variable, layer), allocated once and reused.

    Page faults of fresh memory would cost more than the copy. A tensor that one pass computes for the whole
    segment is used without a copy. Copies from a GPU are asynchronous: call `mark_copies_queued` after the
    last one is queued, and `wait` before reading.
    """

    def __init__(
        self,
        shapes: Mapping[VariableLayer, tuple[int, ...]],
        dtypes: Mapping[VariableLayer, torch.dtype],
        device: torch.device,
    ) -> None:
        """Describe the arrays; their memory is allocated on first use.

        Arguments:
            shapes: (variable, layer) -> shape of its array, for the longest segment.
            dtypes: (variable, layer) -> dtype of its array.
            device: device that computes the activations.
        """
        self._shapes, self._dtypes, self._device = shapes, dtypes, device
        self._allocated: dict[VariableLayer, Tensor] = {}
        self._adopted: dict[VariableLayer, Tensor] = {}
        self._copies_queued: torch.cuda.Event | None = None

    def view(self, cell: VariableLayer, rows: int) -> Tensor:
        """The rows of the current segment in one array, to be written or read.

        Arguments:
            cell: (variable, layer).
            rows: rows of the segment, which may be shorter than the longest.
        """
        if cell in self._adopted:
            return self._adopted[cell]
        if cell not in self._allocated:
            self._allocated[cell] = _memory(self._shapes[cell], self._dtypes[cell], self._device)
        return self._allocated[cell][:rows]

    def adopt(self, cell: VariableLayer, rows: Tensor) -> None:
        """Use a tensor as one of the arrays until the segment is written, instead of copying it.

        Arguments:
            cell: (variable, layer) of the array.
            rows: tensor with all rows of the segment; it must not change meanwhile.
        """
        self._adopted[cell] = rows

    def clear(self) -> None:
        """Release the tensors that `adopt` took."""
        self._adopted.clear()

    def mark_copies_queued(self) -> None:
        """Record a CUDA event after the last queued copy, for `wait` to synchronise on."""
        if self._device.type == "cuda":
            # blocking: the writer thread sleeps while it waits, instead of using up a core.
            self._copies_queued = torch.cuda.Event(blocking=True)
            self._copies_queued.record(torch.cuda.current_stream(self._device))

    def wait(self) -> None:
        """Wait, on any thread, until all queued copies have arrived."""
        if self._copies_queued is not None:
            self._copies_queued.synchronize()


def send(value: Tensor, target: Tensor) -> None:
    """Copy a tensor into part of a segment buffer.

    A copy from a GPU is complete once `SegmentBuffer.wait` returns.

    Arguments:
        value: tensor on any device.
        target: part of a buffer, of the same shape.
    """
    # Only pinned memory can be copied to asynchronously.
    target.copy_(value, non_blocking=target.is_pinned())


def _memory(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialised CPU array; pinned for a GPU, which copies asynchronously only to pinned memory."""
    if device.type == "cuda":
        # The system may refuse to pin more memory. Copies to unpinned memory are synchronous.
        with suppress(RuntimeError):
            return torch.empty(shape, dtype=dtype, pin_memory=True)
    return torch.empty(shape, dtype=dtype)


class OverlappedWriter:
    """Writes filled buffers on background threads while the next segment is computed.

    Use as a context manager: its end waits for submitted jobs, and raises the first error of a writer.
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
        """Describe what is written; threads start with the context manager.

        Arguments:
            make: creates one buffer.
            write: writes a filled buffer; its second argument is the job that was submitted with it.
            drop: called with each job that is not written because of an earlier error.
            buffers: number of buffers.
            threads: number of writer threads.
        """
        self._make, self._write, self._drop = make, write, drop
        self._n_unmade = buffers
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
        """Return a free buffer; waits while the writers use all of them. Raises the error of a writer."""
        self._raise_error()
        if self._free.empty() and self._n_unmade:
            self._n_unmade -= 1
            return self._make()
        buffer = self._free.get()
        self._raise_error()
        return buffer

    def submit(self, buffer: SegmentBuffer, job: Any) -> None:
        """Queue a filled segment buffer for writing; the method `buffer` returns it again once it is written.

        Arguments:
            buffer: the filled buffer.
            job: passed to the function that writes it.
        """
        self._jobs.put((buffer, job))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._jobs.put(None)
            for thread in self._threads:
                thread.join()
        except BaseException:
            self._jobs.put(None)  # a second Ctrl-C does not wait: the threads end without being joined
            raise
        if error is None:
            self._raise_error()

    def _work(self) -> None:
        while (task := self._jobs.get()) is not None:
            buffer, job = task
            try:
                if self._error is None:
                    self._write(buffer, job)
                else:
                    self._drop(job)
            except BaseException as error:  # noqa: BLE001  # the forward loop raises it
                self._error = error
            finally:
                buffer.clear()
                self._free.put(buffer)
        self._jobs.put(None)  # for the next thread

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error
