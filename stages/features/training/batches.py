"""Batches of stored activations in an order that looks random and can be taken up anywhere.

Border: rows and their order; what the rows mean is the trainer's.

Idea: shuffling activations on disk costs more than training on them. The store keeps the order of the
prompts, and order is made at reading, on two levels. An epoch is a permutation of blocks of neighbouring
tokens; some blocks in a row are a window, held in memory; a window is permuted row by row. Batches run
across the borders of windows and epochs. Each permutation is a function of (seed, epoch) or (seed, epoch,
window), so that where a training stands is three numbers, `Cursor`. One thread reads the next window while
this one is used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .source import CellRows, StoredActivations, as_tensor, require_rows

if TYPE_CHECKING:
    from torch import Tensor

    from ....store.runs.committed import VariableLayer

__all__ = ["Batches", "Cursor"]

_BLOCKS, _ROWS = 1, 2  # tags that keep the two kinds of permutation apart


@dataclass(frozen=True)
class Cursor:
    """Where the next batch starts: row `offset` of the permuted window `window` of an epoch."""

    epoch: int = 0
    window: int = 0
    offset: int = 0


class Batches:
    """An endless iterator of batches: cell -> float32 [batch, width], aligned. Close it, or use `with`.

    cursor: where to go on. Raises ConfigError when there are fewer rows than a batch, ShapeError where an
    activation is not finite.
    """

    def __init__(
        self,
        source: StoredActivations,
        cells: Sequence[VariableLayer],
        *,
        batch: int,
        window: int,
        block: int,
        seed: int,
        skip_positions: int,
        cursor: Cursor | None = None,
    ) -> None:
        require_rows(source, batch, skip_positions)
        self.source, self.cells, self.batch = source, tuple(cells), batch
        self.seed, self.skip_positions = seed, skip_positions
        self.cursor = cursor or Cursor()
        self._blocks = source.blocks(block)
        self._per_window = max(1, window // block)
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="window")
        self._next: tuple[tuple[int, int], Future[CellRows]] | None = None
        self._held: tuple[tuple[int, int], CellRows, npt.NDArray[np.int64]] | None = None

    def __enter__(self) -> Batches:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop reading ahead."""
        self._reader.shutdown(wait=True, cancel_futures=True)

    def __iter__(self) -> Iterator[dict[VariableLayer, Tensor]]:
        return self

    def __next__(self) -> dict[VariableLayer, Tensor]:
        """The next batch; `cursor` then stands behind it."""
        parts: list[CellRows] = []
        wanted = self.batch
        while wanted:
            rows, order = self._window(self.cursor.epoch, self.cursor.window)
            chosen = order[self.cursor.offset : self.cursor.offset + wanted]
            parts.append({cell: held[chosen] for cell, held in rows.items()})
            wanted -= len(chosen)
            self.cursor = self._after(len(chosen), len(order))
        return {cell: as_tensor(_joined([part[cell] for part in parts])) for cell in self.cells}

    @property
    def windows(self) -> int:
        """Windows of an epoch."""
        return -(-len(self._blocks) // self._per_window)

    def _after(self, taken: int, size: int) -> Cursor:
        at = self.cursor
        if at.offset + taken < size:
            return Cursor(at.epoch, at.window, at.offset + taken)
        return Cursor(*self._following(at.epoch, at.window))

    def _following(self, epoch: int, window: int) -> tuple[int, int]:
        return (epoch, window + 1) if window + 1 < self.windows else (epoch + 1, 0)

    def _window(self, epoch: int, window: int) -> tuple[CellRows, npt.NDArray[np.int64]]:
        """Rows of a window as read, and the order they are used in. Reading of the one after it begins."""
        place = (epoch, window)
        if self._held is None or self._held[0] != place:
            ahead = self._next
            rows = ahead[1].result() if ahead and ahead[0] == place else self._read(place)
            count = len(next(iter(rows.values())))
            order = np.random.default_rng([self.seed, _ROWS, epoch, window]).permutation(count)
            self._held = (place, rows, order)
            following = self._following(epoch, window)
            self._next = (following, self._reader.submit(self._read, following))
        return self._held[1], self._held[2]

    def _read(self, place: tuple[int, int]) -> CellRows:
        epoch, window = place
        order = np.random.default_rng([self.seed, _BLOCKS, epoch]).permutation(len(self._blocks))
        some = order[window * self._per_window : (window + 1) * self._per_window]
        parts = []
        for number in some:
            tokens = self._blocks[number]
            parts.append(self.source.read(self.cells, tokens, self.source.keep(tokens, self.skip_positions)))
        return {cell: _joined([part[cell] for part in parts]) for cell in self.cells}


def _joined(parts: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
