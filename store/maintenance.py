"""Upkeep: is every byte what was committed, what may go, where did a result come from.

Border: files and records; what they mean to an analysis is not asked.

verify      every committed file against its recorded size and digest, several at a time, at sha256 speed
quarantine  one damaged file is set aside and only what it belonged to is withdrawn: a shard takes its own
            (variable, layer) with it, and that only until the next run has computed the one segment again
gc          leftovers of killed writers go after `grace`; above a quota, whole folders go, least recently used
first.
            Kept in any case: what is pinned, newer than `grace` or leased, and all it was made from.
            Order of removal: keys, manifests, data - a reader meets a miss, never a torn entry
lineage     from a content digest back through the inputs of each request

There are no reference counts: after a crash they would be wrong, and marking reads a few small files.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .claims import TTL
from .committed import RECORD
from .coordinates import metadata_record
from .digest import digest, file_digest
from .entries import CELL_MANIFEST, group_attributes
from .errors import CorruptEntry, EntryNotFound, ReadOnlyStore
from .files import THREADS
from .provenance import as_json, get_provenance
from .records import ACTIVATION, PIN, RESULT, Record
from .results import MANIFEST
from .sealed import sealed, unsealed
from .vocabularies import CHECK, VOCABULARIES

if TYPE_CHECKING:
    from .store import Store

PINS = "pins"
_LEASE = 300.0  # seconds after which a lease whose holder no longer touches it counts for nothing


@dataclass(frozen=True)
class Damage:
    """One committed file that is not what was committed.

    data: folder of the run or result, relative to the store.  file: relative to that folder.
    expected, found: "<bytes> bytes" or "sha256:…"; found is "missing" when the file is gone.
    """

    data: str
    file: str
    expected: str
    found: str

    def __str__(self) -> str:
        return f"{self.data}/{self.file}: expected {self.expected}, found {self.found}"


@dataclass(frozen=True)
class Usage:
    """What one run or result takes up.  used: seconds since the epoch of the last known use."""

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


# -- verify and quarantine


def verify(store: Store, *, quick: bool, progress: Callable[[int, int], None] | None) -> list[Damage]:
    """Committed files that differ from their record, and records that are unreadable or lead nowhere."""
    found = _dangling(store)
    expected = []
    for data in [*_folders(store), VOCABULARIES]:
        files, unreadable = committed_files(store, data)
        found += unreadable
        expected += [(data, name, int(size), str(told)) for name, (size, told) in files.items()]
    total, done = sum(size for _, _, size, _ in expected), 0
    with ThreadPoolExecutor(THREADS) as pool:
        checks = {pool.submit(_check, store, *one, quick=quick): one[2] for one in expected}
        for check in as_completed(checks):
            if (damage := check.result()) is not None:
                found.append(damage)
            done += checks[check]
            if progress is not None:
                progress(done, total)
    return sorted(found, key=lambda damage: (damage.data, damage.file))


def _dangling(store: Store) -> list[Damage]:
    """Key files and pins that cannot be read, keys without their manifest, runs that are not described."""
    found = []
    for name in store.files.list("keys"):
        folder, _, file = name.rpartition("/")
        try:
            record = store.lookup(Path(name).stem)
        except CorruptEntry:
            found.append(Damage(folder, file, "a key file", "unreadable"))
            continue
        if record is not None:
            manifest = _manifest(record)
            if not store.files.path(f"{record.data}/{manifest}").exists():
                found.append(Damage(record.data, manifest, f"the manifest of {record.label}", "missing"))
    for name in store.files.list(PINS):
        if (text := store.files.get(name)) is not None:
            found += _unreadable(PINS, name.removeprefix(f"{PINS}/"), "a pin", unsealed, name, text, PIN)
    for data in _folders(store):
        if store.files.get(f"{data}/zarr.json") is not None:
            described = group_attributes, store.files, data
            found += _unreadable(data, "zarr.json", "the description of a run", *described)
    return found


def _unreadable(
    data: str, file: str, what: str, read: Callable[..., object], *arguments: object
) -> list[Damage]:
    try:
        read(*arguments)
    except CorruptEntry:
        return [Damage(data, file, what, "unreadable")]
    return []


def _manifest(record: Record) -> str:
    """Where a record's list of files lies, relative to its folder."""
    return "manifest.json" if record.kind == RESULT else f"manifest/{record.label.replace('/', '.')}.json"


