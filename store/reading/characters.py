"""Characters of a text and the tokens that stand for them; phrases as spans of characters.

Border: one text and the spans of its tokens; knows no tokenizer. The one place of this mapping: `Encoding`
has it for a text just tokenised, `ds.mi.characters` for a stored prompt.

Unit everywhere: characters, as Python slices text, never bytes; spans are half-open. A token with an empty
span (BOS and its like, at (0, 0)) stands for no character and never competes for one. Several tokens may
share a character: byte-level vocabularies split rare ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import PromptError, nearest

__all__ = ["CharacterSpans", "find_span", "find_spans", "words"]


class CharacterSpans:
    """Where the tokens of one text lie in it.

    start, end: int [token], half-open span of each token in characters.
    """

    def __init__(
        self, start: Sequence[int] | npt.NDArray[Any], end: Sequence[int] | npt.NDArray[Any]
    ) -> None:
        self.start, self.end = np.asarray(start, np.int64), np.asarray(end, np.int64)
        self.placed = np.flatnonzero(self.end > self.start)
        """Positions of the tokens that stand for characters."""

    def __len__(self) -> int:
        return len(self.start)

    def char_to_token(self, char: int) -> int | None:
        """First token that covers a character; None if none does."""
        return _first((self.start <= char) & (char < self.end))

    def char_to_token_fuzzy(self, char: int) -> int | None:
        """The token that covers a character, else the one whose middle is nearest to it (the earlier of two
        as near); None only where no token stands for a character.
        """
        exact = self.char_to_token(char)
        if exact is not None or not len(self.placed):
            return exact
        middle = (self.start[self.placed] + self.end[self.placed]) // 2
        return int(self.placed[np.abs(middle - char).argmin()])

    def char_to_token_start(self, char: int) -> int | None:
        """First token that starts at a character or later."""
        return _first((self.start >= char) & (self.end > self.start))

    def char_range_to_tokens(self, start: int, end: int) -> list[int]:
        """All tokens that overlap characters start … end-1."""
        found = (self.end > start) & (self.start < end) & (self.end > self.start)
        return np.flatnonzero(found).tolist()


def find_spans(text: str, phrase: str) -> list[tuple[int, int]]:
    """(start, end) in characters of every occurrence of a phrase as whole words: "Paris" is not in
    "Parisian".

    >>> find_spans("Paris, Parisian Paris", "Paris")
    [(0, 5), (16, 21)]
    """
    if not phrase:
        raise PromptError("expected a phrase to look for, found an empty one")
    found, start = [], text.find(phrase)
    while start >= 0:
        end = start + len(phrase)
        opens = not (phrase[0].isalnum() and text[start - 1 : start].isalnum())
        closes = not (phrase[-1].isalnum() and text[end : end + 1].isalnum())
        if opens and closes:
            found.append((start, end))
        start = text.find(phrase, start + 1)
    return found


def find_span(text: str, phrase: str) -> tuple[int, int]:
    """(start, end) of the one place where a phrase stands as whole words.

    Raises PromptError, with the nearest word, where there is none, and with the places where there are
    several.
    """
    found = find_spans(text, phrase)
    if len(found) == 1:
        return found[0]
    if found:
        places = ", ".join(str(start) for start, _ in found)
        raise PromptError(
            f"expected {phrase!r} once, found it at characters {places} of {text!r}; take more of the words "
            "around it, or give a token position"
        )
    near = nearest(phrase, [text[start:end] for start, end in words(text)])
    hint = f"; did you mean {near!r}?" if near else ""
    raise PromptError(f"expected a phrase of the prompt {text!r}, found {phrase!r}{hint}")


def words(text: str) -> list[tuple[int, int]]:
    """(start, end) of every run of letters and digits.

    >>> words("It's 5!")
    [(0, 2), (3, 4), (5, 6)]
    """
    found, start = [], None
    for i, char in enumerate(f"{text} "):
        if char.isalnum() and start is None:
            start = i
        elif not char.isalnum() and start is not None:
            found.append((start, i))
            start = None
    return found


def _first(holds: npt.NDArray[np.bool_]) -> int | None:
    at = int(holds.argmax()) if len(holds) else 0
    return at if len(holds) and holds[at] else None
