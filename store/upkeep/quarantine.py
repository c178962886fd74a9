"""One damaged file is set aside, and only what it belonged to is withdrawn.

A shard takes its own (variable, layer) with it, and that only until the next run has computed the one segment
again.

Border: files and records; what they mean to an analysis is not asked.
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
"""Files of an entry that say what its arrays hold."""
_GROUPS = tuple(f"{name}/zarr.json" for name in BOOKKEEPING)
"""What makes these folders groups to Zarr; nothing of ours reads it."""


def quarantine(store: Catalog, damage: Damage) -> None:
    """Set the damaged file aside and withdraw what it belonged to."""
    if store.read_only:
        raise ReadOnlyStore(
            f"cannot quarantine in {store.address}: opened with mode='r'; open it with mode='a'"
        )
    aside = f"quarantine/{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{secrets.token_hex(3)}"
    published = [record for record in _readable(store) if record.data == damage.data]
    segments = _segment_records(store, damage)
    variable = damage.file.removeprefix("coordinates/").removesuffix("zarr.json")[:-1]
    described = metadata_record(variable)
    if segments:
        for name, segment in segments.items():
            _withdraw_cells(store, damage, name, segment, aside)
        _move(store, f"{damage.data}/{damage.file}", aside)
    elif not _is_in_data(damage.data) or damage.file in _GROUPS:
        _move(store, f"{damage.data}/{damage.file}", aside)
        if damage.file in _GROUPS:
            store.files.put_new(f"{damage.data}/{damage.file}", EMPTY_GROUP)
    elif damage.file.startswith(RECORD_FOLDERS):
        # Bookkeeping: without it the data is invisible until the next run commits it again, as it is.
        labels = _whole(record.label for record in published if manifest_of(record) == damage.file)
        _withdraw(store, [record for record in published if record.label in labels])
        _move(store, f"{damage.data}/{damage.file}", aside)
    elif variable and described.rpartition("/")[2] in store.files.children(f"{damage.data}/coordinates"):
        # What describes an array, or the digest of that: neither can be trusted; both are written again.
        names = _whole([variable])
        _withdraw(store, [record for record in published if record.label.partition("/")[0] in names])
        _move(store, f"{damage.data}/{described}", aside)
        _move(store, f"{damage.data}/{variable}/zarr.json", aside)
    elif "/c/" in damage.file and damage.file not in committed_files(store, damage.data)[0]:
        _move(store, f"{damage.data}/{damage.file}", aside)  # in the way of a shard nobody has committed
    else:
        # A result, or the labels of a run: nothing smaller than the folder can be computed again.
        _withdraw(store, published)
        _move(store, damage.data, aside)
    store.files.put_new(f"{aside}/damage.json", as_json(damage.__dict__))
    store.index.forget(damage.data)
    forget_entries()  # one may hold the damaged file mapped


def _is_in_data(data: str) -> bool:
    """Whether damage is of a run or a result, by its folder; of a small file of the store otherwise."""
    return data.startswith("data/") and data.count("/") == 2


def _readable(store: Catalog) -> Iterator[Record]:
    """Every record, but for key files that are themselves damaged."""
    for name in store.files.list("keys"):
        with suppress(CorruptEntry):
            if (record := store.lookup(Path(name).stem)) is not None:
                yield record


def _withdraw(store: Catalog, published: list[Record]) -> None:
    """Take records out of sight, each key before its manifest."""
    for record in published:
        store.files.delete(record.path)
        if record.kind == ACTIVATION:
            store.files.delete(f"{record.data}/{manifest_of(record)}")


def _segment_records(store: Catalog, damage: Damage) -> dict[str, dict[str, Any]]:
    """The segment records that list the damaged file, by name."""
    found = {}
    for name in store.files.list(f"{damage.data}/seg"):
        if name.endswith(".json") and not name.endswith("/zarr.json"):
            with suppress(CorruptEntry):  # an unreadable record is damage of its own
                record = unsealed(name, store.files.get(name) or b"", ("segment", "cells", "files", PLAIN))
                if damage.file in record["files"]:
                    found[name] = record
    return found


def _withdraw_cells(store: Catalog, damage: Damage, name: str, record: dict[str, Any], aside: str) -> None:
    """Take the damaged file's cells out of a segment record and out of sight; the others stay committed."""
    variable, _, *place = damage.file.split("/")
    bad = [c for c in record["cells"] if c == variable or c == f"{variable}.{place[0]}"]
    rest = [cell for cell in record["cells"] if cell not in bad]
    files = {file: told for file, told in record["files"].items() if file != damage.file}
    if rest:
        plain = {file: told for file, told in record[PLAIN].items() if file in files}
        kept = {**record, "cells": rest, "files": files, PLAIN: plain}
        store.files.put_new(record_name(damage.data, record["segment"], rest), sealed(kept))
    labels = _whole(cell.replace(".", "/") for cell in bad)
    _withdraw(store, [r for r in _readable(store) if r.data == damage.data and r.label in labels])
    _move(store, name, aside)


def _whole(labels: Iterable[str]) -> set[str]:
    """Labels or names of arrays, and of those that mean nothing without them: int8 and its scales."""
    found = set()
    for label in labels:
        variable, slash, layer = label.partition("/")
        name = scaled_name(variable)
        found |= {f"{variable}{slash}{layer}", f"{name}{slash}{layer}", f"{scale_name(name)}{slash}{layer}"}
    return found


def _move(store: Catalog, name: str, aside: str) -> None:
    store.files.move(name, f"{aside}/{name}")
