"""The drawing of an attribution graph: its strongest nodes by layer and position, and what runs between them.

Border: a pruned graph in, matplotlib's axes filled. Which nodes and edges are drawn is decided here, as a
picture holds fewer than pruning keeps.
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
"""Drawn at most: more cannot be told apart."""
ACROSS, SLOT, LABEL = 6, 0.55, 2.9
"""Nodes side by side, the room of each, and that of an output; the room of a position alone is 1."""
NAMES = 4.6
"""Inches for the names of features."""


def drawn_part(
    pruned: PrunedGraph, features: int = FEATURES, edges: int = EDGES
) -> tuple[Ints, Ints, Floats]:
    """Nodes drawn, edges drawn (places among the kept ones), and of every kept edge the influence through it.

    Features by influence, tokens and logits all; of the edges among them those that carry most, and beside
    them the strongest one out of each feature.
    """
    kept, count = pruned.kept, pruned.graph.counts
    onward = kept.influence.copy()
    onward[count.sources :] += pruned.graph.logit_probabilities
    magnitude = np.abs(kept.weight.astype(np.float64))
    entering = np.bincount(kept.target, magnitude, count.nodes)
    through = magnitude / entering[kept.target] * onward[kept.target]
    inner = np.flatnonzero(kept.nodes[: count.features])
    chosen = inner[np.argsort(-kept.influence[inner], kind="stable")[:features]]
    nodes = np.concatenate([np.sort(chosen), np.arange(count.token_nodes.start, count.nodes)])
    is_drawn = np.zeros(count.nodes, bool)
    is_drawn[nodes] = True
    among = np.flatnonzero(is_drawn[kept.source] & is_drawn[kept.target])
    among = among[np.argsort(-through[among], kind="stable")]
    _, first = np.unique(kept.source[among], return_index=True)
    of_features = first[kept.source[among[first]] < count.features]
    found = np.union1d(among[:edges], among[of_features])
    return nodes, found[np.argsort(through[found], kind="stable")], through


@dataclass(frozen=True)
class Drawing:
    """Tokens below, logits above, features between by layer; the strongest ones numbered and named beside it.

    strongest: features of the graph, largest influence first.
    """

    pruned: PrunedGraph
    strongest: Sequence[StrongFeature]

    @cached_property
    def _part(self) -> tuple[Ints, Ints, Floats]:
        return drawn_part(self.pruned)

    @cached_property
    def _layout(self) -> _Layout:
        return _Layout(self.pruned, self._part[0])

    def inches(self) -> tuple[float, float]:
        """As wide as the prompt is long, as high as there are layers, and room for the names."""
        return min(17.0, 7.5 + 0.45 * self._layout.width), max(4.2, 1.6 + 0.62 * (self._layout.top + 2))

    def draw(self, axes: Any) -> None:
        """Draw it into matplotlib's axes, and names of the strongest features right of them."""
        nodes, edges, through = self._part
        layout, graph = self._layout, self.pruned.graph
        told = [one for one in self.strongest if one.node in set(nodes.tolist())]
        _grid(axes, graph, layout)
        _edges(axes, self.pruned, edges, through, layout)
        _marks(axes, self.pruned, nodes, layout, {one.node: i for i, one in enumerate(told, 1)})
        _names(axes.inset_axes((1.02, 0, NAMES / (self.inches()[0] - NAMES), 1)), told)


