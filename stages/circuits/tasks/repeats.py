"""Tasks of random tokens: induction, and copying of a repeated sequence.

Random tokens carry no other cue than the repetition (Olsson et al. 2022, "In-context Learning and Induction
Heads"). Tokens decode to a space and a word, so that a tokenizer's merging rules do not apply to them.

Border: token ids; texts serve only to select tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ....store.errors import ConfigError
from ...causal.grids.patching_metrics import LogitDifference
from ..pairs import Pair

if TYPE_CHECKING:
    from ...forward.text.tokens import Tokenizer

__all__ = ["copying", "induction"]

LENGTH = 8
"""Number of tokens of a sequence."""
AGAIN = 6
"""Number of first tokens of the sequence that are repeated."""


def induction(tokenizer: Tokenizer, count: int, seed: int) -> list[Pair]:
    """Pairs of the task induction: random tokens ... A B ... A, to be continued by B.

    In the corrupted prompt another token, the wrong answer, follows the first A.

    Arguments:
        tokenizer: The model's tokenizer.
        count: Number of pairs.
        seed: Seed of the draw.
    """
    words, prefix, rng = _words("induction", tokenizer), _prefix(tokenizer), np.random.default_rng(seed)
    pairs = []
    for _ in range(count):
        # Without repetition: a token that occurs twice would have two successors.
        *row, wrong = rng.permutation(words)[: LENGTH + 1].tolist()
        # Not at the end: the repeated token must have a successor, and some distance to its repetition.
        index = int(rng.integers(0, LENGTH - 3))
        clean = (*prefix, *row, row[index])
        corrupted = [*row[: index + 1], wrong, *row[index + 2 :]]
        pairs.append(Pair(clean, (*prefix, *corrupted, row[index]), LogitDifference(row[index + 1], wrong)))
    return pairs


def copying(tokenizer: Tokenizer, count: int, seed: int) -> list[Pair]:
    """Pairs of the task copying: a random sequence and its beginning again, to be continued as before.

    In the corrupted prompt another sequence stands first; its token at that index is the wrong answer.

    Arguments:
        tokenizer: The model's tokenizer.
        count: Number of pairs.
        seed: Seed of the draw.
    """
    words, prefix, rng = _words("copying", tokenizer), _prefix(tokenizer), np.random.default_rng(seed)
    pairs = []
    for _ in range(count):
        tokens = rng.permutation(words)[: 2 * LENGTH].tolist()
        row, other_row = tokens[:LENGTH], tokens[LENGTH:]
        pairs.append(
            Pair(
                (*prefix, *row, *row[:AGAIN]),
                (*prefix, *other_row, *row[:AGAIN]),
                LogitDifference(row[AGAIN], other_row[AGAIN]),
            )
        )
    return pairs


def _words(task: str, tokenizer: Tokenizer) -> list[int]:
    """Ids of tokens that are a space and an ASCII word; ConfigError if too few for two sequences."""
    word_ids = [
        token
        for token, text in enumerate(tokenizer.vocabulary)
        if len(text) > 3 and text[0] == " " and text[1:].isascii() and text[1:].isalpha()
    ]
    if len(word_ids) < 2 * LENGTH:
        raise ConfigError(
            f"{task}: expected at least {2 * LENGTH} tokens that are a space and a word, found "
            f"{len(word_ids)} of {len(tokenizer.vocabulary)} in this tokenizer; choose another task"
        )
    return word_ids


def _prefix(tokenizer: Tokenizer) -> list[int]:
    """Special tokens that the tokenizer puts before a text."""
    encoded = tokenizer.encode("a")
    return [token for token, special in zip(encoded.ids, encoded.special, strict=True) if special]
