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
    """Causal attention patterns of one prompt; a page shows one head, selected from a grid of all heads."""

    kind: ClassVar[str] = "attention"
    is_drawn: ClassVar[bool] = True
    tokens: tuple[str, ...]
    """Text of each token of the prompt [position]."""
    layers: tuple[int, ...]
    """Numbers of the layers along the axis `layer`."""
    pattern: Array
    """Attention weights, float [layer, head, query_position, key_position] when passed in.

    Stored as [layer, head, pair], where a pair is a query and a key at or before it: the lower triangle in
    row order, since the weights above the diagonal of causal attention are zero.
    """
    overview: Array
    """Number that colours each head in the grid of heads, float [layer, head]."""
    overview_name: str
    """Name of the quantity in `overview`."""
    overview_unit: str = ""
    """Unit of the quantity in `overview`; "" without a unit."""
    layer: int = 0
    """Number of the layer that a page shows first."""
    head: int | None = None
    """Head that a page shows first; None for the mean over the heads of the layer."""
    query: int = 0
    """Query position that a page shows first."""

    def __post_init__(self) -> None:
        length, heads = len(self.tokens), self.pattern.shape[1]
        query_positions, key_positions = np.tril_indices(length)
        # `replace` calls this again with a pattern that is already [layer, head, pair].
        if self.pattern.ndim == 4:
            labels.expect("pattern", self.pattern, (len(self.layers), heads, length, length))
            object.__setattr__(self, "pattern", self.pattern[..., query_positions, key_positions])
        labels.expect("pattern", self.pattern, (len(self.layers), heads, len(query_positions)))
        labels.expect("overview", self.overview, (len(self.layers), heads))

    def within(self, room: int) -> View:
        """A view of as many of the first layers as fit into `room` bytes; the caption names them."""
        # Pattern and overview grow with the number of layers; the bytes of all other fields are fixed.
        n_fixed_bytes = size(replace(self, pattern=self.pattern[:0], overview=self.overview[:0], layers=()))
        bytes_of_all_layers = max(1, size(self) - n_fixed_bytes)
        n_layers = min(len(self.layers), (room - n_fixed_bytes) * len(self.layers) // bytes_of_all_layers)
        if n_layers == len(self.layers):
            return self
        if n_layers < 1:
            return super().within(room)
        layers = self.layers[:n_layers]
        omission = f"The size limit of this page leaves room for layers {layers[0]} to {layers[-1]} only."
        return replace(
            self,
            layers=layers,
            pattern=self.pattern[:n_layers],
            overview=self.overview[:n_layers],
            layer=self.layer if self.layer in layers else layers[0],
            caption=f"{self.caption} {omission}".strip(),
        )
