"""Streamed weights: read from files as passes need them, for a model larger than the memory it may take.

A layer is read when a pass reaches it, and stays in memory as long as there is room. So do the embedding and
the LM head where the whole matrix is needed; to embed tokens, only their rows are read. Norms outside the
layers, and tensors that several layers share, are always in memory. Passes run through the layers in order,
again and again, so the layer to evict is the one used last: it is needed again latest (Belady 1966).

Files are read as long as the model is used, so they must not change: this is checked at each read. Weights in
memory must not be edited, because evicting them would lose the change: this is checked at each eviction.

residency.py decides how many bytes the weights may take.
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
    """Reads weights from files, and checks that the files have not changed."""

    checkpoint: Checkpoint
    """Weight files, whose tensors are read by name."""
    config: Architecture
    """Architecture of the model."""
    dtype: torch.dtype
    """Dtype that tensors are converted to."""
    device: torch.device
    """Device that tensors are moved to."""
    shared: dict[str, Tensor] = field(default_factory=dict)
    """Tensors that several layers share, by name; always in memory."""

    def __post_init__(self) -> None:
        self._stamps = self._stamped()

    @contextmanager
    def opened(self) -> Iterator[Take]:
        """Open the files in this block, with a function that reads a tensor by name.

        Its tensors have the dtype `dtype` and are on `device`.

        Raises:
            SourceChanged: if the files changed since the model was opened.
            WeightsError: for missing or damaged tensors.
        """
        with self.checkpoint.opened() as tensors:
            take = as_computed(tensors, self.dtype, self.device)
            yield read_shared_once(take, self.config, self.shared)
        # After reading: a file that changed meanwhile may have given bytes of either version.
        self.check()

    def rows(self, name: str, ids: Tensor) -> Tensor | None:
        """Read some rows of a matrix without reading the others.

        Arguments:
            name: name of the matrix in the checkpoint.
            ids: indices of the rows, [row].

        Returns:
            [row, width]; None if rows cannot be read alone, e.g. from a quantised matrix.
        """
        if (mapped := self.checkpoint.mapped(name)) is None:
            return None
        # Indexing copies the rows: later passes do not depend on the mapping.
        rows = np.ascontiguousarray(mapped[ids.cpu().numpy()])
        is_bfloat16 = rows.dtype.name == "bfloat16"
        tensor = torch.from_numpy(rows.view(np.int16) if is_bfloat16 else rows)
        tensor = tensor.view(torch.bfloat16) if is_bfloat16 else tensor
        converted = as_computed(lambda _: tensor, self.dtype, self.device)(name)
        self.check()
        return converted

    def check(self) -> None:
        """Raise SourceChanged if the files changed since the model was loaded."""
        if self._stamped() != self._stamps:
            names = ", ".join(path.name for path in self.checkpoint.files[:3])
            raise SourceChanged(
                f"expected the weight files ({names}) unchanged since the model was loaded, because layers "
                "are still read from them, found them changed; load the model again"
            )

    def _stamped(self) -> tuple[Stamp, ...]:
        adapter = self.checkpoint.adapter
        files = (*self.checkpoint.files, *(() if adapter is None else (adapter.file,)))
        return tuple(stamp(path.stat()) for path in files)


class Window:
    """The units of weights (layers, embedding, LM head) in memory, within a limit of bytes.

    Safe to use from several threads; threads that run through layers at the same time evict each other's.
    """

    def __init__(self, read: Callable[[Unit], Any], sizes: Any, room: int, name: str) -> None:
        """Start with no weights in memory.

        A unit is what is read and evicted together: a layer (by its number), the embedding or the LM head.

        Arguments:
            read: reads the weights of a unit from the files.
            sizes: unit -> bytes.
            room: most bytes of all units in memory.
            name: name of the model, for errors.
        """
        self._read, self._sizes, self._room, self._name = read, sizes, room, name
        self._loaded: dict[Unit, tuple[Any, Fingerprint]] = {}
        """Unit -> (weights, fingerprint as read), in order of last use."""
        self._lock = threading.RLock()
        self.reads: dict[Unit, int] = {}
        """Number of times that each unit was read."""

    def __contains__(self, unit: Unit) -> bool:
        return unit in self._loaded

    def get(self, unit: Unit) -> Any:
        """The weights of a layer, or the matrix [vocab, width] of embedding or LM head.

        They are read from the files if they are not in memory.

        Arguments:
            unit: number of a layer, `EMBEDDING` or `HEAD`.

        Raises:
            ConfigError: if they are larger than the memory limit, or if weights to evict were edited.
        """
        with self._lock:
            if unit in self._loaded:
                # To the end: the dict is in the order of last use.
                self._loaded[unit] = self._loaded.pop(unit)
            else:
                self._make_room(unit)
                weights = self._read(unit)
                # The fingerprint is compared when the unit is evicted, and for the identity of the model.
                self._loaded[unit] = weights, fingerprint(weights)
                self.reads[unit] = self.reads.get(unit, 0) + 1
            return self._loaded[unit][0]

    def keep_only(self, units: Collection[Unit]) -> None:
        """Remove all other weights from memory.

        Arguments:
            units: layers (by number), `EMBEDDING` or `HEAD` to keep.

        Raises:
            ConfigError: if weights to remove were edited in memory, because the edit would be lost.
        """
        with self._lock:
            for unit in [unit for unit in self._loaded if unit not in units]:
                self._evict(unit)

    def groups(self, layers: Sequence[int], beside: Mapping[int, int]) -> Iterator[Sequence[int]]:
        """Split consecutive layers into groups that fit in memory together.

        Arguments:
            layers: numbers of the layers, in order.
            beside: layer -> bytes of buffers for it. Room for the buffers of one layer, the largest, is
                already set aside.
        """
        # The limit already sets aside the largest layer's buffers, which each group counts again.
        room = self._room + max(beside.values(), default=0)
        group: list[int] = []
        for layer in layers:
            if group and sum(self._sizes[n] + beside.get(n, 0) for n in (*group, layer)) > room:
                yield group
                group = []
            group.append(layer)
        if group:
            yield group

    def altered(self) -> list[Unit]:
        """Layers (by number), embedding or LM head whose weights were edited in memory after reading."""
        with self._lock:
            return [
                unit
                for unit, (weights, as_read) in self._loaded.items()
                if as_read.first_difference(fingerprint(weights))
            ]

    def expect_room(self, unit: Unit) -> None:
        """Raise ConfigError for a layer, embedding or LM head that is larger than the memory limit."""
        if self._sizes[unit] > self._room:
            raise ConfigError(
                f"expected memory for the {unit} of {self._name}, {self._sizes[unit]:,} bytes, found a limit "
                f"that leaves {self._room:,} for it; allow more (max_memory=)"
            )

    def _make_room(self, unit: Unit) -> None:
        self.expect_room(unit)
        while sum(self._sizes[loaded] for loaded in self._loaded) + self._sizes[unit] > self._room:
            self._evict(next(reversed(self._loaded)))  # the one used last (Belady 1966)

    def _evict(self, unit: Unit) -> None:
        weights, as_read = self._loaded.pop(unit)
        if as_read.first_difference(fingerprint(weights)) is not None:
            unit_name = f"layer {unit}" if isinstance(unit, int) else f"the {unit}"
            raise ConfigError(
                f"expected unedited weights of {self._name}, which are read from files layer by layer, found "
                f"{unit_name} edited in memory; to edit weights, load the model with memory for all of them "
                "(max_memory=)"
            )


class StreamedLayers(Sequence[Layer], Generic[Layer]):
    """Sequence of model layers; indexing reads the layer's weights from files if necessary."""

    def __init__(self, window: Window, count: int) -> None:
        """Make a sequence of layers that are read when they are indexed.

        Arguments:
            window: reads and evicts the layers.
            count: number of layers.
        """
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
    """Network weights that are read from files on demand, within a memory limit."""

    def __init__(self, files: WeightFiles, room: int, name: str) -> None:
        """Read the weights that always stay in memory: norms outside the layers, tensors shared by layers.

        Arguments:
            files: the files of the weights.
            room: most bytes of weights in memory, including the weights that always stay there.
            name: name of the model, for errors.
        """
        config, sizes = files.config, bytes_of(files.config, files.dtype.itemsize)
        self._fields(_files=files, _name=name, nbytes=sizes.total, room=room)
        like = torch.empty(0, dtype=files.dtype, device=files.device)
        with files.opened() as take:
            small = outer_weights(take, config, like)
            for shared in config.tensors.shared:
                # Reading puts it into `files.shared`, where it stays.
                take(shared)
        window = Window(self._read_unit, sizes.units, room - sizes.always, name)
        self._fields(**small, window=window, layers=StreamedLayers(window, config.num_layers))
        self._fields(_ends=(small, files.shared))
        self._fields(_as_read=fingerprint(self._ends))

    def __repr__(self) -> str:
        return f"StreamedWeights({self._name!r}, {self.nbytes:,} bytes)"

    nbytes: int
    """Bytes of all weights, in the dtype the model computes in."""
    room: int
    """Most bytes of weights in memory."""
    window: Window
    """The layers, embedding and LM head in memory."""
    _files: WeightFiles
    _name: str
    _ends: tuple[dict[str, Any], dict[str, Tensor]]
    _as_read: Fingerprint

    def _fields(self, **values: Any) -> None:
        vars(self).update(values)  # the dataclass is frozen, and its fields are set in several steps

    def _read_unit(self, unit: Unit) -> Any:
        """Read the weights of a layer, or the matrix [vocab, width] of embedding or LM head."""
        config = self._files.config
        with self._files.opened() as take:
            if unit == EMBEDDING:
                return take(config.tensors.outside["embed"].name)
            if unit == HEAD:
                return separate_head(take, config)
            return NETWORKS[config.kind][0](take, config, unit)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype that the model computes in."""
        return self._files.dtype

    @property
    def device(self) -> torch.device:
        """Device that weights are read to."""
        return self._files.device

    @property
    def embed(self) -> Tensor:
        """The embedding matrix [vocab, width], read if it is not in memory."""
        matrix: Tensor = self.window.get(EMBEDDING)
        return matrix

    @property
    def lm_head(self) -> Tensor | None:
        """LM head matrix [vocab, width], read if not in memory; None for a head tied to the embedding."""
        return None if self.head == EMBEDDING else self.window.get(HEAD)

    @property
    def head(self) -> Unit:
        """Which matrix `Window.get` reads for the LM head: `EMBEDDING` if the head is tied or absent, else
        `HEAD`."""
        outside = self._files.config.tensors.outside
        return EMBEDDING if outside.get("head", outside["embed"]) == outside["embed"] else HEAD

    @property
    def embeds_whole(self) -> bool:
        """Whether tokens can be embedded only by reading the whole matrix, e.g. because it is quantised."""
        return self._files.checkpoint.mapped(self._files.config.tensors.outside["embed"].name) is None

    def embedded(self, ids: Tensor) -> Tensor:
        """Embeddings [..., width] of token ids [...]; reads only their rows if the matrix is not loaded."""
        if EMBEDDING not in self.window:
            # Each row is read once, however often its token occurs.
            unique_ids, indices = ids.unique(return_inverse=True)
            rows = self._files.rows(self._files.config.tensors.outside["embed"].name, unique_ids)
            if rows is not None:
                return F.embedding(indices, rows)
        return super().embedded(ids)

    def known_by(self) -> dict[str, Any]:
        """State to compare in a fingerprint of the model: names of weights that were edited in memory.

        It is text and no tensor, so that a model with some weights edited and others not read yet has no
        identity.
        """
        altered = [str(unit) for unit in self.window.altered()]
        edited_outside = self._as_read.first_difference(fingerprint(self._ends))
        return {"weights": " ".join(altered if edited_outside is None else [*altered, edited_outside])}


def stream(
    checkpoint: Checkpoint,
    config: Architecture,
    *,
    dtype: torch.dtype,
    device: torch.device,
    room: int,
    name: str,
) -> StreamedWeights:
    """Streamed weights of an architecture, read from a checkpoint on demand.

    Arguments:
        checkpoint: files of the weights.
        config: architecture of the model.
        dtype: dtype to compute in.
        device: device to read weights to.
        room: most bytes of weights in memory.
        name: name of the model, for errors.

    Raises:
        WeightsError: for names or shapes that do not fit; for damaged tensors later, when they are read.
    """
    files = WeightFiles(checked_checkpoint(checkpoint, config), config, dtype, device)
    return StreamedWeights(files, room, name)
