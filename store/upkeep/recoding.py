"""Shards of an array as another store has them: compressed, or plain again.

Border: one array of a run, from one store into another; which arrays, and what says that they stand, is told
by copying.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..catalog import Catalog
from ..digest import content_digest
from ..errors import REPAIR, ConfigError, CorruptEntry, StoreFormatError
from ..runs.archived import plain_measure, recoded
from ..runs.coordinates import metadata_record
from ..runs.shards import CODECS, ShardLayout, Written
from ..sealed import read_json, sealed

__all__ = ["PLAINLY", "Differs", "Recoding", "check_codec", "put_text", "recoding_of"]

PLAINLY = "none"
"""What people say for no codec."""


class Differs(Exception):
    """The target holds something else under a name."""


def put_text(target: Catalog, name: str, text: bytes) -> None:
    """Put a file that describes others; Differs if there is another one."""
    if not target.files.put_new(name, text) and target.files.get(name) != text:
        raise Differs(name)


def check_codec(codec: str | None) -> None:
    """ConfigError for a codec there is not."""
    if codec not in (None, PLAINLY, *CODECS):
        known = ", ".join((*CODECS, PLAINLY))
        raise ConfigError(f"expected a codec among {known}, found {codec!r}; name one, or leave it out")


@dataclass(frozen=True)
class Recoding:
    """How the shards of one array change on the way. data: folder of the run; text: its `zarr.json` in the
    target."""

    data: str
    variable: str
    before: ShardLayout
    after: ShardLayout
    text: bytes

    def describe(self, target: Catalog) -> None:
        """Put the description of the array, and the digest of that; Differs if there is another one."""
        file = f"{self.variable}/zarr.json"
        told = {"files": {file: [len(self.text), content_digest(self.text)]}}
        described = {
            f"{self.data}/{file}": self.text,
            f"{self.data}/{metadata_record(self.variable)}": sealed(told),
        }
        for name, text in described.items():
            put_text(target, name, text)

    def put(
        self, source: Catalog, target: Catalog, file: str, told: Written, plain: Written
    ) -> tuple[Written, int]:
        """Put one shard; returns size and digest of the file in the target, and the bytes written.

        told: of the file in the source; plain: of what it holds without a codec, which has to be the same in
        the end. Raises CorruptEntry, Differs, and StoreFormatError for a shard that another program wrote.
        """
        name = f"{self.data}/{file}"
        where = source.files.where(name)
        content = source.files.get(name)
        if content is None or (len(content), content_digest(content)) != told:
            found = None if content is None else (len(content), content_digest(content))
            raise CorruptEntry(f"{where}: expected {told}, found {found}; {REPAIR}")
        made = b"".join(recoded(content, self.before, self.after, where))
        if self._plain(made, where) != plain:
            raise StoreFormatError(
                f"{where}: expected a shard as mizarr lays it out, found one of another program, which "
                "cannot be stored otherwise to the bit; copy it without a codec"
            )
        if target.files.put_new(name, made):
            return (len(made), content_digest(made)), len(made)
        # Of a copy that was cut off, or by another version of the codec: what it holds is what counts.
        there = target.files.get(name) or b""
        if self._plain(there, target.files.where(name)) != plain:
            raise Differs(name)
        return (len(there), content_digest(there)), 0

    def _plain(self, content: bytes, where: str) -> Written:
        if self.after.codec:
            return plain_measure(content, self.after, where)
        return len(content), content_digest(content)


def recoding_of(
    source: Catalog, target: Catalog, data: str, variable: str, codec: str | None
) -> Recoding | None:
    """How the shards of an array change; None where they are copied as they lie: as they are wanted already,
    or of a kind that is none of ours. What the target has of the array decides before what is asked for."""
    name = f"{data}/{variable}/zarr.json"
    text, there = source.files.get(name), target.files.get(name)
    before, wanted = _layout(text), _layout(there)
    if text is None or before is None or (there is not None and wanted is None):
        return None
    after = before if codec is None else replace(before, codec="" if codec == PLAINLY else codec)
    if wanted is not None:
        after = replace(before, codec=wanted.codec)
    if after == before:
        return None
    metadata = read_json(text)
    told = (metadata[field] for field in ("shape", "dimension_names", "attributes"))
    return Recoding(data, variable, before, after, after.metadata(*told))


def _layout(text: bytes | None) -> ShardLayout | None:
    if text is None:
        return None
    try:
        metadata: Mapping[str, object] = read_json(text)
    except ValueError:
        return None
    return ShardLayout.from_metadata(metadata)
