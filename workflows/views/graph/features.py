"""Notes on the features of an attribution graph: logit effects and activating examples.

Axes: row (one per feature that has notes), rank (strongest first), window (tokens around an activation).
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
    """Position at which the feature is active."""
    token: str
    """Text of the token at this position."""
    activation: float
    """Activation of the feature at this position."""
    influence: float
    """Influence of the node on the logits, as `AttributionGraph.prune` computes it."""
    cumulative: float
    """Share of the total influence of this node and all stronger ones."""
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
    """The feature nodes of the unpruned graph with most influence, largest first; ties in the graph's order.

    Arguments:
        pruned: The graph.
        vocabulary: Text of each token id; needed with `effects`.
        effects: Output of the stage `logit_effects` for this graph; None leaves `raised` and `lowered` empty.
        most: Largest number of features.
    """
    graph, kept = pruned.graph, pruned.kept
    nodes = graph.nodes
    texts = [format_token(str(text)) for text in graph.dataset["input_text"].values]

    def tokens(name: str, node: int) -> tuple[str, ...]:
        if effects is None:
            return ()
        return tuple(format_token(vocabulary[token]) for token in effects[name].values[node].tolist())

    features = []
    for node in np.argsort(-kept.influence[: graph.counts.features], kind="stable")[:most].tolist():
        layer, position, index = (int(nodes[name].values[node]) for name in ("layer", "position", "feature"))
        features.append(
            StrongFeature(
                node,
                FeatureId(layer, index),
                position,
                texts[position],
                float(nodes["activation"].values[node]),
                float(kept.influence[node]),
                float(kept.cumulative[node]),
                tokens("raised", node),
                tokens("lowered", node),
            )
        )
    return tuple(features)


@dataclass(frozen=True)
class FeatureNotes:
    """Notes on features that do not depend on the prompt: logit effects and activating examples."""

    words: tuple[str, ...]
    """Distinct token texts; the integer arrays hold indices into it, -1 for none."""
    raised: Array
    """Tokens whose logits a feature raises most, int [row, rank], strongest first."""
    raised_by: Array
    """Change of these logits per unit of activation, float [row, rank]."""
    lowered: Array
    """Tokens whose logits a feature lowers most, int [row, rank], strongest first."""
    lowered_by: Array
    """Change of these logits per unit of activation, float [row, rank]."""
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
        """Build notes from the fields that exist; the others have no ranks.

        Arguments:
            rows: Number of features.
            words: Distinct token texts.
            arrays: Field name -> array.
        """
        pairs, texts = (rows, 0), (rows, 0, 0)
        indices = {"raised": pairs, "lowered": pairs, "example_words": texts}
        values = {"raised_by": pairs, "lowered_by": pairs, "example_values": texts}
        empty = {name: np.zeros(shape, np.int32) for name, shape in indices.items()}
        empty |= {name: np.zeros(shape, np.float32) for name, shape in values.items()}
        return cls(words=words, **{**empty, **arrays})

    def rows(self, indices: Array) -> FeatureNotes:
        """Notes on the features with these row indices, int or bool."""
        arrays = {
            item.name: getattr(self, item.name)[indices] for item in fields(self) if item.name != "words"
        }
        return replace(self, **arrays)

    def without_examples(self) -> FeatureNotes:
        """The notes with logit effects only."""
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
    """Notes on the features among some nodes of a graph, with one row per feature.

    Arguments:
        graph: The graph.
        node_indices: Indices of the nodes, in increasing order.
        vocabulary: Text of each token id.
        effects: Output of the stage `logit_effects` for this graph; None for none.
        examples: Layer -> output of `features.examples.contexts`; features without examples have none.

    Returns:
        (row of each node, notes); the row is -1 for a node that is not a feature. A feature that is active at
        several positions has several nodes with the same row.

    Raises:
        ShapeError: `effects` belongs to another graph.
    """
    row = np.full(len(node_indices), -1)
    if effects is None and not examples:
        return row, FeatureNotes.of(0)
    features = node_indices[node_indices < graph.counts.features]
    # Columns of active_features are (layer, position, index): position does not matter for notes.
    active = graph.active_features[graph.selected_features[features]][:, [0, 2]]
    # Features are the first nodes: their rows are the beginning of `row`.
    unique, first_index, row[: len(features)] = np.unique(
        active, axis=0, return_index=True, return_inverse=True
    )
    arrays: dict[str, Array] = {}
    if effects is not None:
        labels.expect("effects", effects["raised"].values[:, 0], (graph.counts.features,))
        arrays |= {name: effects[name].values[features[first_index]] for name in _EFFECTS}
    if examples:
        arrays |= _examples(unique, examples)
    # Token ids become indices into the few words that occur, so that a page need not embed the vocabulary.
    ids = np.unique(np.concatenate([arrays[name].ravel() for name in _INDICES if name in arrays]))
    ids = ids[ids >= 0]
    for name in _INDICES:
        if name in arrays:
            arrays[name] = np.where(arrays[name] >= 0, np.searchsorted(ids, arrays[name]), -1)
    return row, FeatureNotes.of(
        len(unique), tuple(format_token(vocabulary[i]) for i in ids.tolist()), **arrays
    )


_EFFECTS = ("raised", "raised_by", "lowered", "lowered_by")
"""Fields of the notes that the stage `logit_effects` computes."""
_INDICES = ("raised", "lowered", "example_words")
"""Fields of the notes that hold tokens."""


def _examples(unique: Array, examples: Mapping[int, xr.Dataset]) -> dict[str, Array]:
    """Token ids and activations of the example texts of features.

    Arguments:
        unique: (layer, index) of each feature, int [row, 2].
        examples: Layer -> output of `features.examples.contexts`.

    Returns:
        `example_words`, int [row, rank, window], -1 for none, and `example_values`, float, 0 for none.
    """
    # Layers may differ in the number and length of their examples: padded to the largest.
    shapes = [examples[layer]["token_id"].shape[1:] for layer in examples]
    shape = (len(unique), *(max(sizes) for sizes in zip(*shapes, strict=True)))
    words, values = np.full(shape, -1, np.int64), np.zeros(shape, np.float32)
    for layer, contexts in examples.items():
        row_of_feature = {feature: k for k, feature in enumerate(contexts["feature"].values.tolist())}
        pairs = [
            (i, row_of_feature[index])
            for i, (feature_layer, index) in enumerate(unique.tolist())
            if feature_layer == layer and index in row_of_feature
        ]
        if pairs:
            target_rows, source_rows = np.array(pairs).T
            block = np.ix_(target_rows, *map(np.arange, contexts["token_id"].shape[1:]))
            words[block] = contexts["token_id"].values[source_rows]
            values[block] = contexts["activation"].values[source_rows]
    return {"example_words": words, "example_values": values}
