"""Key files, `keys/<ab>/<key>.json`: the records that make data visible.

A key file gives the folder and content digest of published data. It is created once and never changed.
Readers start from key files only: data without one does not exist for them. Downstream keys contain
`content`, never `key`, so recomputing an input with equal bytes changes nothing downstream (early cutoff).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime

from .errors import REPAIR, CorruptEntry
from .sealed import sealed, unsealed

ACTIVATION = "activation"
"""Kind of the record of a captured array (variable, layer) of a run."""
RESULT = "result"
"""Kind of the record of a stage's result."""
_DATA = re.compile(r"data/[0-9a-f]{2}/[0-9a-f]+(\.[0-9a-f]+)?")
_FIELDS = ("kind", "data", "content", "created", "label")


@dataclass(frozen=True)
class Record:
    """Where the data of one published array or result lies, and what its content is."""

    key: str
    """Digest of the key under which the data is published, 64 hex digits; also the name of the file."""
    kind: str
    """"activation" for an array of a run, "result" for the result of a stage."""
    data: str
    """Folder of the data, relative to the store, e.g. "data/ab/ab12…"."""
    content: str
    """Content digest of the data, "sha256:…"."""
    created: str
    """Time of publication: UTC, ISO 8601, to the second."""
    label: str = ""
    """Readable name, e.g. "resid_post/5" or "logit_lens/1"."""

    @property
    def short(self) -> str:
        """First 12 digits of the key, for display."""
        return self.key[:12]

    @property
    def path(self) -> str:
        """Path of the key file, relative to the store."""
        return key_path(self.key)

    def to_bytes(self) -> bytes:
        """Content of the record's file, with its checksum."""
        return sealed({name: getattr(self, name) for name in _FIELDS})

    @classmethod
    def from_bytes(cls, key: str, text: bytes) -> Record:
        """Parse the file of a record.

        Arguments:
            key: Digest of the key, 64 hex digits.
            text: Content of the file.

        Raises:
            CorruptEntry: The file is damaged, or names a folder outside of the store's data.
        """
        fields = unsealed(key_path(key), text, _FIELDS)
        record = cls(key, **{name: str(fields[name]) for name in _FIELDS})
        # The path comes from a file that may have been manipulated; it must stay inside `data/`.
        if not _DATA.fullmatch(record.data) or ".." in record.label:
            raise CorruptEntry(
                f"{key_path(key)}: expected a record that names a folder data/ab/… of the store, found "
                f"{record.data!r:.80}; {REPAIR}"
            )
        return record


def key_path(key: str) -> str:
    """Path of the record's file of a key (64 hex digits), relative to the store."""
    return f"keys/{key[:2]}/{key}.json"


def now() -> str:
    """Current time as records state it: UTC, ISO 8601, whole seconds."""
    return datetime.now(UTC).isoformat(timespec="seconds")
