"""Attention patterns, to be looked into head by head."""

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
    """Attention patterns of one prompt: `pattern` [layer, head, query_position, key_position], float.

    Weights above the diagonal are not embedded: there a causal model has none.  overview: [layer, head], a
    number by which heads are told apart in the grid one is chosen from, with its name.  layer, head: shown
    first; head None is the mean over heads.  query: position shown first.
    """

    kind: ClassVar[str] = "attention"
    is_drawn: ClassVar[bool] = True
    tokens: tuple[str, ...]
    layers: tuple[int, ...]
    pattern: Array
    overview: Array
    overview_name: str
    overview_unit: str = ""
    layer: int = 0
    head: int | None = None
    query: int = 0

    def __post_init__(self) -> None:
        length, heads = len(self.tokens), self.pattern.shape[1]
        rows, columns = np.tril_indices(length)
        if self.pattern.ndim == 4:
            labels.expect("pattern", self.pattern, (len(self.layers), heads, length, length))
            object.__setattr__(self, "pattern", self.pattern[..., rows, columns])
        labels.expect("pattern", self.pattern, (len(self.layers), heads, len(rows)))
        labels.expect("overview", self.overview, (len(self.layers), heads))

    def within(self, room: int) -> View:
        """As many layers as fit, from the first on; the caption tells what is left out."""
        fixed = size(replace(self, pattern=self.pattern[:0], overview=self.overview[:0], layers=()))
        kept = min(len(self.layers), (room - fixed) * len(self.layers) // max(1, size(self) - fixed))
        if kept == len(self.layers):
            return self
        if kept < 1:
            return super().within(room)
        told = f"Layers {self.layers[0]} to {self.layers[kept - 1]} are on this page, which is limited."
        shown = self.layers[:kept]
        return replace(
            self,
            layers=shown,
            pattern=self.pattern[:kept],
            overview=self.overview[:kept],
            layer=self.layer if self.layer in shown else shown[0],
            caption=f"{self.caption} {told}".strip(),
        )
