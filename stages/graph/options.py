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
    """Options of `attribution_graph`, as callers give them."""

    targets: Any = option(
        None,
        "Logits to explain: token ids, strings of one token each, or (label, weight, vector [hidden]) "
        "triples; default the most likely next tokens.",
    )
    max_n_logits: int = option(
        10, "Largest number of tokens that are explained without `targets`.", kind="count"
    )
    desired_logit_prob: float = option(
        0.95,
        "Without `targets`, the most likely tokens are explained until their probabilities add up to this, "
        "or `max_n_logits` is reached.",
    )
    max_feature_nodes: int | None = option(
        None, "Number of features that get incoming edges, chosen by influence; default all."
    )
    # Both as circuit-tracer's. Only their product matters here: batches are sized by memory.
    batch_size: int = option(
        512, "Features are ranked by influence again after batch_size * update_interval features."
    )
    update_interval: int = option(4, "Number of batches between two rankings of features.")
    zero_positions: int = option(
        1,
        "Number of positions at the start that have neither features nor errors (4 for dictionaries of "
        "instruction-tuned Gemma 3).",
    )
    arithmetic: str = option("float32", "Dtype in which edges are computed.", choices=("float32", "float64"))
    memory: int | str | None = option(
        None,
        'Memory for the computation beside the model, in bytes or as "2GiB"; default 1 GiB.',
        kind="bytes",
    )


@dataclass(frozen=True, eq=False)
class GraphOptions:
    """Settings that, with model, dictionary and prompt, determine a graph; all are part of its key."""

    targets: TargetChoice
    """Which logits are explained."""
    selection: RowSelection
    """Which features get incoming edges."""
    zero_positions: int = 1
    """Number of positions at the start that have neither features nor errors."""
    arithmetic: str = "float32"
    """Dtype in which edges are computed, "float32" or "float64"."""

    def params(self) -> dict[str, Any]:
        """The settings as JSON values, which enter the key of the graph."""
        # Memory and device are left out: edges do not depend on how they are batched.
        return {
            "targets": self.targets.canonical(),
            "selection": self.selection.canonical(),
            "zero_positions": self.zero_positions,
            "arithmetic": self.arithmetic,
        }
