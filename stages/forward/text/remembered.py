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
    """Encodings of texts, from a cache on disk if it has all of them, else computed and added to it.

    Arguments:
        texts: the texts, in order; many or long texts are encoded without the cache.
        add_special: whether special tokens are added to each text.
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
    entries = [
        _encoding_from_json(cache.find(key).get(tokenizer), text)
        for key, text in zip(keys, texts, strict=True)
    ]
    cached = [encoding for encoding in entries if encoding is not None]
    if len(cached) == len(texts):
        return cached
    # All texts at once: building the tokenizer costs far more than encoding the known ones again.
    computed = encode()
    for key, encoding in zip(keys, computed, strict=True):
        cache.add(key, tokenizer, _encoding_to_json(encoding))
    return computed


def _encoding_to_json(encoding: Encoding) -> str:
    return json.dumps([encoding.ids, encoding.tokens, encoding.offsets, encoding.special])


def _encoding_from_json(entry: object, text: str) -> Encoding | None:
    """The encoding of a text from its cache entry; None for a missing or malformed entry."""
    try:
        ids, tokens, offsets, special = json.loads(str(entry))
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
