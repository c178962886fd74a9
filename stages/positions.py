"""Places in a prompt by what stands there: phrases and words as token positions.

The mapping between characters and tokens itself belongs to `Encoding` (forward/tokens.py): special tokens
never compete for a character, offsets are characters, not bytes. Here is what a person says instead of a
number: "last", "first", or a phrase of the prompt.

Border: texts and encodings; knows no model and never imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..store.errors import PromptError, nearest

if TYPE_CHECKING:
    from .forward.tokens import Encoding

__all__ = ["find_span", "find_spans", "first_difference", "phrase_tokens", "position_of", "words"]

Where = int | str
"""A position: an index (negative from the end), "first", "last", or a phrase of the prompt."""


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


def phrase_tokens(encoding: Encoding, phrase: str) -> list[int]:
    """Positions of all tokens that overlap a phrase of the text."""
    return encoding.char_range_to_tokens(*find_span(encoding.text, phrase))


def position_of(encoding: Encoding, where: Where) -> int:
    """The position meant: an index, "first" (BOS, where there is one), "last", or the last token of a phrase,
    where a model has read all of it.

    Raises PromptError for a position out of range or a phrase that is not there.
    """
    length = len(encoding)
    if isinstance(where, str):
        if where in ("first", "last"):
            return 0 if where == "first" else length - 1
        return phrase_tokens(encoding, where)[-1]
    if not -length <= where < length:
        raise PromptError(
            f"expected a position in 0..{length - 1} (or negative, from the end), found {where}"
        )
    return where % length


def first_difference(ids: Sequence[int], other: Sequence[int]) -> int:
    """First position at which two prompts of equal length differ.

    Raises PromptError if they do not, or are of different length.
    """
    if len(ids) != len(other):
        raise PromptError(
            f"expected prompts of equal length, found {len(ids)} and {len(other)} tokens; choose another "
            "counterpart, or the position 'last'"
        )
    for position, (one, two) in enumerate(zip(ids, other, strict=True)):
        if one != two:
            return position
    raise PromptError("expected prompts that differ, found the same one twice; there is nothing to contrast")
