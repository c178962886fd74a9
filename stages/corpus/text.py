"""Prose laid out in lines of a given width, and how far into its line each token starts.

Border: strings and integers; knows no tokenizer, no model. Whoever owns the tokenizer passes spans in.

The protocol of Gurnee et al. 2025, "When Models Manipulate Manifolds"
(transformer-circuits.pub/2025/linebreaks): the same prose wrapped at many widths, so that character counts
are not tied to particular words.

Unit everywhere: characters, that is Unicode code points as Python counts them, never bytes. The character
count of a token is the number of characters between the start of its line and the token's first character:
the first token of a line has count 0, and a token "\\n" belongs to the line it ends.
"""

from __future__ import annotations

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
    """`text` greedily re-wrapped at `width` characters; newlines and runs of white space become one space.

    A line exceeds `width` only when it holds one single longer word.

    >>> wrap("the cat\\nsat on the mat", 7)
    'the cat\\nsat on\\nthe mat'
    """
    if width < 1:
        raise PromptError(f"expected a line width of at least 1 character, found {width}")
    lines: list[str] = []
    line: list[str] = []
    length = 0
    for word in text.split():
        if line and length + 1 + len(word) > width:
            lines.append(" ".join(line))
            line, length = [], 0
        length += len(word) + bool(line)
        line.append(word)
    if line:
        lines.append(" ".join(line))
    return "\n".join(lines)


def character_counts(text: str, char_start: Sequence[int] | npt.NDArray[Any]) -> npt.NDArray[np.int32]:
    """Character count of each token, int32 [token]: characters from the start of its line to its own start.

    char_start: offset of each token's first character in `text`, in characters; -1 for tokens that are not
    part of the text (a beginning-of-sequence token), whose count is -1.

    >>> character_counts("ab\\ncde", [0, 2, 3, 5]).tolist()
    [0, 2, 0, 2]
    """
    starts = np.asarray(char_start, np.int64)
    if len(starts) and starts.max() > len(text):
        raise PromptError(
            f"expected token starts within the text ({len(text)} characters), found {starts.max()}; "
            "are these byte offsets, or offsets into another text?"
        )
    newlines = np.flatnonzero(np.fromiter((c == "\n" for c in text), bool, len(text)))
    line_starts = np.concatenate([[0], newlines + 1])
    # side="right" of start: a line that starts exactly here is this token's line.
    line = np.searchsorted(line_starts, starts, side="right") - 1
    return np.where(starts < 0, -1, starts - line_starts[line]).astype(np.int32)


def pack_lines(text: str, char_start: Sequence[int] | npt.NDArray[Any], context: int) -> list[str]:
    """`text` cut at line starts into pieces of at most `context` tokens, as many whole lines each as fit.

    Cutting elsewhere would leave a model with tokens whose distance from the last newline it cannot know.
    char_start: start of every token of the whole text, as in `character_counts`.
    Raises PromptError when a single line is longer than `context`.
    """
    lines = text.splitlines(keepends=True)
    ends = np.array(list(accumulate(len(line) for line in lines)), np.int64)
    starts = np.asarray(char_start, np.int64)
    per_line = np.bincount(np.searchsorted(ends, starts[starts >= 0], side="right"), minlength=len(lines))
    pieces: list[list[str]] = []
    room = 0
    for number, (line, tokens) in enumerate(zip(lines, per_line.tolist(), strict=False)):
        if tokens > context:
            raise PromptError(
                f"line {number} has {tokens} tokens, expected at most {context}; wrap at a smaller width"
            )
        if tokens > room:
            pieces.append([])
            room = context
        pieces[-1].append(line)
        room -= tokens
    return ["".join(piece) for piece in pieces]


def token_counts(tokens: PackedTokens, *, line_breaks: bool) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Character count of every token, int32 [token]; -1 for tokens that take no part.

    These are special tokens and, unless `line_breaks`, tokens that hold a line break: they sit at counts near
    the widths of the text and nowhere else, so that their mean would tell the width grid, not the count.
    """
    assert tokens.texts is not None
    assert tokens.char_start is not None
    assert tokens.char_end is not None
    starts = np.where(tokens.char_end > tokens.char_start, tokens.char_start, -1)
    rows = []
    for i, text in enumerate(tokens.texts):
        start, end = starts[tokens.row(i)], tokens.char_end[tokens.row(i)]
        counts = character_counts(text, start)
        if not line_breaks:
            breaks = np.cumsum([0, *(c == "\n" for c in text)])
            counts[breaks[end] > breaks[start.clip(0)]] = -1
        rows.append(counts)
    return np.concatenate(rows)
