"""Token strings of tokenizers, kept once per tokenizer so that datasets show them without it.

Border: a tokenizer is a digest here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..errors import REPAIR, CorruptEntry
from ..files import Folder
from ..sealed import sealed, unsealed

VOCABULARIES = "vocabularies"
"""Folder of a store that holds a record of token strings for each tokenizer."""

_registered: dict[str, Callable[[], Sequence[str] | None]] = {}


def register_vocabulary(tokenizer: str, load: Callable[[], Sequence[str] | None]) -> None:
    """Say how to get the token strings of a tokenizer (by digest); called when they are first shown."""
    _registered[tokenizer] = load


def registered_vocabulary(tokenizer: str) -> Callable[[], Sequence[str] | None] | None:
    """How to get the token strings of a tokenizer; None where nobody said."""
    return _registered.get(tokenizer)


def put_vocabulary(files: Folder, tokenizer: str, tokens: Sequence[str]) -> None:
    """Keep the token strings of a tokenizer; the first to do so wins."""
    name = vocabulary_path(tokenizer)
    if files.size(name) is None:
        files.put_new(name, sealed({"tokens": list(tokens)}))


def read_vocabulary(files: Folder, tokenizer: str) -> list[str] | None:
    """Token strings by id; None if they are not kept, CorruptEntry if they are not as they were written."""
    name = vocabulary_path(tokenizer)
    if (text := files.get(name)) is None:
        return None
    tokens = unsealed(name, text, ("tokens",))["tokens"]
    try:
        return [str(token) for token in tokens]
    except TypeError as error:
        raise CorruptEntry(f"{name}: expected token strings, found {error}; {REPAIR}") from error


def vocabulary_path(tokenizer: str) -> str:
    """Where the token strings of a tokenizer (by digest) lie, relative to the store."""
    return f"{VOCABULARIES}/{tokenizer.removeprefix('sha256:')}.json"
