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
    """Lengths of its axes."""
    dtype: str
    """Code of its dtype in the safetensors format, e.g. "BF16"."""


class TensorSource(Protocol):
    """Tensors by name."""

    @property
    def entries(self) -> Mapping[str, TensorEntry]:
        """Every tensor of the source. Raises WeightsError for damaged files."""
        ...

    def mapped(self, name: str) -> Array | None:
        """A memory-mapped array; None for a tensor that no file stores in its final form."""
        ...

    @contextmanager
    def opened(self) -> Iterator[Take]:
        """Open the source for reading; the reader raises KeyError for a name without entry."""
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
        """See `TensorSource`."""
        entries = dict(self.base.entries)
        # Popped, so that a tensor under its stored name does not count as unused.
        renamed = {name: entries.pop(stored) for name, stored in self.stand_ins.items()}
        return {**entries, **renamed}

    def mapped(self, name: str) -> Array | None:
        """See `TensorSource`."""
        return self.base.mapped(self.stand_ins.get(name, name))

    @contextmanager
    def opened(self) -> Iterator[Take]:
        """See `TensorSource`."""
        with self.base.opened() as take:
            yield lambda name: take(self.stand_ins.get(name, name))
