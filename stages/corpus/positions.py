"""Resolves token positions that settings name as an index, "first", "last", or a phrase of the prompt.

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
        encoding: tokens of the text.
        phrase: a phrase that occurs once.

    Raises:
        PromptError: if the phrase occurs never or several times.
    """
    return encoding.char_range_to_tokens(*find_span(encoding.text, phrase))


def position_of(encoding: Encoding, where: Where) -> int:
    """Token position, 0 to length - 1.

    Arguments:
        encoding: tokens of the prompt.
        where: index (negative from the end), "first" (BOS, if the prompt has one), "last", or a phrase of the
            prompt.

    Raises:
        PromptError: for a position out of range, or a phrase that occurs never or several times.
    """
    length = len(encoding)
    if isinstance(where, str):
        if where in ("first", "last"):
            return 0 if where == "first" else length - 1
        # The last token of a phrase: a causal model has read the whole phrase only there.
        return phrase_tokens(encoding, where)[-1]
    if not -length <= where < length:
        raise PromptError(
            f"expected a position in 0..{length - 1} (or negative, from the end), found {where}"
        )
    return where % length


def first_difference(ids: Sequence[int], other: Sequence[int]) -> int:
    """First position at which two prompts of equal length differ.

    Arguments:
        ids: token ids of one prompt.
        other: token ids of the other.

    Raises:
        PromptError: if the prompts are equal, or of different length.
    """
    if len(ids) != len(other):
        raise PromptError(
            f"expected prompts of equal length, found {len(ids)} and {len(other)} tokens; choose another "
            "counterpart, or the position 'last'"
        )
    for position, pair in enumerate(zip(ids, other, strict=True)):
        if pair[0] != pair[1]:
            return position
    raise PromptError("expected prompts that differ, found the same one twice; there is nothing to contrast")
