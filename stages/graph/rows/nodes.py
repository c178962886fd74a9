"""The nodes of a graph: how many of each kind, in which order, and their labels.

Border: counts and labels; never imports torch.

Order, as in circuit-tracer: selected features by (layer, position, index); errors by (layer, position);
tokens; logits. Only features and logits have incoming edges, only features, errors and tokens outgoing ones,
so the stored matrix has a row for each of the former and a column for each of the latter.

Axes: target = features, then logits; source = features, errors, tokens; node = all of them in order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ....store.arrays import Ints

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["ERROR", "FEATURE", "LOGIT", "TOKEN", "NodeCounts", "counts_of", "node_labels"]

FEATURE, ERROR, TOKEN, LOGIT = "feature", "error", "token", "logit"


@dataclass(frozen=True)
class NodeCounts:
    """How many nodes there are of each kind."""

    features: int
    layers: int
    positions: int
    logits: int

    @property
    def errors(self) -> int:
        """One per layer and position."""
        return self.layers * self.positions

    @property
    def sources(self) -> int:
        """Columns: nodes that may have outgoing edges."""
        return self.features + self.errors + self.positions

    @property
    def targets(self) -> int:
        """Rows: nodes that may have incoming edges."""
        return self.features + self.logits

    @property
    def nodes(self) -> int:
        """How many nodes there are of all kinds."""
        return self.sources + self.logits

    @property
    def error_nodes(self) -> slice:
        """Errors among nodes, or sources."""
        return slice(self.features, self.features + self.errors)

    @property
    def token_nodes(self) -> slice:
        """Tokens among nodes, or sources."""
        return slice(self.features + self.errors, self.sources)

    @property
    def target_nodes(self) -> Ints:
        """Node of every row: int64 [target]."""
        return np.concatenate([np.arange(self.features), np.arange(self.sources, self.nodes)])


def counts_of(graph: xr.Dataset) -> NodeCounts:
    """The counts of a graph's dataset."""
    sizes = graph.sizes
    return NodeCounts(
        sizes["selected"], int(graph.attrs["n_layers"]), sizes["input_position"], sizes["logit"]
    )


def node_labels(graph: xr.Dataset) -> dict[str, npt.NDArray[Any]]:
    """kind, layer, position, feature, activation of every node, each [node].

    layer: -1 for tokens, the number of layers for logits. feature: index in its layer, or the token's id, or
    -1 for errors. activation: NaN for all but features.
    """
    count = counts_of(graph)
    chosen = graph["selected_features"].values
    features = graph["active_features"].values[chosen]
    last = count.positions - 1
    error_layer, error_position = np.divmod(np.arange(count.errors), max(count.positions, 1))
    sizes = (count.features, count.errors, count.positions, count.logits)
    no = np.full(count.nodes - count.features, np.nan)
    return {
        "kind": np.repeat(np.array([FEATURE, ERROR, TOKEN, LOGIT], object), sizes).astype(str),
        "layer": np.concatenate(
            [features[:, 0], error_layer, np.full(sizes[2], -1), np.full(sizes[3], count.layers)]
        ),
        "position": np.concatenate(
            [features[:, 1], error_position, np.arange(count.positions), np.full(sizes[3], last)]
        ),
        "feature": np.concatenate(
            [
                features[:, 2],
                np.full(count.errors, -1),
                graph["input_tokens"].values,
                graph["logit_token_ids"].values,
            ]
        ),
        "activation": np.concatenate([graph["activation_values"].values[chosen], no]),
    }
