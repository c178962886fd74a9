"""How much every node matters for the logits, and how much of that is explained; row block by row block.

Border: rows of edges and counts of nodes; numpy only.

With M the magnitudes of the edges, each row divided by its sum, and w the weights of the logits, influence is
w M + w M^2 + ... = w ((1 - M)^-1 - 1) (Ameisen et al. 2025, "Circuit Tracing", appendix; circuit-tracer
`compute_influence`). Features read before their layer writes, so edges run from lower to higher layers only:
rows taken from the last layer down are complete when their turn comes, and one pass over the rows, in
reverse, gives the sum. No N x N matrix exists, and rows may lie on disk.

Scores, of the unpruned graph: replacement = influence of tokens / influence of tokens and errors.
completeness = share of what enters nodes, weighted by their influence, that does not come from errors.
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
"""Of rows, as float64, that exist at a time."""
_SMALLEST = 1e-10  # as in circuit-tracer: an empty row stays empty


@dataclass(frozen=True)
class GraphRows:
    """The edges of a graph: rows that may lie on disk, read in blocks.

    weights: [target, source], an array on disk or in memory. layer: of each row, ascending, logits last.
    logit_weights [logit]. kept: bool [node]; edges of the others count as zero.
    """

    weights: xr.DataArray
    counts: NodeCounts
    layer: npt.NDArray[np.int64]
    logit_weights: Floats
    kept: Bools | None = None

    @classmethod
    def of(cls, graph: xr.Dataset) -> GraphRows:
        """The rows of a graph's dataset."""
        count = counts_of(graph)
        layer = graph["active_features"].values[graph["selected_features"].values, 0]
        ends = np.full(count.logits, count.layers)
        weights = np.asarray(graph["logit_probabilities"].values, np.float64)
        return cls(graph["weights"], count, np.concatenate([layer, ends]), weights)

    def blocks(self, rows: slice) -> Iterator[tuple[slice, Floats]]:
        """Magnitudes of the edges of a range of rows, block by block: (rows, float64 [row, source])."""
        step = max(1, BLOCK_BYTES // (8 * max(1, self.counts.sources)))
        for start in range(rows.start, rows.stop, step):
            here = slice(start, min(start + step, rows.stop))
            block = np.abs(np.asarray(self.weights[here].values, np.float64))
            if self.kept is not None:
                block *= self.kept[: self.counts.sources]
                block *= self.kept[self.counts.target_nodes[here], None]
            yield here, block

    def layers(self) -> Iterator[slice]:
        """Ranges of rows of one layer, the logits first, then from the last layer down."""
        ends = np.flatnonzero(np.diff(self.layer)) + 1
        cuts = [0, *ends.tolist(), len(self.layer)]
        for start, stop in reversed(list(itertools.pairwise(cuts))):
            if stop > start:
                yield slice(start, stop)


@dataclass(frozen=True)
class Influence:
    """node [node]: influence. row_sum [target]: of magnitudes. error_share [target]: of it, from errors."""

    node: Floats
    row_sum: Floats
    error_share: Floats

    def with_logits(self, weights: Floats) -> Floats:
        """Influence, with the logits' own weights added: [node]."""
        found = self.node.copy()
        found[len(found) - len(weights) :] += weights
        return found


def influence(rows: GraphRows) -> Influence:
    """Influence of every node; see the module's docstring.

    Raises ShapeError if edges run from a layer to itself or a lower one.
    """
    counts = rows.counts
    total = np.zeros(counts.nodes)
    total[counts.sources :] = rows.logit_weights
    row_sum, error_share = np.zeros(counts.targets), np.zeros(counts.targets)
    nodes = counts.target_nodes
    for layer in rows.layers():
        found = np.zeros(counts.sources)
        for here, block in rows.blocks(layer):
            row_sum[here] = block.sum(1)
            divisor = np.maximum(row_sum[here], _SMALLEST)
            error_share[here] = block[:, counts.error_nodes].sum(1) / divisor
            found += (total[nodes[here]] / divisor) @ block
        if found[layer.start : counts.features].any():
            raise ShapeError(
                "expected edges from lower to higher layers only, found one into layer "
                f"{rows.layer[layer.start]} from a feature of the same layer or a later one; is this matrix "
                "transposed?"
            )
        total[: counts.sources] += found
    total[counts.sources :] = 0
    return Influence(total, row_sum, error_share)


def scores(rows: GraphRows, found: Influence) -> Mapping[str, float]:
    """replacement_score and completeness_score, both 0 to 1; NaN where nothing has influence."""
    counts = rows.counts
    tokens = float(found.node[counts.token_nodes].sum())
    errors = float(found.node[counts.error_nodes].sum())
    weight = found.with_logits(rows.logit_weights)
    lost = float(found.error_share @ weight[counts.target_nodes])
    whole = float(weight.sum())
    return {
        "replacement_score": tokens / (tokens + errors) if tokens + errors else float("nan"),
        "completeness_score": 1 - lost / whole if whole else float("nan"),
    }


def partial_influence(blocks: Sequence[tuple[npt.NDArray[np.int64], Any]], start: Floats) -> Floats:
    """Influence [node] of all nodes by way of the rows there are so far.

    blocks: (node of each row, weights [row, source], in memory or not). start [node]: the weights of the
    logits. Rows come in any order, so the series is summed term by term (circuit-tracer
    `compute_partial_influences`).
    """
    divisors = [np.maximum(np.abs(_read(weights)).sum(1, dtype=np.float64), 1e-8) for _, weights in blocks]
    total, step = np.zeros_like(start), start
    while step.any():
        following = np.zeros_like(start)
        for (nodes, weights), divisor in zip(blocks, divisors, strict=True):
            share = step[nodes] / divisor
            if share.any():
                rows = np.abs(_read(weights))
                following[: rows.shape[1]] += share @ rows
        total += following
        step = following
    return total


def _read(weights: Any) -> npt.NDArray[np.float32]:
    """Rows of a block; those on disk are read, and not held."""
    return np.asarray(weights[:], np.float32)
