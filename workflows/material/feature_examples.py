"""Positions of a corpus at which features are most active, for workflows that show features.

Border: selects texts and builds nodes of stages/features/corpus/encode.py and examples.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...pipeline import StageNode
from ...stages.features.corpus.encode import encode_nodes
from ...stages.features.corpus.examples import top_examples
from ...store.errors import ConfigError
from ...store.runs.packed import PackedTokens
from ..subject import read_texts, shipped_facts, shipped_prose

if TYPE_CHECKING:
    from ...pipeline import StageNode
    from ...stages.features.dictionary import Dictionary
    from ..subject import Subject

__all__ = ["ExampleNodes", "corpus_texts", "example_nodes", "passages"]

PASSAGE = 64
"""Largest number of tokens of a passage: the context of an example is a line, not a page."""


@dataclass(frozen=True)
class ExampleNodes:
    """Nodes that search a corpus for examples of features, by layer of the dictionary."""

    encoded: dict[int, StageNode]
    """The corpus encoded as features."""
    ranked: dict[int, StageNode]
    """Corpus positions with the largest activations of each feature."""


def example_nodes(
    subject: Subject, dictionary: Dictionary, tokens: PackedTokens, *, most: int, zero_positions: int = 0
) -> ExampleNodes:
    """Nodes that find the tokens of a corpus with the largest activations of each feature.

    Arguments:
        subject: the model.
        dictionary: the feature dictionary.
        tokens: the corpus.
        most: number of positions per feature.
        zero_positions: number of first positions of each prompt at which features are set to 0.
    """
    states = subject.capture(tokens, *map(str, dictionary.read_hooks))
    encoded = encode_nodes(dictionary, states, zero_positions=zero_positions)
    return ExampleNodes(
        encoded, {layer: top_examples.on(encoded=node, k=most) for layer, node in encoded.items()}
    )


def corpus_texts(corpus: str, model: str) -> list[str]:
    """Texts of the corpus that a setting names; empty if it names none.

    Arguments:
        corpus: file or folder; "none" for no texts; empty for the shipped texts if the model is the specimen,
            and for no texts otherwise.
        model: name of the model.
    """
    if corpus and corpus != "none":
        return read_texts(corpus)
    if corpus or model != "specimen":
        return []
    return [*(f"{fact['prompt']} {fact['target']}" for fact in shipped_facts()), shipped_prose()]


def passages(subject: Subject, texts: Sequence[str], most: int) -> PackedTokens:
    """Prompts of at most PASSAGE tokens: the beginnings of paragraphs; of long texts every n-th paragraph.

    Arguments:
        subject: the model.
        texts: the texts.
        most: approximate largest number of tokens in all.

    Raises:
        ConfigError: there is no paragraph.
    """
    # Line breaks within a paragraph come from the width of the file, not from the text.
    paragraphs = [" ".join(part.split()) for text in texts for part in text.split("\n\n")]
    encodings = subject.tokenizer.encode_batch(list(filter(None, paragraphs)))
    length = min(PASSAGE, subject.config.context_length)
    rows = [encoding.ids[:length] for encoding in encodings]
    if not rows:
        raise ConfigError(
            "expected a corpus with at least one paragraph of text, found none; name other files: corpus=…"
        )
    # Every n-th paragraph, so that the end of a corpus is searched as well as its beginning.
    step = math.ceil(sum(map(len, rows)) / most)
    return PackedTokens.from_lists(rows[::step])