def _check(store: Store, data: str, name: str, size: int, told: str, *, quick: bool) -> Damage | None:
    path = store.files.path(f"{data}/{name}")
    try:
        there = path.stat().st_size
        if there != size:
            return Damage(data, name, f"{size} bytes", f"{there} bytes")
        if not quick and (found := file_digest(path)) != told:
            return Damage(data, name, told, found)
    except (FileNotFoundError, NotADirectoryError):
        return Damage(data, name, told, "missing")
    except OSError as error:
        return Damage(data, name, told, f"unreadable ({error.strerror})")
    return None


def committed_files(store: Store, data: str) -> tuple[dict[str, list[Any]], list[Damage]]:
    """File -> [size, digest] of all committed in a folder, published or not; and unreadable lists."""
    files: dict[str, list[Any]] = {}
    unreadable = []
    for name, known in _lists(store, data):
        if (text := store.files.get(name)) is None:
            continue
        try:
            files |= unsealed(name, text, known).get("files", {})
        except (CorruptEntry, TypeError):
            unreadable.append(Damage(data, name.removeprefix(f"{data}/"), "a list of files", "unreadable"))
    return files, unreadable


def _lists(store: Store, data: str) -> Iterator[tuple[str, Sequence[str]]]:
    """Names of the records in a folder, and the fields each has."""
    if data == VOCABULARIES:
        yield from ((name, ("files",)) for name in store.files.list(data) if name.endswith(CHECK))
        return
    yield f"{data}/manifest.json", MANIFEST
    fields = {"coordinates": ("files",), "manifest": CELL_MANIFEST, "seg": RECORD}
    for part, known in fields.items():
        for name in sorted(store.files.list(f"{data}/{part}")):
            if name.endswith(".json") and not name.endswith("/zarr.json"):
                yield name, ("labels",) if name.endswith("/labels.json") else known


def quarantine(store: Store, damage: Damage) -> None:
    """Set the damaged file aside and withdraw what it belonged to."""
    if store.read_only:
        raise ReadOnlyStore(f"cannot quarantine in {store.path}: opened with mode='r'; open it with mode='a'")
    aside = f"quarantine/{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{secrets.token_hex(3)}"
    published = [record for record in _readable(store) if record.data == damage.data]
    segments = _segment_records(store, damage)
    variable = damage.file.removeprefix("coordinates/").removesuffix("zarr.json")[:-1]
    described = f"{damage.data}/{metadata_record(variable)}"
    if segments:
        for name, segment in segments.items():
            _withdraw_cells(store, damage, name, segment, aside)
        _move(store, f"{damage.data}/{damage.file}", aside)
    elif damage.data == VOCABULARIES:
        stem = damage.file.removesuffix(CHECK).removesuffix(".json")
        _move(store, f"{VOCABULARIES}/{stem}.json", aside)
        _move(store, f"{VOCABULARIES}/{stem}{CHECK}", aside)
    elif damage.file.startswith(("seg/", "manifest/")) or damage.data.startswith(("keys/", PINS)):
        # Bookkeeping: without it the data is invisible until the next run commits it again, as it is.
        _withdraw(store, [record for record in published if _manifest(record) == damage.file])
        _move(store, f"{damage.data}/{damage.file}", aside)
    elif variable and store.files.get(described) is not None:
        # What describes an array, or the digest of that: neither can be trusted; both are written again.
        _withdraw(store, [record for record in published if record.label.partition("/")[0] == variable])
        _move(store, described, aside)
        _move(store, f"{damage.data}/{variable}/zarr.json", aside)
    else:
        # A result, or the labels of a run: nothing smaller than the folder can be computed again.
        _withdraw(store, published)
        _move(store, damage.data, aside)
    store.files.put_new(f"{aside}/damage.json", as_json(damage.__dict__))
    _forget(store, damage.data)


