"""Mapping between the characters of a text and its tokens; occurrences of phrases.

Used by `Encoding` for a text just tokenised and by `ds.mi.characters` for a stored prompt.

Offsets count characters (as Python slices a string), never bytes; spans are half-open. A token with an empty
span (BOS and the like, at (0, 0)) covers no character. Several tokens may share a character, as byte-level
vocabularies split rare ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import PromptError, did_you_mean

__all__ = ["CharacterSpans", "find_span", "find_spans", "words"]


class CharacterSpans:
    """Which characters of a text each of its tokens covers; finds the tokens of characters.

    Arguments:
        start: First character of each token, int [token].
        end: End (exclusive) of each token, int [token].
    """

    def __init__(
        self, start: Sequence[int] | npt.NDArray[Any], end: Sequence[int] | npt.NDArray[Any]
    ) -> None:
        self.start, self.end = np.asarray(start, np.int64), np.asarray(end, np.int64)
        self.placed = np.flatnonzero(self.end > self.start)
        """Positions of the tokens that cover at least one character."""

    def __len__(self) -> int:
        return len(self.start)

    def char_to_token(self, char: int) -> int | None:
        """Position of the first token that covers a character; None for an uncovered character."""
        return _first((self.start <= char) & (char < self.end))

    def char_to_token_fuzzy(self, char: int) -> int | None:
        """Position of the token that covers a character, or else of the token whose middle is nearest to it.

        Of two equally near tokens, the earlier one. None only if no token covers any character.
        """
        exact = self.char_to_token(char)
        if exact is not None or not len(self.placed):
            return exact
        # Integer division makes ties go to the earlier token, as argmin takes the first minimum.
        middle = (self.start[self.placed] + self.end[self.placed]) // 2
        return int(self.placed[np.abs(middle - char).argmin()])

    def char_to_token_start(self, char: int) -> int | None:
        """Position of the first token that starts at a character or later; None beyond the start of the last
        token."""
        return _first((self.start >= char) & (self.end > self.start))

    def char_range_to_tokens(self, start: int, end: int) -> list[int]:
        """Positions of all tokens that overlap a span of characters.

        Arguments:
            start: First character.
            end: End of the span (exclusive).
        """
        overlaps = (self.end > start) & (self.start < end) & (self.end > self.start)
        return np.flatnonzero(overlaps).tolist()


def find_spans(text: str, phrase: str) -> list[tuple[int, int]]:
    """Spans of all occurrences of a phrase as whole words: "Paris" does not occur in "Parisian".

    Arguments:
        text: The text to search.
        phrase: One or several words, or any other characters.

    Raises:
        PromptError: The phrase is empty.

    >>> find_spans("Paris, Parisian Paris", "Paris")
    [(0, 5), (16, 21)]
    """
    if not phrase:
        raise PromptError("the phrase to find in the prompt is empty; give a word of the prompt")
    spans, start = [], text.find(phrase)
    while start >= 0:
        end = start + len(phrase)
        # Only where the phrase itself begins with a letter or digit; " Paris" or "," may stand anywhere.
        starts_word = not (phrase[0].isalnum() and text[start - 1 : start].isalnum())
        ends_word = not (phrase[-1].isalnum() and text[end : end + 1].isalnum())
        if starts_word and ends_word:
            spans.append((start, end))
        # + 1, not + length: occurrences may overlap.
        start = text.find(phrase, start + 1)
    return spans


def find_span(text: str, phrase: str) -> tuple[int, int]:
    """Span (start, end) of the only occurrence of a phrase as whole words.

    Arguments:
        text: The text to search.
        phrase: One or several words, or any other characters.

    Raises:
        PromptError: The phrase occurs several times (the message lists where) or not at all (the message
            names
            the most similar word).
    """
    spans = find_spans(text, phrase)
    if len(spans) == 1:
        return spans[0]
    if spans:
        starts = ", ".join(str(start) for start, _ in spans)
        raise PromptError(
            f"the phrase {phrase!r} occurs at characters {starts} of {text!r}, expected it once; add some of "
            "the words around it, or give a token position"
        )
    hint = did_you_mean(phrase, [text[start:end] for start, end in words(text)])
    raise PromptError(f"the phrase {phrase!r} does not occur as whole words in the prompt {text!r}{hint}")


def words(text: str) -> list[tuple[int, int]]:
    """Spans (start, end) of all words in a text: maximal sequences of letters and digits.

    >>> words("It's 5!")
    [(0, 2), (3, 4), (5, 6)]
    """
    spans, start = [], None
    for i, char in enumerate(f"{text} "):
        if char.isalnum() and start is None:
            start = i
        elif not char.isalnum() and start is not None:
            spans.append((start, i))
            start = None
    return spans


def _first(mask: npt.NDArray[np.bool_]) -> int | None:
    """Index of the first True in a mask; None for a mask without True."""
    index = int(mask.argmax()) if len(mask) else 0
    return index if len(mask) and mask[index] else None
