"""Nodes of a graph: their number, order and labels. Never imports torch.

The order is that of circuit-tracer: selected features by (layer, position, index); errors by (layer,
position); tokens; logits. Only features and logits have incoming edges, and only features, errors and tokens
have outgoing edges, so the stored matrix has one row per feature and logit, and one column per feature, error
and token.

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
"""Node kinds, values of the label `kind`."""


@dataclass(frozen=True)
class NodeCounts:
    """Numbers of a graph's nodes of each kind, and the ranges that they occupy."""

    features: int
    """Number of features that are nodes."""
    layers: int
    """Number of layers of the model."""
    positions: int
    """Number of tokens of the prompt."""
    logits: int
    """Number of logits that are explained."""

    @property
    def errors(self) -> int:
        """Number of error nodes: one per layer and position."""
        return self.layers * self.positions

    @property
    def sources(self) -> int:
        """Number of columns of the stored matrix: features, errors and tokens."""
        return self.features + self.errors + self.positions

    @property
    def targets(self) -> int:
        """Number of rows of the stored matrix: features and logits."""
        return self.features + self.logits

    @property
    def nodes(self) -> int:
        """Number of all nodes."""
        return self.sources + self.logits

    @property
    def error_nodes(self) -> slice:
        """Range of the error nodes among all nodes, and among the columns of the stored matrix."""
        return slice(self.features, self.features + self.errors)

    @property
    def token_nodes(self) -> slice:
        """Range of the token nodes among all nodes, and among the columns of the stored matrix."""
        return slice(self.features + self.errors, self.sources)

    @property
    def target_nodes(self) -> Ints:
        """Number of the node to which each row of the stored matrix belongs, int64 [target]."""
        return np.concatenate([np.arange(self.features), np.arange(self.sources, self.nodes)])


def counts_of(graph: xr.Dataset) -> NodeCounts:
    """Numbers of a graph's nodes of each kind, from the graph's dataset."""
    sizes = graph.sizes
    return NodeCounts(
        sizes["selected"], int(graph.attrs["n_layers"]), sizes["input_position"], sizes["logit"]
    )


def node_labels(graph: xr.Dataset) -> dict[str, npt.NDArray[Any]]:
    """Kind, layer, position, feature and activation of every node of a graph.

    Returns:
        By name, arrays [node].
        "kind": `FEATURE`, `ERROR`, `TOKEN` or `LOGIT`. "layer": -1 for tokens, the number of layers for
        logits. "position". "feature": index in its layer; token id for tokens and logits; -1 for errors.
        "activation": NaN for all kinds but features.
    """
    count = counts_of(graph)
    selected = graph["selected_features"].values
    features = graph["active_features"].values[selected]
    # Logits are those of the last position.
    last_position = count.positions - 1
    error_layer, error_position = np.divmod(np.arange(count.errors), max(count.positions, 1))
    sizes = (count.features, count.errors, count.positions, count.logits)
    # Only features have activations.
    no_activation = np.full(count.nodes - count.features, np.nan)
    return {
        "kind": np.repeat(np.array([FEATURE, ERROR, TOKEN, LOGIT], object), sizes).astype(str),
        "layer": np.concatenate(
            [features[:, 0], error_layer, np.full(sizes[2], -1), np.full(sizes[3], count.layers)]
        ),
        "position": np.concatenate(
            [features[:, 1], error_position, np.arange(count.positions), np.full(sizes[3], last_position)]
        ),
        "feature": np.concatenate(
            [
                features[:, 2],
                np.full(count.errors, -1),
                graph["input_tokens"].values,
                graph["logit_token_ids"].values,
            ]
        ),
        "activation": np.concatenate([graph["activation_values"].values[selected], no_activation]),
    }
