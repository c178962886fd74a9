"""What people say of things: short texts beside what is stored, part of no key and no result.

Border: names and texts; what is annotated is known elsewhere, by a digest (the subject) and a name in it (the
item).

    annotations/<subject>/<when>-<random>.json     one call's texts, sealed, never changed

Appended only: a later text stands for an earlier one of the same item, an empty one takes it back, and the
earlier one can still be read. Nothing that is computed reads them, so that the same results have the same
keys whoever said what.
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

__all__ = ["ANNOTATIONS", "Annotation", "annotate", "said_of"]

ANNOTATIONS = "annotations"
LONGEST = 2000
"""Characters of a text."""


@dataclass(frozen=True)
class Annotation:
    """One text. item: what it is about.  created: UTC, ISO 8601, seconds."""

    item: str
    text: str
    author: str
    created: str


def annotate(files: Folder, subject: str, said: Mapping[str, str], author: str) -> None:
    """Keep texts by item, about a subject (64 hex digits).

    Raises ShapeError for what is no digest, for nothing said, and for a text or name of several lines, of
    characters that cannot be printed, or of more than 2,000.
    """
    if not re.fullmatch(r"[0-9a-f]{64}", subject):
        raise ShapeError(f"expected a digest of 64 hex digits to annotate, found {subject!r:.80}")
    if not said:
        raise ShapeError("expected at least one text, found none; say what of what")
    for what in (author, *said, *said.values()):
        if not isinstance(what, str) or not what.isprintable() or len(what) > LONGEST:
            raise ShapeError(
                f"expected one line of printable text of at most {LONGEST} characters, found {what!r:.80}"
            )
    fields = {"subject": subject, "said": dict(said), "author": author, "created": now()}
    name = f"{time.time_ns():020d}-{secrets.token_hex(4)}"
    files.put_new(f"{ANNOTATIONS}/{subject}/{name}.json", sealed(fields))


def said_of(files: Folder, subject: str) -> list[Annotation]:
    """Everything said about a subject, oldest first; CorruptEntry for a record that is not what was
    written."""
    found = []
    for name in sorted(
        f"{ANNOTATIONS}/{subject}/{each}" for each in files.children(f"{ANNOTATIONS}/{subject}")
    ):
        if (text := files.get(name)) is not None:
            told = unsealed(name, text, ("said", "author", "created"))
            found += [
                Annotation(item, said, told["author"], told["created"]) for item, said in told["said"].items()
            ]
    return found
