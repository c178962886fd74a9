"""Drawing of an attribution graph in matplotlib: its strongest nodes by layer and position, and their edges.

A figure can show fewer nodes and edges than pruning keeps; `drawn_part` selects which.
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
"""Largest numbers of features and of edges drawn; a reader could not tell more of them apart."""
ACROSS, SLOT, LABEL = 6, 0.55, 2.9
"""Largest number of nodes side by side; width of a node; width of the label of a logit node.

Widths are in x units of the drawing, where a position with at most one node per layer is 1 wide.
"""
NAMES = 4.6
"""Width in inches of the list of feature names beside the drawing."""


def drawn_part(
    pruned: PrunedGraph, features: int = FEATURES, edges: int = EDGES
) -> tuple[Ints, Ints, Floats]:
    """Select the nodes and edges to draw.

    Selected are the most influential features, all tokens and all logits; of the edges among them those that
    carry most influence, and in any case the strongest outgoing edge of each feature.

    Arguments:
        pruned: The graph after pruning.
        features: Largest number of features.
        edges: Largest number of edges, besides the strongest of each feature.

    Returns:
        (indices of the nodes, indices of the edges among `pruned.kept`, weakest first, influence through each
        edge of `pruned.kept`).
    """
    kept, count = pruned.kept, pruned.graph.counts
    # Influence through an edge: its share of its target's input, times the target's influence. A logit's
    # influence is its probability.
    node_influence = kept.influence.copy()
    node_influence[count.sources :] += pruned.graph.logit_probabilities
    magnitude = np.abs(kept.weight.astype(np.float64))
    total_input = np.bincount(kept.target, magnitude, count.nodes)
    through = magnitude / total_input[kept.target] * node_influence[kept.target]
    kept_features = np.flatnonzero(kept.nodes[: count.features])
    strongest = kept_features[np.argsort(-kept.influence[kept_features], kind="stable")[:features]]
    nodes = np.concatenate([np.sort(strongest), np.arange(count.token_nodes.start, count.nodes)])
    is_drawn = np.zeros(count.nodes, bool)
    is_drawn[nodes] = True
    candidates = np.flatnonzero(is_drawn[kept.source] & is_drawn[kept.target])
    candidates = candidates[np.argsort(-through[candidates], kind="stable")]
    # The first edge of each source is its strongest, as the candidates are sorted by influence.
    sources, first_edge = np.unique(kept.source[candidates], return_index=True)
    strongest_of_features = candidates[first_edge[sources < count.features]]
    drawn = np.union1d(candidates[:edges], strongest_of_features)
    return nodes, drawn[np.argsort(through[drawn], kind="stable")], through


@dataclass(frozen=True)
class Drawing:
    """Drawing of a graph: tokens at the bottom, logits at the top, features by layer between them.

    The strongest features are numbered; a list beside the drawing says which feature has which number.
    """

    pruned: PrunedGraph
    """The graph after pruning."""
    strongest: Sequence[StrongFeature]
    """Features to number and list, most influential first; features that are not drawn are skipped."""

    @cached_property
    def _part(self) -> tuple[Ints, Ints, Floats]:
        """Nodes to draw, edges to draw, and influence through each kept edge; see `drawn_part`."""
        return drawn_part(self.pruned)

    @cached_property
    def _layout(self) -> _Layout:
        """Coordinates of the drawn nodes."""
        return _Layout(self.pruned, self._part[0])

    def inches(self) -> tuple[float, float]:
        """(width, height) in inches; they grow with the length of the prompt and the number of layers."""
        return min(17.0, 7.5 + 0.45 * self._layout.width), max(4.2, 1.6 + 0.62 * (self._layout.top + 2))

    def draw(self, axes: Any) -> None:
        """Draw the graph into matplotlib axes, and the list of the strongest features right of them."""
        nodes, edges, through = self._part
        layout, graph = self._layout, self.pruned.graph
        drawn_nodes = set(nodes.tolist())
        listed = [feature for feature in self.strongest if feature.node in drawn_nodes]
        number_of_node = {feature.node: number for number, feature in enumerate(listed, 1)}
        _draw_grid(axes, graph, layout)
        _draw_edges(axes, self.pruned, edges, through, layout)
        _draw_nodes(axes, self.pruned, nodes, layout, number_of_node)
        # Axes of the list, as (left, bottom, width, height) in shares of the axes of the drawing.
        list_axes = axes.inset_axes((1.02, 0, NAMES / (self.inches()[0] - NAMES), 1))
        _draw_feature_list(list_axes, listed)


class _Layout:
    """Coordinates of the drawing: `columns` (x of each position), `x` and `y` of each node, `width`, `top`.

    Nodes of the same layer and position are side by side, the most influential first, in rows of at most
    ACROSS; a position with many nodes is wider than others.
    """

    def __init__(self, pruned: PrunedGraph, nodes: Ints) -> None:
        """Compute the coordinates of some nodes (indices) of a graph and of all its logit nodes."""
        labels, count = pruned.graph.nodes, pruned.graph.counts
        layer, position = labels["layer"].values, labels["position"].values
        # (position, layer) -> nodes there, most influential first.
        nodes_at: dict[tuple[int, int], list[int]] = {}
        inner = nodes[nodes < count.sources]
        for node in sorted(inner.tolist(), key=lambda node: (-pruned.kept.influence[node], node)):
            nodes_at.setdefault((int(position[node]), int(layer[node])), []).append(node)
        widest_rows = [1] * count.positions
        for (column, _), cell_nodes in nodes_at.items():
            widest_rows[column] = max(widest_rows[column], min(len(cell_nodes), ACROSS))
        widths = np.array([max(1.0, SLOT * (n_nodes + 1)) for n_nodes in widest_rows])
        self.width = float(widths.sum())
        self.columns: list[float] = (np.cumsum(widths) - widths / 2).tolist()
        self.x: dict[int, float] = {}
        self.y: dict[int, float] = {}
        for (column, layer_y), cell_nodes in nodes_at.items():
            # Rounded up twice: the fewest rows, then rows of nearly equal length.
            n_rows = -(-len(cell_nodes) // ACROSS)
            row_length = -(-len(cell_nodes) // n_rows)
            for i, node in enumerate(cell_nodes):
                row, index = divmod(i, row_length)
                n_in_row = min(row_length, len(cell_nodes) - row * row_length)
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


def _draw_grid(axes: Any, graph: AttributionGraph, layout: _Layout) -> None:
    """Draw lines between layers, the tokens of the prompt below, and the names of the layers on the left."""
    count = graph.counts
    texts = [paper.fit(format_token(str(text)), 11) for text in graph.dataset["input_text"].values]
    for layer in range(-1, count.layers):
        axes.axhline(layer + 0.5, color="#eceef2", lw=0.8, zorder=0)
    axes.set(xlim=(-0.1, layout.width + 0.1), ylim=(-1.55, layout.top + 0.75))
    axes.set_xticks(layout.columns, texts, rotation=45, ha="right", rotation_mode="anchor")
    names = ["token", *(f"layer {layer}" for layer in range(count.layers)), "output"]
    axes.set_yticks(range(-1, count.layers + 1), names)
    paper.bare(axes)


def _draw_edges(axes: Any, pruned: PrunedGraph, edges: Ints, through: Floats, layout: _Layout) -> None:
    """Draw edges: width and opacity by the influence through them, colour by the sign of the weight.

    Arguments:
        axes: Matplotlib axes.
        pruned: The graph after pruning.
        edges: Indices of edges among `pruned.kept`, drawn in this order.
        through: Influence through each edge of `pruned.kept`.
        layout: Coordinates of the nodes.
    """
    kept = pruned.kept
    # `initial`: without edges `max` would raise, and a largest influence of 0 would be a divisor.
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


def _draw_nodes(
    axes: Any, pruned: PrunedGraph, nodes: Ints, layout: _Layout, numbers: Mapping[int, int]
) -> None:
    """Draw nodes: features as circles, tokens as squares, logits as labels; sizes by influence.

    Arguments:
        axes: Matplotlib axes.
        pruned: The graph after pruning.
        nodes: Indices of the nodes to draw.
        layout: Coordinates of the nodes.
        numbers: Node index -> number that is written into the node.
    """
    graph, influence = pruned.graph, pruned.kept.influence
    kinds, count = graph.nodes["kind"].values, graph.counts
    largest = max(influence[nodes].max(), 1e-12)
    middle = {"ha": "center", "va": "center", "zorder": 4}
    for node in nodes.tolist():
        xy = layout.x[node], layout.y[node]
        if str(kinds[node]) == LOGIT:
            # The logit nodes are the last ones, after all nodes that can be a source.
            logit = node - count.sources
            probability = format_probability(float(graph.logit_probabilities[logit]))
            text = f"{paper.fit(format_token(graph.logit_tokens[logit]), 10)!r}  {probability}"
            box = {"boxstyle": "round,pad=0.3", "fc": "white", "ec": paper.INK, "lw": 1}
            axes.annotate(text, xy, fontsize=8, fontweight="bold", bbox=box, **middle)
            continue
        is_token, is_numbered = str(kinds[node]) == TOKEN, node in numbers
        # Area in points squared: a root, so that weak nodes stay visible beside strong ones.
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


def _draw_feature_list(axes: Any, features: Sequence[StrongFeature]) -> None:
    """List features by number with the tokens whose logits they raise; below, the legend of the drawing.

    Arguments:
        axes: Matplotlib axes, whose coordinates are set to 0..1.
        features: Features to list; their numbers count from 1.
    """
    axes.axis("off")
    axes.set(xlim=(0, 1), ylim=(0, 1))
    axes.text(0, 1, "Features with most influence", fontsize=9, fontweight="bold", va="top")
    axes.text(0.53, 1, "raises the logits of", fontsize=8, va="top", color=paper.SOFT)
    small: dict[str, Any] = {"fontsize": 7.5, "va": "top"}
    step = min(0.062, 0.75 / max(1, len(features)))
    height = 1 - 0.07
    for number, feature in enumerate(features, 1):
        axes.text(0.045, height, str(number), ha="right", **small)
        axes.text(0.075, height, f"{feature.feature} at {paper.fit(feature.token, 12)!r}", **small)
        raised = " · ".join(paper.fit(token, 12) for token in feature.raised[:3])
        axes.text(0.53, height, paper.fit(raised, 34), color=paper.SOFT, **small)
        height -= step
    legend = (
        "Edges: orange raises its target, blue lowers it;\n"
        "width: influence on the logits through the edge.\n"
        "Size of a node: its influence on the logits."
    )
    axes.text(0, height - 0.03, legend, color=paper.SOFT, linespacing=1.5, **small)
