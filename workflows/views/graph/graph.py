"""View of an attribution graph: interactive on a page (pruning, pinning, grouping), drawn in a figure.

The view holds the arrays that a page embeds. The page prunes by the same rule as `AttributionGraph.prune` and
gets the same counts, because it has all edges among the embedded nodes; its slider cannot select a threshold
that would keep more nodes than these.

Axes: node, edge, and those of features.py. Weights are in units of the edge's target (pre-activation of a
feature, or logit); influence and probabilities are dimensionless.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ....stages.graph.rows.influence import GraphRows
from ....stages.graph.rows.nodes import ERROR, FEATURE, LOGIT, TOKEN
from ....stages.logits.lens import format_token
from ....store.arrays import Array
from .. import labels
from ..blocks import size
from ..view import View
from .drawing import Drawing
from .features import FeatureNotes, StrongFeature, notes_of

if TYPE_CHECKING:
    import xarray as xr

    from ....stages.graph.graph import PrunedGraph

__all__ = ["EDGES", "Graph"]

KINDS = (FEATURE, ERROR, TOKEN, LOGIT)
"""Node kinds by name; `Graph.kinds` indexes this tuple."""
EDGES = 1 << 17
"""Largest number of embedded edges: about 1.4 MB of a page."""
BLOCK_BYTES = 1 << 26
"""Bytes of adjacency rows that are read at a time."""
NODES = 2000
"""Largest number of embedded features and errors; more than a person can look at."""


@dataclass(frozen=True, kw_only=True)
class Graph(View):
    """Nodes of an attribution graph by layer and position, and the edges among them, strongest first."""

    kind: ClassVar[str] = "graph"
    is_drawn: ClassVar[bool] = True
    tokens: tuple[str, ...]
    """Texts of the prompt's tokens [position]."""
    layers: int
    """Number of layers of the model."""
    kinds: Array
    """Kind of each node, uint8 [node]: index into KINDS. Logits are the last nodes."""
    layer: Array
    """Layer of each node, int [node]; -1 for tokens, the number of layers for logits."""
    position: Array
    """Position of each node, int [node]."""
    number: Array
    """Feature index or token id of each node, int [node]; -1 for errors."""
    activation: Array
    """Activation of each feature, float [node]; NaN for other nodes."""
    influence: Array
    """Influence of each node on the logits, float [node], as `AttributionGraph.prune` computes it."""
    cumulative: Array
    """Share of the total influence of a node and all stronger ones, float [node]."""
    probability: Array
    """Probability of each logit node, float [node]; NaN for other nodes."""
    logits: tuple[str, ...]
    """Texts of the logit nodes' tokens, in the order of the nodes."""
    source: Array
    """Node that each edge starts at, int [edge]."""
    target: Array
    """Node that each edge ends at, int [edge]."""
    weight: Array
    """Weight of each edge, float [edge], in units of the target."""
    row: Array
    """Row of each feature in `notes`, int [node]; -1 for none."""
    notes: FeatureNotes
    """Logit effects and examples of the features."""
    n_nodes: int
    """Number of nodes of the whole graph."""
    n_edges: int
    """Number of edges among the nodes of this view, embedded or not."""
    share: float
    """Largest node threshold that keeps only nodes of this view."""
    node_threshold: float
    """Initial node threshold of the page's slider."""
    edge_threshold: float
    """Initial edge threshold of the page's slider."""
    pinned: tuple[str, ...] = ()
    """Names of initially pinned nodes, in the format that circuit-tracer's viewer saves."""
    supernodes: tuple[tuple[str, ...], ...] = ()
    """Initial groups of nodes in the same format: the name of the group, then names of nodes."""
    called: tuple[tuple[str, str], ...] = ()
    """(feature, label) of features that people labelled, such as ("L3:17", "capitals")."""
    pruned: PrunedGraph = field(compare=False, metadata={"page": False})
    """The pruned graph, whose most influential part a figure draws."""
    strongest: tuple[StrongFeature, ...] = field(default=(), metadata={"page": False})
    """Features that a figure numbers and names."""

    def __post_init__(self) -> None:
        for name in (*_BY_NODE, "kinds"):
            labels.expect(name, getattr(self, name), (len(self.kinds),))
        for name in ("target", "weight"):
            labels.expect(name, getattr(self, name), self.source.shape)

    @classmethod
    def of(
        cls,
        pruned: PrunedGraph,
        *,
        vocabulary: Sequence[str] = (),
        effects: xr.Dataset | None = None,
        examples: Mapping[int, xr.Dataset] | None = None,
        edges: int = EDGES,
        **view_fields: Any,
    ) -> Graph:
        """Build the view from a graph.

        Arguments:
            pruned: The graph, pruned by the thresholds at which the sliders start.
            vocabulary: Text of each token id, for `effects` and `examples`.
            effects: Output of the stage `logit_effects` for the graph; None for none.
            examples: Layer -> output of `features.examples.contexts`; None for none.
            edges: Largest number of embedded edges.
            view_fields: Other fields of the view; they override those of the graph.
        """
        graph, score = pruned.graph, pruned.kept.influence
        dataset, cumulative, nodes = graph.dataset, pruned.kept.cumulative, graph.nodes
        rows = GraphRows.of(dataset)
        indices = _candidates(score, rows)
        # Features and errors come before the token nodes.
        inner = indices[indices < rows.counts.token_nodes.start]
        is_all = len(inner) == np.count_nonzero(score[: rows.counts.token_nodes.start])
        kinds = nodes["kind"].values[indices]
        source, target, weight = _edges_among(rows, indices)
        probability = np.full(len(score), np.nan)
        probability[rows.counts.sources :] = graph.logit_probabilities
        row, notes = notes_of(graph, indices, vocabulary, effects, examples or {})
        graph_fields: dict[str, Any] = {
            "tokens": tuple(
                format_token(str(text)) or f"#{i}"  # graphs of other programs may have token ids only
                for text, i in zip(dataset["input_text"].values, graph.input_tokens.tolist(), strict=True)
            ),
            "layers": rows.counts.layers,
            "kinds": np.array([KINDS.index(str(kind)) for kind in kinds], np.uint8),
            **{name: nodes[name].values[indices] for name in ("layer", "position")},
            "number": nodes["feature"].values[indices],
            "activation": nodes["activation"].values[indices],
            "influence": score[indices],
            "cumulative": cumulative[indices],
            "probability": probability[indices],
            "logits": tuple(map(format_token, graph.logit_tokens)),
            "n_nodes": rows.counts.nodes,
            "share": 1.0 if is_all else float(cumulative[inner].max()),
            "node_threshold": pruned.node_threshold,
            "edge_threshold": pruned.edge_threshold,
        }
        view = cls(
            **{**graph_fields, **view_fields},
            source=source,
            target=target,
            weight=weight,
            n_edges=len(weight),
            row=row,
            notes=notes,
            pruned=pruned,
        )
        return view.limited(edges)

    def inches(self) -> tuple[float, float]:
        """Size of the drawing with its list of features; see `View.inches`."""
        return Drawing(self.pruned, self.strongest).inches()

    def draw(self, axes: Any) -> None:
        """Draw the most influential part, and the list of the strongest features beside it."""
        Drawing(self.pruned, self.strongest).draw(axes)

    def limited(self, edges: int) -> Graph:
        """The view with at most `edges` edges, sorted by the magnitude of their weight.

        Keeps as many of the most influential nodes as have at most `edges` edges among them, but at least the
        nodes that `node_threshold` keeps; if these have more edges, those with least influence through them
        are omitted.
        """
        rank = self._ranks()
        # An edge exists as soon as both of its nodes are kept.
        edge_rank = np.maximum(rank[self.source], rank[self.target])
        # Number of edges among the nodes up to each rank, from rank -1 on.
        n_edges_by_rank = np.bincount(edge_rank + 1, minlength=len(rank) + 1).cumsum()
        # As in `prune`: the node that reaches the threshold is kept, and all of equal influence.
        lowest_influence = self.influence[self.cumulative >= self.node_threshold].max(initial=0)
        required_rank = int(rank[self.influence >= lowest_influence].max(initial=-1))
        # Index j counts the edges up to rank j - 1; searchsorted gives the first index with too many edges.
        last_rank = max(int(np.searchsorted(n_edges_by_rank, edges, side="right")) - 2, required_rank)
        nodes = rank <= last_rank
        indices = np.flatnonzero(edge_rank <= last_rank)
        n_edges = self.n_edges if nodes.all() else len(indices)
        if len(indices) > edges:
            indices = indices[np.argsort(-self._scores()[indices], kind="stable")[:edges]]
        # The last key of lexsort sorts first: by magnitude, ties by target and source.
        order = np.lexsort((self.source[indices], self.target[indices], -abs(self.weight[indices])))
        indices = indices[order]
        new_index = np.cumsum(nodes) - 1
        row, notes = self.row[nodes], self.notes
        if len(row) < len(self.row):
            used_rows = np.unique(row[row >= 0])
            row, notes = np.where(row >= 0, np.searchsorted(used_rows, row), -1), notes.rows(used_rows)
        return replace(
            self,
            **{name: getattr(self, name)[nodes] for name in _BY_NODE if name != "row"},
            kinds=self.kinds[nodes],
            row=row,
            notes=notes,
            source=new_index[self.source[indices]],
            target=new_index[self.target[indices]],
            weight=self.weight[indices],
            n_edges=n_edges,
            share=self.share if nodes.all() else float(self.cumulative[nodes & (rank >= 0)].max(initial=0)),
        )

    def within(self, room: int) -> View:
        """The view in at most `room` bytes: first without examples, then with fewer nodes and edges.

        The page shows the numbers of nodes and edges of the whole graph.
        """
        if size(self) <= room:
            return self
        bare = replace(self, notes=self.notes.without_examples())
        if size(bare) <= room:
            return bare
        none = self.source[:0]
        fixed = size(replace(bare, source=none, target=none, weight=self.weight[:0]))
        edges = (room - fixed) * len(self.source) // max(1, size(bare) - fixed)
        return bare.limited(edges) if edges > 0 else super().within(room)

    def _ranks(self) -> Array:
        """Rank of each feature and error by influence, int [node], 0 = strongest.

        Tokens and logits have rank -1, as they are always kept.
        """
        inner = np.flatnonzero(self.kinds < KINDS.index(TOKEN))
        rank = np.full(len(self.kinds), -1, np.int64)
        rank[inner[np.argsort(self.cumulative[inner], kind="stable")]] = np.arange(len(inner))
        return rank

    def _scores(self) -> Array:
        """Influence through each edge, float [edge], by the rule of pruning."""
        magnitude = np.abs(self.weight.astype(np.float64))
        total_input = np.bincount(self.target, magnitude, len(self.kinds))
        onward = self.influence + np.nan_to_num(self.probability)
        # As in pruning, a target without input is not divided by zero.
        scores: Array = magnitude * (onward / np.maximum(total_input, 1e-10))[self.target]
        return scores


