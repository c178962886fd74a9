"""A checkpoint: the tensors of some files by name, as plain numbers.

Border: the one value that readers of weights are given. What lies between the bytes of a file and a weight
(that it is quantised, an adapter that is merged in) is settled here, so that networks, readouts and component
weights cannot disagree.
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

__all__ = ["Checkpoint", "Files", "checkpoint_of"]


@dataclass(frozen=True)
class Checkpoint:
    """Files and what is done to their tensors before anybody uses them.

    quantisation: how weights are packed, which are made plain in float32. adapter: merged into the tensors
    it changes, in float32. stand_ins: see `Renamed`.
    """

    files: tuple[Path, ...]
    quantisation: Scheme | None = None
    adapter: Adapter | None = None
    stand_ins: tuple[tuple[str, str], ...] = ()

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
        """Every tensor before it is read, by name. Raises WeightsError for damaged files."""
        return dict(self._source.entries)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of every tensor, by name."""
        return {name: entry.shape for name, entry in self.entries.items()}

    def standing_in(self, config: Architecture) -> Checkpoint:
        """The same with shared tensors under the names by which an architecture reads them."""
        missing = config.tensors.stand_ins(self.entries)
        return replace(self, stand_ins=tuple(missing.items())) if missing else self

    def check(self, config: Architecture) -> None:
        """Raise WeightsError for an adapter that changes what the model does not read, or one of two weights
        that are one tensor: PEFT then parts them, and a merged checkpoint cannot."""
        if self._adapted is None:
            return
        embed, head = config.tensors.outside["embed"].name, config.tensors.outside["head"].name
        for name in self._adapted.changes:
            if name not in config.tensors.shapes:
                raise WeightsError(
                    f"expected an adapter of tensors the model reads, found that it changes {name!r}; merge "
                    "it into its base model with PEFT, and save that"
                )
            if embed == head == name:
                raise WeightsError(
                    f"expected an adapter that leaves {name!r} alone, which is embedding and head at once, "
                    "found that it changes it; merge it into its base model with PEFT, and save that"
                )

    @property
    def nbytes(self) -> int:
        """Of the files, as they are stored."""
        return sum(path.stat().st_size for path in self.files)

    @contextmanager
    def opened(self) -> Iterator[Take]:
        """Reads tensors, for as long as it is open."""
        with self._source.opened() as take:
            yield take

    def mapped(self, name: str) -> Array | None:
        """As `TensorSource.mapped`."""
        return self._source.mapped(name)

    def array(self, name: str) -> Array:
        """One tensor for numpy, bfloat16 as ml_dtypes.bfloat16: mapped, and torch not imported, where the
        file holds it as it is. Raises WeightsError for a name there is not and for numbers that are not
        plain."""
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
        """As `array`, of a tensor that is there, whatever its numbers are."""
        if (mapped := self.mapped(name)) is not None:
            return mapped
        with self.opened() as take:
            return _as_array(take(name))


Files = Checkpoint | Sequence[Path]
"""A checkpoint, or safetensors files that are one as they are."""


def checkpoint_of(files: Files) -> Checkpoint:
    """Safetensors files as a checkpoint; a checkpoint as it is."""
    return files if isinstance(files, Checkpoint) else Checkpoint(tuple(files))


def _as_array(tensor: Tensor) -> Array:
    import ml_dtypes
    import torch

    if tensor.dtype == torch.bfloat16:
        raw: Array = tensor.view(torch.int16).numpy()
        return raw.view(ml_dtypes.bfloat16)
    found: Array = tensor.numpy()
    return found
