"""The small file that makes a result visible: `keys/<ab>/<key>.json`.

Border: names and plain values; who writes the file, and when, is decided by the entry or the result it points
to.

A key file says where the data lies and what its bytes digest to. It is created once, never changed, and is
the only thing a reader starts from: data without a key file does not exist. Downstream keys are made of
`content`, never of `key`, so an upstream recompute that gives the same bytes stops there (early cutoff).
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

from .sealed import sealed, unsealed

ACTIVATION = "activation"
RESULT = "result"
PIN = ("key", "created")
"""Fields of a pin."""
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
        return cls(key, **{name: str(fields[name]) for name in _FIELDS})


def key_path(key: str) -> str:
    """Where the key file of `key` (64 hex) lies, relative to the store."""
    return f"keys/{key[:2]}/{key}.json"


def now() -> str:
    """Current time as records write it: UTC, ISO 8601, whole seconds."""
    return datetime.now(UTC).isoformat(timespec="seconds")
