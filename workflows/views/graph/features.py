"""What is known of an attribution graph's features: tokens they raise and lower, texts they are active in.

Axes: row (one per feature with something known of it), rank, window.
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
    """A feature at a position: a node of a graph (`node` its number), and the tokens it raises and lowers."""

    node: int
    feature: FeatureId
    position: int
    token: str
    activation: float
    influence: float
    cumulative: float
    raised: tuple[str, ...] = ()
    lowered: tuple[str, ...] = ()


def strongest_features(
    pruned: PrunedGraph,
    *,
    vocabulary: Sequence[str] = (),
    effects: xr.Dataset | None = None,
    most: int,
) -> tuple[StrongFeature, ...]:
    """The features of the whole graph with most influence, largest first; equal ones in the graph's order.

    effects: what `logit_effects` gives for it. vocabulary: strings by token id.
    """
    graph, kept = pruned.graph, pruned.kept
    nodes = graph.nodes
    texts = [format_token(str(text)) for text in graph.dataset["input_text"].values]

    def tokens(name: str, node: int) -> tuple[str, ...]:
        if effects is None:
            return ()
        return tuple(format_token(vocabulary[token]) for token in effects[name].values[node].tolist())

    found = []
    for node in np.argsort(-kept.influence[: graph.counts.features], kind="stable")[:most].tolist():
        layer, position, index = (int(nodes[name].values[node]) for name in ("layer", "position", "feature"))
        found.append(
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
    return tuple(found)


@dataclass(frozen=True)
class FeatureNotes:
    """What is known of features whatever the prompt: tokens they raise and lower, texts they are active in.

    words: strings that the integer arrays point into, -1 for none. raised, lowered int [row, rank], with the
    logits per unit of activation, strongest first; example_words int [row, rank, window], with activations.
    """

    words: tuple[str, ...]
    raised: Array
    raised_by: Array
    lowered: Array
    lowered_by: Array
    example_words: Array
    example_values: Array

    def __post_init__(self) -> None:
        for name, values in (("raised", "raised_by"), ("lowered", "lowered_by")):
            labels.expect(values, getattr(self, values), getattr(self, name).shape)
        labels.expect("example_values", self.example_values, self.example_words.shape)

    @classmethod
    def of(cls, rows: int, words: tuple[str, ...] = (), **known: Array) -> FeatureNotes:
        """So many rows of what is known, by name; nothing of the rest."""
        pairs, texts = (rows, 0), (rows, 0, 0)
        shapes = {"raised": pairs, "lowered": pairs, "example_words": texts}
        values = {"raised_by": pairs, "lowered_by": pairs, "example_values": texts}
        empty = {name: np.zeros(shape, np.int32) for name, shape in shapes.items()}
        empty |= {name: np.zeros(shape, np.float32) for name, shape in values.items()}
        return cls(words=words, **{**empty, **known})

    def rows(self, chosen: Array) -> FeatureNotes:
        """Those of some features, by their rows."""
        arrays = {
            each.name: getattr(self, each.name)[chosen] for each in fields(self) if each.name != "words"
        }
        return replace(self, **arrays)

    def without_examples(self) -> FeatureNotes:
        """Only what they raise and lower."""
        return replace(
            self, example_words=self.example_words[:, :0], example_values=self.example_values[:, :0]
        )


def notes_of(
    graph: AttributionGraph,
    chosen: Array,
    vocabulary: Sequence[str],
    effects: xr.Dataset | None,
    examples: Mapping[int, xr.Dataset],
) -> tuple[Array, FeatureNotes]:
    """Row of every chosen node, -1 for none, and the notes: one row per feature, however many positions it is
    active at. Arguments as `Graph.of` has them. Raises ShapeError for effects of another graph."""
    row = np.full(len(chosen), -1)
    if effects is None and not examples:
        return row, FeatureNotes.of(0)
    features = chosen[chosen < graph.counts.features]
    active = graph.active_features[graph.selected_features[features]][:, [0, 2]]
    unique, first, row[: len(features)] = np.unique(active, axis=0, return_index=True, return_inverse=True)
    found: dict[str, Array] = {}
    if effects is not None:
        labels.expect("effects", effects["raised"].values[:, 0], (graph.counts.features,))
        found |= {name: effects[name].values[features[first]] for name in _EFFECTS}
    if examples:
        found |= _examples(unique, examples)
    ids = np.unique(np.concatenate([found[name].ravel() for name in _INDICES if name in found]))
    ids = ids[ids >= 0]
    for name in _INDICES:
        if name in found:
            found[name] = np.where(found[name] >= 0, np.searchsorted(ids, found[name]), -1)
    return row, FeatureNotes.of(
        len(unique), tuple(format_token(vocabulary[i]) for i in ids.tolist()), **found
    )


_EFFECTS = ("raised", "raised_by", "lowered", "lowered_by")
_INDICES = ("raised", "lowered", "example_words")


def _examples(unique: Array, examples: Mapping[int, xr.Dataset]) -> dict[str, Array]:
    """Token ids and activations [row, rank, window] of features (layer, index); -1 and 0 where there are
    none."""
    shapes = [examples[layer]["token_id"].shape[1:] for layer in examples]
    shape = (len(unique), *(max(sizes) for sizes in zip(*shapes, strict=True)))
    words, values = np.full(shape, -1, np.int64), np.zeros(shape, np.float32)
    for layer, told in examples.items():
        known = {feature: k for k, feature in enumerate(told["feature"].values.tolist())}
        mine = [
            (i, known[index])
            for i, (at, index) in enumerate(unique.tolist())
            if at == layer and index in known
        ]
        if mine:
            here, there = np.array(mine).T
            part = np.ix_(here, *map(np.arange, told["token_id"].shape[1:]))
            words[part], values[part] = told["token_id"].values[there], told["activation"].values[there]
    return {"example_words": words, "example_values": values}
