"""The attribution graph: pruned, looked into, pinned and grouped on a page, drawn in a figure.

Border: a graph of stages/graph, and what is known of its features, in; arrays that a page can hold out. The
page prunes by the same rule as `AttributionGraph.prune`, with the same counts: of the nodes that are embedded
it has all edges among them, and a threshold that keeps more nodes cannot be chosen.

Axes: node, edge, and those of features.py. Weights are in units of the edge's target (pre-activation,
or logits); influence and probabilities have none.
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
EDGES = 1 << 17
"""Edges embedded at most: about 1.4 MB of a page."""
BLOCK_BYTES = 1 << 26
"""Of rows of the graph that are read at a time."""
NODES = 2000
"""Features and errors among which edges are looked up: what a person can look at, and more."""


@dataclass(frozen=True, kw_only=True)
class Graph(View):
    """Nodes by layer and position, and the edges among them, strongest first.

    tokens: of the prompt.  layers: of the model.  kinds: index into KINDS [node]; layer: -1 for tokens, the
    number of layers for logits; number: a feature's index, a token's id, -1 for errors; activation: NaN for
    all but features; probability: NaN for all but logits, whose texts are `logits`, in their order, last of
    all nodes.  influence, cumulative: as `prune` has them.  row: a feature's row in `notes`, -1 for none.
    source, target: nodes of each edge.  n_nodes: of the whole graph.  n_edges: among the nodes here, embedded
    or not.  share: largest threshold that keeps no node but those here.  node_threshold, edge_threshold:
    where the sliders stand.
    pinned, supernodes: names of nodes as circuit-tracer's viewer saves them, what the page begins with.
    called: (name, label) of features that people named, such as ("L3:17", "capitals").
    pruned: the kept part, of which a figure draws what carries most.  strongest: features it numbers
    and names.
    """

    kind: ClassVar[str] = "graph"
    is_drawn: ClassVar[bool] = True
    tokens: tuple[str, ...]
    layers: int
    kinds: Array
    layer: Array
    position: Array
    number: Array
    activation: Array
    influence: Array
    cumulative: Array
    probability: Array
    logits: tuple[str, ...]
    source: Array
    target: Array
    weight: Array
    row: Array
    notes: FeatureNotes
    n_nodes: int
    n_edges: int
    share: float
    node_threshold: float
    edge_threshold: float
    pinned: tuple[str, ...] = ()
    supernodes: tuple[tuple[str, ...], ...] = ()
    called: tuple[tuple[str, str], ...] = ()
    pruned: PrunedGraph = field(compare=False, metadata={"page": False})
    strongest: tuple[StrongFeature, ...] = field(default=(), metadata={"page": False})

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
        **told: Any,
    ) -> Graph:
        """From a graph, pruned where the sliders are to stand.

        effects: as the stage `logit_effects` gives them for it.  examples: layer -> what
        `features.examples.contexts` gives; features it does not have show none.  vocabulary: strings by token
        id, for both.  edges: how many are embedded at most.  told: other fields.
        """
        graph, score = pruned.graph, pruned.kept.influence
        whole, cumulative, known = graph.dataset, pruned.kept.cumulative, graph.nodes
        rows = GraphRows.of(whole)
        chosen = _candidates(score, rows)
        inner = chosen[chosen < rows.counts.token_nodes.start]
        is_all = len(inner) == np.count_nonzero(score[: rows.counts.token_nodes.start])
        kinds = known["kind"].values[chosen]
        source, target, weight = _edges_among(rows, chosen)
        probability = np.full(len(score), np.nan)
        probability[rows.counts.sources :] = graph.logit_probabilities
        row, notes = notes_of(graph, chosen, vocabulary, effects, examples or {})
        own: dict[str, Any] = {
            "tokens": tuple(
                format_token(str(text)) or f"#{i}"  # files of other programs may hold ids alone
                for text, i in zip(whole["input_text"].values, graph.input_tokens.tolist(), strict=True)
            ),
            "layers": rows.counts.layers,
            "kinds": np.array([KINDS.index(str(kind)) for kind in kinds], np.uint8),
            **{name: known[name].values[chosen] for name in ("layer", "position")},
            "number": known["feature"].values[chosen],
            "activation": known["activation"].values[chosen],
            "influence": score[chosen],
            "cumulative": cumulative[chosen],
            "probability": probability[chosen],
            "logits": tuple(map(format_token, graph.logit_tokens)),
            "n_nodes": rows.counts.nodes,
            "share": 1.0 if is_all else float(cumulative[inner].max()),
            "node_threshold": pruned.node_threshold,
            "edge_threshold": pruned.edge_threshold,
        }
        made = cls(
            **{**own, **told},
            source=source,
            target=target,
            weight=weight,
            n_edges=len(weight),
            row=row,
            notes=notes,
            pruned=pruned,
        )
        return made.limited(edges)

    def inches(self) -> tuple[float, float]:
        """Room for positions, layers, and the names of the strongest features."""
        return Drawing(self.pruned, self.strongest).inches()

    def draw(self, axes: Any) -> None:
        """The part that carries most, and the names of the strongest features beside it."""
        Drawing(self.pruned, self.strongest).draw(axes)

    def limited(self, edges: int) -> Graph:
        """As many of the most influential nodes as have at most so many edges among them, but no fewer than
        node_threshold keeps: where these have more, the weakest edges are left out. Edges strongest first."""
        rank = self._ranks()
        entry = np.maximum(rank[self.source], rank[self.target])
        among = np.bincount(entry + 1, minlength=len(rank) + 1).cumsum()  # edges among the nodes up to a rank
        least = self.influence[self.cumulative >= self.node_threshold].max(initial=0)
        needed = int(rank[self.influence >= least].max(initial=-1))
        last = max(int(np.searchsorted(among, edges, side="right")) - 2, needed)
        nodes, kept = rank <= last, entry <= last
        chosen = np.flatnonzero(kept)
        n_edges = self.n_edges if nodes.all() else len(chosen)
        if len(chosen) > edges:
            chosen = chosen[np.argsort(-self._scores()[chosen], kind="stable")[:edges]]
        chosen = chosen[np.lexsort((self.source[chosen], self.target[chosen], -abs(self.weight[chosen])))]
        place = np.cumsum(nodes) - 1
        row, notes = self.row[nodes], self.notes
        if len(row) < len(self.row):
            some = np.unique(row[row >= 0])
            row, notes = np.where(row >= 0, np.searchsorted(some, row), -1), notes.rows(some)
        return replace(
            self,
            **{name: getattr(self, name)[nodes] for name in _BY_NODE if name != "row"},
            kinds=self.kinds[nodes],
            row=row,
            notes=notes,
            source=place[self.source[chosen]],
            target=place[self.target[chosen]],
            weight=self.weight[chosen],
            n_edges=n_edges,
            share=self.share if nodes.all() else float(self.cumulative[nodes & (rank >= 0)].max(initial=0)),
        )

    def within(self, room: int) -> View:
        """Without examples, then with fewer nodes and edges; the page tells how many there are."""
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
        """Place of every feature and error by influence, 0 first; -1 for tokens and logits: always here."""
        inner = np.flatnonzero(self.kinds < KINDS.index(TOKEN))
        rank = np.full(len(self.kinds), -1, np.int64)
        rank[inner[np.argsort(self.cumulative[inner], kind="stable")]] = np.arange(len(inner))
        return rank

    def _scores(self) -> Array:
        """Influence that runs through each edge, as pruning scores it."""
        magnitude = np.abs(self.weight.astype(np.float64))
        entering = np.bincount(self.target, magnitude, len(self.kinds))
        onward = self.influence + np.nan_to_num(self.probability)
        found: Array = magnitude * (onward / np.maximum(entering, 1e-10))[self.target]
        return found


_BY_NODE = (
    *("layer", "position", "number", "activation", "influence", "cumulative", "probability"),
    "row",
)


def _candidates(score: Array, rows: GraphRows) -> Array:
    """Nodes [node] that may be shown: tokens, logits, and the most influential others, in their order."""
    counts = rows.counts
    inner = np.argsort(-score[: counts.token_nodes.start], kind="stable")[:NODES]
    inner = inner[score[inner] > 0]  # without influence, no threshold keeps a node
    found: Array = np.concatenate([np.sort(inner), np.arange(counts.token_nodes.start, counts.nodes)])
    return found


def _edges_among(rows: GraphRows, chosen: Array) -> tuple[Array, Array, Array]:
    """source, target (indices into `chosen`) and weight of every edge among these nodes, row by row."""
    counts = rows.counts
    place = np.full(counts.nodes, -1)
    place[chosen] = np.arange(len(chosen))
    columns = chosen[chosen < counts.sources]
    wanted = place[counts.target_nodes] >= 0
    step = max(1, BLOCK_BYTES // (4 * max(1, counts.sources)))
    parts = []
    for start in range(0, counts.targets, step):
        here = np.flatnonzero(wanted[start : start + step])
        if len(here):
            block = np.asarray(rows.weights[start : start + step].values, np.float32)[np.ix_(here, columns)]
            row, column = np.nonzero(block)
            parts.append((columns[column], counts.target_nodes[start + here[row]], block[row, column]))
    source, target, weight = (np.concatenate([part[i] for part in parts]) for i in range(3))
    return place[source], place[target], weight
