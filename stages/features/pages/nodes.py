"""All contents of the pages of a dictionary's features, as nodes of one graph.

    nodes = page_nodes(dictionary, encoded=encode_nodes(dictionary, capture)[layer], layer=layer, readout=…)
    run(nodes.values(), store)

Border: connects the stages. Encoding is cached by segment of the corpus, the other stages by block of
features, so that a killed run resumes at the next one. Memory holds one of these, with a block of the corpus
or of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ....pipeline import StageNode
from ..corpus.examples import top_examples
from ..corpus.statistics import feature_statistics
from .decoders import decoder_neighbours
from .feature_blocks import feature_blocks
from .intervals import feature_intervals
from .logits import feature_logits
from .partners import feature_partners
from .places import place_norms
from .windows import example_windows

if TYPE_CHECKING:
    from ....pipeline import Node
    from ..dictionary import Dictionary

__all__ = ["PageLayout", "page_nodes"]


@dataclass(frozen=True)
class PageLayout:
    """How much the page of a feature shows, and how many features are computed together."""

    strongest: int = 12
    """Number of examples with the largest activations."""
    intervals: int = 5
    """Number of intervals of activation from which examples are drawn."""
    per_interval: int = 4
    """Number of examples per interval."""
    before: int = 16
    """Number of tokens before an example."""
    after: int = 8
    """Number of tokens after an example."""
    related: int = 8
    """Number of features with similar decoders, of correlated ones, and of ones active at the same tokens."""
    logits: int = 10
    """Number of tokens with the most raised logits, and number with the most lowered logits."""
    bins: int = 50
    """Number of bins of histograms."""
    sample: int = 1 << 15
    """Largest number of tokens in the sample in which co-occurrences of features are counted."""
    seed: int = 0
    """Seed of all draws."""
    block: int = 1 << 14
    """Number of features that are computed and cached together; memory grows with it."""


def page_nodes(
    dictionary: Dictionary,
    *,
    encoded: Node,
    layer: int,
    readout: Node | None = None,
    features: Sequence[int] = (),
    layout: PageLayout | None = None,
) -> dict[str, StageNode]:
    """Plan nodes that compute everything on the pages of a layer's features, by name.

    The names are "statistics", "strongest", "intervals", "windows", "partners", "decoders", for a crosscoder
    "places" and, with a readout, "logits".

    Arguments:
        dictionary: The dictionary.
        encoded: Node that computes the active features of the layer.
        layer: Layer that the features read.
        readout: Node that computes the model's readout; None leaves out "logits".
        features: Indices of the features in any order; empty for all.
        layout: How much is shown; None for the defaults.

    Raises:
        DictionaryError: The dictionary lacks the layer or a feature.
    """
    settings = layout or PageLayout()
    dictionary.targets(layer)  # raises for a layer that the dictionary does not have
    indices = tuple(dictionary.feature((layer, feature)).index for feature in sorted(features))
    # Blocks are of the sorted features: the same set in another order has the same keys.
    blocks = feature_blocks(indices or dictionary.n_features, settings.block)
    resource = dictionary.as_resource()  # computing the identity reads weights, so once for all nodes
    statistics = feature_statistics.on(encoded=encoded)
    strongest = top_examples.on(encoded=encoded, k=settings.strongest, features=indices or None)
    intervals = feature_intervals.on(
        encoded=encoded,
        statistics=statistics,
        blocks=blocks,
        bins=settings.bins,
        intervals=settings.intervals,
        draws=settings.per_interval,
        seed=settings.seed,
    )
    nodes = {
        "statistics": statistics,
        "strongest": strongest,
        "intervals": intervals,
        "windows": example_windows.on(
            encoded=encoded,
            strongest=strongest,
            drawn=intervals,
            blocks=blocks,
            before=settings.before,
            after=settings.after,
        ),
        "partners": feature_partners.on(
            encoded=encoded, blocks=blocks, k=settings.related, tokens=settings.sample, seed=settings.seed
        ),
        "decoders": decoder_neighbours.on(
            blocks=blocks, dictionary=resource, layer=layer, k=settings.related
        ),
    }
    if dictionary.places:
        nodes["places"] = place_norms.on(blocks=blocks, dictionary=resource)
    if readout is not None:
        nodes["logits"] = feature_logits.on(
            readout=readout,
            blocks=blocks,
            dictionary=resource,
            layer=layer,
            top_k=settings.logits,
            bins=settings.bins,
        )
    return nodes
