"""Tasks of random tokens: what followed the same token before (induction), what came next last time
(copying).

Random tokens leave nothing else to go by (Olsson et al., In-context Learning and Induction Heads, 2022). They
are those that decode to a word behind a space, so that no rule of a tokenizer's applies to them.

Border: token ids; knows texts only to choose among them.
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
"""Tokens of a sequence that is repeated, or in which a pair stands."""
AGAIN = 6
"""Of them that stand a second time."""


def induction(tokenizer: Tokenizer, count: int, seed: int) -> list[Pair]:
    """… A B … A -> B. Corrupted: another token behind the first A, which is the wrong answer."""
    words, prefix, rng = _words("induction", tokenizer), _prefix(tokenizer), np.random.default_rng(seed)
    found = []
    for _ in range(count):
        *row, wrong = rng.permutation(words)[: LENGTH + 1].tolist()
        place = int(rng.integers(0, LENGTH - 3))
        clean = (*prefix, *row, row[place])
        other = [*row[: place + 1], wrong, *row[place + 2 :]]
        found.append(Pair(clean, (*prefix, *other, row[place]), LogitDifference(row[place + 1], wrong)))
    return found


def copying(tokenizer: Tokenizer, count: int, seed: int) -> list[Pair]:
    """A sequence, and its beginning again -> its next token. Corrupted: another sequence the first time,
    whose token in that place is the wrong answer."""
    words, prefix, rng = _words("copying", tokenizer), _prefix(tokenizer), np.random.default_rng(seed)
    found = []
    for _ in range(count):
        both = rng.permutation(words)[: 2 * LENGTH].tolist()
        row, other = both[:LENGTH], both[LENGTH:]
        found.append(
            Pair(
                (*prefix, *row, *row[:AGAIN]),
                (*prefix, *other, *row[:AGAIN]),
                LogitDifference(row[AGAIN], other[AGAIN]),
            )
        )
    return found


def _words(task: str, tokenizer: Tokenizer) -> list[int]:
    """Tokens that are words behind a space, which read back as themselves."""
    found = [
        token
        for token, text in enumerate(tokenizer.vocabulary)
        if len(text) > 3 and text[0] == " " and text[1:].isascii() and text[1:].isalpha()
    ]
    if len(found) < 2 * LENGTH:
        raise ConfigError(
            f"{task}: expected at least {2 * LENGTH} tokens that are words behind a space, found "
            f"{len(found)} of {len(tokenizer.vocabulary)} with this tokenizer; ask another task"
        )
    return found


def _prefix(tokenizer: Tokenizer) -> list[int]:
    """What the tokenizer puts before a text."""
    encoded = tokenizer.encode("a")
    return [token for token, special in zip(encoded.ids, encoded.special, strict=True) if special]
