"""What runs and results take up, and what of it may go.

Leftovers of killed writers go after `grace`; above a quota, whole folders go, least recently used first. Kept
in any case: what is pinned, newer than `grace` or leased, and all it was made from. Order of removal: keys,
manifests, data - a reader meets a miss, never a torn entry.

Border: files and records; what they mean to an analysis is not asked.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..catalog import Catalog
from ..errors import CorruptEntry, ReadOnlyStore
from ..files import Folder
from ..provenance import as_json, get_provenance
from ..reading.datasets import forget_entries
from ..records import ACTIVATION, Record
from ..repeated import Repeated
from ..runs.claims import TTL
from ..sealed import read_json
from .lineage import inputs_of

_LEASE = 300.0  # seconds after which a lease whose holder no longer touches it counts for nothing


@dataclass(frozen=True)
class Usage:
    """What one run or result takes up.  used: seconds since the epoch of the last known use; now where files
    are from the future."""

    data: str
    kind: str
    labels: tuple[str, ...]
    bytes: int
    files: int
    used: float


@dataclass(frozen=True)
class GcReport:
    """What gc removed, or would have with dry_run: folders and leftover files, and the bytes they took."""

    removed: tuple[str, ...] = ()
    leftovers: tuple[str, ...] = ()
    bytes: int = 0
    kept_bytes: int = 0
    over_quota: int = 0
    dry_run: bool = False


def usage(store: Catalog) -> list[Usage]:
    """Bytes by run and result, largest first."""
    labels: dict[str, list[Record]] = {}
    for record in store.records():
        labels.setdefault(record.data, []).append(record)
    used, now = store.index.last_used(), store.files.now()
    found = []
    for data in store.folders():
        count, total, newest = measure(store.files, data)
        kind = ACTIVATION if store.files.size(f"{data}/zarr.json") is not None else "result"
        names = tuple(record.label for record in labels.get(data, ()))
        last = min(max(used.get(data, 0.0), newest), now)
        found.append(Usage(data, kind, names, total, count, last))
    return sorted(found, key=lambda one: (-one.bytes, one.data))


def gc(store: Catalog, *, grace: float, quota: int | None, dry_run: bool) -> GcReport:
    """Remove leftovers, then what is over quota. Raises ReadOnlyStore unless it is a dry run."""
    if store.read_only and not dry_run:
        raise ReadOnlyStore(
            f"cannot collect in {store.address}: opened with mode='r'; use dry_run=True to look"
        )
    horizon = store.files.now() - grace
    folders = usage(store)
    keys: dict[str, list[Record]] = {}
    for record in store.records():
        keys.setdefault(record.data, []).append(record)
    spare = marked(store, keys, horizon)
    gone = [one for one in folders if one.data not in keys and one.data not in spare and one.used < horizon]
    kept = sum(one.bytes for one in folders) - sum(one.bytes for one in gone)
    if quota is not None:
        for one in sorted(folders, key=lambda one: one.used):
            if kept <= quota:
                break
            if one.data in keys and one.data not in spare:
                gone.append(one)
                kept -= one.bytes
    doomed = {one.data for one in gone}
    strays = [path for path in _strays(store, horizon) if not any(path.startswith(f"{d}/") for d in doomed)]
    stray_bytes = sum(store.files.size(path) or 0 for path in strays)
    if not dry_run:
        for one in gone:
            _remove(store, one.data, keys.get(one.data, []))
        for path in strays:
            store.files.delete(path)
    return GcReport(
        removed=tuple(one.data for one in gone),
        leftovers=tuple(strays),
        bytes=sum(one.bytes for one in gone) + stray_bytes,
        kept_bytes=kept - stray_bytes,
        over_quota=max(0, kept - stray_bytes - quota) if quota is not None else 0,
        dry_run=dry_run,
    )


def marked(
    store: Catalog,
    keys: Mapping[str, Sequence[Record]],
    horizon: float,
    notes: Callable[[str], Sequence[Mapping[str, Any]]] | None = None,
) -> set[str]:
    """Folders gc must leave: pinned, new or leased, and everything those were made from.

    keys: records by folder. horizon: seconds since the epoch; what is younger stays. notes: provenance of a
    folder, where somebody remembers it; by default read.
    """
    read = notes or partial(get_provenance, store.files)
    pinned = set(store.pins().values())
    leased = _leased(store)
    roots = []
    for data, records in keys.items():
        fresh = any(_mtime(store.files, record.path) >= horizon for record in records)
        if data in leased or fresh or any(record.key in pinned for record in records):
            roots.append(data)
    by_content: dict[str, set[str]] = {}
    for data, records in keys.items():
        for record in records:
            by_content.setdefault(record.content, set()).add(data)
    found, waiting = set(leased), roots
    while waiting:
        data = waiting.pop()
        if data not in found or data in leased:
            found.add(data)
            parents = {
                parent
                for note in read(data)
                for contents in inputs_of(note).values()
                for content in contents
                for parent in by_content.get(content, ())
            }
            waiting += [parent for parent in parents if parent not in found]
    return found


def _leased(store: Catalog) -> set[str]:
    """Folders somebody reads or writes right now: leases and claims that are still being touched."""
    now, found = store.files.now(), set()
    for name in store.files.list("leases"):
        if now - _mtime(store.files, name) < _LEASE and (text := store.files.get(name)) is not None:
            found.add(_of_lease(store.files.where(name), text))
    for data in store.folders():
        claims = (stat for name, stat in store.files.stamps(f"{data}/seg") if name.endswith(".claim"))
        if any(now - stat.modified < TTL for stat in claims):
            found.add(data)
    return found


def _of_lease(name: str, text: bytes) -> str:
    """The folder that a lease holds."""
    try:
        return str(read_json(text)["data"])
    except (ValueError, LookupError, TypeError) as error:
        raise CorruptEntry(
            f"{name}: expected a lease, found {error}; what it keeps cannot be told: remove it"
        ) from error


def _strays(store: Catalog, horizon: float) -> list[str]:
    """Temporary files of killed writers, and leases and claims nobody holds, older than the horizon."""
    found = []
    for part in ("data", "keys", "pins", "leases", "vocabularies", "annotations"):
        for name, stat in store.files.walk(part):
            hidden = any(step.startswith(".") for step in name.split("/"))
            dead = hidden or name.endswith(".claim") or part == "leases"
            if dead and stat.modified < horizon:
                found.append(name)
    return sorted(found)


def _remove(store: Catalog, data: str, keys: list[Record]) -> None:
    for record in keys:
        store.files.delete(record.path)
    store.files.delete(f"{data}/manifest.json")
    store.files.remove_tree(f"{data}/manifest")
    store.files.remove_tree(data)
    store.index.forget(data)
    forget_entries()  # one may hold files of it mapped


@contextmanager
def lease(store: Catalog, record: Record) -> Iterator[None]:
    """Touch a small file now and then for as long as the block runs; a read-only store takes none."""
    if store.read_only:
        yield
        return
    name = f"leases/{secrets.token_hex(8)}.json"

    def keep_alive() -> None:
        with suppress(OSError):
            store.files.touch(name)

    try:
        store.files.put_new(name, as_json({"data": record.data, "key": record.key}))
        with Repeated(_LEASE / 4, keep_alive, "mizarr-lease"):
            yield
    finally:
        try:
            store.files.delete(name)
        except BaseException:  # interrupted
            store.files.delete(name)
            raise


def measure(files: Folder, data: str) -> tuple[int, int, float]:
    """Files below a folder, their bytes, and the newest change among them."""
    top = files.folder_stat(data)  # of a folder that is still empty
    count, total, newest = 0, 0, 0.0 if top is None else top.modified
    for _, stat in files.walk(data):
        count, total, newest = count + 1, total + stat.size, max(newest, stat.modified)
    return count, total, newest


def _mtime(files: Folder, name: str) -> float:
    stat = files.stat(name)
    return 0.0 if stat is None else stat.modified
