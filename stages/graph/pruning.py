"""Prunes a graph to the nodes and edges that carry a given share of the influence on the logits.

As circuit-tracer's `prune_graph`, in three steps. First keep the most influential nodes that together have
`node_threshold` of the influence, and all tokens and logits. Of the edges among them keep those that together
have `edge_threshold` of the edge scores, M[t, s] (I + w)[t], with M and I of the graph of kept nodes. Then,
until nothing changes, remove features and errors without outgoing edges, and features without incoming ones.

Kept edges are lists, not masks: only a block of rows and the kept edges are in memory. Numpy only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ...pipeline import stage
from ...store.arrays import Floats, Ints
from ...store.errors import StageError
from .quantile import share_threshold, sorted_threshold
from .rows.influence import GraphRows, influence, scores

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["KeptPart", "cumulative_scores", "kept_part", "pruned_graph"]


@dataclass(frozen=True)
class KeptPart:
    """The nodes and edges of a graph that pruning keeps, with scores of all nodes."""

    nodes: npt.NDArray[np.bool_]
    """Whether each node is kept, bool [node]."""
    target: Ints
    """Target node of each kept edge, int [edge], sorted."""
    source: Ints
    """Source node of each kept edge, int [edge]."""
    weight: npt.NDArray[np.float32]
    """Weight of each kept edge in the whole graph, [edge]."""
    influence: Floats
    """Influence of each node in the whole graph, [node]."""
    cumulative: Floats
    """`cumulative_scores` of the whole graph, [node]."""

    @classmethod
    def of(cls, pruned: xr.Dataset) -> KeptPart:
        """Nodes and edges from the result of the stage `pruned_graph`."""
        return cls(
            nodes=pruned["kept"].values,
            target=pruned["edge_target"].values,
            source=pruned["edge_source"].values,
            weight=pruned["edge_weight"].values,
            influence=pruned["influence"].values,
            cumulative=pruned["cumulative"].values,
        )

    def edge_mask(self) -> npt.NDArray[np.bool_]:
        """Bool [target, source] over all nodes, True for kept edges."""
        mask = np.zeros((len(self.nodes), len(self.nodes)), bool)
        mask[self.target, self.source] = True
        return mask


def kept_part(rows: GraphRows, *, node_threshold: float = 0.8, edge_threshold: float = 0.98) -> KeptPart:
    """The most influential nodes and edges of a graph, chosen as the docstring of this module describes.

    Arguments:
        rows: Edges of the graph.
        node_threshold: Share of the influence that the kept nodes carry, 0 to 1.
        edge_threshold: Share of the edge scores that the kept edges carry, 0 to 1.

    Raises:
        StageError: A threshold is outside 0 to 1.
    """
    for name, share in (("node_threshold", node_threshold), ("edge_threshold", edge_threshold)):
        if not 0 <= share <= 1:
            raise StageError(f"expected {name} to be a share from 0 to 1, found {share!r}")
    count = rows.counts
    whole = influence(rows)
    nodes = whole.node >= sorted_threshold(whole.node, node_threshold)
    nodes[count.token_nodes.start :] = True  # tokens and logits are always kept
    kept_rows = replace(rows, kept=nodes)
    part = influence(kept_rows)  # rows are normalised again, over the kept nodes alone
    # (I + w)[t] per unit of the row sum that normalises M; 1e-10 as in circuit-tracer.
    target_scores = part.with_logits(rows.logit_weights)[count.target_nodes] / np.maximum(part.row_sum, 1e-10)

    # Read twice from the rows: for the threshold, and for the edges above it. No matrix of scores exists.
    def edge_scores() -> Iterator[tuple[slice, Floats]]:
        for block_rows, block in kept_rows.blocks(slice(0, count.targets)):
            yield block_rows, block * target_scores[block_rows, None]

    least = share_threshold(lambda: (block for _, block in edge_scores()), edge_threshold)
    target, source, weight = _edges_above(rows, edge_scores(), least)
    nodes, edges = _connected(nodes, target, source, count.features, count.features + count.errors)
    return KeptPart(
        nodes=nodes,
        target=target[edges],
        source=source[edges],
        weight=weight[edges],
        influence=whole.node,
        cumulative=cumulative_scores(whole.node),
    )


def cumulative_scores(influence: Floats) -> Floats:
    """For each node, the share of the total influence that it and more influential nodes carry [node].

    Small values mark important nodes.
    """
    order = np.argsort(-influence, kind="stable")
    shares = np.empty(len(influence))
    total = influence.sum()
    shares[order] = np.cumsum(influence[order]) / (total if total else 1.0)
    return shares


def _edges_above(
    rows: GraphRows, blocks: Iterator[tuple[slice, Floats]], least: float
) -> tuple[Ints, Ints, npt.NDArray[np.float32]]:
    """(target, source, weight), each [edge], of the edges with a score of at least `least`."""
    nodes = rows.counts.target_nodes
    parts: list[tuple[Ints, Ints, npt.NDArray[np.float32]]] = []
    for block_rows, block in blocks:
        target, source = np.nonzero(block >= least)
        # Read again: `blocks` has magnitudes, and edges keep their signs.
        weights = np.asarray(rows.weights[block_rows].values, np.float32)[target, source]
        parts.append((nodes[block_rows][target], source, weights))
    target, source, weight = (np.concatenate([part[i] for part in parts]) for i in range(3))
    return target, source, weight


def _connected(
    nodes: npt.NDArray[np.bool_], target: Ints, source: Ints, features: int, inner: int
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Remove unconnected nodes and their edges until nothing changes: (kept nodes, kept edges), both bool.

    Arguments:
        nodes: Whether each node is kept so far, bool [node].
        target, source: Numbers of the nodes of each edge [edge].
        features: Number of features, the first nodes, which need incoming and outgoing edges.
        inner: Number of features and errors, the first nodes, which need outgoing edges.
    """
    nodes, edges = nodes.copy(), np.ones(len(target), bool)
    while True:
        before = int(nodes.sum())  # a removed node may leave others unconnected
        nodes[:inner] &= np.bincount(source[edges], minlength=len(nodes))[:inner] > 0
        nodes[:features] &= np.bincount(target[edges], minlength=len(nodes))[:features] > 0
        edges &= nodes[target] & nodes[source]
        if int(nodes.sum()) == before:
            return nodes, edges


