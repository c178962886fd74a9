"""Options of attribution graphs: `AttributionOptions` of callers, and `GraphOptions`, part of graph keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..options import option
from .rows.selection import RowSelection
from .rows.targets import TargetChoice

__all__ = ["AttributionOptions", "GraphOptions"]


@dataclass(frozen=True)
class AttributionOptions:
    """Options of `attribution_graph`."""

    targets: Any = option(
        None,
        "Logits to explain: token ids, strings of one token each, or (label, weight, vector [hidden]) "
        "triples; default the likeliest tokens.",
    )
    max_n_logits: int = option(10, "Most tokens explained by default.", kind="count")
    desired_logit_prob: float = option(
        0.95, "Total probability that the tokens explained by default reach, if `max_n_logits` can."
    )
    max_feature_nodes: int | None = option(
        None, "Number of features with incoming edges, chosen greedily by influence; default all."
    )
    # Both as circuit-tracer's. Only their product matters here: batches are sized by memory.
    batch_size: int = option(
        512, "With `update_interval`: batch_size * update_interval features between two rankings."
    )
    update_interval: int = option(4, "Batches between two rankings of features.")
    zero_positions: int = option(
        1,
        "Number of first positions that have neither features nor errors (Gemma 3's instruction-tuned "
        "dictionaries: 4).",
    )
    arithmetic: str = option("float32", "Dtype of the linear maps.", choices=("float32", "float64"))
    memory: int | str | None = option(
        None, 'Bytes the computation may take beside the model, or "2GiB"; default 1 GiB.', kind="bytes"
    )


@dataclass(frozen=True, eq=False)
class GraphOptions:
    """Settings that determine a graph, besides model, dictionary and prompt; all are part of its key."""

    targets: TargetChoice
    """Logits to explain."""
    selection: RowSelection
    """Features that get incoming edges."""
    zero_positions: int = 1
    """Number of first positions without features and errors."""
    arithmetic: str = "float32"
    """Dtype of the linear maps, "float32" or "float64"."""

    def params(self) -> dict[str, Any]:
        """JSON values for the key."""
        # Without memory and device: rows do not depend on their batch.
        return {
            "targets": self.targets.canonical(),
            "selection": self.selection.canonical(),
            "zero_positions": self.zero_positions,
            "arithmetic": self.arithmetic,
        }
