"""Checkpoint: the tensors of a model's files by name, as plain numbers.

The one value that every reader of weights gets. Dequantising and merging an adapter happen here, so that
networks, readouts and analyses of weights cannot disagree about a weight.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from ....store.arrays import Array
from ....store.errors import WeightsError, nearest
from ....store.exchange.tensors import FLOATS
from ..architectures.architecture import Architecture
from .adapter import MERGE, Adapted, Adapter
from .formats import is_pickled, stored_in
from .quantised.scheme import Dequantised, Scheme
from .source import Renamed, Take, TensorEntry, TensorSource

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Checkpoint", "Files", "as_array", "checkpoint_of"]


@dataclass(frozen=True)
class Checkpoint:
    """Tensors of a model's weight files, dequantised and with a LoRA adapter merged."""

    files: tuple[Path, ...]
    """Weight files of one format."""
    quantisation: Scheme | None = None
    """Quantisation of the stored weights, which are dequantised to float32; None for plain weights."""
    adapter: Adapter | None = None
    """LoRA adapter merged into the tensors that it changes, in float32; None without adapter."""
    stand_ins: tuple[tuple[str, str], ...] = ()
    """(name under which a tensor is read, name under which it is stored) pairs, where the two differ."""

    @cached_property
    def _plain(self) -> TensorSource:
        stored = stored_in(self.files)
        stored = Renamed(stored, dict(self.stand_ins)) if self.stand_ins else stored
        return stored if self.quantisation is None else Dequantised(stored, self.quantisation)

    @cached_property
    def _adapted(self) -> Adapted | None:
        return None if self.adapter is None else Adapted(self._plain, self.adapter)

    @property
    def _source(self) -> TensorSource:
        return self._adapted or self._plain

    @property
    def entries(self) -> dict[str, TensorEntry]:
        """Shape and dtype of every tensor, by name.

        Raises:
            WeightsError: for damaged files.
        """
        return dict(self._source.entries)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor, by name."""
        return {name: entry.shape for name, entry in self.entries.items()}

    @property
    def is_pickled(self) -> bool:
        """Whether the files are torch's pickles, whose tensors cannot be listed without torch."""
        return is_pickled(self.files)

    def standing_in(self, config: Architecture) -> Checkpoint:
        """A checkpoint in which tensors have the names that an architecture reads.

        A file stores a tensor that two names share, such as a tied LM head, under one of them.
        """
        # safetensors stores tensors that share memory once, under one of their names.
        missing = config.tensors.stand_ins(self.entries)
        return replace(self, stand_ins=tuple(missing.items())) if missing else self

    def check(self, config: Architecture) -> None:
        """Check that the adapter changes only tensors that a model reads.

        Raises:
            WeightsError: for an adapter of other tensors, or of an embedding that is also the LM head.
        """
        if self._adapted is None:
            return
        ends = map(config.tensors.outside.get, ("embed", "head"))
        embed, head = (None if stored is None else stored.name for stored in ends)
        # PEFT separates a tied embedding from the head when it trains one of them; one merged tensor cannot.
        for name in self._adapted.changes:
            if name not in config.tensors.shapes:
                raise WeightsError(
                    f"expected a LoRA adapter that changes only tensors of the model, found a change of "
                    f"{name!r}; {MERGE}"
                )
            if embed == head == name:
                raise WeightsError(
                    f"expected a LoRA adapter that does not change {name!r}, which is both embedding and LM "
                    f"head, found a change of it; {MERGE}"
                )

    @property
    def nbytes(self) -> int:
        """Size of the files in bytes, as stored."""
        return sum(path.stat().st_size for path in self.files)

    @contextmanager
    def opened(self) -> Iterator[Take]:
        """Open the files in this block, with a function that reads a tensor by name."""
        with self._source.opened() as take:
            yield take

    def mapped(self, name: str) -> Array | None:
        """A memory-mapped array of a tensor; None for a tensor that no file stores in its final form."""
        return self._source.mapped(name)

    def array(self, name: str) -> Array:
        """Read one floating-point tensor as a numpy array; bfloat16 as ml_dtypes.bfloat16.

        If a file stores it in its final form, the array is memory-mapped and torch is not imported.

        Raises:
            WeightsError: for an unknown name, or a tensor that is not floating point.
        """
        entries = self.entries
        if name not in entries:
            raise WeightsError(
                f"expected a tensor {name!r} in {self.files[0].parent}, found {len(entries)} other tensors, "
                f"nearest {nearest(name, entries)!r}; check the name, and that no file of the checkpoint is "
                "missing"
            )
        if entries[name].dtype not in FLOATS:
            raise WeightsError(
                f"expected tensor {name!r} of dtype {', '.join(FLOATS)}, found {entries[name].dtype}; load "
                "an unquantised checkpoint of the model"
            )
        return self.numbers(name)

    def numbers(self, name: str) -> Array:
        """Read one tensor of any dtype as a numpy array; KeyError for an unknown name."""
        # Mapping reads only the pages that are used and needs no torch.
        if (mapped := self.mapped(name)) is not None:
            return mapped
        with self.opened() as take:
            return as_array(take(name))


Files = Checkpoint | Sequence[Path]
"""A checkpoint, or the paths of unquantised safetensors files."""


def checkpoint_of(files: Files) -> Checkpoint:
    """Make a Checkpoint of paths of unquantised files; a Checkpoint is returned unchanged."""
    return files if isinstance(files, Checkpoint) else Checkpoint(tuple(files))


def as_array(tensor: Tensor) -> Array:
    """A CPU tensor as a numpy array without a copy; bfloat16 has the dtype `ml_dtypes.bfloat16`."""
    import ml_dtypes
    import torch

    # numpy has no bfloat16: the bits pass through int16 to ml_dtypes' type.
    if tensor.dtype == torch.bfloat16:
        raw: Array = tensor.view(torch.int16).numpy()
        return raw.view(ml_dtypes.bfloat16)
    array: Array = tensor.numpy()
    return array
