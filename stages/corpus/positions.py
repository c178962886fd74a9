"""Finds token positions that settings name as an index, "first", "last", or a phrase of the prompt.

Spans of phrases and the mapping of characters to tokens are in store/reading/characters.py, which stored
prompts (`ds.mi`) use too.

Border: texts and encodings; knows no model and never imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...store.errors import PromptError
from ...store.reading.characters import find_span

if TYPE_CHECKING:
    from ..forward.text.tokens import Encoding

__all__ = ["first_difference", "phrase_tokens", "position_of"]

Where = int | str
"""A position: an index (negative from the end), "first", "last", or a phrase of the prompt."""


def phrase_tokens(encoding: Encoding, phrase: str) -> list[int]:
    """Positions of all tokens that overlap a phrase.

    Arguments:
        encoding: Text with its tokens.
        phrase: Phrase that occurs once in the text.

    Raises:
        PromptError: The phrase occurs never or several times.
    """
    return encoding.char_range_to_tokens(*find_span(encoding.text, phrase))


def position_of(encoding: Encoding, where: Where) -> int:
    """Token position that `where` names, from 0 to the number of tokens - 1.

    Arguments:
        encoding: Prompt with its tokens.
        where: Index (negative from the end), "first" (BOS, if the prompt has one), "last", or a phrase of the
            prompt, whose last token is meant.

    Raises:
        PromptError: The index is out of range, or the phrase occurs never or several times.
    """
    length = len(encoding)
    if isinstance(where, str):
        if where in ("first", "last"):
            return 0 if where == "first" else length - 1
        # The last token of a phrase: a causal model has read the whole phrase only there.
        return phrase_tokens(encoding, where)[-1]
    if not -length <= where < length:
        raise PromptError(
            f"expected a position from 0 to {length - 1}, or from {-length} to -1 counted from the end, as "
            f"the prompt has {length} tokens, found {where}"
        )
    return where % length


def first_difference(ids: Sequence[int], other: Sequence[int]) -> int:
    """First position at which two prompts of equal length differ.

    Arguments:
        ids: Token ids of one prompt.
        other: Token ids of the other prompt.

    Raises:
        PromptError: The prompts are equal, or of different length.
    """
    if len(ids) != len(other):
        raise PromptError(
            f"expected two prompts of equal length, whose first difference is a position, found {len(ids)} "
            f"and {len(other)} tokens; choose another counterpart, or the position 'last'"
        )
    for position, pair in enumerate(zip(ids, other, strict=True)):
        if pair[0] != pair[1]:
            return position
    raise PromptError("expected two different prompts to compare, found the same prompt twice; change one")
