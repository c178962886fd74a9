"""Weights that come and go: those of a network whose files are larger than the memory it may take.

A layer is read when a pass reaches it and stays as long as there is room; so does the embedding or the LM
head where somebody wants the whole of it, and of tokens that are embedded the rows alone are read. Norms
outside of layers, and what several layers share, are there from the beginning. Passes go through layers in
order, again and again: where one must go, it is the one that was used last, which will not be needed for
longest (Belady 1966).

Files are read for as long as the model is used. So before and after each read they must be what they were
when the model was opened; and what was read must be what it was when it is let go, as a change would be lost:
who wants other weights saves them, or has all of them in memory.

Border: files and tensors; how much room there is, residency.py says.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, overload

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ....store.errors import ConfigError, SourceChanged
from ....store.files import Stamp, stamp
from ..architectures.architecture import Architecture
from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.source import Take
from ..networks.table import NETWORKS
from ..networks.weights import (
    Weights,
    as_computed,
    checked_checkpoint,
    outer_weights,
    read_shared_once,
    separate_head,
)
from .fingerprint import Fingerprint, fingerprint
from .residency import EMBEDDING, HEAD, Unit, bytes_of

__all__ = ["StreamedWeights", "stream"]

Layer = TypeVar("Layer")


@dataclass
class WeightFiles:
    """Reads weights from files that stay what they were."""

    checkpoint: Checkpoint
    config: Architecture
    dtype: torch.dtype
    device: torch.device
    shared: dict[str, Tensor] = field(default_factory=dict)
    """What several layers read, by name."""

    def __post_init__(self) -> None:
        self._stamps = self._stamped()

    @contextmanager
    def opened(self) -> Iterator[Take]:
        """Gives tensors as they are computed with. Raises SourceChanged for files that were written, and
        WeightsError as loading does."""
        with self.checkpoint.opened() as tensors:
            take = as_computed(tensors, self.dtype, self.device)
            yield read_shared_once(take, self.config, self.shared)
        self.check()

    def rows(self, name: str, ids: Tensor) -> Tensor | None:
        """Rows of a matrix by their numbers [row, width]; None where its file does not hold it as it is."""
        if (mapped := self.checkpoint.mapped(name)) is None:
            return None
        rows = np.ascontiguousarray(mapped[ids.cpu().numpy()])
        is_bfloat16 = rows.dtype.name == "bfloat16"
        tensor = torch.from_numpy(rows.view(np.int16) if is_bfloat16 else rows)
        tensor = tensor.view(torch.bfloat16) if is_bfloat16 else tensor
        found = as_computed(lambda _: tensor, self.dtype, self.device)(name)
        self.check()
        return found

    def check(self) -> None:
        """Raise SourceChanged unless the files are those that were opened."""
        if self._stamped() != self._stamps:
            names = ", ".join(path.name for path in self.checkpoint.files[:3])
            raise SourceChanged(
                f"expected the weight files ({names}) as they were when the model was opened, found them "
                "changed meanwhile, and layers are still to be read of them; load the model anew"
            )

    def _stamped(self) -> tuple[Stamp, ...]:
        adapter = self.checkpoint.adapter
        files = (*self.checkpoint.files, *(() if adapter is None else (adapter.file,)))
        return tuple(stamp(path.stat()) for path in files)


class Window:
    """Weights that are in memory now, within `room` bytes; for any number of threads, though several that go
    through layers at once have each other's read again."""

    def __init__(self, read: Callable[[Unit], Any], sizes: Any, room: int, name: str) -> None:
        """read: makes a unit. sizes: bytes by unit."""
        self._read, self._sizes, self._room, self._name = read, sizes, room, name
        self._held: dict[Unit, tuple[Any, Fingerprint]] = {}
        """In the order in which they were used."""
        self._lock = threading.RLock()
        self.reads: dict[Unit, int] = {}
        """How often each was read."""

    def __contains__(self, unit: Unit) -> bool:
        return unit in self._held

    def get(self, unit: Unit) -> Any:
        """A layer's weights, or a matrix [vocab, width]. Raises ConfigError for one larger than the room, and
        where one that must go for it was changed."""
        with self._lock:
            if unit in self._held:
                self._held[unit] = self._held.pop(unit)
            else:
                self._make_room(unit)
                made = self._read(unit)
                self._held[unit] = made, fingerprint(made)
                self.reads[unit] = self.reads.get(unit, 0) + 1
            return self._held[unit][0]

    def keep_only(self, units: Collection[Unit]) -> None:
        """Let all others go. Raises ConfigError where one of them was changed."""
        with self._lock:
            for unit in [unit for unit in self._held if unit not in units]:
                self._let_go(unit)

    def groups(self, layers: Sequence[int], beside: Mapping[int, int]) -> Iterator[Sequence[int]]:
        """Neighbouring layers in order, as many at once as there is room for. beside: bytes that are taken
        beside each, where there is room for those of one."""
        room = self._room + max(beside.values(), default=0)
        group: list[int] = []
        for layer in layers:
            if group and sum(self._sizes[each] + beside.get(each, 0) for each in (*group, layer)) > room:
                yield group
                group = []
            group.append(layer)
        if group:
            yield group

    def altered(self) -> list[Unit]:
        """Which of those in memory are no longer what was read."""
        with self._lock:
            return [
                unit for unit, (made, was) in self._held.items() if was.first_difference(fingerprint(made))
            ]

    def expect_room(self, unit: Unit) -> None:
        """Raise ConfigError for one larger than the room."""
        if self._sizes[unit] > self._room:
            raise ConfigError(
                f"expected room for the {unit} of {self._name}, {self._sizes[unit]:,} bytes at once, found "
                f"{self._room:,} allowed beside what is always there; allow more (max_memory=)"
            )

    def _make_room(self, unit: Unit) -> None:
        self.expect_room(unit)
        while sum(self._sizes[each] for each in self._held) + self._sizes[unit] > self._room:
            self._let_go(next(reversed(self._held)))

    def _let_go(self, unit: Unit) -> None:
        made, was = self._held.pop(unit)
        if was.first_difference(fingerprint(made)) is not None:
            what = f"layer {unit}" if isinstance(unit, int) else f"the {unit}"
            raise ConfigError(
                f"expected the weights of {self._name} as they were read, found {what} changed: weights that "
                "come and go cannot be edited; load the model with room for all of them (max_memory=)"
            )