def _readable(store: Store) -> Iterator[Record]:
    """Every record, but for key files that are themselves damaged."""
    for name in store.files.list("keys"):
        with suppress(CorruptEntry):
            if (record := store.lookup(Path(name).stem)) is not None:
                yield record


def _withdraw(store: Store, published: list[Record]) -> None:
    """Take records out of sight, each key before its manifest."""
    for record in published:
        store.files.delete(record.path)
        if record.kind == ACTIVATION:
            store.files.delete(f"{record.data}/{_manifest(record)}")


def _segment_records(store: Store, damage: Damage) -> dict[str, dict[str, Any]]:
    """The segment records that list the damaged file, by name."""
    found = {}
    for name in store.files.list(f"{damage.data}/seg"):
        if name.endswith(".json") and not name.endswith("/zarr.json"):
            with suppress(CorruptEntry):  # an unreadable record is damage of its own
                record = unsealed(name, store.files.get(name) or b"", RECORD)
                if damage.file in record.get("files", {}):
                    found[name] = record
    return found


def _withdraw_cells(store: Store, damage: Damage, name: str, record: dict[str, Any], aside: str) -> None:
    """Take the damaged file's cells out of a segment record and out of sight; the others stay committed."""
    variable, _, *place = damage.file.split("/")
    bad = [c for c in record["cells"] if c == variable or c == f"{variable}.{place[0]}"]
    rest = [cell for cell in record["cells"] if cell not in bad]
    files = {file: told for file, told in record["files"].items() if file != damage.file}
    if rest:
        kept = dict(zip(RECORD, (record["segment"], rest, files), strict=True))
        folder = name.rsplit("/", 1)[0]
        new = f"{folder}/{record['segment']}.{digest('cells', rest)[:12]}.json"
        store.files.put_new(new, sealed(kept))
    labels = {cell.replace(".", "/") for cell in bad}
    _withdraw(store, [r for r in _readable(store) if r.data == damage.data and r.label in labels])
    _move(store, name, aside)


def _move(store: Store, name: str, aside: str) -> None:
    source, target = store.files.path(name), store.files.path(f"{aside}/{name}")
    if source.exists():
        with store.files.writing(name):
            target.parent.mkdir(parents=True, exist_ok=True)
            source.rename(target)


def _forget(store: Store, data: str) -> None:
    from .datasets import forget_entries

    store.index.forget(data)
    forget_entries()  # one may hold the damaged file mapped


def unchecked(store: Store, folders: Sequence[str] | None = None) -> list[str]:
    """Stored arrays whose chunks carry no checksums, so that readers cannot check them, by name.

    folders: of runs and results, by default all. A description that cannot be read is left to `verify`.
    """
    found = []
    for data in _folders(store) if folders is None else folders:
        for name in store.files.list(data):
            if name.endswith("/zarr.json"):
                with suppress(ValueError, LookupError, TypeError, AttributeError):
                    codecs = json.loads(store.files.get(name) or b"{}").get("codecs", ())
                    if codecs and not _carry_checksums(codecs):
                        found.append(name.removesuffix("/zarr.json"))
    return sorted(found)


def _carry_checksums(codecs: Sequence[dict[str, Any]]) -> bool:
    inner = [one for codec in codecs for one in codec.get("configuration", {}).get("codecs", [codec])]
    return any(codec["name"] == "crc32c" for codec in inner)


# -- usage and gc


def usage(store: Store) -> list[Usage]:
    """Bytes by run and result, largest first."""
    labels: dict[str, list[Record]] = {}
    for record in store.records():
        labels.setdefault(record.data, []).append(record)
    used = store.index.last_used()
    found = []
    for data in _folders(store):
        count, total, newest = _measure(store.files.path(data))
        kind = ACTIVATION if store.files.path(f"{data}/zarr.json").exists() else "result"
        names = tuple(record.label for record in labels.get(data, ()))
        found.append(Usage(data, kind, names, total, count, max(used.get(data, 0.0), newest)))
    return sorted(found, key=lambda one: (-one.bytes, one.data))


