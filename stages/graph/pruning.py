"""The part of a graph that matters: nodes and edges that carry a given share of the influence on the logits.

Border: a graph's dataset in, masks and edges out; numpy only. As circuit-tracer's `prune_graph`: the nodes
that together have `node_threshold` of the influence, all tokens and logits; of the edges among them those
that have `edge_threshold` of the edges' scores, M[t, s] (I + w)[t] with M and I of the matrix so cut; then,
until nothing changes, features and errors without outgoing edges and features without incoming ones go.

Kept edges are listed, not masked: what is in memory is a block of rows and the edges that are kept.
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

__all__ = ["Kept", "cumulative_scores", "kept_part", "pruned_graph"]


@dataclass(frozen=True)
class Kept:
    """What is kept of a graph.

    nodes: bool [node]. target, source: node indices of the kept edges, [edge], row by row; weight: of each,
    as in the graph. influence, cumulative: [node], of the whole graph.
    """

    nodes: npt.NDArray[np.bool_]
    target: Ints
    source: Ints
    weight: npt.NDArray[np.float32]
    influence: Floats
    cumulative: Floats

    @classmethod
    def of(cls, pruned: xr.Dataset) -> Kept:
        """From what the stage `pruned_graph` gave."""
        return cls(
            nodes=pruned["kept"].values,
            target=pruned["edge_target"].values,
            source=pruned["edge_source"].values,
            weight=pruned["edge_weight"].values,
            influence=pruned["influence"].values,
            cumulative=pruned["cumulative"].values,
        )

    def edge_mask(self) -> npt.NDArray[np.bool_]:
        """The kept edges as a matrix, bool [node, node]: row = target."""
        mask = np.zeros((len(self.nodes), len(self.nodes)), bool)
        mask[self.target, self.source] = True
        return mask


def kept_part(rows: GraphRows, *, node_threshold: float = 0.8, edge_threshold: float = 0.98) -> Kept:
    """Prune; see the module's docstring. Raises StageError for thresholds outside 0 to 1."""
    for name, share in (("node_threshold", node_threshold), ("edge_threshold", edge_threshold)):
        if not 0 <= share <= 1:
            raise StageError(f"expected {name} from 0 to 1, found {share!r}")
    count = rows.counts
    found = influence(rows)
    nodes = found.node >= sorted_threshold(found.node, node_threshold)
    nodes[count.token_nodes.start :] = True
    cut = replace(rows, kept=nodes)
    within = influence(cut)
    onward = within.with_logits(rows.logit_weights)[count.target_nodes] / np.maximum(within.row_sum, 1e-10)

    def edge_scores() -> Iterator[tuple[slice, Floats]]:
        for here, block in cut.blocks(slice(0, count.targets)):
            yield here, block * onward[here, None]

    least = share_threshold(lambda: (block for _, block in edge_scores()), edge_threshold)
    target, source, weight = _listed(rows, edge_scores(), least)
    nodes, edges = _connected(nodes, target, source, count.features, count.features + count.errors)
    return Kept(
        nodes=nodes,
        target=target[edges],
        source=source[edges],
        weight=weight[edges],
        influence=found.node,
        cumulative=cumulative_scores(found.node),
    )


def cumulative_scores(influence: Floats) -> Floats:
    """Share of the influence of all nodes that are at least as influential: small means important; [node]."""
    order = np.argsort(-influence, kind="stable")
    found = np.empty(len(influence))
    total = influence.sum()
    found[order] = np.cumsum(influence[order]) / (total if total else 1.0)
    return found


def _listed(
    rows: GraphRows, blocks: Iterator[tuple[slice, Floats]], least: float
) -> tuple[Ints, Ints, npt.NDArray[np.float32]]:
    """Target, source and weight of the edges with a score of at least `least`."""
    nodes = rows.counts.target_nodes
    parts: list[tuple[Ints, Ints, npt.NDArray[np.float32]]] = []
    for here, block in blocks:
        target, source = np.nonzero(block >= least)
        weights = np.asarray(rows.weights[here].values, np.float32)[target, source]
        parts.append((nodes[here][target], source, weights))
    target, source, weight = (np.concatenate([part[i] for part in parts]) for i in range(3))
    return target, source, weight


def _connected(
    nodes: npt.NDArray[np.bool_], target: Ints, source: Ints, features: int, inner: int
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Nodes and edges left when what leads nowhere, and features nothing leads to, are gone.

    features: that many first nodes need edges in and out; inner: that many need edges out.
    """
    nodes, edges = nodes.copy(), np.ones(len(target), bool)
    while True:
        before = int(nodes.sum())
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
    """The part of an attribution graph that carries these shares of the influence, and the graph's scores.

    kept: bool [node]. edge_*: kept edges, from node edge_source to node edge_target, with the weight they
    have in the graph. cumulative: of nodes at least as influential, the share of all influence.
    """
    import xarray as xr

    rows = GraphRows.of(graph)
    found = kept_part(rows, node_threshold=node_threshold, edge_threshold=edge_threshold)
    return xr.Dataset(
        {
            "kept": ("node", found.nodes),
            "influence": ("node", found.influence),
            "cumulative": ("node", found.cumulative),
            "edge_target": ("edge", found.target),
            "edge_source": ("edge", found.source),
            "edge_weight": ("edge", found.weight),
            **{name: ((), value) for name, value in scores(rows, influence(rows)).items()},
        }
    )
