"""Prose that is wrapped at line widths and cut at line starts into prompts.

Border: texts and tokens; loads no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ...stages.corpus.text import pack_lines, wrap

if TYPE_CHECKING:
    from ...store import PackedTokens
    from ..subject import Subject

__all__ = ["line_corpus", "wrapped_prose"]

STRETCH = 400
"""Number of words that are wrapped at one width before the next width."""


def line_corpus(subject: Subject, texts: Sequence[str], widths: Sequence[int], context: int) -> PackedTokens:
    """Prompts of texts that are wrapped at every width and cut at starts of lines.

    Arguments:
        subject: model whose tokenizer encodes the texts.
        texts: texts to wrap.
        widths: line widths in characters.
        context: largest number of tokens of a prompt, special tokens included.

    Returns:
        Packed prompts in random order, the same in every call.
    """
    pieces = [piece for text in texts for width in widths for piece in _pieces(subject, text, width, context)]
    # The control shuffles counts within a segment of the corpus. With one width per segment, shuffled counts
    # would still be large where lines are wide.
    order = np.random.default_rng(0).permutation(len(pieces))
    return subject.pack([pieces[i] for i in order])


def wrapped_prose(
    subject: Subject, texts: Sequence[str], widths: Sequence[int], context: int
) -> PackedTokens:
    """Prompts of texts that are wrapped stretch by stretch, each stretch at one of the widths in turn.

    Arguments:
        subject: model whose tokenizer encodes the texts.
        texts: texts to wrap.
        widths: line widths in characters; stretches of text use them in turn.
        context: largest number of tokens of a prompt, special tokens included.
    """
    stretches = []
    for text in texts:
        words = text.split()
        stretches += [" ".join(words[start : start + STRETCH]) for start in range(0, len(words), STRETCH)]
    pieces: list[str] = []
    for i, stretch in enumerate(stretches):
        # One width per stretch: no words of the test prompts occur in training at another width.
        pieces += _pieces(subject, stretch, widths[i % len(widths)], context)
    return subject.pack(pieces)


def _pieces(subject: Subject, text: str, width: int, context: int) -> list[str]:
    """Pieces of a text that is wrapped at a width and cut at starts of lines, of at most `context` tokens
    each."""
    wrapped = wrap(text, width)
    # `pack` adds the special tokens to every piece.
    return pack_lines(wrapped, subject.starts(wrapped), context - subject.special_tokens)
