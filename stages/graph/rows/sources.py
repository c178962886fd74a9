"""Vectors that the sources of a graph (features, errors, tokens) add to the residual stream.

Sources of one position have neighbouring columns, and among them those that write after the same layer. So
their edges to a batch of targets are one matrix product per layer and position, without gathering gradients.

Axes: column = features by (position, layer, index), then errors by (layer, position), then tokens. `order`
brings columns into the order of the graph, where features go by (layer, position, index).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .replacement import Replacement

if TYPE_CHECKING:
    from ...features.layers.active import Active

__all__ = ["Sources", "error_vectors"]


@dataclass(frozen=True, eq=False)
class SourceBlock:
    """Features of one position that write to the residual stream after one layer."""

    position: int
    """Position of the features."""
    first: int
    """Column of the first feature; those of the others follow."""
    vectors: Tensor
    """Vector that each feature adds to the residual stream [feature, hidden]."""


class Sources:
    """The sources of a graph (features, errors, tokens), with the vectors that they add to the stream."""

    def __init__(
        self, replacement: Replacement, active: Active, errors: Tensor, *, room: int = 1 << 30
    ) -> None:
        """Arrange the columns.

        Arguments:
            replacement: The local replacement model.
            active: Active features, sorted by layer, position, index.
            errors: Error vectors at the write hook [layer, position, d_out].
            room: Bytes for cached decoder vectors; if they do not fit, they are read for every batch.
        """
        self.replacement = replacement
        self.active = active = type(active)(
            *(getattr(active, field.name).to(replacement.device) for field in fields(active))
        )
        self.n_features, layers = len(active), replacement.n_layers
        positions = replacement.n_positions
        self.n_columns = self.n_features + layers * positions + positions
        place = active.position * layers + active.layer
        # Stable: the index within (layer, position) stays ascending.
        self._sorted = torch.argsort(place, stable=True)
        self._place = place[self._sorted].contiguous()
        self.order = torch.arange(self.n_columns, device=replacement.device)
        self.order[self._sorted] = torch.arange(self.n_features, device=replacement.device)
        errors = errors.to(replacement.dtype)
        self._errors = torch.stack(
            [replacement.written(layer, errors[layer], slice(None)) for layer in range(layers)]
        )
        self._embed = replacement.frozen.embed.to(replacement.dtype)
        self._cache: dict[int, list[SourceBlock]] | None = {}
        if self._nbytes() > room:
            self._cache = None
        self._piece = max(1, room // (self._embed.shape[1] * self._embed.itemsize))

    @property
    def is_kept(self) -> bool:
        """Whether decoder vectors are cached in memory."""
        return self._cache is not None

    def fill(self) -> None:
        """Read all decoder vectors into the cache, if enabled, before several threads use it."""
        for layer in range(self.replacement.n_layers if self.is_kept else 0):
            for _ in self._blocks(layer, self.replacement.n_positions):
                pass

    def contract(self, layer: int, gradient: Tensor, out: Tensor) -> None:
        """Add to rows the effects of features and errors that write after a layer.

        Arguments:
            layer: The layer.
            gradient: Gradients of the targets after this layer [position, target, hidden].
            out: Rows so far [target, column], changed in place.
        """
        count = len(gradient)
        for block in self._blocks(layer, count):
            columns = out[:, block.first : block.first + len(block.vectors)]
            columns.addmm_(gradient[block.position], block.vectors.T)
        # Errors go by (layer, position) in the graph too, so `order` leaves their columns as they are.
        start = self.n_features + layer * self.replacement.n_positions
        out[:, start : start + count] = _dots(gradient, self._errors[layer, :count])

    def contract_tokens(self, gradient: Tensor, out: Tensor) -> None:
        """Set the effects of tokens in rows.

        Arguments:
            gradient: Gradients of the targets at the embedding [position, target, hidden].
            out: Rows so far [target, column], changed in place.
        """
        start = self.n_columns - self.replacement.n_positions
        out[:, start : start + len(gradient)] = _dots(gradient, self._embed[: len(gradient)])

    def _blocks(self, layer: int, count: int) -> Iterator[SourceBlock]:
        """Yield the features of the first `count` positions that write after a layer, in blocks."""
        if self._cache is None:
            blocks: Iterator[SourceBlock] = self._read_blocks(layer)
        else:
            if layer not in self._cache:
                self._cache[layer] = list(self._read_blocks(layer))
            blocks = iter(self._cache[layer])
        for block in blocks:
            if block.position >= count:
                return
            yield block

    def _read_blocks(self, layer: int) -> Iterator[SourceBlock]:
        """Yield the features of all positions that write after a layer, at most `_piece` per block."""
        layers, writers = self.replacement.n_layers, self._writers(layer)
        if not writers:
            return
        for position in range(self.replacement.n_positions):
            # Places of one position from the first to the last layer that writes here are contiguous.
            ends = torch.tensor([position * layers + writers[0], position * layers + writers[-1] + 1])
            begin, end = torch.searchsorted(self._place, ends.to(self._place)).tolist()
            for start in range(begin, end, self._piece):
                indices = self._sorted[start : min(start + self._piece, end)]
                yield SourceBlock(position, start, self._vectors(layer, indices))

    def _writers(self, layer: int) -> list[int]:
        """Layers whose features write to the residual stream after `layer`."""
        dictionary = self.replacement.dictionary
        return [source for source in dictionary.layers if layer in dictionary.targets(source)]

    def _vectors(self, layer: int, indices: Tensor) -> Tensor:
        """Vectors [feature, hidden] that features add to the residual stream after `layer`.

        Arguments:
            layer: The layer.
            indices: Indices of active features, sorted by layer.
        """
        parts, active = [], self.active
        sources, counts = active.layer[indices].unique_consecutive(return_counts=True)
        for source, of_source in zip(sources.tolist(), indices.split(counts.tolist()), strict=True):
            # Between writers of this layer there may be layers that do not write to it: zero vectors.
            if layer not in self.replacement.dictionary.targets(source):
                parts.append(self._embed.new_zeros(len(of_source), self._embed.shape[1]))
                continue
            features = self.replacement.dictionary.layer(source)
            rows = features.decoder_rows(active.feature[of_source].cpu(), layer).to(self._embed)
            rows *= active.value[of_source, None].to(rows)
            parts.append(self.replacement.written(layer, rows, active.position[of_source]))
        return torch.cat(parts)

    def _nbytes(self) -> int:
        """Bytes of all decoder vectors: one per active feature and layer it writes to."""
        counts = torch.bincount(self.active.layer, minlength=self.replacement.n_layers).tolist()
        dictionary = self.replacement.dictionary
        vectors = sum(counts[layer] * len(dictionary.targets(layer)) for layer in dictionary.layers)
        return int(vectors * self._embed.shape[1] * self._embed.itemsize)


def error_vectors(replacement: Replacement, active: Active, *, zero_positions: int) -> Tensor:
    """Error vectors of a graph: MLP outputs minus their reconstruction by features [layer, position, d_out].

    Arguments:
        replacement: The local replacement model.
        active: Active features of the prompt.
        zero_positions: Number of positions at the start whose errors are set to zero.
    """
    frozen, dictionary = replacement.frozen, replacement.dictionary
    states = {layer: read.to(replacement.dtype) for layer, read in frozen.read.items()}
    rebuilt = dictionary.reconstruct(active, states)
    layers = range(replacement.n_layers)
    written = [frozen.written[layer].to(replacement.dtype) for layer in layers]
    errors = torch.stack([written[layer] - rebuilt[layer].to(written[layer]) for layer in layers])
    errors[:, :zero_positions] = 0
    return errors


def _dots(gradient: Tensor, vectors: Tensor) -> Tensor:
    """Dot products over `hidden`: [position, target, hidden] . [position, hidden] -> [target, position]."""
    return torch.bmm(gradient, vectors[:, :, None])[:, :, 0].T
