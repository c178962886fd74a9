"""Texts tokenised once however often they are asked for.

Workflows over shipped facts tokenise all of them when they are built, which tests do some hundred times.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from mizarr.stages.forward.models.files import ModelFiles
from mizarr.stages.forward.text.library import LibraryTokenizer


@contextmanager
def each_text_read_once() -> Iterator[None]:
    """Within it, tokenizers of the same files are one, and remember what they said."""
    encoded = functools.cache(LibraryTokenizer._encode)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LibraryTokenizer, "_encode", encoded)
        patch.setattr(
            LibraryTokenizer,
            "_encode_batch",
            lambda self, texts, special: [encoded(self, text, special) for text in texts],
        )
        patch.setattr(ModelFiles, "tokenizer", functools.cache(ModelFiles.tokenizer))
        yield
