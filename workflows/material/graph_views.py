"""Views of an attribution graph: its scores, the interactive graph, and a table of its strongest features.

Border: a graph and information on its features in, views out; views/ defines their appearance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from ...stages.features.corpus.examples import contexts
from ...stages.features.layers.layout import FeatureId
from ...stages.graph.rows.nodes import ERROR, FEATURE
from ..views import Graph, Table, Values
from ..views.graph.features import StrongFeature
from .feature_labels import FeatureLabels

if TYPE_CHECKING:
    import xarray as xr

    from ...stages.graph.graph import AttributionGraph, PrunedGraph

__all__ = ["examples_of", "graph_views", "kept_of"]


def graph_views(
    pruned: PrunedGraph,
    strongest: Sequence[StrongFeature],
    scores: Mapping[str, float],
    *,
    sources: tuple[str, ...] = (),
    called: Mapping[FeatureId, str] = MappingProxyType({}),
    **known: Any,
) -> tuple[Values, Graph, Table]:
    """Views of a pruned attribution graph: its scores, the interactive graph, and a table of its strongest
    features.

    Arguments:
        pruned: the graph; its thresholds are the initial positions of the sliders.
        strongest: features with most influence, from `strongest_features`.
        scores: replacement_score and completeness_score.
        sources: results of the workflow that these were computed from.
        called: labels of features by people.
        known: further arguments of `Graph.of`.
    """
    counts = pruned.graph.counts
    values = Values(
        title="How much of the output the features explain",
        caption="An error node is what the features of one layer leave unexplained at one token. Replacement "
        "score: share of the influence on the explained logits that comes from tokens through features, not "
        "from error nodes. Completeness score: share of the input of all nodes, weighted by their influence, "
        "that does not come from error nodes. Kept: after pruning.",
        sources=sources,
        pairs=(
            ("replacement score", f"{scores['replacement_score']:.3f}"),
            ("completeness score", f"{scores['completeness_score']:.3f}"),
            ("features kept", f"{kept_of(pruned, FEATURE):,} of {counts.features:,}"),
            ("errors kept", f"{kept_of(pruned, ERROR):,} of {counts.errors:,}"),
            ("edges kept", f"{len(pruned.kept.weight):,}"),
        ),
        json=scores,
    )
    graph = Graph.of(
        pruned,
        title="Direct effects of tokens, features and errors on the output",
        caption="Nodes: tokens, features, errors and logits. Lines: direct effects of one node on another. "
        "The weight of an edge is by how much the target (a feature's pre-activation, or a logit minus the "
        "mean of all logits) would change if the source were added a second time. Point at a node to see its "
        "numbers and edges; click to pin it. The sliders prune like AttributionGraph.prune. Pins and groups "
        "are saved in the format of circuit-tracer's viewer.",
        sources=sources,
        strongest=tuple(strongest),
        called=tuple((str(feature), text) for feature, text in sorted(called.items())),
        **known,
    )
    return values, graph, _table(strongest, sources, called)


def kept_of(pruned: PrunedGraph, kind: str) -> int:
    """Number of nodes of a kind that remain after pruning.

    Arguments:
        pruned: the pruned graph.
        kind: "feature", "error", "token" or "logit".
    """
    return int(np.count_nonzero(pruned.nodes["kind"].values == kind))


def examples_of(
    graph: AttributionGraph,
    encoded: Mapping[int, xr.Dataset],
    ranked: Mapping[int, xr.Dataset],
    *,
    most: int = 4,
) -> dict[int, xr.Dataset]:
    """Contexts in a stored corpus where a graph's features are most active, by layer.

    Arguments:
        graph: the graph.
        encoded: layer -> corpus encoded as features (`encode_nodes`).
        ranked: layer -> result of `top_examples` for all features.
        most: number of contexts per feature.
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


def _label(strong: StrongFeature, called: Mapping[FeatureId, str]) -> str:
    """All known labels of a strong feature: by people, promoted token, and token that it fires on."""
    writes = {strong.feature: strong.raised[0]} if strong.raised else {}
    return FeatureLabels(writes, {strong.feature: strong.token}, called).label(strong.feature)


def _table(
    strongest: Sequence[StrongFeature], sources: tuple[str, ...], called: Mapping[FeatureId, str]
) -> Table:
    """Table of the most influential features, with the tokens that each feature raises and lowers, if the
    logit effects were computed."""
    # Features carry no tokens if the graph's effects on the logits were not computed.
    is_known = any(strong.raised for strong in strongest)
    effects = (
        ("raises", lambda strong: " · ".join(strong.raised)),
        ("lowers", lambda strong: " · ".join(strong.lowered)),
    )
    return Table.of(
        strongest,
        ("feature", lambda strong: FeatureLabels(by_people=called).short(strong.feature)),
        ("token", lambda strong: f"{strong.position} {strong.token}"),
        ("activation", lambda strong: strong.activation, ".3f"),
        ("influence", lambda strong: strong.influence, ".4f"),
        *(effects if is_known else ()),
        title="Features with most influence",
        caption="One row per feature, the largest influence on the explained logits first. Token: position "
        "and token of the prompt at which it is active."
        + (
            " Raises, lowers: tokens whose logits the feature's own decoder changes most, whatever the "
            "prompt."
            if is_known
            else ""
        ),
        sources=sources,
        json={
            "features": [
                {
                    "layer": strong.feature.layer,
                    "index": strong.feature.index,
                    "label": _label(strong, called),
                    "position": strong.position,
                    "token": strong.token,
                    "activation": strong.activation,
                    "influence": strong.influence,
                    "cumulative": strong.cumulative,
                    "raises": strong.raised,
                    "lowers": strong.lowered,
                }
                for strong in strongest
            ]
        },
    )
