"""Disk usage of runs and results, and garbage collection.

First, leftovers of killed writers go once they are older than `grace`. Then, above a quota, whole folders go,
least recently used first. Always kept: what is pinned, younger than `grace` or leased, and everything it was
made from.

Removal deletes keys first, then manifests, then data, so that a concurrent reader gets a miss and never a
torn entry.
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

_LEASE = 300.0  # seconds until a lease expires without a sign of life from its holder


@dataclass(frozen=True)
class Usage:
    """Disk usage of one run or result."""

    data: str
    """Folder, relative to the store."""
    kind: str
    """"activation" for a run, or "result"."""
    labels: tuple[str, ...]
    """Labels of its published records."""
    bytes: int
    """Bytes of all files."""
    files: int
    """Number of files."""
    used: float
    """Last known use, seconds since the epoch; never later than now."""


@dataclass(frozen=True)
class GcReport:
    """What gc removed, or would remove in a dry run."""

    removed: tuple[str, ...] = ()
    """Folders of runs and results."""
    leftovers: tuple[str, ...] = ()
    """Single files of killed writers."""
    bytes: int = 0
    """Bytes of both."""
    kept_bytes: int = 0
    """Bytes that remain."""
    over_quota: int = 0
    """Bytes that remain above the quota, because they are pinned, new or leased."""
    dry_run: bool = False
    """Whether nothing was removed."""


def usage(store: Catalog) -> list[Usage]:
    """Disk usage of every run and result, largest first."""
    labels: dict[str, list[Record]] = {}
    for record in store.records():
        labels.setdefault(record.data, []).append(record)
    used, now = store.index.last_used(), store.files.now()
    usages = []
    for data in store.folders():
        count, total, newest = measure(store.files, data)
        kind = ACTIVATION if store.files.size(f"{data}/zarr.json") is not None else "result"
        names = tuple(record.label for record in labels.get(data, ()))
        # Times in the future (a clock that was set back) count as now, which keeps the folder.
        last = min(max(used.get(data, 0.0), newest), now)
        usages.append(Usage(data, kind, names, total, count, last))
    return sorted(usages, key=lambda item: (-item.bytes, item.data))


def gc(store: Catalog, *, grace: float, quota: int | None, dry_run: bool) -> GcReport:
    """Remove leftovers, then what is over quota. ReadOnlyStore unless it is a dry run.

    Arguments:
        store: The store.
        grace: Seconds for which new files are safe, as their writer may still be at work.
        quota: Bytes that may remain; None for no limit.
        dry_run: Whether to report only.
    """
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
    # Without a key: attempts and unfinished runs of killed writers, which go by age, whatever the quota.
    removable = [
        folder
        for folder in folders
        if folder.data not in keys and folder.data not in spare and folder.used < horizon
    ]
    kept_bytes = sum(folder.bytes for folder in folders) - sum(folder.bytes for folder in removable)
    if quota is not None:
        for folder in sorted(folders, key=lambda folder: folder.used):
            if kept_bytes <= quota:
                break
            if folder.data in keys and folder.data not in spare:
                removable.append(folder)
                kept_bytes -= folder.bytes
    removed = {folder.data for folder in removable}
    strays = [path for path in _strays(store, horizon) if not any(path.startswith(f"{d}/") for d in removed)]
    stray_bytes = sum(store.files.size(path) or 0 for path in strays)
    if not dry_run:
        for folder in removable:
            _remove(store, folder.data, keys.get(folder.data, []))
        for path in strays:
            store.files.delete(path)
    return GcReport(
        removed=tuple(folder.data for folder in removable),
        leftovers=tuple(strays),
        bytes=sum(folder.bytes for folder in removable) + stray_bytes,
        kept_bytes=kept_bytes - stray_bytes,
        over_quota=max(0, kept_bytes - stray_bytes - quota) if quota is not None else 0,
        dry_run=dry_run,
    )


def marked(
    store: Catalog,
    keys: Mapping[str, Sequence[Record]],
    horizon: float,
    notes: Callable[[str], Sequence[Mapping[str, Any]]] | None = None,
) -> set[str]:
    """Folders protected from gc: pinned, new or leased ones, and the inputs they were computed from.

    Arguments:
        store: The store.
        keys: Published records by folder.
        horizon: Seconds since the epoch; younger records are kept.
        notes: Provenance of a folder, if the caller has a cache of it; by default it is read.
    """
    read = notes or partial(get_provenance, store.files)
    pinned = set(store.pins().values())
    leased = _leased(store)
    roots = []
    for data, records in keys.items():
        # By the key's time, not the data's: a run that took days is new when it is published.
        is_new = any(_mtime(store.files, record.path) >= horizon for record in records)
        if data in leased or is_new or any(record.key in pinned for record in records):
            roots.append(data)
    by_content: dict[str, set[str]] = {}
    for data, records in keys.items():
        for record in records:
            by_content.setdefault(record.content, set()).add(data)
    # Walk from the roots to their inputs. Contents identify inputs, as several folders may hold equal ones.
    reached, waiting = set(leased), roots
    while waiting:
        data = waiting.pop()
        if data not in reached or data in leased:
            reached.add(data)
            parents = {
                parent
                for note in read(data)
                for contents in inputs_of(note).values()
                for content in contents
                for parent in by_content.get(content, ())
            }
            waiting += [parent for parent in parents if parent not in reached]
    return reached


def _leased(store: Catalog) -> set[str]:
    """Folders in use: those with a lease or claim whose holder still renews it."""
    now, in_use = store.files.now(), set()
    for name in store.files.list("leases"):
        if now - _mtime(store.files, name) < _LEASE and (text := store.files.get(name)) is not None:
            in_use.add(_leased_folder(store.files.where(name), text))
    for data in store.folders():
        # A run under computation has no lease, but its workers renew claims.
        claims = (stat for name, stat in store.files.stamps(f"{data}/seg") if name.endswith(".claim"))
        if any(now - stat.modified < TTL for stat in claims):
            in_use.add(data)
    return in_use


def _leased_folder(name: str, text: bytes) -> str:
    """The folder that a lease protects; CorruptEntry for a damaged lease."""
    try:
        return str(read_json(text)["data"])
    except (ValueError, LookupError, TypeError) as error:
        raise CorruptEntry(
            f"{name}: expected a lease, found {error}; the folder it protects is unknown: remove it"
        ) from error


def _strays(store: Catalog, horizon: float) -> list[str]:
    """Temporary files of killed writers, and expired leases and claims, older than the horizon."""
    strays = []
    for part in ("data", "keys", "pins", "leases", "vocabularies", "annotations"):
        for name, stat in store.files.walk(part):
            is_temporary = any(step.startswith(".") for step in name.split("/"))
            is_stray = is_temporary or name.endswith(".claim") or part == "leases"
            if is_stray and stat.modified < horizon:
                strays.append(name)
    return sorted(strays)


def _remove(store: Catalog, data: str, keys: list[Record]) -> None:
    for record in keys:
        store.files.delete(record.path)
    # Keys are gone by now. Then manifests, so that no moment exists in which `verify` sees a manifest of
    # missing files.
    store.files.delete(f"{data}/manifest.json")
    store.files.remove_tree(f"{data}/manifest")
    store.files.remove_tree(data)
    store.index.forget(data)
    forget_entries()  # a cached entry may have files of this folder mapped


@contextmanager
def lease(store: Catalog, record: Record) -> Iterator[None]:
    """Context that protects a folder from gc by a lease file that is renewed.

    Arguments:
        store: The store; nothing is protected in a read-only one.
        record: Published record of the run or result.
    """
    if store.read_only:
        yield
        return
    name = f"leases/{secrets.token_hex(8)}.json"

    def keep_alive() -> None:
        with suppress(OSError):
            store.files.touch(name)

    try:
        # Unsealed, unlike records: a lease decides no number, and its time of modification is all that
        # counts.
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
    """Disk usage of a folder.

    Arguments:
        files: The store's files.
        data: Folder of a run or result.

    Returns:
        Number of files, their bytes, and the time of the newest change in seconds since the epoch.
    """
    top = files.folder_stat(data)  # counts as a change in a folder that is still empty
    count, total, newest = 0, 0, 0.0 if top is None else top.modified
    for _, stat in files.walk(data):
        count, total, newest = count + 1, total + stat.size, max(newest, stat.modified)
    return count, total, newest


def _mtime(files: Folder, name: str) -> float:
    stat = files.stat(name)
    return 0.0 if stat is None else stat.modified
