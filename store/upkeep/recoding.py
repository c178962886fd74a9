"""Convert shards between codecs (compressed, uncompressed) while copying a run to another store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..catalog import Catalog
from ..errors import REPAIR, ConfigError, CorruptEntry, StoreFormatError
from ..runs.archived import plain_measure, recoded
from ..runs.coordinates import metadata_record
from ..runs.shards import CODECS, FileChecksum, ShardLayout, file_checksum
from ..sealed import read_json, sealed

__all__ = ["PLAINLY", "Differs", "Recoding", "check_codec", "put_text", "recoding_of"]

PLAINLY = "none"
"""Value of the codec option for uncompressed shards."""


class Differs(Exception):
    """Conflict in a copy: the target store has another file of the same name."""


def put_text(target: Catalog, name: str, text: bytes) -> None:
    """Write a metadata file of a copy, unless the target has it already.

    Arguments:
        target: Store to write.
        name: Path of the file.
        text: Its content.

    Raises:
        Differs: The target has another content under that name.
    """
    if not target.files.put_new(name, text) and target.files.get(name) != text:
        raise Differs(name)


def check_codec(codec: str | None) -> None:
    """Raise ConfigError unless the codec is known or None."""
    if codec not in (None, PLAINLY, *CODECS):
        known = ", ".join((*CODECS, PLAINLY))
        raise ConfigError(
            f"expected codec (--codec) among {known}, found {codec!r}; leave it out to copy files as they are"
        )


@dataclass(frozen=True)
class Recoding:
    """Conversion of the shards of one array between compressed and uncompressed, while it is copied."""

    data: str
    """Folder of the run."""
    variable: str
    """Name of the array."""
    before: ShardLayout
    """Shard layout in the source store, with its codec."""
    after: ShardLayout
    """Shard layout in the target store, with its codec."""
    text: bytes
    """Content of the array's `zarr.json` in the target store."""

    def describe(self, target: Catalog) -> None:
        """Write the array's metadata and its checksum record; raises Differs if the target has others."""
        file = f"{self.variable}/zarr.json"
        record = {"files": {file: file_checksum(self.text)}}
        put_text(target, f"{self.data}/{file}", self.text)
        put_text(target, f"{self.data}/{metadata_record(self.variable)}", sealed(record))

    def put(
        self, source: Catalog, target: Catalog, file: str, checksum: FileChecksum, plain: FileChecksum
    ) -> tuple[FileChecksum, int]:
        """Convert and write one shard.

        Arguments:
            source: Store to read.
            target: Store to write.
            file: Path of the shard relative to the run.
            checksum: Size and checksum of the file in the source.
            plain: Size and checksum of its uncompressed form, which the conversion must preserve.

        Returns:
            Size and checksum of the file in the target, and the number of bytes written.

        Raises:
            CorruptEntry: The source file does not match its checksum.
            Differs: The target has another content.
            StoreFormatError: Another program wrote the shard, in a form that cannot be restored bit by bit.
        """
        name = f"{self.data}/{file}"
        where = source.files.where(name)
        content = source.files.get(name)
        actual = None if content is None else file_checksum(content)
        if content is None or actual != checksum:
            raise CorruptEntry(
                f"{where} is damaged: expected size and checksum {checksum}, found {actual}; {REPAIR}"
            )
        new_content = b"".join(recoded(content, self.before, self.after, where))
        # Padding rows of another writer may differ from zeros, and would be lost.
        if plain_measure(new_content, self.after, where) != plain:
            raise StoreFormatError(
                f"{where} was written by another program, and changing its compression would change its "
                "values; copy without --codec (codec=None)"
            )
        if target.files.put_new(name, new_content):
            return file_checksum(new_content), len(new_content)
        # Left by an interrupted copy, or compressed by another zstd version: only the uncompressed form must
        # match.
        existing = target.files.get(name) or b""
        if plain_measure(existing, self.after, target.files.where(name)) != plain:
            raise Differs(name)
        return file_checksum(existing), 0


def recoding_of(
    source: Catalog, target: Catalog, data: str, variable: str, codec: str | None
) -> Recoding | None:
    """Choose the codec conversion of an array's shards for a copy.

    Arguments:
        source: Store to read.
        target: Store to write.
        data: Folder of the run.
        variable: Name of the array.
        codec: Requested codec: "zstd", "none", or None to keep that of the source.

    Returns:
        The conversion; its codec is that of the target if the array exists there. None if files are copied as
        they are: they have that codec already, or were not written by mizarr.
    """
    name = f"{data}/{variable}/zarr.json"
    text, existing = source.files.get(name), target.files.get(name)
    before, target_layout = _layout(text), _layout(existing)
    if text is None or before is None or (existing is not None and target_layout is None):
        return None
    after = before if codec is None else replace(before, codec="" if codec == PLAINLY else codec)
    if target_layout is not None:
        after = replace(before, codec=target_layout.codec)
    if after == before:
        return None
    metadata = read_json(text)
    fields = (metadata[field] for field in ("shape", "dimension_names", "attributes"))
    return Recoding(data, variable, before, after, after.metadata(*fields))


def _layout(text: bytes | None) -> ShardLayout | None:
    """Shard layout in a `zarr.json`; None without a file, or for a file of another program."""
    if text is None:
        return None
    try:
        metadata: Mapping[str, object] = read_json(text)
    except ValueError:
        return None
    return ShardLayout.from_metadata(metadata)
