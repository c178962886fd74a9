"""View of attention patterns, explored head by head on a page."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from ...store.arrays import Array
from . import labels
from .blocks import size
from .view import View

__all__ = ["Attention"]


@dataclass(frozen=True, kw_only=True)
class Attention(View):
    """Causal attention patterns of one prompt, with a grid of heads to select from."""

    kind: ClassVar[str] = "attention"
    is_drawn: ClassVar[bool] = True
    tokens: tuple[str, ...]
    """Texts of the prompt's tokens [position]."""
    layers: tuple[int, ...]
    """Layer numbers."""
    pattern: Array
    """Attention weights, float [layer, head, query_position, key_position], or already [layer, head, pair].

    Stored as [layer, head, pair]: the lower triangle in row order, as weights above the diagonal are zero.
    """
    overview: Array
    """One number per head, float [layer, head], which colours the grid of heads."""
    overview_name: str
    """Name of the overview's number."""
    overview_unit: str = ""
    """Unit of the overview's number."""
    layer: int = 0
    """Layer number shown first."""
    head: int | None = None
    """Head shown first; None for the mean over heads."""
    query: int = 0
    """Query position shown first."""

    def __post_init__(self) -> None:
        length, heads = len(self.tokens), self.pattern.shape[1]
        rows, columns = np.tril_indices(length)
        # `replace` calls this again with a pattern that is already a triangle.
        if self.pattern.ndim == 4:
            labels.expect("pattern", self.pattern, (len(self.layers), heads, length, length))
            object.__setattr__(self, "pattern", self.pattern[..., rows, columns])
        labels.expect("pattern", self.pattern, (len(self.layers), heads, len(rows)))
        labels.expect("overview", self.overview, (len(self.layers), heads))

    def within(self, room: int) -> View:
        """The attention patterns of the leading layers that fit into `room` bytes; the caption names them."""
        fixed = size(replace(self, pattern=self.pattern[:0], overview=self.overview[:0], layers=()))
        # Pattern and overview grow with the number of layers, all other fields are `fixed`.
        n_layers = min(len(self.layers), (room - fixed) * len(self.layers) // max(1, size(self) - fixed))
        if n_layers == len(self.layers):
            return self
        if n_layers < 1:
            return super().within(room)
        layers = self.layers[:n_layers]
        omission = f"Layers {layers[0]} to {layers[-1]} are on this page, which is limited."
        return replace(
            self,
            layers=layers,
            pattern=self.pattern[:n_layers],
            overview=self.overview[:n_layers],
            layer=self.layer if self.layer in layers else layers[0],
            caption=f"{self.caption} {omission}".strip(),
        )
