"""Places of a corpus at which features are strongest, for workflows that show features.

Border: names texts and declares nodes; what they compute is stages/features/corpus/encode.py and examples.py.
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
"""Tokens of a passage, at most: what stands around a place is a line, not a page."""


@dataclass(frozen=True)
class ExampleNodes:
    """By layer: the corpus as features, and the places at which each feature is strongest."""

    encoded: dict[int, StageNode]
    ranked: dict[int, StageNode]


def example_nodes(
    subject: Subject, dictionary: Dictionary, tokens: PackedTokens, *, most: int, zero_positions: int = 0
) -> ExampleNodes:
    """The `most` strongest places of every feature of a dictionary in a corpus."""
    states = subject.capture(tokens, *map(str, dictionary.read_hooks))
    encoded = encode_nodes(dictionary, states, zero_positions=zero_positions)
    return ExampleNodes(
        encoded, {layer: top_examples.on(encoded=node, k=most) for layer, node in encoded.items()}
    )


def corpus_texts(corpus: str, model: str) -> list[str]:
    """Texts of a file or folder; none for "none"; for an empty name those shipped with the specimen, and none
    for other models."""
    if corpus and corpus != "none":
        return read_texts(corpus)
    if corpus or model != "specimen":
        return []
    return [*(f"{fact['prompt']} {fact['target']}" for fact in shipped_facts()), shipped_prose()]


def passages(subject: Subject, texts: Sequence[str], most: int) -> PackedTokens:
    """The beginnings of paragraphs, every n-th where all of them have more than `most` tokens.

    Raises ConfigError for texts without any.
    """
    paragraphs = [" ".join(part.split()) for text in texts for part in text.split("\n\n")]
    length = min(PASSAGE, subject.config.context_length)
    rows = [e.ids[:length] for e in subject.tokenizer.encode_batch([part for part in paragraphs if part])]
    if not rows:
        raise ConfigError("expected a corpus with at least one paragraph of text, found none")
    step = math.ceil(sum(map(len, rows)) / most)
    return PackedTokens.from_lists(rows[::step])
