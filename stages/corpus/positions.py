"""Places in a prompt by what a person says instead of a number: "last", "first", or a phrase of the prompt.

Characters, tokens and phrases are mapped to each other in store/reading/characters.py, for a text just
tokenised (`Encoding`) as for a stored one (`ds.mi`).

Border: texts and encodings; knows no model and never imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...store.errors import PromptError
from ...store.reading.characters import find_span, find_spans, words

if TYPE_CHECKING:
    from ..forward.text.tokens import Encoding

__all__ = ["find_span", "find_spans", "first_difference", "phrase_tokens", "position_of", "words"]

Where = int | str
"""A position: an index (negative from the end), "first", "last", or a phrase of the prompt."""


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
