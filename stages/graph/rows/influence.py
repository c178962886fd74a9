"""Influence of every node on the logits, and scores of the whole graph, computed in blocks of rows. Numpy
only.

With M the magnitudes of the edges, each row divided by its sum, and w the weights of the logits, influence is
w M + w M^2 + ... = w ((1 - M)^-1 - 1) (Ameisen et al. 2025, "Circuit Tracing", appendix; circuit-tracer
`compute_influence`). Features read before their layer writes, so edges run from lower to higher layers only:
processing rows from the last layer down, the influence of a node is complete before its row is used, and one
pass over the rows suffices. No N x N matrix exists, and rows may be on disk.

Scores of the unpruned graph: replacement = influence of tokens / influence of tokens and errors.
completeness = share of the input of nodes, weighted by their influence, that does not come from errors.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ....store.arrays import Bools, Floats
from ....store.errors import ShapeError
from .nodes import NodeCounts, counts_of

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["Influence", "GraphRows", "influence", "partial_influence", "scores"]

BLOCK_BYTES = 1 << 23
"""Largest size in bytes of the rows, as float64, that are in memory at once."""
_SMALLEST = 1e-10  # as in circuit-tracer: an empty row stays empty


@dataclass(frozen=True)
class GraphRows:
    """The edges of a graph, read in blocks of rows."""

    weights: xr.DataArray
    """Edge weights [target, source], in memory or on disk."""
    counts: NodeCounts
    """Numbers of nodes of each kind."""
    layer: npt.NDArray[np.int64]
    """Layer of each row's target, ascending [target]; the number of layers for logits."""
    logit_weights: Floats
    """Weight of each logit [logit]: its probability, or the weight of a custom direction."""
    kept: Bools | None = None
    """Which nodes are kept, bool [node]: edges of others count as zero. None keeps all."""

    @classmethod
    def of(cls, graph: xr.Dataset) -> GraphRows:
        """Edges of a graph, from the dataset that `GraphNode` stores."""
        count = counts_of(graph)
        layer = graph["active_features"].values[graph["selected_features"].values, 0]
        ends = np.full(count.logits, count.layers)
        weights = np.asarray(graph["logit_probabilities"].values, np.float64)
        return cls(graph["weights"], count, np.concatenate([layer, ends]), weights)

    def blocks(self, rows: slice) -> Iterator[tuple[slice, Floats]]:
        """Yield (rows, magnitudes of their edges, float64 [row, source]) for blocks of a range of rows."""
        step = max(1, BLOCK_BYTES // (8 * max(1, self.counts.sources)))
        for start in range(rows.start, rows.stop, step):
            block_rows = slice(start, min(start + step, rows.stop))
            block = np.abs(np.asarray(self.weights[block_rows].values, np.float64))
            if self.kept is not None:
                block *= self.kept[: self.counts.sources]
                block *= self.kept[self.counts.target_nodes[block_rows], None]
            yield block_rows, block

    def layers(self) -> Iterator[slice]:
        """Yield the range of rows of each layer: the logits first, then from the last layer down."""
        # Rows are sorted by layer, so each layer is one range.
        ends = np.flatnonzero(np.diff(self.layer)) + 1
        cuts = [0, *ends.tolist(), len(self.layer)]
        for start, stop in reversed(list(itertools.pairwise(cuts))):
            if stop > start:
                yield slice(start, stop)


@dataclass(frozen=True)
class Influence:
    """Influence of the nodes of a graph on the logits, and what its scores need."""

    node: Floats
    """Influence of each node [node]; 0 for logits."""
    row_sum: Floats
    """Sum of the magnitudes of the edges into each target [target]."""
    error_share: Floats
    """Share of `row_sum` that comes from error nodes [target]."""

    def with_logits(self, weights: Floats) -> Floats:
        """Influence [node] plus the weights [logit] of the logits themselves."""
        total = self.node.copy()
        total[len(total) - len(weights) :] += weights
        return total


def influence(rows: GraphRows) -> Influence:
    """Influence of every node on the logits, as the docstring of this module defines it.

    Raises:
        ShapeError: An edge runs from a layer to itself or to a lower one.
    """
    counts = rows.counts
    total = np.zeros(counts.nodes)
    total[counts.sources :] = rows.logit_weights
    row_sum, error_share = np.zeros(counts.targets), np.zeros(counts.targets)
    nodes = counts.target_nodes
    for layer in rows.layers():
        through_layer = np.zeros(counts.sources)
        for block_rows, block in rows.blocks(layer):
            row_sum[block_rows] = block.sum(1)
            divisor = np.maximum(row_sum[block_rows], _SMALLEST)
            error_share[block_rows] = block[:, counts.error_nodes].sum(1) / divisor
            through_layer += (total[nodes[block_rows]] / divisor) @ block
        # Complete when used only if no edge runs within the layer or down; a transposed matrix fails here.
        if through_layer[layer.start : counts.features].any():
            raise ShapeError(
                "expected edges from lower to higher layers only, found one into layer "
                f"{rows.layer[layer.start]} from a feature of the same layer or a later one; check that the "
                "matrix is [target, source], not transposed"
            )
        total[: counts.sources] += through_layer
    total[counts.sources :] = 0  # the weights of the logits were the start of the series, not a term of it
    return Influence(total, row_sum, error_share)


def scores(rows: GraphRows, result: Influence) -> Mapping[str, float]:
    """Replacement score and completeness score of a graph.

    Arguments:
        rows: Edges of the graph.
        result: Influence of its nodes.

    Returns:
        "replacement_score" and "completeness_score", both 0 to 1; NaN if no node has influence.
    """
    counts = rows.counts
    tokens = float(result.node[counts.token_nodes].sum())
    errors = float(result.node[counts.error_nodes].sum())
    weight = result.with_logits(rows.logit_weights)
    lost = float(result.error_share @ weight[counts.target_nodes])
    whole = float(weight.sum())
    return {
        "replacement_score": tokens / (tokens + errors) if tokens + errors else float("nan"),
        "completeness_score": 1 - lost / whole if whole else float("nan"),
    }


def partial_influence(blocks: Sequence[tuple[npt.NDArray[np.int64], Any]], start: Floats) -> Floats:
    """Influence [node] of all nodes on the logits, through the rows computed so far.

    Rows are in any order, so the series is summed term by term (circuit-tracer `compute_partial_influences`).

    Arguments:
        blocks: Blocks of rows: (node of each row, weights [row, source], in memory or on disk).
        start: Weights of the logits, 0 for all other nodes [node].

    Returns:
        Influence [node].
    """
    # 1e-8 here and 1e-10 above, as in circuit-tracer.
    divisors = [np.maximum(np.abs(_read(weights)).sum(1, dtype=np.float64), 1e-8) for _, weights in blocks]
    total, step = np.zeros_like(start), start
    # Ends, as edges run upwards only: after as many steps as the longest path has edges.
    while step.any():
        following = np.zeros_like(start)
        for (nodes, weights), divisor in zip(blocks, divisors, strict=True):
            share = step[nodes] / divisor
            if share.any():  # otherwise the block need not be read from disk
                rows = np.abs(_read(weights))
                following[: rows.shape[1]] += share @ rows
        total += following
        step = following
    return total


def _read(weights: Any) -> npt.NDArray[np.float32]:
    """Rows of a block as a numpy array; rows on disk are read at every call, to save memory."""
    return np.asarray(weights[:], np.float32)
