"""The small file that makes a result visible: `keys/<ab>/<key>.json`.

Border: names and plain values; who writes the file, and when, is decided by the entry or the result it points
to.

A key file says where the data lies and what its bytes digest to. It is created once, never changed, and is
the only thing a reader starts from: data without a key file does not exist. Downstream keys are made of
`content`, never of `key`, so an upstream recompute that gives the same bytes stops there (early cutoff).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime

from .errors import REPAIR, CorruptEntry
from .sealed import sealed, unsealed

ACTIVATION = "activation"
RESULT = "result"
_DATA = re.compile(r"data/[0-9a-f]{2}/[0-9a-f]+(\.[0-9a-f]+)?")
_FIELDS = ("kind", "data", "content", "created", "label")


@dataclass(frozen=True)
class Record:
    """One published array or result.

    key: 64 hex, digest of the request (the file's name).
    kind: "activation" or "result".
    data: folder that holds it, relative to the store, e.g. "data/ab/ab12…".
    content: R, "sha256:…" over what was computed.
    created: UTC, ISO 8601, seconds.
    label: for people, e.g. "resid_post/5" or "logit_lens/1".
    """

    key: str
    kind: str
    data: str
    content: str
    created: str
    label: str = ""

    @property
    def short(self) -> str:
        """First 12 digits of the key."""
        return self.key[:12]

    @property
    def path(self) -> str:
        """Name of the key file, relative to the store."""
        return key_path(self.key)

    def to_bytes(self) -> bytes:
        """Content of the key file."""
        return sealed({name: getattr(self, name) for name in _FIELDS})

    @classmethod
    def from_bytes(cls, key: str, text: bytes) -> Record:
        """The record in a key file; CorruptEntry if it is not one, or not what was written."""
        fields = unsealed(key_path(key), text, _FIELDS)
        found = cls(key, **{name: str(fields[name]) for name in _FIELDS})
        if not _DATA.fullmatch(found.data) or ".." in found.label:
            raise CorruptEntry(
                f"{key_path(key)}: expected a folder of the store, found {found.data!r:.80}; {REPAIR}"
            )
        return found


def key_path(key: str) -> str:
    """Where the key file of `key` (64 hex) lies, relative to the store."""
    return f"keys/{key[:2]}/{key}.json"


def now() -> str:
    """Current time as records write it: UTC, ISO 8601, whole seconds."""
    return datetime.now(UTC).isoformat(timespec="seconds")
