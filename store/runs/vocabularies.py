"""Token strings of tokenizers, stored once per tokenizer so that datasets can show tokens as text.

A tokenizer is identified by its digest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..errors import REPAIR, CorruptEntry
from ..files import Folder
from ..sealed import sealed, unsealed

VOCABULARIES = "vocabularies"
"""Folder in the store with one record of token strings per tokenizer."""

_registered: dict[str, Callable[[], Sequence[str] | None]] = {}
"""Functions that load token strings, by the digest of the tokenizer."""


def register_vocabulary(tokenizer: str, load: Callable[[], Sequence[str] | None]) -> None:
    """Register a function that loads the token strings of a tokenizer, called on first use.

    Arguments:
        tokenizer: Digest of the tokenizer.
        load: Returns the token strings by id, or None if the tokenizer cannot be loaded.
    """
    _registered[tokenizer] = load


def registered_vocabulary(tokenizer: str) -> Callable[[], Sequence[str] | None] | None:
    """Function that loads the token strings of a tokenizer (by digest); None if none is registered."""
    return _registered.get(tokenizer)


def put_vocabulary(files: Folder, tokenizer: str, tokens: Sequence[str]) -> None:
    """Store the token strings of a tokenizer, unless they are stored already.

    Arguments:
        files: The store's files.
        tokenizer: Digest of the tokenizer.
        tokens: Token strings by id.
    """
    name = vocabulary_path(tokenizer)
    # A vocabulary has megabytes; the check saves serialising it for every capture.
    if files.size(name) is None:
        files.put_new(name, sealed({"tokens": list(tokens)}))


def read_vocabulary(files: Folder, tokenizer: str) -> list[str] | None:
    """Read the token strings of a tokenizer, indexed by token id; None if they are not stored.

    Arguments:
        files: The store's files.
        tokenizer: Digest of the tokenizer.

    Raises:
        CorruptEntry: The record is damaged.
    """
    name = vocabulary_path(tokenizer)
    if (text := files.get(name)) is None:
        return None
    tokens = unsealed(name, text, ("tokens",))["tokens"]
    try:
        return [str(token) for token in tokens]
    except TypeError as error:
        raise CorruptEntry(f"{name}: expected a list of token strings, found {error}; {REPAIR}") from error


def vocabulary_path(tokenizer: str) -> str:
    """Path of the file with a tokenizer's token strings, relative to the store."""
    return f"{VOCABULARIES}/{tokenizer.removeprefix('sha256:')}.json"
