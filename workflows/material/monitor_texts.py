"""Labelled texts for the workflow `monitor`, and word features for its text baselines.

From a file (probe_targets.py), or shipped: clauses of prose as they are written, and the same words in random
order. The two texts of a pair have equal words, so that counts of words cannot tell them apart.

Text features (baselines without a model): counts of words, and the same weighted by rarity (tf-idf; Spärck
Jones 1972, smoothed as in scikit-learn).

Border: texts and numbers; loads no model.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ...store.arrays import Bools, Floats, Ints
from ...store.errors import ConfigError, PromptError, nearest
from .probe_targets import as_word, groups_of, labelled_entries

__all__ = ["LabelledTexts", "last_words", "read_labelled_texts", "shuffled_clauses", "word_features"]

WORDS = 2000
"""Largest number of words in the vocabulary of text features: the ones in most texts."""
CLAUSES = 150
"""Number of shipped clauses."""
SHORTEST, LONGEST = 6, 16
"""Smallest and largest number of words of a shipped clause."""


@dataclass(frozen=True, eq=False)
class LabelledTexts:
    """Texts with a binary label."""

    texts: tuple[str, ...]
    """The texts."""
    is_positive: Bools
    """Whether each text has the label to detect, [text]."""
    group: Ints
    """Group of each text, whose members are in one part, [text]."""
    positive: str
    """Name of the label to detect."""
    negative: str
    """Name of the other label, or "other" for several."""

    def some(self, count: int, seed: int) -> LabelledTexts:
        """Random groups of at most `count` texts together, in the original order; all texts if there are no
        more."""
        if count >= len(self.texts):
            return self
        order = np.random.default_rng(seed).permutation(np.unique(self.group))
        sizes = np.bincount(self.group)[order]
        chosen = np.flatnonzero(np.isin(self.group, order[np.cumsum(sizes) <= count]))
        return replace(
            self,
            texts=tuple(self.texts[i] for i in chosen),
            is_positive=self.is_positive[chosen],
            group=self.group[chosen],
        )


def read_labelled_texts(path: str, positive: str, groups: str) -> LabelledTexts:
    """Texts of a file with a label each; see probe_targets.py for the format.

    Arguments:
        path: the file.
        positive: label to detect; empty for, of two labels, the last in alphabetical order.
        groups: field that names the group of a text; empty to make each text a group.

    Raises:
        ConfigError: the file has another format, or no such label.
        PromptError: a text has no label, or all have the same.
    """
    entries = labelled_entries(path)
    for i, entry in enumerate(entries):
        if entry.get("label") is None:
            raise PromptError(
                f"entry {i} of {path!r}: expected a label of the whole text, found "
                f"{'labels of spans' if 'spans' in entry else 'none'}; add one, or remove the text"
            )
    words = [as_word(entry["label"]) for entry in entries]
    labels = sorted(set(words))
    if len(labels) < 2:
        raise PromptError(
            f"expected two labels in {path!r}, found {labels[0]!r} at all {len(words)} texts; add texts with "
            "another label"
        )
    listed = ", ".join(labels[:6]) + (", …" if len(labels) > 6 else "")
    if positive and positive not in labels:
        near = nearest(positive, labels)
        raise ConfigError(
            f"expected the label to detect, {positive!r}, in {path!r}, found {listed}; "
            + (f"did you mean {near!r}?" if near else "set positive to a label of every file")
        )
    if not positive and len(labels) > 2:
        raise ConfigError(
            f"expected two labels in {path!r}, found {len(labels)} ({listed}); set positive=LABEL, which is "
            "then told from all others"
        )
    positive = positive or labels[-1]
    others = [label for label in labels if label != positive]
    return LabelledTexts(
        tuple(entry["text"] for entry in entries),
        np.array([word == positive for word in words]),
        groups_of(entries, groups, path),
        positive,
        others[0] if len(others) == 1 else "other",
    )


def label_of(path: str) -> str:
    """Name of the question that a file of labels asks, for titles: its name without the ending."""
    return Path(path).stem if path else "word order"


def shuffled_clauses(prose: str) -> LabelledTexts:
    """Clauses of prose, each as it is written and with its words in random order; a pair is a group.

    Arguments:
        prose: the text.
    """
    rng = np.random.default_rng(0)
    clauses = [re.findall(r"[a-z]+(?:'[a-z]+)?", part.lower()) for part in re.split(r"[.,;:!?\"]", prose)]
    clauses = [words for words in clauses if SHORTEST <= len(words) <= LONGEST]
    chosen = rng.permutation(len(clauses))[:CLAUSES]
    texts = []
    for i in sorted(chosen.tolist()):
        order = rng.permutation(len(clauses[i]))
        texts += [" ".join(clauses[i]), " ".join(clauses[i][at] for at in order)]
    n = len(texts)
    return LabelledTexts(tuple(texts), np.arange(n) % 2 == 1, np.arange(n) // 2, "shuffled", "in order")


def word_features(texts: Sequence[str]) -> tuple[Floats, Floats]:
    """(counts of words, tf-idf) of texts, both [text, word]; words in a single text are left out.

    The vocabulary and the rarities are those of all texts, the test part included.

    Arguments:
        texts: the texts; words are runs of letters, digits and underscores, in lower case.
    """
    counted = [Counter(_words(text)) for text in texts]
    documents = Counter(word for counts in counted for word in counts)
    # Sorted: words in equally many texts are in no order otherwise.
    shared = sorted(
        (word for word, n in documents.items() if n > 1), key=lambda word: (-documents[word], word)
    )
    words = shared[:WORDS] or sorted(documents)[:WORDS]
    counts = np.array([[row[word] for word in words] for row in counted], np.float64)
    rarity = np.log((1 + len(texts)) / (1 + np.array([documents[word] for word in words]))) + 1
    weighted = counts * rarity
    norm = np.linalg.norm(weighted, axis=1, keepdims=True)
    return counts, weighted / np.where(norm > 0, norm, 1)


def last_words(texts: Sequence[str]) -> Ints:
    """Number of the last word of each text, equal for equal words, [text]."""
    words = [(_words(text) or [""])[-1] for text in texts]
    return np.unique(words, return_inverse=True)[1].astype(np.int64)


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())