class StreamedLayers(Sequence[Layer], Generic[Layer]):
    """The layers of a model, each there when it is asked for."""

    def __init__(self, window: Window, count: int) -> None:
        self._window, self._count = window, count

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, at: int) -> Layer: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Layer]: ...
    def __getitem__(self, at: int | slice) -> Layer | Sequence[Layer]:
        if isinstance(at, slice):
            return [self[layer] for layer in range(*at.indices(self._count))]
        layer: Layer = self._window.get(range(self._count)[at])
        return layer


class StreamedWeights(Weights[Any]):
    """All of a network's weights, of which some are in memory."""

    def __init__(self, files: WeightFiles, room: int, name: str) -> None:
        """room: bytes for everything, what is always there included."""
        config, sizes = files.config, bytes_of(files.config, files.dtype.itemsize)
        self._fields(_files=files, _name=name, nbytes=sizes.total, room=room)
        like = torch.empty(0, dtype=files.dtype, device=files.device)
        with files.opened() as take:
            small = outer_weights(take, config, like)
            for shared in config.tensors.shared:
                take(shared)
        window = Window(self._made, sizes.units, room - sizes.always, name)
        self._fields(**small, window=window, layers=StreamedLayers(window, config.num_layers))
        self._fields(_ends=(small, files.shared))
        self._fields(_as_read=fingerprint(self._ends))

    def __repr__(self) -> str:
        return f"StreamedWeights({self._name!r}, {self.nbytes:,} bytes)"

    nbytes: int
    """Of all of them, as they are computed with."""
    room: int
    """Bytes those that are in memory may take."""
    window: Window
    """Those that come and go."""
    _files: WeightFiles
    _name: str
    _ends: tuple[dict[str, Any], dict[str, Tensor]]
    _as_read: Fingerprint

    def _fields(self, **values: Any) -> None:
        vars(self).update(values)  # frozen, and no field is to be given at once

    def _made(self, unit: Unit) -> Any:
        """A layer's weights, or a matrix [vocab, width], read from the files."""
        config = self._files.config
        with self._files.opened() as take:
            if unit == EMBEDDING:
                return take(config.tensors.outside["embed"].name)
            if unit == HEAD:
                return separate_head(take, config)
            return NETWORKS[config.kind][0](take, config, unit)

    @property
    def dtype(self) -> torch.dtype:
        """See `Weights`."""
        return self._files.dtype

    @property
    def device(self) -> torch.device:
        """See `Weights`: where they come to."""
        return self._files.device

    @property
    def embed(self) -> Tensor:
        """The whole embedding matrix [vocab, width], read unless it is in memory."""
        matrix: Tensor = self.window.get(EMBEDDING)
        return matrix

    @property
    def lm_head(self) -> Tensor | None:
        """The whole of what the LM head multiplies by; None where it is the embedding."""
        return None if self.head == EMBEDDING else self.window.get(HEAD)

    @property
    def head(self) -> Unit:
        """What the LM head multiplies by, as it comes and goes."""
        outside = self._files.config.tensors.outside
        return EMBEDDING if outside["head"] == outside["embed"] else HEAD

    @property
    def embeds_whole(self) -> bool:
        """Whether tokens are embedded by the whole matrix, as no file holds it as it is."""
        return self._files.checkpoint.mapped(self._files.config.tensors.outside["embed"].name) is None

    def embedded(self, ids: Tensor) -> Tensor:
        """See `Weights`; rows are read by themselves where the matrix is not in memory."""
        if EMBEDDING not in self.window:
            wanted, places = ids.unique(return_inverse=True)
            rows = self._files.rows(self._files.config.tensors.outside["embed"].name, wanted)
            if rows is not None:
                return F.embedding(places, rows)
        return super().embedded(ids)

    def known_by(self) -> dict[str, Any]:
        """What tells whether they are what they were (fingerprint.py): which of those in memory are not what
        was read, as nobody can name a model of which only some weights were changed."""
        altered = [str(unit) for unit in self.window.altered()]
        where = self._as_read.first_difference(fingerprint(self._ends))
        return {"weights": " ".join(altered if where is None else [*altered, where])}


def stream(
    checkpoint: Checkpoint,
    config: Architecture,
    *,
    dtype: torch.dtype,
    device: torch.device,
    room: int,
    name: str,
) -> StreamedWeights:
    """The weights of an architecture from its checkpoint, within `room` bytes. Raises WeightsError as loading
    all of them does, for what can be told before they are read, and of each when it is read."""
    files = WeightFiles(checked_checkpoint(checkpoint, config), config, dtype, device)
    return StreamedWeights(files, room, name)
