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
from .adapter import Adapted, Adapter
from .formats import stored_in
from .quantised.scheme import Dequantised, Scheme
from .source import Renamed, Take, TensorEntry, TensorSource

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Checkpoint", "Files", "as_array", "checkpoint_of"]


@dataclass(frozen=True)
class Checkpoint:
    """Files of a model, and the processing of their tensors before use."""

    files: tuple[Path, ...]
    """Weight files of one format."""
    quantisation: Scheme | None = None
    """How weights are packed; they are dequantised to float32. None for plain weights."""
    adapter: Adapter | None = None
    """Adapter merged into the tensors that it changes, in float32."""
    stand_ins: tuple[tuple[str, str], ...] = ()
    """(name under which a tensor is read, name under which it is stored) pairs; see `Renamed`."""

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
        """Shape and dtype of every tensor, by name. Raises WeightsError for damaged files."""
        return dict(self._source.entries)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor, by name."""
        return {name: entry.shape for name, entry in self.entries.items()}

    def standing_in(self, config: Architecture) -> Checkpoint:
        """The checkpoint with shared tensors renamed to the names that an architecture reads."""
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
        embed, head = config.tensors.outside["embed"].name, config.tensors.outside["head"].name
        # PEFT separates a tied embedding from the head when it trains one of them; one merged tensor cannot.
        for name in self._adapted.changes:
            if name not in config.tensors.shapes:
                raise WeightsError(
                    f"expected an adapter of tensors that the model reads, found that it changes {name!r}; "
                    "merge it into its base model with PEFT, and save that"
                )
            if embed == head == name:
                raise WeightsError(
                    f"expected an adapter that leaves {name!r} alone, which is embedding and head at once, "
                    "found that it changes it; merge it into its base model with PEFT, and save that"
                )

    @property
    def nbytes(self) -> int:
        """Size of the files in bytes, as stored."""
        return sum(path.stat().st_size for path in self.files)

    @contextmanager
    def opened(self) -> Iterator[Take]:
        """Open the files for reading tensors."""
        with self._source.opened() as take:
            yield take

    def mapped(self, name: str) -> Array | None:
        """See `TensorSource.mapped`."""
        return self._source.mapped(name)

    def array(self, name: str) -> Array:
        """One floating-point tensor as a numpy array; bfloat16 as ml_dtypes.bfloat16.

        Memory-mapped, and without importing torch, where a file stores it in its final form.

        Raises:
            WeightsError: for an unknown name, or a tensor that is not floating point.
        """
        entries = self.entries
        if name not in entries:
            raise WeightsError(
                f"expected a tensor {name!r}, found {len(entries)} others, nearest "
                f"{nearest(name, entries)!r}; are all files of the checkpoint there?"
            )
        if entries[name].dtype not in FLOATS:
            raise WeightsError(
                f"expected {name!r} as one of {', '.join(FLOATS)}, found {entries[name].dtype}; dequantise "
                "the checkpoint"
            )
        return self.numbers(name)

    def numbers(self, name: str) -> Array:
        """One tensor as a numpy array, whatever its dtype; its name must exist."""
        # Mapping reads only the pages that are used and needs no torch.
        if (mapped := self.mapped(name)) is not None:
            return mapped
        with self.opened() as take:
            return as_array(take(name))


Files = Checkpoint | Sequence[Path]
"""A checkpoint, or the paths of unquantised safetensors files."""


def checkpoint_of(files: Files) -> Checkpoint:
    """A Checkpoint of the files; a Checkpoint is returned unchanged."""
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
