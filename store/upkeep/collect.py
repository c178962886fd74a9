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

_LEASE_SECONDS = 300.0  # a lease expires so long after its holder last renewed it


@dataclass(frozen=True)
class Usage:
    """Disk usage of one run or result."""

    data: str
    """Folder of the run or result, relative to the store, such as "data/ab/ab12…"."""
    kind: str
    """"activation" for a run, or "result"."""
    labels: tuple[str, ...]
    """Labels of the published arrays, such as "resid_post/5", or of the result, such as "logit_lens/1"."""
    bytes: int
    """Bytes of all files in the folder."""
    files: int
    """Number of files in the folder."""
    used: float
    """Last known use, seconds since the epoch; never later than now."""


@dataclass(frozen=True)
class GcReport:
    """What a garbage collection removed, or would remove in a dry run."""

    removed: tuple[str, ...] = ()
    """Removed folders of runs and results, relative to the store."""
    leftovers: tuple[str, ...] = ()
    """Removed single files that killed writers left behind, relative to the store."""
    bytes: int = 0
    """Bytes of the removed folders and files."""
    kept_bytes: int = 0
    """Bytes of data that remain in the store."""
    over_quota: int = 0
    """Bytes by which the store still exceeds the quota, because the rest is pinned, new or in use."""
    dry_run: bool = False
    """Whether this was a dry run, which removes nothing."""


def usage(store: Catalog) -> list[Usage]:
    """Measure the disk usage of every run and result, largest first."""
    records_of: dict[str, list[Record]] = {}  # by folder
    for record in store.records():
        records_of.setdefault(record.data, []).append(record)
    last_used, now = store.index.last_used(), store.files.now()
    usages = []
    for folder in store.folders():
        n_files, n_bytes, newest_change = measure(store.files, folder)
        # The group file of a run lies in its folder, that of a result one level below.
        kind = ACTIVATION if store.files.size(f"{folder}/zarr.json") is not None else "result"
        labels = tuple(record.label for record in records_of.get(folder, ()))
        # Times in the future (a clock that was set back) count as now, which keeps the folder.
        used = min(max(last_used.get(folder, 0.0), newest_change), now)
        usages.append(Usage(folder, kind, labels, n_bytes, n_files, used))
    return sorted(usages, key=lambda item: (-item.bytes, item.data))


def gc(store: Catalog, *, grace: float, quota: int | None, dry_run: bool) -> GcReport:
    """Collect garbage: remove leftovers of killed writers, then the least recently used data above a quota.

    Arguments:
        store: The store.
        grace: Age in seconds below which nothing is removed, as its writer may still be at work.
        quota: Bytes that may remain; None for no limit.
        dry_run: Whether to report what would be removed, and remove nothing.

    Raises:
        ReadOnlyStore: The store was opened with mode="r", and this is no dry run.
    """
    if store.read_only and not dry_run:
        raise ReadOnlyStore(
            f"cannot collect garbage in {store.address}, which was opened with mode='r'; open it with "
            "mode='a', or give dry_run=True to see what would be removed"
        )
    newest_removable = store.files.now() - grace
    folders = usage(store)
    records: dict[str, list[Record]] = {}  # by folder
    for record in store.records():
        records.setdefault(record.data, []).append(record)
    protected = marked(store, records, newest_removable)
    # Folders without a record were left by killed writers. They go by age, whatever the quota.
    removable = [
        folder
        for folder in folders
        if folder.data not in records and folder.data not in protected and folder.used < newest_removable
    ]
    kept_bytes = sum(folder.bytes for folder in folders) - sum(folder.bytes for folder in removable)
    if quota is not None:
        for folder in sorted(folders, key=lambda folder: folder.used):
            if kept_bytes <= quota:
                break
            if folder.data in records and folder.data not in protected:
                removable.append(folder)
                kept_bytes -= folder.bytes
    removed_folders = tuple(f"{folder.data}/" for folder in removable)
    leftovers = [
        path for path in _leftover_files(store, newest_removable) if not path.startswith(removed_folders)
    ]
    leftover_bytes = sum(store.files.size(path) or 0 for path in leftovers)
    if not dry_run:
        for folder in removable:
            _remove(store, folder.data, records.get(folder.data, []))
        for path in leftovers:
            store.files.delete(path)
    kept_bytes -= leftover_bytes
    return GcReport(
        removed=tuple(folder.data for folder in removable),
        leftovers=tuple(leftovers),
        bytes=sum(folder.bytes for folder in removable) + leftover_bytes,
        kept_bytes=kept_bytes,
        over_quota=max(0, kept_bytes - quota) if quota is not None else 0,
        dry_run=dry_run,
    )