@stage(
    version=1,
    inputs={"graph": None},
    outputs={
        "kept": ("node",),
        "influence": ("node",),
        "cumulative": ("node",),
        "edge_target": ("edge",),
        "edge_source": ("edge",),
        "edge_weight": ("edge",),
        "replacement_score": (),
        "completeness_score": (),
    },
)
def pruned_graph(
    graph: xr.Dataset, *, node_threshold: float = 0.8, edge_threshold: float = 0.98
) -> xr.Dataset:
    """Prune an attribution graph to its most influential nodes and edges, and compute its scores.

    Arguments:
        graph: Dataset of the graph.
        node_threshold: Share of the influence that the kept nodes carry, 0 to 1.
        edge_threshold: Share of the edge scores that the kept edges carry, 0 to 1.

    Returns:
        `kept`, bool [node]; `edge_source`, `edge_target`, `edge_weight` of the kept edges; `influence` and
        `cumulative` (`cumulative_scores`) of all nodes; `replacement_score` and `completeness_score`.
    """
    import xarray as xr

    rows = GraphRows.of(graph)
    part = kept_part(rows, node_threshold=node_threshold, edge_threshold=edge_threshold)
    return xr.Dataset(
        {
            "kept": ("node", part.nodes),
            "influence": ("node", part.influence),
            "cumulative": ("node", part.cumulative),
            "edge_target": ("edge", part.target),
            "edge_source": ("edge", part.source),
            "edge_weight": ("edge", part.weight),
            **{name: ((), value) for name, value in scores(rows, influence(rows)).items()},
        }
    )
