"""TensorSource: tensors by name, from files of one format or computed from the tensors of another source.

Knows names, shapes and dtypes; which tensors a model needs is not decided here. Entries are listed without
torch wherever the format allows it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ....store.arrays import Array

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Renamed", "Take", "TensorEntry", "TensorSource"]

Take = Callable[[str], "Tensor"]
"""Reads a tensor by name into newly allocated memory."""


@dataclass(frozen=True)
class TensorEntry:
    """Shape and dtype of one tensor, known before it is read."""

    shape: tuple[int, ...]
    """Length of each axis."""
    dtype: str
    """Dtype as the safetensors format writes it, e.g. "BF16"."""


class TensorSource(Protocol):
    """Tensors that can be listed and read by name: stored in files, or computed from stored tensors."""

    @property
    def entries(self) -> Mapping[str, TensorEntry]:
        """Shape and dtype of every tensor, by name.

        Raises:
            WeightsError: for damaged files.
        """
        ...

    def mapped(self, name: str) -> Array | None:
        """A memory-mapped array of a tensor; None for a tensor that no file stores in its final form."""
        ...

    @contextmanager
    def opened(self) -> Iterator[Take]:
        """Open the files in this block, with a function that reads a tensor by name (KeyError if unknown)."""
        ...


@dataclass(frozen=True)
class Renamed:
    """A tensor source with aliases: some tensors are read under a name that differs from the stored name."""

    base: TensorSource
    """The tensors under their stored names."""
    stand_ins: Mapping[str, str]
    """Name under which a tensor is read -> its stored name."""

    @property
    def entries(self) -> Mapping[str, TensorEntry]:
        """Shape and dtype of every tensor, by the name under which it is read."""
        entries = dict(self.base.entries)
        # Popped, so that a tensor under its stored name does not count as unused.
        renamed = {name: entries.pop(stored) for name, stored in self.stand_ins.items()}
        return {**entries, **renamed}

    def mapped(self, name: str) -> Array | None:
        """A memory-mapped array of a tensor; None for a tensor that no file stores in its final form."""
        return self.base.mapped(self.stand_ins.get(name, name))

    @contextmanager
    def opened(self) -> Iterator[Take]:
        """Open the files in this block, with a function that reads a tensor by name."""
        with self.base.opened() as take:
            yield lambda name: take(self.stand_ins.get(name, name))
