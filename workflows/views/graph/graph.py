"""View of an attribution graph: interactive on a page (pruning, pinning, grouping), drawn in a figure.

The view holds the arrays that a page embeds. The page prunes by the same rule as `AttributionGraph.prune` and
keeps the same nodes and edges, because it has all edges among the embedded nodes; its slider cannot select a
threshold that would keep a node that is not embedded.

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
"""Largest number of edges that a page embeds: about 1.4 MB."""
BLOCK_BYTES = 1 << 26
"""Bytes of the adjacency matrix that are read at a time."""
NODES = 2000
"""Largest number of feature and error nodes that a page embeds; more than a person can look at."""


@dataclass(frozen=True, kw_only=True)
class Graph(View):
    """An attribution graph: nodes by layer and position, and the weighted edges among them, strongest
    first."""

    kind: ClassVar[str] = "graph"
    is_drawn: ClassVar[bool] = True
    tokens: tuple[str, ...]
    """Text of each token of the prompt [position]."""
    layers: int
    """Number of layers of the model."""
    kinds: Array
    """Kind of each node, uint8 [node]: index into KINDS. Logit nodes come last."""
    layer: Array
    """Layer of each node, int [node]; -1 for tokens, the number of layers for logits."""
    position: Array
    """Position of each node, int [node]."""
    number: Array
    """Index of each node's feature, or its token id, int [node]; -1 for error nodes."""
    activation: Array
    """Activation of each feature node, float [node]; NaN for other nodes."""
    influence: Array
    """Influence of each node on the logits, float [node], as `AttributionGraph.prune` computes it."""
    cumulative: Array
    """Share of the total influence, 0 to 1, that a node and all nodes with more influence have together,
    float [node]."""
    probability: Array
    """Probability of each logit node, float [node]; NaN for other nodes."""
    logits: tuple[str, ...]
    """Text of the token of each logit node, in the order of the nodes."""
    source: Array
    """Index of the node that each edge starts at, int [edge]."""
    target: Array
    """Index of the node that each edge ends at, int [edge]."""
    weight: Array
    """Weight of each edge, float [edge], in units of the target (pre-activation or logit)."""
    row: Array
    """Row of each node's feature in `notes`, int [node]; -1 for a node without notes."""
    notes: FeatureNotes
    """Logit effects of the features and texts that activate them."""
    n_nodes: int
    """Number of nodes of the whole graph, before selection and pruning."""
    n_edges: int
    """Number of edges among the nodes of this view; `source` may hold only the strongest of these edges."""
    share: float
    """Largest node threshold, 0 to 1, at which pruning keeps only nodes of this view."""
    node_threshold: float
    """Share of the influence, 0 to 1, at which the page's slider for nodes starts."""
    edge_threshold: float
    """Share of the influence, 0 to 1, at which the page's slider for edges starts."""
    pinned: tuple[str, ...] = ()
    """Names of the nodes that are pinned at first, in the format that circuit-tracer's viewer saves."""
    supernodes: tuple[tuple[str, ...], ...] = ()
    """Groups of nodes that exist at first, in the same format: the name of the group, then names of nodes."""
    called: tuple[tuple[str, str], ...] = ()
    """(feature, label) of features that a person labelled, such as ("L3:17", "capitals")."""
    pruned: PrunedGraph = field(compare=False, metadata={"page": False})
    """The graph after pruning, whose most influential part a figure draws."""
    strongest: tuple[StrongFeature, ...] = field(default=(), metadata={"page": False})
    """Features that a figure numbers, and lists with the tokens whose logits they raise."""

    def __post_init__(self) -> None:
        for name in (*_ARRAYS_BY_NODE, "kinds"):
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
            pruned: The graph, pruned by the thresholds at which the page's sliders start.
            vocabulary: Text of each token id; needed with `effects` or `examples`.
            effects: Output of the stage `logit_effects` for the graph; None to show no logit effects.
            examples: Layer -> output of `features.examples.contexts`, texts that activate the features; None
                to show no texts.
            edges: Largest number of edges that a page embeds.
            view_fields: Other fields of the view; they override those derived from the graph.
        """
        graph, score = pruned.graph, pruned.kept.influence
        dataset, cumulative, nodes = graph.dataset, pruned.kept.cumulative, graph.nodes
        rows = GraphRows.of(dataset)
        indices = _embedded_nodes(score, rows)
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
        """(width, height) in inches of the drawing and the list of features beside it."""
        return Drawing(self.pruned, self.strongest).inches()

    def draw(self, axes: Any) -> None:
        """Draw the most influential nodes and edges, and a list of the strongest features beside them."""
        Drawing(self.pruned, self.strongest).draw(axes)

    def limited(self, edges: int) -> Graph:
        """The view with at most `edges` edges, sorted by the magnitude of their weight.

        Keeps as many of the most influential nodes as have at most `edges` edges among them, but at least the
        nodes that `node_threshold` keeps; if these have more edges, those with least influence through them
        are omitted.
        """
        rank = self._ranks_by_influence()
        # An edge exists as soon as both of its nodes are kept.
        edge_rank = np.maximum(rank[self.source], rank[self.target])
        # Number of edges among the nodes up to each rank, from rank -1 on.
        n_edges_by_rank = np.bincount(edge_rank + 1, minlength=len(rank) + 1).cumsum()
        # As in `prune`: the node that reaches the threshold is kept, and all of equal influence.
        lowest_influence = self.influence[self.cumulative >= self.node_threshold].max(initial=0)
        required_rank = int(rank[self.influence >= lowest_influence].max(initial=-1))
        # Index j counts the edges up to rank j - 1; searchsorted gives the first index with too many edges.
        last_rank = max(int(np.searchsorted(n_edges_by_rank, edges, side="right")) - 2, required_rank)
        is_kept = rank <= last_rank
        kept_edges = np.flatnonzero(edge_rank <= last_rank)
        n_edges = self.n_edges if is_kept.all() else len(kept_edges)
        if len(kept_edges) > edges:
            by_influence = np.argsort(-self._edge_influence()[kept_edges], kind="stable")
            kept_edges = kept_edges[by_influence[:edges]]
        # The last key of lexsort sorts first: by magnitude, ties by target and source.
        source, target, weight = self.source[kept_edges], self.target[kept_edges], self.weight[kept_edges]
        order = np.lexsort((source, target, -abs(weight)))
        new_index = np.cumsum(is_kept) - 1
        row, notes = self.row[is_kept], self.notes
        if len(row) < len(self.row):
            used_rows = np.unique(row[row >= 0])
            row, notes = np.where(row >= 0, np.searchsorted(used_rows, row), -1), notes.rows(used_rows)
        return replace(
            self,
            **{name: getattr(self, name)[is_kept] for name in _ARRAYS_BY_NODE if name != "row"},
            kinds=self.kinds[is_kept],
            row=row,
            notes=notes,
            source=new_index[source[order]],
            target=new_index[target[order]],
            weight=weight[order],
            n_edges=n_edges,
            share=self.share
            if is_kept.all()
            else float(self.cumulative[is_kept & (rank >= 0)].max(initial=0)),
        )

    def within(self, room: int) -> View:
        """The view in at most `room` bytes: without example texts, and if needed with fewer nodes and edges.

        Returns:
            The view itself if it fits; else a smaller copy, or a `Note` if not even the nodes fit.
        """
        if size(self) <= room:
            return self
        without_examples = replace(self, notes=self.notes.without_examples())
        n_bytes = size(without_examples)
        if n_bytes <= room:
            return without_examples
        no_edges = self.source[:0]
        without_edges = replace(without_examples, source=no_edges, target=no_edges, weight=self.weight[:0])
        n_node_bytes = size(without_edges)
        # All edges take n_bytes - n_node_bytes: as many are embedded as fit into the rest of the room.
        n_edges = (room - n_node_bytes) * len(self.source) // max(1, n_bytes - n_node_bytes)
        return without_examples.limited(n_edges) if n_edges > 0 else super().within(room)

    def _ranks_by_influence(self) -> Array:
        """Rank of each feature and error node by influence, int [node], 0 = most influential.

        Tokens and logits have rank -1, as they are always kept.
        """
        inner_nodes = np.flatnonzero(self.kinds < KINDS.index(TOKEN))
        rank = np.full(len(self.kinds), -1, np.int64)
        rank[inner_nodes[np.argsort(self.cumulative[inner_nodes], kind="stable")]] = np.arange(
            len(inner_nodes)
        )
        return rank

    def _edge_influence(self) -> Array:
        """Influence on the logits through each edge, float [edge], by the rule of pruning."""
        magnitude = np.abs(self.weight.astype(np.float64))
        total_input = np.bincount(self.target, magnitude, len(self.kinds))
        # The influence of a logit node is its probability.
        target_influence = self.influence + np.nan_to_num(self.probability)
        # As in pruning, a target without input is not divided by zero.
        influence: Array = magnitude * (target_influence / np.maximum(total_input, 1e-10))[self.target]
        return influence


_ARRAYS_BY_NODE = (
    *("layer", "position", "number", "activation", "influence", "cumulative", "probability"),
    "row",
)
"""Fields of `Graph` with one value per node, besides `kinds`."""


def _embedded_nodes(influence: Array, rows: GraphRows) -> Array:
    """Indices of the nodes that a page embeds: tokens, logits, and the most influential features and errors.

    Arguments:
        influence: Influence of each node of the graph, float [node].
        rows: The graph, as rows of its adjacency matrix.

    Returns:
        Node indices, int, in increasing order; at most NODES features and errors.
    """
    # Features and errors come before the token nodes.
    first_token = rows.counts.token_nodes.start
    inner = np.argsort(-influence[:first_token], kind="stable")[:NODES]
    inner = inner[influence[inner] > 0]  # no threshold keeps a node without influence
    indices: Array = np.concatenate([np.sort(inner), np.arange(first_token, rows.counts.nodes)])
    return indices


def _edges_among(rows: GraphRows, indices: Array) -> tuple[Array, Array, Array]:
    """All edges among some nodes, ordered by target.

    Arguments:
        rows: The graph, as rows of its adjacency matrix (a row is a target); read in blocks of BLOCK_BYTES.
        indices: Indices of the nodes.

    Returns:
        (source, target, weight) of the edges, each [edge]; source and target are indices into `indices`.
    """
    counts = rows.counts
    new_index = np.full(counts.nodes, -1)
    new_index[indices] = np.arange(len(indices))
    source_nodes = indices[indices < counts.sources]
    is_selected_target = new_index[counts.target_nodes] >= 0
    # A float32 weight has 4 bytes.
    rows_per_block = max(1, BLOCK_BYTES // (4 * max(1, counts.sources)))
    edge_blocks = []
    for start in range(0, counts.targets, rows_per_block):
        stop = start + rows_per_block
        selected_rows = np.flatnonzero(is_selected_target[start:stop])
        if len(selected_rows):
            weights = np.asarray(rows.weights[start:stop].values, np.float32)
            block = weights[np.ix_(selected_rows, source_nodes)]
            row, column = np.nonzero(block)
            target_nodes = counts.target_nodes[start + selected_rows[row]]
            edge_blocks.append((source_nodes[column], target_nodes, block[row, column]))
    source, target, weight = (np.concatenate(parts) for parts in zip(*edge_blocks, strict=True))
    return new_index[source], new_index[target], weight