def gc(store: Store, *, grace: float, quota: int | None, dry_run: bool) -> GcReport:
    """Remove leftovers, then what is over quota. Raises ReadOnlyStore unless it is a dry run."""
    if store.read_only and not dry_run:
        raise ReadOnlyStore(f"cannot collect in {store.path}: opened with mode='r'; use dry_run=True to look")
    horizon = time.time() - grace
    folders = usage(store)
    keys: dict[str, list[Record]] = {}
    for record in store.records():
        keys.setdefault(record.data, []).append(record)
    marked = _marked(store, keys, horizon)
    gone = [one for one in folders if one.data not in keys and one.data not in marked and one.used < horizon]
    kept = sum(one.bytes for one in folders) - sum(one.bytes for one in gone)
    if quota is not None:
        for one in sorted(folders, key=lambda one: one.used):
            if kept <= quota:
                break
            if one.data in keys and one.data not in marked:
                gone.append(one)
                kept -= one.bytes
    doomed = {one.data for one in gone}
    strays = [path for path in _strays(store, horizon) if not any(path.startswith(f"{d}/") for d in doomed)]
    spared = sum(store.files.path(path).stat().st_size for path in strays)
    if not dry_run:
        for one in gone:
            _remove(store, one.data, keys.get(one.data, []))
        for path in strays:
            store.files.delete(path)
    return GcReport(
        removed=tuple(one.data for one in gone),
        leftovers=tuple(strays),
        bytes=sum(one.bytes for one in gone) + spared,
        kept_bytes=kept - spared,
        over_quota=max(0, kept - spared - quota) if quota is not None else 0,
        dry_run=dry_run,
    )


def _marked(store: Store, keys: dict[str, list[Record]], horizon: float) -> set[str]:
    """Folders gc must leave: pinned, new or leased, and everything those were made from."""
    pinned = set(store.pins().values())
    leased = _leased(store)
    roots = []
    for data, records in keys.items():
        fresh = any(_mtime(store.files.path(record.path)) >= horizon for record in records)
        if data in leased or fresh or any(record.key in pinned for record in records):
            roots.append(data)
    by_content: dict[str, set[str]] = {}
    for data, records in keys.items():
        for record in records:
            by_content.setdefault(record.content, set()).add(data)
    marked, waiting = set(leased), roots
    while waiting:
        data = waiting.pop()
        if data not in marked or data in leased:
            marked.add(data)
            parents = {
                parent
                for note in get_provenance(store.files, data)
                for contents in _inputs(note).values()
                for content in contents
                for parent in by_content.get(content, ())
            }
            waiting += [parent for parent in parents if parent not in marked]
    return marked


def _leased(store: Store) -> set[str]:
    """Folders somebody reads or writes right now: leases and claims that are still being touched."""
    now, found = time.time(), set()
    for name in store.files.list("leases"):
        if now - _mtime(store.files.path(name)) < _LEASE and (text := store.files.get(name)) is not None:
            found.add(str(json.loads(text)["data"]))
    for claim in store.files.path("data").glob("*/*/seg/*.claim"):
        if now - _mtime(claim) < TTL:
            found.add(str(claim.parents[1].relative_to(store.path)))
    return found


def _strays(store: Store, horizon: float) -> list[str]:
    """Temporary files of killed writers, and leases and claims nobody holds, older than the horizon."""
    found = []
    for part in ("data", "keys", "pins", "leases", "vocabularies"):
        for top, _, names in os.walk(store.files.path(part)):
            for path in (Path(top) / name for name in names):
                within = path.relative_to(store.path)
                hidden = any(name.startswith(".") for name in within.parts)
                dead = hidden or path.suffix == ".claim" or part == "leases"
                if dead and _mtime(path) < horizon:
                    found.append(str(within))
    return sorted(found)


