"""Encodings of short texts, cached across processes for tokenizers that are slow to build.

Building a tokenizer of 262,144 tokens takes 1.5 s, half as long as everything else in an answer whose results
are cached, and such an answer needs only the token ids of its prompts. Corpora are not cached.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from ....store.digest import content_digest
from ....store.index import encodings
from .tokens import Encoding

__all__ = ["cached_encodings"]

_TEXTS, _CHARACTERS = 64, 1 << 16
"""Limits of one call: number of texts, and their characters together."""


def cached_encodings(
    texts: Sequence[str], add_special: bool, tokenizer: str, encode: Callable[[], list[Encoding]]
) -> list[Encoding]:
    """Encodings of texts from the user's cache, or computed and added to it.

    Arguments:
        texts: looked up one by one; all are encoded where one is missing.
        add_special: whether special tokens are added to each.
        tokenizer: digest of everything that decides an encoding, versions included.
        encode: computes the encodings of all texts.
    """
    # A corpus: too much for the cache, and its texts are encoded once.
    if len(texts) > _TEXTS or sum(map(len, texts)) > _CHARACTERS:
        return encode()
    cache = encodings()
    keys = [
        content_digest(b"1" if add_special else b"0", text.encode("utf-8", "surrogatepass")) for text in texts
    ]
    entries = [_read(cache.find(key).get(tokenizer), text) for key, text in zip(keys, texts, strict=True)]
    cached = [encoding for encoding in entries if encoding is not None]
    if len(cached) == len(texts):
        return cached
    # All texts at once: building the tokenizer costs far more than encoding the known ones again.
    computed = encode()
    for key, encoding in zip(keys, computed, strict=True):
        cache.add(key, tokenizer, _written(encoding))
    return computed


def _written(encoding: Encoding) -> str:
    return json.dumps([encoding.ids, encoding.tokens, encoding.offsets, encoding.special])


def _read(written: object, text: str) -> Encoding | None:
    """A cached encoding; None for a missing or malformed entry, as the file may hold anything."""
    try:
        ids, tokens, offsets, special = json.loads(str(written))
        encoding = Encoding(
            [int(token) for token in ids],
            [str(token) for token in tokens],
            [(int(start), int(end)) for start, end in offsets],
            [bool(mark) for mark in special],
            text,
        )
    except (TypeError, ValueError):
        return None
    is_whole = len(ids) == len(tokens) == len(offsets) == len(special)
    return encoding if is_whole else None
