"""The files of a store as objects in S3, Google Cloud Storage, Azure or memory, through obstore.

Border: that of `folder.py`. Who is spoken to, and how failures read, is told in `cloud.py`.

An object is created by one conditional PUT and never changed, so the first to create it wins and nobody sees
half of one. A PUT whose reply was lost is sent again and then meets its own object: each carries a *write id*
in its metadata, by which its writer knows it. There are no folders, links or locks, and nothing here needs
any: what is moved is copied and deleted, what is linked is copied, and times are those of the server.
"""

from __future__ import annotations

import hashlib
import secrets
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..digest import Buffer, content_digest
from ..errors import ReadOnlyStore, StoreError
from .cache import ReadCache, cache_folder
from .cloud import as_store_error, connected, is_worth_a_retry, normalised
from .folder import THREADS, Folder, Measured, checked
from .mapped import Fetched, Mapped
from .stamps import Stat

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import ObjectStore

__all__ = ["ObjectFolder"]

T = TypeVar("T")

WRITE_ID = "mizarrwrite"
"""Metadata of an object: which PUT created it. Letters only, as Azure takes no others."""
_AT_ONCE = 16  # requests
_ATTEMPTS = 3  # of ours, each after obstore's own have failed
_PAUSE = 0.2  # seconds before the second attempt
_LOOK = 2.0  # seconds for which a look counts; what we write ourselves is seen at once
_LOOKS = 100_000  # remembered
_AT_MOST = 5 << 30  # bytes of one PUT