def marked(
    store: Catalog,
    keys: Mapping[str, Sequence[Record]],
    horizon: float,
    notes: Callable[[str], Sequence[Mapping[str, Any]]] | None = None,
) -> set[str]:
    """Find the folders that garbage collection keeps: pinned, new or in use, with all their direct and
    indirect inputs.

    Arguments:
        store: The store.
        keys: Published records by folder.
        horizon: Seconds since the epoch; records published from then on are new.
        notes: Function that returns the provenance notes of a folder, such as a cache; None reads them.
    """
    notes_of = notes or partial(get_provenance, store.files)
    pinned_keys = set(store.pins().values())
    in_use = _folders_in_use(store)
    roots = []
    for data_folder, records in keys.items():
        # By the key's time, not the data's: a run that took days is new when it is published.
        is_new = any(_mtime(store.files, record.path) >= horizon for record in records)
        if data_folder in in_use or is_new or any(record.key in pinned_keys for record in records):
            roots.append(data_folder)
    folders_of_content: dict[str, set[str]] = {}
    for data_folder, records in keys.items():
        for record in records:
            folders_of_content.setdefault(record.content, set()).add(data_folder)
    # Walk from the roots to their inputs. Contents identify inputs, as several folders may hold equal ones.
    reached, waiting = set(in_use), roots
    while waiting:
        data_folder = waiting.pop()
        # Folders in use are reached from the start, and their inputs are still to be found.
        if data_folder not in reached or data_folder in in_use:
            reached.add(data_folder)
            inputs = {
                content
                for note in notes_of(data_folder)
                for group in inputs_of(note).values()
                for content in group
            }
            input_folders = {folder for content in inputs for folder in folders_of_content.get(content, ())}
            waiting += [folder for folder in input_folders if folder not in reached]
    return reached


def _folders_in_use(store: Catalog) -> set[str]:
    """Folders that another process reads or computes: those with a lease or claim that is still renewed."""
    now, in_use = store.files.now(), set()
    for name in store.files.list("leases"):
        is_alive = now - _mtime(store.files, name) < _LEASE_SECONDS
        if is_alive and (text := store.files.get(name)) is not None:
            in_use.add(_leased_folder(store.files.where(name), text))
    for folder in store.folders():
        # A run under computation has no lease, but its workers renew claims.
        claims = (stat for name, stat in store.files.stamps(f"{folder}/seg") if name.endswith(".claim"))
        if any(now - stat.modified < TTL for stat in claims):
            in_use.add(folder)
    return in_use


def _leased_folder(name: str, text: bytes) -> str:
    """Parse a lease file and return the folder that it protects; CorruptEntry if it is damaged."""
    try:
        return str(read_json(text)["data"])
    except (ValueError, LookupError, TypeError) as error:
        raise CorruptEntry(
            f"the lease file {name} is damaged ({error}), so the folder that it protects from garbage "
            "collection is unknown; remove the file once no other process uses the store"
        ) from error


def _leftover_files(store: Catalog, newest_removable: float) -> list[str]:
    """Temporary files of killed writers, and expired leases and claims, last modified before a time in
    seconds since the epoch."""
    leftovers = []
    for part in ("data", "keys", "pins", "leases", "vocabularies", "annotations"):
        for name, stat in store.files.walk(part):
            # Names of temporary files and folders begin with a dot.
            is_temporary = any(step.startswith(".") for step in name.split("/"))
            is_leftover = is_temporary or name.endswith(".claim") or part == "leases"
            if is_leftover and stat.modified < newest_removable:
                leftovers.append(name)
    return sorted(leftovers)


def _remove(store: Catalog, folder: str, records: list[Record]) -> None:
    """Remove the folder of a run or result, and its records."""
    for record in records:
        store.files.delete(record.path)
    # No record names the folder now. Manifests before data: otherwise `verify` could see a manifest whose
    # files are missing.
    store.files.delete(f"{folder}/manifest.json")
    store.files.remove_tree(f"{folder}/manifest")
    store.files.remove_tree(folder)
    store.index.forget(folder)
    forget_entries()  # a cached entry may have files of this folder mapped


@contextmanager
def lease(store: Catalog, record: Record) -> Iterator[None]:
    """Context manager: protect a folder from garbage collection, by a lease file that a thread renews.

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
        # Without a checksum, unlike records: a lease decides no number, only its modification time counts.
        store.files.put_new(name, as_json({"data": record.data, "key": record.key}))
        with Repeated(_LEASE_SECONDS / 4, keep_alive, "mizarr-lease"):
            yield
    finally:
        try:
            store.files.delete(name)
        except BaseException:  # interrupted
            store.files.delete(name)
            raise


def measure(files: Folder, data: str) -> tuple[int, int, float]:
    """Measure the disk usage of a folder.

    Arguments:
        files: The store's files.
        data: Folder of a run or result.

    Returns:
        Number of files, their bytes, and the time of the newest change in seconds since the epoch.
    """
    folder = files.folder_stat(data)
    # A folder that is still empty was changed when it was created.
    n_files, n_bytes, newest_change = 0, 0, 0.0 if folder is None else folder.modified
    for _, stat in files.walk(data):
        n_files, n_bytes, newest_change = n_files + 1, n_bytes + stat.size, max(newest_change, stat.modified)
    return n_files, n_bytes, newest_change


def _mtime(files: Folder, name: str) -> float:
    """Time of a file's last change, in seconds since the epoch; 0 if the file is missing."""
    stat = files.stat(name)
    return 0.0 if stat is None else stat.modified
