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
    """Conflict: the target contains another file of the same name."""


def put_text(target: Catalog, name: str, text: bytes) -> None:
    """Write a metadata file.

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
        raise ConfigError(f"expected a codec among {known}, found {codec!r}; name one, or leave it out")


@dataclass(frozen=True)
class Recoding:
    """Conversion of the shards of one array."""

    data: str
    """Folder of the run."""
    variable: str
    """Name of the array."""
    before: ShardLayout
    """Layout in the source."""
    after: ShardLayout
    """Layout in the target."""
    text: bytes
    """`zarr.json` of the array in the target."""

    def describe(self, target: Catalog) -> None:
        """Write the array's metadata and its checksum record; raises Differs if the target has others."""
        file = f"{self.variable}/zarr.json"
        record = {"files": {file: file_checksum(self.text)}}
        described = {
            f"{self.data}/{file}": self.text,
            f"{self.data}/{metadata_record(self.variable)}": sealed(record),
        }
        for name, text in described.items():
            put_text(target, name, text)

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
            raise CorruptEntry(f"{where}: expected {checksum}, found {actual}; {REPAIR}")
        new_content = b"".join(recoded(content, self.before, self.after, where))
        # Padding rows of another writer may differ from zeros, and would be lost.
        if plain_measure(new_content, self.after, where) != plain:
            raise StoreFormatError(
                f"{where}: expected a shard in the layout of mizarr, found one of another program, which "
                "cannot be recoded bit by bit; copy it without a codec"
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
    """Which conversion an array needs.

    Arguments:
        source: Store to read.
        target: Store to write.
        data: Folder of the run.
        variable: Name of the array.
        codec: Requested codec; "none" for none, None as in the source.

    Returns:
        None if its files are copied as they are: the codec is the requested one, or the array was not written
        by mizarr. The codec of an array that the target already has wins over the requested one.
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
    if text is None:
        return None
    try:
        metadata: Mapping[str, object] = read_json(text)
    except ValueError:
        return None
    return ShardLayout.from_metadata(metadata)
