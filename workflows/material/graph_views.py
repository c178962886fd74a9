"""What is said of an attribution graph: its scores, the graph to look into, its strongest features.

Border: a graph, and what is known of its features, in; views out. What any of it looks like is views/.
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
    """A graph as views; the sliders stand where it is pruned.

    strongest: as `strongest_features` gives them.  scores: replacement_score and completeness_score.
    sources: the workflow's results these were made from.  called: what people call features.  known: more of
    what `Graph.of` takes.
    """
    counts = pruned.graph.counts
    values = Values(
        title="How much of the output the features explain",
        caption="Replacement: share of the influence that comes from tokens rather than from errors. "
        "Completeness: share of what enters nodes, weighted by their influence, that does not come from "
        "errors.",
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
        title="Tokens, features and errors that bring about the output",
        caption="Point at a node for its numbers and its edges, click to pin it. An edge tells what its "
        "target would gain if its source were added once more: pre-activation of a feature, or logit less "
        "the mean of all logits. The sliders prune as AttributionGraph.prune does; pins and groups are "
        "saved as circuit-tracer's viewer saves them.",
        sources=sources,
        strongest=tuple(strongest),
        called=tuple((str(feature), text) for feature, text in sorted(called.items())),
        **known,
    )
    return values, graph, _table(strongest, sources, called)


def kept_of(pruned: PrunedGraph, kind: str) -> int:
    """How many nodes of a kind ("feature", "error", "token", "logit") are kept."""
    return int(np.count_nonzero(pruned.nodes["kind"].values == kind))


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


def _label(one: StrongFeature, called: Mapping[FeatureId, str]) -> str:
    """What people call a feature, what it writes, and the token it is active at."""
    writes = {one.feature: one.raised[0]} if one.raised else {}
    return FeatureLabels(writes, {one.feature: one.token}, called).label(one.feature)


def _table(
    strongest: Sequence[StrongFeature], sources: tuple[str, ...], called: Mapping[FeatureId, str]
) -> Table:
    """The features with most influence, with the tokens they raise and lower where these are known."""
    is_known = any(one.raised for one in strongest)
    effects = (
        ("raises", lambda one: " · ".join(one.raised)),
        ("lowers", lambda one: " · ".join(one.lowered)),
    )
    return Table.of(
        strongest,
        ("feature", lambda one: FeatureLabels(said=called).short(one.feature)),
        ("token", lambda one: f"{one.position} {one.token}"),
        ("activation", lambda one: one.activation, ".3f"),
        ("influence", lambda one: one.influence, ".4f"),
        *(effects if is_known else ()),
        title="Features with most influence",
        caption="tokens raised and lowered by what the feature writes itself, whatever the prompt"
        if is_known
        else "",
        sources=sources,
        json={
            "features": [
                {
                    "layer": one.feature.layer,
                    "index": one.feature.index,
                    "label": _label(one, called),
                    "position": one.position,
                    "token": one.token,
                    "activation": one.activation,
                    "influence": one.influence,
                    "cumulative": one.cumulative,
                    "raises": one.raised,
                    "lowers": one.lowered,
                }
                for one in strongest
            ]
        },
    )
