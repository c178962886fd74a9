"""Token strings of tokenizers, kept once per tokenizer so that datasets show them without it.

Border: a tokenizer is a digest here. The strings are a plain JSON list, as ever; their digest lies in a
record beside it, and strings kept before there were such records are read as they are.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from ..digest import content_digest
from ..errors import REPAIR, CorruptEntry
from ..files import Folder
from ..sealed import read_json, sealed, unsealed

VOCABULARIES = "vocabularies"
CHECK = ".check.json"
"""End of the name of a record that holds the digest of the file beside it."""


_registered: dict[str, Callable[[], Sequence[str] | None]] = {}


def register_vocabulary(tokenizer: str, load: Callable[[], Sequence[str] | None]) -> None:
    """Say how to get the token strings of a tokenizer (by digest); called when they are first shown."""
    _registered[tokenizer] = load


def registered_vocabulary(tokenizer: str) -> Callable[[], Sequence[str] | None] | None:
    """How to get the token strings of a tokenizer; None where nobody said."""
    return _registered.get(tokenizer)


def put_vocabulary(files: Folder, tokenizer: str, tokens: Sequence[str]) -> None:
    """Keep the token strings of a tokenizer; the first to do so wins."""
    name, text = vocabulary_path(tokenizer), json.dumps(list(tokens)).encode()
    files.put_new(name, text)
    if files.get(name) == text:
        told = {name.removeprefix(f"{VOCABULARIES}/"): [len(text), content_digest(text)]}
        files.put_new(_record(name), sealed({"files": told}))


def read_vocabulary(files: Folder, tokenizer: str) -> list[str] | None:
    """Token strings by id; None if they are not kept, CorruptEntry if they are not as they were written."""
    name = vocabulary_path(tokenizer)
    if (text := files.get(name)) is None:
        return None
    if (told := files.get(_record(name))) is not None:
        ((_, expected),) = unsealed(_record(name), told, ("files",))["files"].values()
        if (found := content_digest(text)) != expected:
            raise CorruptEntry(f"{name}: expected {expected}, found {found}; {REPAIR}")
    try:
        return [str(token) for token in read_json(text)]
    except (ValueError, TypeError) as error:
        raise CorruptEntry(f"{name}: expected token strings, found {error}; {REPAIR}") from error


def vocabulary_path(tokenizer: str) -> str:
    """Where the token strings of a tokenizer (by digest) lie, relative to the store."""
    return f"{VOCABULARIES}/{tokenizer.removeprefix('sha256:')}.json"


def _record(name: str) -> str:
    return name.removesuffix(".json") + CHECK
