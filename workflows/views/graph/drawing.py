"""Drawing of an attribution graph in matplotlib: its strongest nodes by layer and position, and their edges.

A figure can show fewer nodes and edges than pruning keeps; `drawn_part` selects them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from ....stages.graph.rows.nodes import LOGIT, TOKEN
from ....stages.logits.lens import format_probability, format_token
from ....store.arrays import Floats, Ints
from .. import paper

if TYPE_CHECKING:
    from ....stages.graph.graph import AttributionGraph, PrunedGraph
    from .features import StrongFeature

__all__ = ["Drawing", "drawn_part"]

FEATURES, EDGES = 40, 70
"""Largest numbers of features and edges drawn; more could not be distinguished."""
ACROSS, SLOT, LABEL = 6, 0.55, 2.9
"""Largest number of nodes side by side, width of a node, width of an output label.

Widths are in units of x, where a position with at most one node per layer is 1 wide.
"""
NAMES = 4.6
"""Width in inches of the list of feature names beside the drawing."""


def drawn_part(
    pruned: PrunedGraph, features: int = FEATURES, edges: int = EDGES
) -> tuple[Ints, Ints, Floats]:
    """Select the nodes and edges to draw.

    Drawn are the most influential features, all tokens and all logits; of the edges among them those with
    most influence through them, and the strongest outgoing edge of each feature.

    Arguments:
        pruned: The graph.
        features: Largest number of features.
        edges: Largest number of edges, besides the strongest of each feature.

    Returns:
        (node indices, indices into the kept edges with the weakest first, influence through each kept edge).
    """
    kept, count = pruned.kept, pruned.graph.counts
    # Influence through an edge: its share of its target's input, times the target's influence. A logit's
    # influence is its probability.
    onward = kept.influence.copy()
    onward[count.sources :] += pruned.graph.logit_probabilities
    magnitude = np.abs(kept.weight.astype(np.float64))
    total_input = np.bincount(kept.target, magnitude, count.nodes)
    through = magnitude / total_input[kept.target] * onward[kept.target]
    kept_features = np.flatnonzero(kept.nodes[: count.features])
    strongest = kept_features[np.argsort(-kept.influence[kept_features], kind="stable")[:features]]
    nodes = np.concatenate([np.sort(strongest), np.arange(count.token_nodes.start, count.nodes)])
    is_drawn = np.zeros(count.nodes, bool)
    is_drawn[nodes] = True
    candidates = np.flatnonzero(is_drawn[kept.source] & is_drawn[kept.target])
    candidates = candidates[np.argsort(-through[candidates], kind="stable")]
    # The first edge of each source is its strongest, as the edges are sorted.
    _, strongest_edge = np.unique(kept.source[candidates], return_index=True)
    of_features = strongest_edge[kept.source[candidates[strongest_edge]] < count.features]
    drawn = np.union1d(candidates[:edges], candidates[of_features])
    return nodes, drawn[np.argsort(through[drawn], kind="stable")], through


@dataclass(frozen=True)
class Drawing:
    """The drawing: tokens at the bottom, logits at the top, features by layer between them.

    The strongest features are numbered, and named in a list beside the drawing.
    """

    pruned: PrunedGraph
    """The graph after pruning."""
    strongest: Sequence[StrongFeature]
    """Features to number and name, largest influence first; those that are not drawn are skipped."""

    @cached_property
    def _part(self) -> tuple[Ints, Ints, Floats]:
        """Nodes and edges of `drawn_part`."""
        return drawn_part(self.pruned)

    @cached_property
    def _layout(self) -> _Layout:
        """Coordinates of the drawn nodes."""
        return _Layout(self.pruned, self._part[0])

    def inches(self) -> tuple[float, float]:
        """Width by the length of the prompt, height by the number of layers, and the list of names."""
        return min(17.0, 7.5 + 0.45 * self._layout.width), max(4.2, 1.6 + 0.62 * (self._layout.top + 2))

    def draw(self, axes: Any) -> None:
        """Draw the graph into matplotlib axes, and the list of the strongest features right of them."""
        nodes, edges, through = self._part
        layout, graph = self._layout, self.pruned.graph
        drawn_nodes = set(nodes.tolist())
        named = [feature for feature in self.strongest if feature.node in drawn_nodes]
        _grid(axes, graph, layout)
        _edges(axes, self.pruned, edges, through, layout)
        _marks(axes, self.pruned, nodes, layout, {feature.node: i for i, feature in enumerate(named, 1)})
        _names(axes.inset_axes((1.02, 0, NAMES / (self.inches()[0] - NAMES), 1)), named)


class _Layout:
    """Coordinates of the drawing: `columns` (x of each position), `x` and `y` of each node, `width`, `top`.

    Nodes of the same layer and position are side by side, the most influential first, in rows of at most
    ACROSS; a position with many nodes is wider than others.
    """

    def __init__(self, pruned: PrunedGraph, nodes: Ints) -> None:
        """Compute the coordinates of some nodes (indices) of a graph; all logits are placed."""
        labels, count = pruned.graph.nodes, pruned.graph.counts
        layer, position = labels["layer"].values, labels["position"].values
        cells: dict[tuple[int, int], list[int]] = {}
        inner = nodes[nodes < count.sources]
        for node in sorted(inner.tolist(), key=lambda node: (-pruned.kept.influence[node], node)):
            cells.setdefault((int(position[node]), int(layer[node])), []).append(node)
        widest_rows = [1] * count.positions
        for (column, _), cell in cells.items():
            widest_rows[column] = max(widest_rows[column], min(len(cell), ACROSS))
        widths = np.array([max(1.0, SLOT * (n_nodes + 1)) for n_nodes in widest_rows])
        self.width = float(widths.sum())
        self.columns: list[float] = (np.cumsum(widths) - widths / 2).tolist()
        self.x: dict[int, float] = {}
        self.y: dict[int, float] = {}
        for (column, layer_y), cell in cells.items():
            # Rounded up twice: the fewest rows, then rows of nearly equal length.
            n_rows = -(-len(cell) // ACROSS)
            row_length = -(-len(cell) // n_rows)
            for i, node in enumerate(cell):
                row, index = divmod(i, row_length)
                n_in_row = min(row_length, len(cell) - row * row_length)
                self.x[node] = self.columns[column] + (index - (n_in_row - 1) / 2) * SLOT
                self.y[node] = layer_y + ((n_rows - 1) / 2 - row) * min(0.36, 0.8 / n_rows)
        # Logits are drawn as labels, wider than a position: in rows, the first above the end of the prompt.
        row_length = max(1, min(count.logits, int(self.width / LABEL)))
        self.top = count.layers + 0.45 * ((count.logits - 1) // row_length)
        for i, node in enumerate(range(count.sources, count.nodes)):
            row, index = divmod(i, row_length)
            n_in_row = min(row_length, count.logits - row * row_length)
            middle = min(self.columns[-1], self.width - n_in_row * LABEL / 2)
            self.x[node] = middle + ((n_in_row - 1) / 2 - index) * LABEL
            self.y[node] = self.top - 0.45 * row


def _grid(axes: Any, graph: AttributionGraph, layout: _Layout) -> None:
    """Draw lines between layers, tokens below the columns, and names of the layers."""
    count = graph.counts
    texts = [paper.fit(format_token(str(text)), 11) for text in graph.dataset["input_text"].values]
    for layer in range(-1, count.layers):
        axes.axhline(layer + 0.5, color="#eceef2", lw=0.8, zorder=0)
    axes.set(xlim=(-0.1, layout.width + 0.1), ylim=(-1.55, layout.top + 0.75))
    axes.set_xticks(layout.columns, texts, rotation=45, ha="right", rotation_mode="anchor")
    names = ["token", *(f"layer {layer}" for layer in range(count.layers)), "output"]
    axes.set_yticks(range(-1, count.layers + 1), names)
    paper.bare(axes)


def _edges(axes: Any, pruned: PrunedGraph, edges: Ints, through: Floats, layout: _Layout) -> None:
    """Draw edges: width and opacity by the influence through them, colour by the sign of the weight.

    Arguments:
        axes: Matplotlib axes.
        pruned: The graph.
        edges: Indices into the kept edges, drawn in this order.
        through: Influence through each kept edge.
        layout: Coordinates of the nodes.
    """
    kept = pruned.kept
    # Without edges `max` would raise, and 0 would be a divisor.
    largest = through[edges].max(initial=1e-12)
    for edge in edges.tolist():
        source, target = int(kept.source[edge]), int(kept.target[edge])
        share = through[edge] / largest
        axes.plot(
            [layout.x[source], layout.x[target]],
            [layout.y[source], layout.y[target]],
            color=paper.ACCENT if kept.weight[edge] > 0 else paper.BLUE,
            lw=0.4 + 2.6 * share,
            alpha=0.25 + 0.55 * share**0.5,
            zorder=1,
            solid_capstyle="round",
        )


def _marks(axes: Any, pruned: PrunedGraph, nodes: Ints, layout: _Layout, numbers: Mapping[int, int]) -> None:
    """Draw nodes: features as circles, tokens as squares, logits as labels; sizes by influence.

    Arguments:
        axes: Matplotlib axes.
        pruned: The graph.
        nodes: Indices of the nodes to draw.
        layout: Coordinates of the nodes.
        numbers: Node index -> number written into the node.
    """
    graph, influence = pruned.graph, pruned.kept.influence
    kinds, count = graph.nodes["kind"].values, graph.counts
    largest = max(influence[nodes].max(), 1e-12)
    middle = {"ha": "center", "va": "center", "zorder": 4}
    for node in nodes.tolist():
        xy = layout.x[node], layout.y[node]
        if str(kinds[node]) == LOGIT:
            probability = format_probability(float(graph.logit_probabilities[node - count.sources]))
            text = f"{paper.fit(format_token(graph.logit_tokens[node - count.sources]), 10)!r}  {probability}"
            box = {"boxstyle": "round,pad=0.3", "fc": "white", "ec": paper.INK, "lw": 1}
            axes.annotate(text, xy, fontsize=8, fontweight="bold", bbox=box, **middle)
            continue
        is_token, is_numbered = str(kinds[node]) == TOKEN, node in numbers
        size = 26 + 260 * (influence[node] / largest) ** 0.5
        axes.scatter(
            *xy,
            s=max(size, 95) if is_numbered else size,
            marker="s" if is_token else "o",
            facecolor="#dbe7ef" if is_token else "white",
            edgecolor=paper.INK if is_numbered else paper.FAINT,
            linewidth=1.1,
            zorder=3,
        )
        if is_numbered:
            axes.annotate(str(numbers[node]), xy, fontsize=7, **middle)


def _names(axes: Any, features: Sequence[StrongFeature]) -> None:
    """List features by number with the tokens they raise, and the legend of the drawing."""
    axes.axis("off")
    axes.set(xlim=(0, 1), ylim=(0, 1))
    axes.text(0, 1, "Features with most influence", fontsize=9, fontweight="bold", va="top")
    axes.text(0.53, 1, "raises", fontsize=8, va="top", color=paper.SOFT)
    small: dict[str, Any] = {"fontsize": 7.5, "va": "top"}
    step = min(0.062, 0.75 / max(1, len(features)))
    height = 1 - 0.07
    for number, feature in enumerate(features, 1):
        axes.text(0.045, height, str(number), ha="right", **small)
        axes.text(0.075, height, f"{feature.feature} at {paper.fit(feature.token, 12)!r}", **small)
        raised = " · ".join(paper.fit(token, 12) for token in feature.raised[:3])
        axes.text(0.53, height, paper.fit(raised, 34), color=paper.SOFT, **small)
        height -= step
    legend = "red raises its target, blue lowers it;\nwidth: influence through the edge; size: of the node"
    axes.text(0, height - 0.03, legend, color=paper.SOFT, linespacing=1.5, **small)
