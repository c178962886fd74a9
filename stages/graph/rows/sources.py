"""What the sources of a graph add to the residual stream: features after each layer, errors, tokens.

Sources of a position lie side by side, and those that write after one layer are neighbours among them, so
that their edges to a batch of targets are one matrix product per layer and position: no gather of gradients.

Border: vectors and columns; gradients come from replacement.py's walk.

Axes: column = features by (position, layer, index), then errors by (layer, position), then tokens. `order`
brings columns into the order of the graph, where features go by (layer, position, index).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .replacement import Replacement

if TYPE_CHECKING:
    from ...features.layers.active import Active

__all__ = ["Sources", "error_vectors"]


@dataclass(frozen=True, eq=False)
class SourceBlock:
    """Sources of one position that write after one layer: columns [first, first + rows), vectors [rows,
    hidden]."""

    position: int
    first: int
    vectors: Tensor


class Sources:
    """The sources of a prompt's graph.

    active: features, sorted by layer, position, index. errors [layer, position, d_out], at the write hook.
    room: bytes for decoder vectors that are kept; when they do not fit they are read for every batch.
    """

    def __init__(
        self, replacement: Replacement, active: Active, errors: Tensor, *, room: int = 1 << 30
    ) -> None:
        self.replacement = replacement
        self.active = active = type(active)(*(part.to(replacement.device) for part in _columns(active)))
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
        self._kept: dict[int, list[SourceBlock]] | None = {}
        if self._nbytes() > room:
            self._kept = None
        self._piece = max(1, room // (self._embed.shape[1] * self._embed.itemsize))

    @property
    def is_kept(self) -> bool:
        """Whether decoder vectors are in memory from batch to batch."""
        return self._kept is not None

    def fill(self) -> None:
        """Read the decoder vectors that are kept now, so that threads may share them."""
        for layer in range(self.replacement.n_layers if self.is_kept else 0):
            for _ in self._blocks(layer, self.replacement.n_positions):
                pass

    def contract(self, layer: int, gradient: Tensor, out: Tensor) -> None:
        """Add to `out` [target, column] what is written after a layer, met by gradients there [position,
        target, hidden]."""
        count = len(gradient)
        for block in self._blocks(layer, count):
            here = out[:, block.first : block.first + len(block.vectors)]
            here.addmm_(gradient[block.position], block.vectors.T)
        start = self.n_features + layer * self.replacement.n_positions
        out[:, start : start + count] = _dots(gradient, self._errors[layer, :count])

    def contract_tokens(self, gradient: Tensor, out: Tensor) -> None:
        """Set in `out` what tokens do, met by gradients at the embedding."""
        start = self.n_columns - self.replacement.n_positions
        out[:, start : start + len(gradient)] = _dots(gradient, self._embed[: len(gradient)])

    def _blocks(self, layer: int, count: int) -> Iterator[SourceBlock]:
        """Blocks of the first `count` positions."""
        if self._kept is None:
            found: Iterator[SourceBlock] = self._made(layer)
        else:
            if layer not in self._kept:
                self._kept[layer] = list(self._made(layer))
            found = iter(self._kept[layer])
        for block in found:
            if block.position >= count:
                return
            yield block

    def _made(self, layer: int) -> Iterator[SourceBlock]:
        """Blocks of all positions, by position; at most `_piece` vectors exist at a time."""
        layers, writers = self.replacement.n_layers, self._writers(layer)
        if not writers:
            return
        for position in range(self.replacement.n_positions):
            ends = torch.tensor([position * layers + writers[0], position * layers + writers[-1] + 1])
            first, last = torch.searchsorted(self._place, ends.to(self._place)).tolist()
            for start in range(first, last, self._piece):
                chosen = self._sorted[start : min(start + self._piece, last)]
                yield SourceBlock(position, start, self._vectors(layer, chosen))

    def _writers(self, layer: int) -> list[int]:
        """Layers whose features write after `layer`."""
        dictionary = self.replacement.dictionary
        return [source for source in dictionary.layers if layer in dictionary.targets(source)]

    def _vectors(self, layer: int, chosen: Tensor) -> Tensor:
        """What features (places among the active ones, sorted by layer) add to the stream after `layer`."""
        parts, active = [], self.active
        sources, counts = active.layer[chosen].unique_consecutive(return_counts=True)
        for source, some in zip(sources.tolist(), chosen.split(counts.tolist()), strict=True):
            if layer not in self.replacement.dictionary.targets(source):
                parts.append(self._embed.new_zeros(len(some), self._embed.shape[1]))
                continue
            features = self.replacement.dictionary.layer(source)
            rows = features.decoder_rows(active.feature[some].cpu(), layer).to(self._embed)
            rows *= active.value[some, None].to(rows)
            parts.append(self.replacement.written(layer, rows, active.position[some]))
        return torch.cat(parts)

    def _nbytes(self) -> int:
        """Of all decoder vectors, one per feature and layer it writes to."""
        counts = torch.bincount(self.active.layer, minlength=self.replacement.n_layers).tolist()
        dictionary = self.replacement.dictionary
        vectors = sum(counts[layer] * len(dictionary.targets(layer)) for layer in dictionary.layers)
        return int(vectors * self._embed.shape[1] * self._embed.itemsize)


def _columns(active: Active) -> tuple[Tensor, ...]:
    return active.layer, active.position, active.feature, active.value


def error_vectors(replacement: Replacement, active: Active, *, zero_positions: int) -> Tensor:
    """What features leave over of the model's own outputs: [layer, position, d_out], at the write hook.

    Zero at the first `zero_positions`.
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
    """[position, target, hidden] . [position, hidden] -> [target, position]."""
    return torch.bmm(gradient, vectors[:, :, None])[:, :, 0].T
