"""Quarantine: move a damaged file aside, and withdraw only the data that depended on it.

A damaged shard withdraws its own array (variable, layer), until the next capture has recomputed that one
segment. The other arrays that were computed with it stay committed.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..catalog import Catalog
from ..errors import CorruptEntry, ReadOnlyStore
from ..provenance import as_json
from ..reading.datasets import forget_entries
from ..records import ACTIVATION, Record
from ..runs.committed import PLAIN, record_name
from ..runs.coordinates import BOOKKEEPING, EMPTY_GROUP, metadata_record
from ..runs.quantised import scale_name, scaled_name
from ..sealed import sealed, unsealed
from .verify import Damage, committed_files, manifest_of

RECORD_FOLDERS = ("seg/", "manifest/", "provenance/")
"""Folders of a run with segment records, manifests and provenance."""
_GROUPS = tuple(f"{name}/zarr.json" for name in BOOKKEEPING)
"""Files that make these folders Zarr groups; mizarr itself does not read them."""


def quarantine(store: Catalog, damage: Damage) -> None:
    """Move a damaged file to `quarantine/` and withdraw the records of the data that depended on it.

    Arguments:
        store: The store.
        damage: The damaged file, from `verify`.

    Raises:
        ReadOnlyStore: The store was opened with mode="r".
    """
    if store.read_only:
        raise ReadOnlyStore(
            f"cannot move damaged files of {store.address}, which was opened with mode='r'; open it with "
            "mode='a'"
        )
    # One folder per incident: a file may be damaged again after it was computed anew.
    aside = f"quarantine/{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{secrets.token_hex(3)}"
    published = [record for record in _readable_records(store) if record.data == damage.data]
    segments = _segment_records(store, damage)
    # Both "resid_post/zarr.json" and its record "coordinates/resid_post.zarr.json" lead to "resid_post".
    variable = damage.file.removeprefix("coordinates/").removesuffix("zarr.json")[:-1]
    checksum_record = metadata_record(variable)
    if segments:
        for name, segment in segments.items():
            _withdraw_arrays(store, damage, name, segment, aside)
        _move(store, f"{damage.data}/{damage.file}", aside)
    elif not _is_in_data(damage.data) or damage.file in _GROUPS:
        _move(store, f"{damage.data}/{damage.file}", aside)
        if damage.file in _GROUPS:
            store.files.put_new(f"{damage.data}/{damage.file}", EMPTY_GROUP)
    elif damage.file.startswith(RECORD_FOLDERS):
        # Without this record the data is invisible until the next run commits the same files again.
        labels = _with_partners(record.label for record in published if manifest_of(record) == damage.file)
        _withdraw(store, [record for record in published if record.label in labels])
        _move(store, f"{damage.data}/{damage.file}", aside)
    elif variable and checksum_record.rpartition("/")[2] in store.files.children(
        f"{damage.data}/coordinates"
    ):
        # Array metadata or its checksum record: which of them is damaged is unknown, so both are written
        # again.
        names = _with_partners([variable])
        _withdraw(store, [record for record in published if record.label.partition("/")[0] in names])
        _move(store, f"{damage.data}/{checksum_record}", aside)
        _move(store, f"{damage.data}/{variable}/zarr.json", aside)
    elif "/c/" in damage.file and damage.file not in committed_files(store, damage.data)[0]:
        # Nobody has committed this file, but it would stand in the way of the shard's next writer.
        _move(store, f"{damage.data}/{damage.file}", aside)
    else:
        # A result, or the labels of a run: no smaller part can be recomputed by itself.
        _withdraw(store, published)
        _move(store, damage.data, aside)
    store.files.put_new(f"{aside}/damage.json", as_json(damage.__dict__))
    store.index.forget(damage.data)
    forget_entries()  # a cached entry may have the damaged file mapped


def _is_in_data(data: str) -> bool:
    """Whether a folder is that of a run or result, as opposed to one of small files like keys or pins."""
    return data.startswith("data/") and data.count("/") == 2


def _readable_records(store: Catalog) -> Iterator[Record]:
    """Yield all records of the store whose key files are intact."""
    for name in store.files.list("keys"):
        with suppress(CorruptEntry):
            if (record := store.lookup(Path(name).stem)) is not None:
                yield record


def _withdraw(store: Catalog, published: list[Record]) -> None:
    """Make records invisible: delete each key, then its manifest."""
    for record in published:
        store.files.delete(record.path)
        if record.kind == ACTIVATION:
            store.files.delete(f"{record.data}/{manifest_of(record)}")


def _segment_records(store: Catalog, damage: Damage) -> dict[str, dict[str, Any]]:
    """Segment records that list the damaged file, by path."""
    records = {}
    for name in store.files.list(f"{damage.data}/seg"):
        if name.endswith(".json") and not name.endswith("/zarr.json"):
            with suppress(CorruptEntry):  # an unreadable record is damage of its own
                record = unsealed(name, store.files.get(name) or b"", ("segment", "cells", "files", PLAIN))
                if damage.file in record["files"]:
                    records[name] = record
    return records


def _withdraw_arrays(store: Catalog, damage: Damage, name: str, record: dict[str, Any], aside: str) -> None:
    """Withdraw the array of a damaged file, and remove the array from a segment record.

    The record without it is written first, so that the other arrays of the segment stay committed throughout.

    Arguments:
        store: The store.
        damage: The damaged file, a shard.
        name: Path of the segment record.
        record: Fields of the segment record; its "cells" are "variable.layer", or "variable" without layers.
        aside: Folder of this incident in the quarantine.
    """
    # The path of a shard is <variable>/c/<layer>/<segment>/… or, without layers, <variable>/c/<segment>/….
    variable, _, *indices = damage.file.split("/")
    damaged = [cell for cell in record["cells"] if cell in (variable, f"{variable}.{indices[0]}")]
    remaining = [cell for cell in record["cells"] if cell not in damaged]
    files = {file: checksum for file, checksum in record["files"].items() if file != damage.file}
    if remaining:
        plain = {file: checksum for file, checksum in record[PLAIN].items() if file in files}
        new_record = {**record, "cells": remaining, "files": files, PLAIN: plain}
        # Under a new name, as its digest covers the cells; the old record is moved away afterwards.
        store.files.put_new(record_name(damage.data, record["segment"], remaining), sealed(new_record))
    labels = _with_partners(cell.replace(".", "/") for cell in damaged)
    records = [record for record in _readable_records(store) if record.data == damage.data]
    _withdraw(store, [record for record in records if record.label in labels])
    _move(store, name, aside)


def _with_partners(labels: Iterable[str]) -> set[str]:
    """Add to each label "variable/layer" of an int8 array the label of its scales, and vice versa.

    Neither has a meaning without the other.
    """
    complete = set()
    for label in labels:
        variable, slash, layer = label.partition("/")
        name = scaled_name(variable)
        complete |= {
            f"{variable}{slash}{layer}",
            f"{name}{slash}{layer}",
            f"{scale_name(name)}{slash}{layer}",
        }
    return complete


def _move(store: Catalog, name: str, aside: str) -> None:
    store.files.move(name, f"{aside}/{name}")
