"""Wraps prose at a line width, and counts the characters between a token and the start of its line.

The protocol of Gurnee et al. 2025, "When Models Manipulate Manifolds"
(transformer-circuits.pub/2025/linebreaks): the same prose wrapped at many widths, so that character counts
are not tied to particular words.

All units are characters (Unicode code points, as Python counts them), never bytes. The first token of a line
has count 0; a token "\\n" belongs to the line that it ends.

Border: strings and integers; knows no tokenizer and no model. Callers pass the character spans of tokens.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ...store.errors import PromptError

if TYPE_CHECKING:
    from ...store import PackedTokens

__all__ = ["character_counts", "pack_lines", "token_counts", "wrap"]


def wrap(text: str, width: int) -> str:
    """The text in lines of at most `width` characters, as many words a line as fit.

    Arguments:
        text: Prose; each run of white space counts as one space.
        width: Largest number of characters of a line; only a line of a single word may be longer.

    Raises:
        PromptError: The width is below 1.

    >>> wrap("the cat\\nsat on the mat", 7)
    'the cat\\nsat on\\nthe mat'
    """
    if width < 1:
        raise PromptError(f"expected a line width of at least 1 character, found {width}")
    # textwrap splits at ASCII white space only, so the text is split at all white space first.
    words = " ".join(text.split())
    return "\n".join(textwrap.wrap(words, width, break_long_words=False, break_on_hyphens=False))


def character_counts(text: str, char_start: Sequence[int] | npt.NDArray[Any]) -> npt.NDArray[np.int32]:
    """Number of characters between the start of the line and each token's first character, int32 [token].

    Arguments:
        text: The text of the tokens.
        char_start: Offset of each token's first character in `text`, in characters; -1 for tokens that are
            not part of the text (BOS), whose count is -1.

    Raises:
        PromptError: An offset is beyond the end of the text.

    >>> character_counts("ab\\ncde", [0, 2, 3, 5]).tolist()
    [0, 2, 0, 2]
    """
    starts = np.asarray(char_start, np.int64)
    if len(starts) and starts.max() > len(text):
        raise PromptError(
            f"expected character offsets of tokens up to {len(text)}, the length of the text, found "
            f"{starts.max()}; give offsets in characters, not bytes, into this text"
        )
    newlines = np.flatnonzero(np.fromiter((c == "\n" for c in text), bool, len(text)))
    line_starts = np.concatenate([[0], newlines + 1])
    # side="right": a token that starts a line belongs to that line, not to the one before.
    line = np.searchsorted(line_starts, starts, side="right") - 1
    return np.where(starts < 0, -1, starts - line_starts[line]).astype(np.int32)


def pack_lines(text: str, char_start: Sequence[int] | npt.NDArray[Any], context: int) -> list[str]:
    """Cut a text into pieces of whole lines, each of at most `context` tokens.

    Within a line a cut would leave tokens whose distance from the last newline the model cannot see.

    Arguments:
        text: The whole text.
        char_start: Offset of each token in `text`, as in `character_counts`.
        context: Largest number of tokens of a piece.

    Raises:
        PromptError: A single line has more tokens than `context`.
    """
    lines = text.splitlines(keepends=True)
    ends = np.array(list(accumulate(len(line) for line in lines)), np.int64)
    starts = np.asarray(char_start, np.int64)
    per_line = np.bincount(np.searchsorted(ends, starts[starts >= 0], side="right"), minlength=len(lines))
    pieces: list[list[str]] = []
    free_tokens = 0
    # Not strict: a token that starts at the end of the text adds an entry after the last line.
    for number, (line, tokens) in enumerate(zip(lines, per_line.tolist(), strict=False)):
        if tokens > context:
            raise PromptError(
                f"expected lines of at most {context} tokens, the length of a prompt, found {tokens} tokens "
                f"in line {number}; wrap the text at a smaller width"
            )
        if tokens > free_tokens:
            pieces.append([])
            free_tokens = context
        pieces[-1].append(line)
        free_tokens -= tokens
    return ["".join(piece) for piece in pieces]


def token_counts(tokens: PackedTokens, *, line_breaks: bool) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Character count of every token in its line, int32 [token]; -1 for tokens that do not count.

    Arguments:
        tokens: Packed tokens with their texts and character spans.
        line_breaks: Whether tokens that contain a line break count. They occur only at counts near the line
            widths of the corpus, so their mean per count reflects these widths instead of the count.
    """
    assert tokens.texts is not None
    assert tokens.char_start is not None
    assert tokens.char_end is not None
    # Special tokens have the empty span (0, 0).
    starts = np.where(tokens.char_end > tokens.char_start, tokens.char_start, -1)
    rows = []
    for i, text in enumerate(tokens.texts):
        start, end = starts[tokens.row(i)], tokens.char_end[tokens.row(i)]
        counts = character_counts(text, start)
        if not line_breaks:
            breaks = np.cumsum([0, *(c == "\n" for c in text)])  # line breaks before each character
            counts[breaks[end] > breaks[start.clip(0)]] = -1
        rows.append(counts)
    return np.concatenate(rows)
