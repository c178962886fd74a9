"""Annotations: short texts that people attach to stored things, such as labels of dictionary features.

    annotations/<subject>/<when>-<random>.json     texts of one call, with a checksum, never changed

The subject is a digest, the item a name within it. Annotations are append-only: a later text of an item
replaces an earlier one, an empty text removes it, and the earlier ones remain readable. No key and no
computation depends on them, so that naming a feature recomputes nothing.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import ShapeError
from ..files import Folder
from ..records import now
from ..sealed import sealed, unsealed

__all__ = ["ANNOTATIONS", "Annotation", "annotate", "annotations_of"]

ANNOTATIONS = "annotations"
LONGEST = 2000
"""Limit on the characters of a text or name."""


@dataclass(frozen=True)
class Annotation:
    """One text that somebody attached to a stored item, such as a label of a dictionary's feature."""

    item: str
    """Name of the item within its subject, such as a feature."""
    text: str
    """Annotation text; an empty text removes the previous annotation."""
    author: str
    """Name of the person or program that wrote the text."""
    created: str
    """UTC, ISO 8601, to the second."""


def annotate(files: Folder, subject: str, texts: Mapping[str, str], author: str) -> None:
    """Store texts about items of a subject, such as labels of the features of one dictionary.

    Arguments:
        files: The store's files.
        subject: Digest of the subject, 64 hex digits.
        texts: Text by the name of the item, such as "feature 3"; an empty text removes the earlier one.
        author: Name of the person or program that wrote the texts.

    Raises:
        ShapeError: The subject is no digest, there is no text, or a text or name has several lines,
            unprintable characters or more than 2,000 characters.
    """
    if not re.fullmatch(r"[0-9a-f]{64}", subject):
        raise ShapeError(
            f"expected the digest of what is annotated, 64 hex digits, found {subject!r:.80}; for a "
            "dictionary give dictionary.identity"
        )
    if not texts:
        raise ShapeError("annotate: no texts were given; give a mapping such as {'feature 3': 'numbers'}")
    for text in (author, *texts, *texts.values()):
        # Shown in terminals and pages later, so control characters and line breaks are refused at the source.
        if not isinstance(text, str) or not text.isprintable() or len(text) > LONGEST:
            raise ShapeError(
                "annotate: item names, texts and the author are one line of printable text of at most "
                f"{LONGEST} characters, found {text!r:.80}; shorten it, or remove line breaks"
            )
    fields = {"subject": subject, "said": dict(texts), "author": author, "created": now()}
    # Names sort by time. The random part separates two calls in one nanosecond of a coarse clock.
    name = f"{time.time_ns():020d}-{secrets.token_hex(4)}"
    files.put_new(f"{ANNOTATIONS}/{subject}/{name}.json", sealed(fields))


def annotations_of(files: Folder, subject: str) -> list[Annotation]:
    """Read all annotations of a subject, oldest first, including those that were replaced or removed.

    Arguments:
        files: The store's files.
        subject: Digest of the subject, 64 hex digits.

    Raises:
        CorruptEntry: A record is damaged.
    """
    annotations = []
    folder = f"{ANNOTATIONS}/{subject}"
    # Names begin with the time, so sorted names are in order of time.
    for name in sorted(f"{folder}/{file}" for file in files.children(folder)):
        if (text := files.get(name)) is not None:
            record = unsealed(name, text, ("said", "author", "created"))
            annotations += [
                Annotation(item, annotation, record["author"], record["created"])
                for item, annotation in record["said"].items()
            ]
    return annotations
