"""What the page of an attribution graph holds: its scores, the graph to look into, its strongest features.

Border: a graph, and what is known of its features, in; elements out. What any of it looks like is report/.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..stages.features.corpus.examples import contexts
from ..stages.features.layers.layout import FeatureId
from ..stages.graph.rows.nodes import ERROR, FEATURE
from ..stages.logits.lens import format_token
from .report import Column, Element, Graph, Run, Table, Values

if TYPE_CHECKING:
    import xarray as xr

    from ..stages.graph.graph import AttributionGraph, PrunedGraph

__all__ = ["LISTED", "StrongFeature", "examples_of", "graph_elements", "strongest_features"]

LISTED = 15
"""Features in the table."""


def graph_elements(
    graph: AttributionGraph,
    *,
    node_threshold: float = 0.8,
    edge_threshold: float = 0.98,
    vocabulary: Sequence[str] = (),
    effects: xr.Dataset | None = None,
    examples: Mapping[int, xr.Dataset] | None = None,
    sources: tuple[str, ...] = (),
    **told: Any,
) -> list[Element]:
    """Elements of a page about one graph.

    effects: what `logit_effects` gives for it.  examples: see `examples_of`.
    vocabulary: strings by token id, for both.  sources: the workflow's results these were made from.  told:
    other fields of the graph's element, such as pinned and supernodes.
    """
    pruned = graph.prune(node_threshold, edge_threshold)
    element = Graph.of(
        graph,
        title="Tokens, features and errors that bring about the output",
        caption="Point at a node for its numbers and its edges, click to pin it. An edge tells what its "
        "target would gain if its source were added once more: pre-activation of a feature, or logit less "
        "the mean of all logits. The sliders prune as AttributionGraph.prune does; pins and groups are "
        "saved as circuit-tracer's viewer saves them.",
        node_threshold=node_threshold,
        edge_threshold=edge_threshold,
        vocabulary=vocabulary,
        effects=effects,
        examples=examples,
        sources=sources,
        **told,
    )
    strongest = strongest_features(graph, graph.influence, vocabulary=vocabulary, effects=effects)
    return [_scores(pruned, sources), element, _strongest(strongest, sources)]


@dataclass(frozen=True)
class StrongFeature:
    """A feature at a position: a node of a graph (`node` its number), and the tokens it raises and lowers."""

    node: int
    feature: FeatureId
    position: int
    token: str
    activation: float
    influence: float
    raised: tuple[str, ...] = ()
    lowered: tuple[str, ...] = ()

    def cells(self, words: int | None = None) -> tuple[str, ...]:
        """As a row of a table: feature, token, activation, influence, raises, lowers (so many words each)."""
        return (
            str(self.feature),
            f"{self.position} {self.token}",
            f"{self.activation:.3f}",
            f"{self.influence:.4f}",
            " · ".join(self.raised[:words]),
            " · ".join(self.lowered[:words]),
        )


def strongest_features(
    graph: AttributionGraph,
    influence: npt.NDArray[np.float64],
    *,
    vocabulary: Sequence[str] = (),
    effects: xr.Dataset | None = None,
    most: int = LISTED,
) -> list[StrongFeature]:
    """The features with most influence, largest first; equal ones in the graph's order.

    influence [node]: as the graph tells it. effects: what `logit_effects` gives for it. vocabulary: strings
    by token id.
    """
    nodes = graph.nodes
    texts = [format_token(str(text)) for text in graph.dataset["input_text"].values]

    def tokens(name: str, node: int) -> tuple[str, ...]:
        if effects is None:
            return ()
        return tuple(format_token(vocabulary[token]) for token in effects[name].values[node].tolist())

    found = []
    for node in np.argsort(-influence[: graph.counts.features], kind="stable")[:most].tolist():
        layer, position, index = (int(nodes[name].values[node]) for name in ("layer", "position", "feature"))
        found.append(
            StrongFeature(
                node,
                FeatureId(layer, index),
                position,
                texts[position],
                float(nodes["activation"].values[node]),
                float(influence[node]),
                tokens("raised", node),
                tokens("lowered", node),
            )
        )
    return found


def examples_of(
    graph: AttributionGraph,
    encoded: Mapping[int, xr.Dataset],
    ranked: Mapping[int, xr.Dataset],
    *,
    most: int = 4,
) -> dict[int, xr.Dataset]:
    """The texts of a stored corpus around the strongest places of a graph's features, by layer.

    encoded: layer -> the corpus as features (`encode_nodes`).  ranked: layer -> what `top_examples` gives
    for it, of all features.  most: texts per feature.
    """
    active = graph.active_features[graph.selected_features]
    return {
        layer: contexts(
            ranked[layer].isel(rank=slice(most)),
            table,
            features=np.unique(active[active[:, 0] == layer, 2]).tolist(),
        )
        for layer, table in encoded.items()
    }


def _scores(pruned: PrunedGraph, sources: tuple[str, ...]) -> Values:
    graph, kinds = pruned.graph, pruned.graph.nodes["kind"].values
    kept = {kind: int(np.count_nonzero(kinds[pruned.node_mask] == kind)) for kind in (FEATURE, ERROR)}
    return Values(
        title="How much of the output the features explain",
        caption="Replacement: share of the influence that comes from tokens rather than from errors. "
        "Completeness: share of what enters nodes, weighted by their influence, that does not come from "
        "errors.",
        pairs=(
            ("replacement score", f"{graph.replacement_score:.3f}"),
            ("completeness score", f"{graph.completeness_score:.3f}"),
            ("features kept", f"{kept[FEATURE]:,} of {graph.counts.features:,}"),
            ("errors kept", f"{kept[ERROR]:,} of {graph.counts.errors:,}"),
            ("edges kept", f"{len(pruned.kept.weight):,}"),
        ),
        sources=sources,
    )


def _strongest(found: Sequence[StrongFeature], sources: tuple[str, ...]) -> Table:
    """The features with most influence, as a table."""
    columns = [
        Column("feature"),
        Column("token"),
        Column("activation", right=True),
        Column("influence", right=True),
    ]
    if any(one.raised for one in found):
        columns += [Column("raises", wraps=True), Column("lowers", wraps=True)]
    rows = [tuple((Run(cell),) for cell in one.cells()[: len(columns)]) for one in found]
    return Table(
        title="Features with most influence", columns=tuple(columns), rows=tuple(rows), sources=sources
    )