class ObjectFolder(Folder):
    """A prefix of a bucket. address: s3://BUCKET/PREFIX, gs://, az:// or memory://NAME.

    memory:// is one process's: every folder of that name there shows the same files, and no other process's.
    Safe for any number of threads. Raises StoreFormatError for other addresses, MissingExtra.
    """

    def __init__(self, address: str, read_only: bool = False, is_store: bool = False) -> None:
        self.read_only, self.is_store = read_only, is_store
        self._address = normalised(address)
        self._is_memory = self._address.startswith("memory://")
        self._looks: dict[str, tuple[float, Stat | None]] = {}
        self._lists: dict[str, tuple[float, list[tuple[str, Stat]]]] = {}
        self._lock = threading.Lock()
        self._store: ObjectStore = connected(self._address)

    def __reduce__(self) -> tuple[type[ObjectFolder], tuple[str, bool, bool]]:
        return type(self), (self._address, self.read_only, self.is_store)

    def as_store(self) -> ObjectFolder:
        """See `Folder`."""
        return ObjectFolder(self._address, self.read_only, is_store=True)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ObjectFolder) and (self._address, self.read_only) == (
            other._address,
            other.read_only,
        )

    def __hash__(self) -> int:
        return hash((self._address, self.read_only))

    def __repr__(self) -> str:
        return f"ObjectFolder({self._address!r}, read_only={self.read_only})"

    @property
    def address(self) -> str:
        """The prefix's URL, as people write it."""
        return self._address

    def where(self, name: str) -> str:
        """The URL of a name."""
        return f"{self._address}/{name}" if name else self._address

    @property
    def free_bytes(self) -> None:
        """None: a bucket does not say how much room it has."""
        return

    @property
    def index_path(self) -> Path | None:
        """In the user's cache folder, by address: an index is no more than a memory of what was seen."""
        if self._is_memory:
            return None
        folder = cache_folder() / "indices"
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{hashlib.sha256(self._address.encode()).hexdigest()[:32]}.sqlite"

    def now(self) -> float:
        """The server's clock, as the time of an object just written told it; this machine's when reading."""
        return time.monotonic() + self._clock

    @cached_property
    def _clock(self) -> float:
        """The server's time less `time.monotonic`."""
        here = time.time() - time.monotonic()
        if self._is_memory or self.read_only:
            return here
        name = f"leases/.clock-{secrets.token_hex(4)}"
        self._put(name, b"")
        stat = self.stat(name)
        self.delete(name)
        return here if stat is None else stat.modified - time.monotonic()

    # -- reading

    def get(self, name: str) -> bytes | None:
        """The bytes of an object; None when there is none."""
        import obstore

        with suppress(FileNotFoundError):
            return self._ask(name, lambda: bytes(obstore.get(self._store, name).bytes()))
        return None

    def get_range(self, name: str, start: int, stop: int | None) -> bytes | None:
        """Bytes of an object from `start` to `stop`, as a slice takes them; None when there is none."""
        if (stat := self.glance(name)) is None:
            return None
        first, last, _ = slice(start, stop).indices(stat.size)
        with suppress(FileNotFoundError):
            return self._ranges(name, [(first, last)])[0] if first < last else b""
        return None

    def _ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        import obstore

        starts, ends = [start for start, _ in ranges], [stop for _, stop in ranges]
        found = self._ask(name, lambda: obstore.get_ranges(self._store, name, starts=starts, ends=ends))
        return [bytes(part) for part in found]

    def stat(self, name: str) -> Stat | None:
        """What the server says of an object; None when there is none."""
        import obstore

        found = None
        with suppress(FileNotFoundError):
            found = _stat(self._ask(name, lambda: obstore.head(self._store, name)))
        self._remember(name, found)
        return found

    def glance(self, name: str) -> Stat | None:
        """`stat`, which may be two seconds old; what was written here meanwhile is seen."""
        looked = self._looks.get(name)
        if looked is not None and time.monotonic() - looked[0] < _LOOK:
            return looked[1]
        return self.stat(name)

    def sizes(self, folder: str, names: Iterable[str]) -> dict[str, int | None]:
        """Bytes of objects below a folder, from one listing."""
        held = {name.removeprefix(f"{folder}/"): stat.size for name, stat in self.walk(folder)}
        return {name: held.get(name) for name in names}

    def measure(self, name: str) -> tuple[int, str]:
        """Size in bytes and "sha256:…" of an object, read as it comes; FileNotFoundError for none."""
        import obstore

        def read() -> tuple[int, str]:
            state, size = hashlib.sha256(), 0
            for part in obstore.get(self._store, name).stream():
                state.update(part)
                size += len(part)
            return size, f"sha256:{state.hexdigest()}"

        return self._ask(name, read)

    def mapped(self, name: str) -> Mapped:
        """An object as memory, fetched range by range as it is read; FileNotFoundError when there is none."""
        if (stat := self.glance(name)) is None:
            raise FileNotFoundError(self.where(name))
        handle = self.cache.open(self.where(name), stat.stamp, stat.size)
        return Fetched(handle, stat.size, self.where(name), lambda some: self._ranges(name, some), self.cache)

    @cached_property
    def cache(self) -> ReadCache:
        """Where what was read is kept; what is in memory anyway is kept nowhere."""
        return ReadCache(Path(), 0) if self._is_memory else ReadCache.of_user()

    def zarr(self, folder: str) -> Any:
        """A Zarr store over the objects below a folder."""
        from .zarr_store import FolderStore

        return FolderStore(self, folder)

    # -- what is there

    def children(self, folder: str) -> Iterator[str]:
        """Names of what lies directly in a folder, without the folder's; hidden ones left out."""
        folders, objects = self._level(folder)
        yield from (name for name in [*folders, *(name for name, _ in objects)] if not name.startswith("."))

    def subfolders(self, folder: str) -> Iterator[str]:
        """Names of the folders directly in a folder, without the folder's; hidden ones left out."""
        yield from (name for name in self._level(folder)[0] if not name.startswith("."))

    def stamps(self, folder: str) -> Iterator[tuple[str, Stat]]:
        """Names of the objects directly in a folder, each with its stat; may be two seconds old."""
        looked = self._lists.get(folder)
        if looked is None or time.monotonic() - looked[0] > _LOOK:
            looked = time.monotonic(), self._level(folder)[1]
            with self._lock:
                self._lists[folder] = looked
        yield from (item for item in looked[1] if not item[0].startswith("."))

    def _level(self, folder: str) -> tuple[list[str], list[tuple[str, Stat]]]:
        """Folders and objects directly in a folder."""
        import obstore

        prefix = folder or None
        found = self._ask(folder, lambda: obstore.list_with_delimiter(self._store, prefix))
        folders = [path.rpartition("/")[2] for path in found["common_prefixes"]]
        return folders, [(each["path"].rpartition("/")[2], _stat(each)) for each in found["objects"]]

    def list(self, folder: str) -> Iterator[str]:
        """Names of all objects below a folder, relative to the root; hidden ones left out."""
        yield from (name for name, _ in self.walk(folder) if not name.rpartition("/")[2].startswith("."))

    def walk(self, folder: str) -> Iterator[tuple[str, Stat]]:
        """All objects below a folder, hidden ones as well, relative to the root."""
        import obstore

        prefix = folder or None
        found = self._ask(
            folder, lambda: [each for some in obstore.list(self._store, prefix) for each in some]
        )
        yield from ((each["path"], _stat(each)) for each in found)

    # -- writing

    def put_all(
        self,
        files: Mapping[str, Sequence[Buffer]],
        *,
        threads: int = 1,
        handed_over: Callable[[], None] = lambda: None,
    ) -> set[str]:
        """Create objects of these parts, each laid end to end; returns the new names, the others stay.

        Many at once, whatever `threads` says: they wait for the network, not for the processor.
        """
        described = [name for name in files if name.endswith(".json")]
        arrays = [name for name in files if not name.endswith(".json")]
        made: set[str] = set()
        handed_over()
        # What describes arrays comes after them, one by one in order.
        with ThreadPoolExecutor(min(_AT_ONCE, max(1, len(arrays)))) as pool:
            new = pool.map(lambda name: self._put(name, _joined(files[name])), arrays)
            made.update(name for name, is_new in zip(arrays, new, strict=True) if is_new)
        made.update(name for name in described if self._put(name, _joined(files[name])))
        return made

    def mark(self, name: str, data: bytes) -> bool:
        """Create a small object; False when it is there already."""
        return self._put(name, data)

    def touch(self, name: str) -> None:
        """Write an object again as it is, if it is there and nobody else did so meanwhile."""
        import obstore
        from obstore.exceptions import NotSupportedError, PreconditionError

        with self.writing(name), suppress(FileNotFoundError, PreconditionError, NotSupportedError):
            there = obstore.get(self._store, name)
            told = {"e_tag": there.meta["e_tag"], "version": there.meta["version"]}
            version = {name: value for name, value in told.items() if value is not None}
            data = bytes(there.bytes())
            obstore.put(self._store, name, data, mode=version, use_multipart=False)  # type: ignore[arg-type]
        self._forget(name)

    def link_all(self, names: Mapping[str, str]) -> set[str]:
        """Create objects with the bytes of others, new -> old; returns the new names, those taken stay."""
        made: set[str] = set()
        for name, old in names.items():
            if (data := self.get(old)) is None:
                raise FileNotFoundError(self.where(old))
            if self._put(name, data):
                made.add(name)
        return made

    def build(self, folder: str, fill: Callable[[Path], None]) -> Measured:
        """A new folder, filled on this machine and then put; returns size and digest of each of its files."""
        with self.writing(folder):
            is_taken = next(self.walk(folder), None) is not None
        if is_taken:
            raise FileExistsError(self.where(folder))
        with tempfile.TemporaryDirectory(prefix="mizarr-", ignore_cleanup_errors=True) as made:
            place = Path(made)
            fill(place)
            names = sorted(str(path.relative_to(place)) for path in place.rglob("*") if path.is_file())
            names.sort(key=lambda name: name.endswith(".json"))

            def one(name: str) -> list[int | str]:
                data = (place / name).read_bytes()
                self._put(f"{folder}/{name}", data)
                return [len(data), content_digest(data)]

            with ThreadPoolExecutor(THREADS) as pool:
                return dict(sorted(zip(names, pool.map(one, names), strict=True)))

    def scratch(self, folder: str) -> Path:
        """See `Folder`: in the user's cache folder, by address."""
        store = hashlib.sha256(self._address.encode()).hexdigest()[:32]
        return cache_folder() / "scratch" / store / folder

    def move(self, source: str, target: str) -> None:
        """Copy an object, or all below a folder, to another name, then delete it."""
        import obstore

        names = {source} if self.stat(source) is not None else {name for name, _ in self.walk(source)}
        with self.writing(source):
            for name in sorted(names):
                obstore.copy(self._store, name, f"{target}{name.removeprefix(source)}")
            self._delete(names)

    def delete(self, name: str) -> None:
        """Remove an object if it is there."""
        with self.writing(name):
            self._delete([name])

    def remove_tree(self, folder: str) -> None:
        """Remove all below a folder, records before what they speak of; what stays is left to gc."""
        if self.read_only:
            return
        with suppress(StoreError):
            names = [name for name, _ in self.walk(folder)]
            self._delete([name for name in names if name.endswith(".json")])
            self._delete([name for name in names if not name.endswith(".json")])

    @contextmanager
    def writing(self, name: str) -> Iterator[None]:
        """Around a write: refuses a store that is read-only or gone, and tells failures as store errors."""
        if self.read_only:
            raise ReadOnlyStore(
                f"cannot write {name}: {self._address} was opened with mode='r'; open it with mode='a'"
            )
        self.require_there()
        with self._told(name):
            yield

    def _put(self, name: str, data: Buffer) -> bool:
        """Create an object; False when it is there already, and was not put by this very call."""
        import obstore
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        if len(data) > _AT_MOST:
            raise StoreError(
                f"{self.where(name)}: expected at most 5 GiB in one object, found {len(data)} bytes; capture "
                "in shorter segments, or compute in smaller chunks"
            )
        token = secrets.token_hex(16)

        def put() -> bool:
            try:
                obstore.put(
                    self._store,
                    name,
                    bytes(data),
                    mode="create",
                    use_multipart=False,
                    attributes={WRITE_ID: token},
                )
            except (AlreadyExistsError, PreconditionError):
                return self._write_id(name) == token  # ours, if only its reply was lost
            except FileNotFoundError as error:
                raise as_store_error(error, self._address) from None
            return True

        with self.writing(name):
            try:
                return self._ask(name, put)
            finally:
                self._forget(name)

    def _write_id(self, name: str) -> str | None:
        """Which PUT created an object; None when nobody says."""
        import obstore

        with suppress(FileNotFoundError):
            found = self._ask(name, lambda: obstore.get(self._store, name, options={"head": True}).attributes)
            return dict(found).get(WRITE_ID)
        return None

    def _delete(self, names: Iterable[str]) -> None:
        import obstore

        asked = list(names)

        def one(name: str) -> None:
            with suppress(FileNotFoundError):
                self._ask(name, lambda: obstore.delete(self._store, name))

        if asked:
            try:
                self._ask(asked[0], lambda: obstore.delete(self._store, asked))
            except FileNotFoundError:
                # At one that is gone already Google stops, and Azure after its 256; S3 does not tell.
                with ThreadPoolExecutor(_AT_ONCE) as pool:
                    list(pool.map(one, asked))
        for name in asked:
            self._forget(name)

    # -- asking

    def _ask(self, name: str, request: Callable[[], T]) -> T:
        """The answer to a request, asked again while that may help; FileNotFoundError, StoreUnreachable."""
        checked(name)
        for attempt in range(_ATTEMPTS):
            try:
                with self._told(name):
                    return request()
            except StoreError as error:
                cause = error.__cause__
                if cause is None or attempt == _ATTEMPTS - 1 or not is_worth_a_retry(cause):
                    raise
                time.sleep(_PAUSE * 4**attempt)
        raise AssertionError("the last attempt returns or raises")

    @contextmanager
    def _told(self, name: str) -> Iterator[None]:
        """Around requests: what obstore raises is told as a store error; FileNotFoundError as it is."""
        from obstore.exceptions import BaseError

        try:
            yield
        except FileNotFoundError as error:
            if "NoSuchBucket" in str(error) or "ContainerNotFound" in str(error):
                raise as_store_error(error, self._address) from error
            raise
        except StoreError:
            raise
        except (BaseError, PermissionError, OSError, ValueError) as error:
            raise as_store_error(error, self.where(name)) from error

    def _remember(self, name: str, stat: Stat | None) -> None:
        with self._lock:
            if len(self._looks) > _LOOKS:
                self._looks.clear()
            self._looks[name] = time.monotonic(), stat

    def _forget(self, name: str) -> None:
        with self._lock:
            self._looks.pop(name, None)
            self._lists.pop(name.rpartition("/")[0], None)


def _stat(meta: ObjectMeta) -> Stat:
    """The stamp has only what every answer tells, and as all of them tell it.

    A list has no quotes about its ETags (Azure), no version (Google, and buckets of S3 that keep old ones),
    and times in milliseconds where a single answer has whole seconds (Google).
    """
    modified = meta["last_modified"].timestamp()
    tag = (meta["e_tag"] or "").removeprefix("W/").strip('"')
    return Stat(meta["size"], modified, (tag, meta["size"], int(modified)), True)


def _joined(parts: Sequence[Buffer]) -> Buffer:
    return parts[0] if len(parts) == 1 else b"".join(parts)
