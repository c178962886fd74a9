"""What gives tensors by name: files of one format, or something that makes them of what another source gives.

Border: names, shapes, dtypes; which tensors a model needs is not known here. Entries are told without torch
wherever the format allows.
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
"""Gives a tensor by its name, in memory of its own."""


@dataclass(frozen=True)
class TensorEntry:
    """One tensor before it is read. dtype: by its code in safetensors ("BF16")."""

    shape: tuple[int, ...]
    dtype: str


class TensorSource(Protocol):
    """Tensors by name, of files or made of those of another source."""

    @property
    def entries(self) -> Mapping[str, TensorEntry]:
        """All there are. Raises WeightsError for files that are damaged."""
        ...

    def mapped(self, name: str) -> Array | None:
        """A tensor for numpy, nothing read yet; None for one that no file holds as it is."""
        ...

    @contextmanager
    def opened(self) -> Iterator[Take]:
        """Reads tensors for as long as it is open; KeyError for a name that is no entry."""
        ...


@dataclass(frozen=True)
class Renamed:
    """A source of which some tensors have another name than the one they are read by."""

    base: TensorSource
    """The tensors under their own names."""
    stand_ins: Mapping[str, str]
    """Name by which a tensor is read -> its own name."""

    @property
    def entries(self) -> Mapping[str, TensorEntry]:
        """See `TensorSource`."""
        found = dict(self.base.entries)
        return {**found, **{name: found.pop(own) for name, own in self.stand_ins.items()}}

    def mapped(self, name: str) -> Array | None:
        """See `TensorSource`."""
        return self.base.mapped(self.stand_ins.get(name, name))

    @contextmanager
    def opened(self) -> Iterator[Take]:
        """See `TensorSource`."""
        with self.base.opened() as take:
            yield lambda name: take(self.stand_ins.get(name, name))
