"""All that pages of a dictionary show, as nodes of one graph.

    nodes = page_nodes(dictionary, encoded=encode_nodes(dictionary, capture)[layer], layer=layer, readout=…)
    run(nodes.values(), store)

Border: what reads what; what is computed, each stage says. Encoding is cached by segment of the corpus, the
rest by block of features, so that a killed run goes on at the next of them; no more is in memory than one of
those, with a block of the corpus or of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ....pipeline import StageNode
from ..corpus.examples import top_examples
from ..corpus.statistics import feature_statistics
from .chosen import feature_blocks
from .decoders import decoder_neighbours
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
    """How much a page shows, and how much is computed at once.

    strongest: examples of the largest activations.  intervals: of activation, with per_interval examples
    each.  before, after: tokens around an example.  related: neighbours, correlated and co-active features
    each.  logits: tokens raised, and lowered.  bins: of histograms.  sample: tokens among which pairs of
    features are counted, at most.  seed: of draws.  block: features computed together, cached as one; half as
    many take half the memory.
    """

    strongest: int = 12
    intervals: int = 5
    per_interval: int = 4
    before: int = 16
    after: int = 8
    related: int = 8
    logits: int = 10
    bins: int = 50
    sample: int = 1 << 15
    seed: int = 0
    block: int = 1 << 14


def page_nodes(
    dictionary: Dictionary,
    *,
    encoded: Node,
    layer: int,
    readout: Node | None = None,
    features: Sequence[int] = (),
    layout: PageLayout | None = None,
) -> dict[str, StageNode]:
    """Nodes "statistics", "strongest", "intervals", "windows", "partners", "decoders", of a crosscoder
    "places" and, with a readout, "logits".

    encoded: of that layer. features: which ones, in any order; all where none is named. Raises
    DictionaryError for a layer or a feature it does not have.
    """
    how = layout or PageLayout()
    dictionary.targets(layer)  # refuses a layer it does not have
    chosen = tuple(dictionary.feature((layer, feature)).index for feature in sorted(features))
    blocks = feature_blocks(chosen or dictionary.n_features, how.block)
    held = dictionary.as_resource()
    statistics = feature_statistics.on(encoded=encoded)
    strongest = top_examples.on(encoded=encoded, k=how.strongest, features=chosen or None)
    intervals = feature_intervals.on(
        encoded=encoded,
        statistics=statistics,
        blocks=blocks,
        bins=how.bins,
        intervals=how.intervals,
        draws=how.per_interval,
        seed=how.seed,
    )
    found = {
        "statistics": statistics,
        "strongest": strongest,
        "intervals": intervals,
        "windows": example_windows.on(
            encoded=encoded,
            strongest=strongest,
            drawn=intervals,
            blocks=blocks,
            before=how.before,
            after=how.after,
        ),
        "partners": feature_partners.on(
            encoded=encoded, blocks=blocks, k=how.related, tokens=how.sample, seed=how.seed
        ),
        "decoders": decoder_neighbours.on(blocks=blocks, dictionary=held, layer=layer, k=how.related),
    }
    if dictionary.places:
        found["places"] = place_norms.on(blocks=blocks, dictionary=held)
    if readout is not None:
        found["logits"] = feature_logits.on(
            readout=readout, blocks=blocks, dictionary=held, layer=layer, top_k=how.logits, bins=how.bins
        )
    return found
