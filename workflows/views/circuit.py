"""A circuit: its nodes by layer, heads side by side and the MLP behind them, and its edges by what they
carry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ...store.arrays import Array
from . import labels, paper
from .view import View

__all__ = ["CircuitDrawing"]

KINDS = ("q", "k", "v")
BENT = {"q": 0.12, "k": 0.0, "v": -0.12}
"""How far edges into the queries, keys and values of one head bend apart."""
THINNEST, WIDEST = 0.4, 3.2


@dataclass(frozen=True, kw_only=True)
class CircuitDrawing(View):
    """Nodes named as in a graph of edges ("input", "a2.h1", "m0", "logits"), and edges between them.

    upstream, downstream: names of the nodes that each edge joins, "a2.h1<k>" for a head's keys.
    weights: float [edge], by which edges are
    wide; those above zero have another colour than those below. n_layers, n_heads: of the model.
    """

    kind: ClassVar[str] = "circuit"
    on_page: ClassVar[bool] = False
    upstream: tuple[str, ...]
    downstream: tuple[str, ...]
    weights: Array
    weight_name: str
    n_layers: int
    n_heads: int

    def __post_init__(self) -> None:
        for name in ("upstream", "downstream"):
            labels.expect(name, np.array(getattr(self, name)), (len(self.weights),))

    def inches(self) -> tuple[float, float]:
        """Room for heads side by side and layers above each other."""
        return min(14.0, 3.4 + 0.62 * self.n_heads), min(14.0, 1.6 + 0.95 * self.n_layers)

    def draw(self, axes: Any) -> None:
        """The weakest edges first, so that the strongest lie on top; then names."""
        from matplotlib.patches import FancyArrowPatch

        largest = float(np.abs(self.weights).max(initial=0.0)) or 1.0
        for number in np.argsort(np.abs(self.weights), kind="stable").tolist():
            node, _, kind = self.downstream[number].partition("<")
            share = abs(float(self.weights[number])) / largest
            axes.add_patch(
                FancyArrowPatch(
                    self._place(self.upstream[number]),
                    self._place(node),
                    connectionstyle=f"arc3,rad={BENT.get(kind.rstrip('>'), 0.05)}",
                    arrowstyle="-|>",
                    mutation_scale=6,
                    lw=THINNEST + (WIDEST - THINNEST) * share,
                    color=paper.ABOVE if self.weights[number] > 0 else paper.BELOW,
                    alpha=0.25 + 0.65 * share,
                    shrinkA=9,
                    shrinkB=9,
                    zorder=1,
                )
            )
        nodes = dict.fromkeys((*self.upstream, *(name.partition("<")[0] for name in self.downstream)))
        box = {"boxstyle": "round,pad=0.25", "fc": "white", "ec": paper.SOFT, "lw": 0.7}
        for node in nodes:
            axes.text(*self._place(node), node, fontsize=7, ha="center", va="center", bbox=box, zorder=2)
        for layer in range(self.n_layers):
            axes.text(-0.9, 2 * layer, f"layer {layer}", fontsize=7, color=paper.FAINT, va="center")
        told = f"width: {self.weight_name}, up to {largest:.3g}; orange above 0, blue below"
        axes.text(0.5, -0.01, told, transform=axes.transAxes, fontsize=7, color=paper.SOFT, ha="center")
        axes.set(xlim=(-1.0, self.n_heads + 0.6), ylim=(-2.2, 2 * self.n_layers + 0.5))
        axes.axis("off")

    def _place(self, node: str) -> tuple[float, float]:
        """Where a node stands, (across, up): heads 1 apart, layers 2."""
        middle = (self.n_heads - 1) / 2
        if node == "input":
            return middle, -1.4
        if node == "logits":
            return middle, 2.0 * self.n_layers
        layer, _, head = node[1:].partition(".h")
        return (float(head), 2.0 * int(layer)) if head else (float(self.n_heads), 2.0 * int(layer) + 0.7)
