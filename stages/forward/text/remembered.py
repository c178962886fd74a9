"""Encodings of short texts, remembered from process to process for tokenizers that take long to make.

A tokenizer of 262,144 tokens takes 1.5 s to make, half as long as all else of an answer that is stored
already, and such an answer needs no more of it than the token ids of its prompts. Corpora are not remembered.

Border: texts, encodings and the cache of a user; knows no tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from ....store.digest import content_digest
from ....store.index import encodings
from .tokens import Encoding

__all__ = ["remembered"]

_TEXTS, _CHARACTERS = 64, 1 << 16
"""Most texts that are remembered of one call, and most characters of them together."""


def remembered(
    texts: Sequence[str], add_special: bool, witness: str, encode: Callable[[], list[Encoding]]
) -> list[Encoding]:
    """Encodings of texts, as they were when the same witness was asked before, else as `encode` gives them.

    Arguments:
        texts: looked up one by one; all are encoded where one is not known.
        add_special: whether special tokens are put around each.
        witness: what encodes: a digest of all that decides an encoding, versions included.
        encode: gives the encodings of all texts.
    """
    if len(texts) > _TEXTS or sum(map(len, texts)) > _CHARACTERS:
        return encode()
    memo = encodings()
    subjects = [
        content_digest(b"1" if add_special else b"0", text.encode("utf-8", "surrogatepass")) for text in texts
    ]
    known = [
        _read(memo.find(subject).get(witness), text) for subject, text in zip(subjects, texts, strict=True)
    ]
    found = [encoding for encoding in known if encoding is not None]
    if len(found) < len(texts):
        found = encode()
        for subject, encoding in zip(subjects, found, strict=True):
            memo.add(subject, witness, _written(encoding))
    return found


def _written(encoding: Encoding) -> str:
    return json.dumps([encoding.ids, encoding.tokens, encoding.offsets, encoding.special])


def _read(written: object, text: str) -> Encoding | None:
    """An encoding of a text; None for nothing, and for what is none: a cache may hold anything."""
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
