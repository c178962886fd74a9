"""View of a circuit as a drawing: heads and MLP of each layer in a row, edges as weighted arrows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ...store.arrays import Array
from . import labels, paper
from .view import View

__all__ = ["CircuitDrawing"]

KINDS = ("q", "k", "v")
"""Inputs of a head that an edge can end at: queries, keys, values."""
BENT = {"q": 0.12, "k": 0.0, "v": -0.12}
"""Curvature of the arrows into queries, keys and values, so that arrows between the same heads do not
overlap."""
THINNEST, WIDEST = 0.4, 3.2
"""Line widths, in points, of an edge with weight zero and of the strongest edge."""


@dataclass(frozen=True, kw_only=True)
class CircuitDrawing(View):
    """Nodes of a circuit and the weighted edges between them.

    Nodes are named "input", "a2.h1" (head 1 of layer 2), "m0" (MLP of layer 0) and "logits".
    """

    kind: ClassVar[str] = "circuit"
    on_page: ClassVar[bool] = False
    upstream: tuple[str, ...]
    """Name of the node that each edge starts at [edge]."""
    downstream: tuple[str, ...]
    """Name of the node that each edge ends at [edge]; "a2.h1<k>" for the keys of head 1 of layer 2."""
    weights: Array
    """Weight of each edge, float [edge]: the sign selects the colour, the magnitude the line width."""
    weight_name: str
    """Name of the quantity in `weights`, for the legend."""
    n_layers: int
    """Number of layers of the model."""
    n_heads: int
    """Number of attention heads per layer of the model."""

    def __post_init__(self) -> None:
        for name in ("upstream", "downstream"):
            labels.expect(name, np.array(getattr(self, name)), (len(self.weights),))

    def inches(self) -> tuple[float, float]:
        """(width, height) in inches; the width grows with the number of heads, the height with that of
        layers."""
        return min(14.0, 3.4 + 0.62 * self.n_heads), min(14.0, 1.6 + 0.95 * self.n_layers)

    def draw(self, axes: Any) -> None:
        """Draw the edges, the strongest last and therefore on top, then the names of the nodes."""
        from matplotlib.patches import FancyArrowPatch

        # `or 1.0`: without edges, or if all weights are zero, weights are divided by 1 instead of 0.
        largest = float(np.abs(self.weights).max(initial=0.0)) or 1.0
        for edge in np.argsort(np.abs(self.weights), kind="stable").tolist():
            # "a2.h1<k>" is the node "a2.h1" with the input "k".
            node, _, head_input = self.downstream[edge].partition("<")
            share = abs(float(self.weights[edge])) / largest
            axes.add_patch(
                FancyArrowPatch(
                    self._coordinates(self.upstream[edge]),
                    self._coordinates(node),
                    connectionstyle=f"arc3,rad={BENT.get(head_input.rstrip('>'), 0.05)}",
                    arrowstyle="-|>",
                    mutation_scale=6,
                    lw=THINNEST + (WIDEST - THINNEST) * share,
                    color=paper.ABOVE if self.weights[edge] > 0 else paper.BELOW,
                    alpha=0.25 + 0.65 * share,
                    # In points: an arrow ends beside the name of a node, not in its middle.
                    shrinkA=9,
                    shrinkB=9,
                    zorder=1,
                )
            )
        nodes = dict.fromkeys((*self.upstream, *(name.partition("<")[0] for name in self.downstream)))
        box = {"boxstyle": "round,pad=0.25", "fc": "white", "ec": paper.SOFT, "lw": 0.7}
        for node in nodes:
            axes.text(
                *self._coordinates(node), node, fontsize=7, ha="center", va="center", bbox=box, zorder=2
            )
        for layer in range(self.n_layers):
            axes.text(-0.9, 2 * layer, f"layer {layer}", fontsize=7, color=paper.FAINT, va="center")
        legend = f"line width: {self.weight_name}, at most {largest:.3g}; orange: above 0, blue: below 0"
        axes.text(0.5, -0.01, legend, transform=axes.transAxes, fontsize=7, color=paper.SOFT, ha="center")
        axes.set(xlim=(-1.0, self.n_heads + 0.6), ylim=(-2.2, 2 * self.n_layers + 0.5))
        axes.axis("off")

    def _coordinates(self, node: str) -> tuple[float, float]:
        """(x, y) of a node in data coordinates: heads are 1 apart, layers 2; an MLP is right of the last
        head."""
        middle = (self.n_heads - 1) / 2
        if node == "input":
            return middle, -1.4
        if node == "logits":
            return middle, 2.0 * self.n_layers
        # "a2.h1" is a head, "m2" the MLP of the same layer.
        layer, _, head = node[1:].partition(".h")
        if head:
            return float(head), 2.0 * int(layer)
        # Above its heads, whose outputs the MLP of a layer reads.
        return float(self.n_heads), 2.0 * int(layer) + 0.7