_BY_NODE = (
    *("layer", "position", "number", "activation", "influence", "cumulative", "probability"),
    "row",
)
"""Fields [node] of `Graph`, besides `kinds`."""


def _candidates(score: Array, rows: GraphRows) -> Array:
    """Node indices that the view embeds: tokens, logits, and the NODES most influential features and errors.

    Arguments:
        score: Influence of each node.
        rows: The graph's adjacency rows.

    Returns:
        Int [node], in increasing order.
    """
    counts = rows.counts
    inner = np.argsort(-score[: counts.token_nodes.start], kind="stable")[:NODES]
    inner = inner[score[inner] > 0]  # no threshold keeps a node without influence
    indices: Array = np.concatenate([np.sort(inner), np.arange(counts.token_nodes.start, counts.nodes)])
    return indices


def _edges_among(rows: GraphRows, indices: Array) -> tuple[Array, Array, Array]:
    """All edges among some nodes, ordered by target.

    Arguments:
        rows: The graph's adjacency rows, read in blocks of BLOCK_BYTES.
        indices: Indices of the nodes.

    Returns:
        (source, target, weight) of each edge; source and target are indices into `indices`.
    """
    counts = rows.counts
    new_index = np.full(counts.nodes, -1)
    new_index[indices] = np.arange(len(indices))
    columns = indices[indices < counts.sources]
    is_selected = new_index[counts.target_nodes] >= 0
    step = max(1, BLOCK_BYTES // (4 * max(1, counts.sources)))
    blocks = []
    for start in range(0, counts.targets, step):
        selected = np.flatnonzero(is_selected[start : start + step])
        if len(selected):
            weights = np.asarray(rows.weights[start : start + step].values, np.float32)
            block = weights[np.ix_(selected, columns)]
            row, column = np.nonzero(block)
            blocks.append((columns[column], counts.target_nodes[start + selected[row]], block[row, column]))
    source, target, weight = (np.concatenate([block[i] for block in blocks]) for i in range(3))
    return new_index[source], new_index[target], weight