class _Layout:
    """Where nodes are drawn: x of each position and of each node, y of each node.

    Nodes of one layer and position stand side by side, the most influential first; a position with many is
    wider than others.
    """

    def __init__(self, pruned: PrunedGraph, nodes: Ints) -> None:
        labels, count = pruned.graph.nodes, pruned.graph.counts
        layer, position = labels["layer"].values, labels["position"].values
        cells: dict[tuple[int, int], list[int]] = {}
        inner = nodes[nodes < count.sources]
        for node in sorted(inner.tolist(), key=lambda node: (-pruned.kept.influence[node], node)):
            cells.setdefault((int(position[node]), int(layer[node])), []).append(node)
        most = [1] * count.positions
        for (column, _), held in cells.items():
            most[column] = max(most[column], min(len(held), ACROSS))
        widths = np.array([max(1.0, SLOT * (across + 1)) for across in most])
        self.width = float(widths.sum())
        self.columns: list[float] = (np.cumsum(widths) - widths / 2).tolist()
        self.x: dict[int, float] = {}
        self.y: dict[int, float] = {}
        for (column, row), held in cells.items():
            rows = -(-len(held) // ACROSS)
            across = -(-len(held) // rows)
            for i, node in enumerate(held):
                down, along = divmod(i, across)
                here = min(across, len(held) - down * across)
                self.x[node] = self.columns[column] + (along - (here - 1) / 2) * SLOT
                self.y[node] = row + ((rows - 1) / 2 - down) * min(0.36, 0.8 / rows)
        # Outputs are labels, wider than a position: side by side, the first above the prompt's end.
        across = max(1, min(count.logits, int(self.width / LABEL)))
        self.top = count.layers + 0.45 * ((count.logits - 1) // across)
        for i, node in enumerate(range(count.sources, count.nodes)):
            down, along = divmod(i, across)
            here = min(across, count.logits - down * across)
            middle = min(self.columns[-1], self.width - here * LABEL / 2)
            self.x[node] = middle + ((here - 1) / 2 - along) * LABEL
            self.y[node] = self.top - 0.45 * down


def _grid(axes: Any, graph: AttributionGraph, layout: _Layout) -> None:
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
    kept = pruned.kept
    most = through[edges].max(initial=1e-12)
    for edge in edges.tolist():
        source, target = int(kept.source[edge]), int(kept.target[edge])
        share = through[edge] / most
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
    graph, influence = pruned.graph, pruned.kept.influence
    kinds, count = graph.nodes["kind"].values, graph.counts
    most = max(influence[nodes].max(), 1e-12)
    middle = {"ha": "center", "va": "center", "zorder": 4}
    for node in nodes.tolist():
        place = layout.x[node], layout.y[node]
        if str(kinds[node]) == LOGIT:
            share = format_probability(float(graph.logit_probabilities[node - count.sources]))
            text = f"{paper.fit(format_token(graph.logit_tokens[node - count.sources]), 10)!r}  {share}"
            box = {"boxstyle": "round,pad=0.3", "fc": "white", "ec": paper.INK, "lw": 1}
            axes.annotate(text, place, fontsize=8, fontweight="bold", bbox=box, **middle)
            continue
        is_token, is_told = str(kinds[node]) == TOKEN, node in numbers
        size = 26 + 260 * (influence[node] / most) ** 0.5
        axes.scatter(
            *place,
            s=max(size, 95) if is_told else size,
            marker="s" if is_token else "o",
            facecolor="#dbe7ef" if is_token else "white",
            edgecolor=paper.INK if is_told else paper.FAINT,
            linewidth=1.1,
            zorder=3,
        )
        if is_told:
            axes.annotate(str(numbers[node]), place, fontsize=7, **middle)


def _names(axes: Any, told: Sequence[StrongFeature]) -> None:
    """The strongest features by number, what they raise, and what the looks of the graph mean."""
    axes.axis("off")
    axes.set(xlim=(0, 1), ylim=(0, 1))
    axes.text(0, 1, "Features with most influence", fontsize=9, fontweight="bold", va="top")
    axes.text(0.53, 1, "raises", fontsize=8, va="top", color=paper.SOFT)
    small: dict[str, Any] = {"fontsize": 7.5, "va": "top"}
    step = min(0.062, 0.75 / max(1, len(told)))
    height = 1 - 0.07
    for number, one in enumerate(told, 1):
        axes.text(0.045, height, str(number), ha="right", **small)
        axes.text(0.075, height, f"{one.feature} at {paper.fit(one.token, 12)!r}", **small)
        raised = " · ".join(paper.fit(token, 12) for token in one.raised[:3])
        axes.text(0.53, height, paper.fit(raised, 34), color=paper.SOFT, **small)
        height -= step
    looks = "red raises its target, blue lowers it;\nwidth: influence through the edge; size: of the node"
    axes.text(0, height - 0.03, looks, color=paper.SOFT, linespacing=1.5, **small)
