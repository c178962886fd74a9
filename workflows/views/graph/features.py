"""Facts about the features of an attribution graph that a page shows: the tokens whose logits a feature
raises or lowers, and texts that activate it.

Axes: row (one per distinct feature), rank (strongest first), window (tokens around an activation).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import numpy as np

from ....stages.features.layers.layout import FeatureId
from ....stages.logits.lens import format_token
from ....store.arrays import Array
from .. import labels

if TYPE_CHECKING:
    import xarray as xr

    from ....stages.graph.graph import AttributionGraph, PrunedGraph

__all__ = ["FeatureNotes", "StrongFeature", "notes_of", "strongest_features"]


@dataclass(frozen=True)
class StrongFeature:
    """A feature node of a graph, with the tokens whose logits it raises and lowers."""

    node: int
    """Index of the node in the graph."""
    feature: FeatureId
    """Layer and index of the feature."""
    position: int
    """Position in the prompt at which the feature is active."""
    token: str
    """Text of the token at this position."""
    activation: float
    """Activation of the feature at this position."""
    influence: float
    """Influence of the node on the logits, as `AttributionGraph.prune` computes it; dimensionless."""
    cumulative: float
    """Share of the total influence that this node and all nodes with more influence have together, 0 to 1."""
    raised: tuple[str, ...] = ()
    """Texts of the tokens whose logits the feature raises most, strongest first."""
    lowered: tuple[str, ...] = ()
    """Texts of the tokens whose logits the feature lowers most, strongest first."""


def strongest_features(
    pruned: PrunedGraph,
    *,
    vocabulary: Sequence[str] = (),
    effects: xr.Dataset | None = None,
    most: int,
) -> tuple[StrongFeature, ...]:
    """The feature nodes with most influence on the logits, largest first; ties in the graph's order.

    Nodes that pruning removed are included.

    Arguments:
        pruned: The graph, with the influence of all its nodes.
        vocabulary: Text of each token id; needed with `effects`.
        effects: Output of the stage `logit_effects` for this graph; None leaves `raised` and `lowered` empty.
        most: Largest number of features returned.
    """
    graph, kept = pruned.graph, pruned.kept
    nodes = graph.nodes
    prompt_texts = [format_token(str(text)) for text in graph.dataset["input_text"].values]

    def effect_texts(name: str, node: int) -> tuple[str, ...]:
        if effects is None:
            return ()
        return tuple(format_token(vocabulary[token]) for token in effects[name].values[node].tolist())

    features = []
    # Feature nodes are the first nodes of a graph.
    for node in np.argsort(-kept.influence[: graph.counts.features], kind="stable")[:most].tolist():
        layer, position, index = (int(nodes[name].values[node]) for name in ("layer", "position", "feature"))
        features.append(
            StrongFeature(
                node,
                FeatureId(layer, index),
                position,
                prompt_texts[position],
                float(nodes["activation"].values[node]),
                float(kept.influence[node]),
                float(kept.cumulative[node]),
                effect_texts("raised", node),
                effect_texts("lowered", node),
            )
        )
    return tuple(features)


@dataclass(frozen=True)
class FeatureNotes:
    """Facts about features that do not depend on the prompt: logit effects and texts that activate them."""

    words: tuple[str, ...]
    """Distinct token texts; the integer arrays of this class hold indices into it, -1 for no token."""
    raised: Array
    """Tokens whose logits a feature raises most, int [row, rank], strongest first."""
    raised_by: Array
    """Rise of these logits per unit of activation, float [row, rank]."""
    lowered: Array
    """Tokens whose logits a feature lowers most, int [row, rank], strongest first."""
    lowered_by: Array
    """Change of these logits per unit of activation (negative), float [row, rank]."""
    example_words: Array
    """Tokens of the texts that activate a feature, int [row, rank, window]."""
    example_values: Array
    """Activations of the feature on these tokens, float [row, rank, window]."""

    def __post_init__(self) -> None:
        for name, values in (("raised", "raised_by"), ("lowered", "lowered_by")):
            labels.expect(values, getattr(self, values), getattr(self, name).shape)
        labels.expect("example_values", self.example_values, self.example_words.shape)

    @classmethod
    def of(cls, rows: int, words: tuple[str, ...] = (), **arrays: Array) -> FeatureNotes:
        """Build notes from some of the arrays; the other arrays are empty (0 ranks).

        Arguments:
            rows: Number of features.
            words: Distinct token texts.
            arrays: Field name -> array.
        """
        no_effects, no_examples = (rows, 0), (rows, 0, 0)
        index_shapes = {"raised": no_effects, "lowered": no_effects, "example_words": no_examples}
        value_shapes = {"raised_by": no_effects, "lowered_by": no_effects, "example_values": no_examples}
        empty = {name: np.zeros(shape, np.int32) for name, shape in index_shapes.items()}
        empty |= {name: np.zeros(shape, np.float32) for name, shape in value_shapes.items()}
        return cls(words=words, **{**empty, **arrays})

    def rows(self, indices: Array) -> FeatureNotes:
        """Notes on the selected features.

        Arguments:
            indices: Row numbers, int [row], or a mask over the rows, bool [row].
        """
        arrays = {
            item.name: getattr(self, item.name)[indices] for item in fields(self) if item.name != "words"
        }
        return replace(self, **arrays)

    def without_examples(self) -> FeatureNotes:
        """A copy without example texts; the logit effects stay."""
        return replace(
            self, example_words=self.example_words[:, :0], example_values=self.example_values[:, :0]
        )


def notes_of(
    graph: AttributionGraph,
    node_indices: Array,
    vocabulary: Sequence[str],
    effects: xr.Dataset | None,
    examples: Mapping[int, xr.Dataset],
) -> tuple[Array, FeatureNotes]:
    """Notes on the features among some nodes of a graph, with one row per distinct feature.

    Arguments:
        graph: The graph.
        node_indices: Indices of the nodes, in increasing order.
        vocabulary: Text of each token id.
        effects: Output of the stage `logit_effects` for this graph; None for notes without logit effects.
        examples: Layer -> output of `features.examples.contexts`, the texts that activate some features of
            the layer; empty for notes without example texts.

    Returns:
        (row of each node in the notes, int [node]; the notes). The row of a node that is not a feature is -1.
        A feature that is active at several positions has several nodes with the same row.

    Raises:
        ShapeError: `effects` belongs to another graph.
    """
    row = np.full(len(node_indices), -1)
    if effects is None and not examples:
        return row, FeatureNotes.of(0)
    feature_nodes = node_indices[node_indices < graph.counts.features]
    # Columns of active_features are (layer, position, index): position does not matter for notes.
    layer_and_index = graph.active_features[graph.selected_features[feature_nodes]][:, [0, 2]]
    # Features are the first nodes of a graph: their rows are the beginning of `row`.
    distinct_features, first_node, row[: len(feature_nodes)] = np.unique(
        layer_and_index, axis=0, return_index=True, return_inverse=True
    )
    arrays: dict[str, Array] = {}
    if effects is not None:
        labels.expect("effects", effects["raised"].values[:, 0], (graph.counts.features,))
        arrays |= {name: effects[name].values[feature_nodes[first_node]] for name in _EFFECT_FIELDS}
    if examples:
        arrays |= _example_arrays(distinct_features, examples)
    # Token ids become indices into the few words that occur, so that a page need not embed the vocabulary.
    token_fields = [name for name in _TOKEN_FIELDS if name in arrays]
    ids = np.unique(np.concatenate([arrays[name].ravel() for name in token_fields]))
    ids = ids[ids >= 0]
    for name in token_fields:
        arrays[name] = np.where(arrays[name] >= 0, np.searchsorted(ids, arrays[name]), -1)
    words = tuple(format_token(vocabulary[token]) for token in ids.tolist())
    return row, FeatureNotes.of(len(distinct_features), words, **arrays)


_EFFECT_FIELDS = ("raised", "raised_by", "lowered", "lowered_by")
"""Fields of `FeatureNotes` that the stage `logit_effects` computes."""
_TOKEN_FIELDS = ("raised", "lowered", "example_words")
"""Fields of `FeatureNotes` that hold tokens."""


def _example_arrays(features: Array, examples: Mapping[int, xr.Dataset]) -> dict[str, Array]:
    """Token ids and activations of the texts that activate features.

    Arguments:
        features: (layer, index) of each feature, int [row, 2].
        examples: Layer -> output of `features.examples.contexts`, for some features of the layer.

    Returns:
        `example_words`: token ids, int [row, rank, window], -1 for no token; `example_values`: activations,
        float of the same shape, 0 for no token.
    """
    # Layers may differ in the number and length of their examples: padded to the largest.
    shapes = [examples[layer]["token_id"].shape[1:] for layer in examples]
    shape = (len(features), *(max(sizes) for sizes in zip(*shapes, strict=True)))
    words, values = np.full(shape, -1, np.int64), np.zeros(shape, np.float32)
    for layer, contexts in examples.items():
        context_row = {feature: row for row, feature in enumerate(contexts["feature"].values.tolist())}
        # (row of the feature in the result, its row in `contexts`)
        row_pairs = [
            (row, context_row[index])
            for row, (feature_layer, index) in enumerate(features.tolist())
            if feature_layer == layer and index in context_row
        ]
        if row_pairs:
            target_rows, source_rows = np.array(row_pairs).T
            block = np.ix_(target_rows, *map(np.arange, contexts["token_id"].shape[1:]))
            words[block] = contexts["token_id"].values[source_rows]
            values[block] = contexts["activation"].values[source_rows]
    return {"example_words": words, "example_values": values}