def _remove(store: Store, data: str, keys: list[Record]) -> None:
    for record in keys:
        store.files.delete(record.path)
    store.files.delete(f"{data}/manifest.json")
    with suppress(OSError):
        shutil.rmtree(store.files.path(f"{data}/manifest"))
    # Out of its place at once, so that a writer that comes back meanwhile begins a folder of its own.
    dying = store.files.path(data).with_name(f".{Path(data).name}.{secrets.token_hex(4)}")
    with store.files.writing(data):
        store.files.path(data).rename(dying)
    shutil.rmtree(dying, ignore_errors=True)
    _forget(store, data)


@contextmanager
def lease(store: Store, record: Record) -> Iterator[None]:
    """Touch a small file now and then for as long as the block runs; a read-only store takes none."""
    if store.read_only:
        yield
        return
    name = f"leases/{secrets.token_hex(8)}.json"
    store.files.put_new(name, as_json({"data": record.data, "key": record.key}))
    stop = threading.Event()

    def beat() -> None:
        while not stop.wait(_LEASE / 4):
            with suppress(OSError):
                os.utime(store.files.path(name))

    thread = threading.Thread(target=beat, name="mizarr-lease", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        store.files.delete(name)


# -- lineage


def lineage(store: Store, content: str) -> dict[str, Any]:
    """What made the content R: {content, key, label, request, at, inputs: {name: …the same…}}.

    content: "sha256:…".  An input that is no longer stored appears with its content digest alone. Raises
    EntryNotFound when nothing stored has this content.
    """
    by_content: dict[str, Record] = {}
    for record in store.records():
        by_content.setdefault(record.content, record)
    if content not in by_content:
        raise EntryNotFound(f"nothing in {store.path} has content {content}; `mizarr ls` shows what is there")
    return _walk(store, content, by_content)


def _walk(
    store: Store, content: str, by_content: dict[str, Record], below: frozenset[str] = frozenset()
) -> dict[str, Any]:
    record = by_content.get(content)
    # A stage may give back its input to the bit; that is an end, not a circle to walk.
    if record is None or content in below:
        return {"content": content}
    notes = get_provenance(store.files, record.data)
    note = next(
        (n for n in notes if n.get("key") == record.key and "request" in n), notes[0] if notes else {}
    )
    inputs = {}
    for name, contents in _inputs(note).items():
        for number, told in enumerate(contents):
            label = name if len(contents) == 1 else f"{name}[{number}]"
            inputs[label] = _walk(store, told, by_content, below | {content})
    return {
        "content": content,
        "key": record.key,
        "label": record.label,
        "request": note.get("request", note.get("run", {})),
        "at": note.get("at", record.created),
        "inputs": inputs,
    }


def _inputs(note: dict[str, Any]) -> dict[str, list[str]]:
    """What a provenance note says was read: input -> content digests.

    A stage notes the stored arrays behind each input ("parents"): an input made of many layers, or a piece of
    one, has a digest of its own, which names nothing in the store.
    """
    parents = {name: list(told) for name, told in note.get("parents", {}).items() if told}
    # A request names the variable that is read, as in states[resid_post]; a note on parents does not.
    inputs = note.get("request", {}).get("inputs", {})
    plain = {name: [told] for name, told in inputs.items() if name.partition("[")[0] not in parents}
    return {str(name): [str(one) for one in told] for name, told in {**plain, **parents}.items()}


# -- the folders of a store


def _folders(store: Store) -> list[str]:
    """Every folder of a run or a result, finished or not, relative to the store."""
    found = store.files.path("data").glob("[0-9a-f][0-9a-f]/[0-9a-f]*")
    return sorted(str(path.relative_to(store.path)) for path in found if path.is_dir())


def _measure(folder: Path) -> tuple[int, int, float]:
    """Files below a folder, their bytes, and the newest change among them."""
    count, total, newest = 0, 0, _mtime(folder)
    for top, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                stat = (Path(top) / name).stat()
                count, total, newest = count + 1, total + stat.st_size, max(newest, stat.st_mtime)
    return count, total, newest


def _mtime(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
