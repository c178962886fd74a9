"""`ObjectFolder`: the files of a store as objects in S3, Google Cloud Storage, Azure or memory, through
obstore.

An object is created by one conditional PUT and never changed, so the first writer wins and nobody sees half
an object. If the reply to a PUT is lost, the retry meets the object of its own first attempt. Therefore each
PUT puts a random *write id* into the object's metadata, by which the writer recognises it.

Object stores have no directories, links, renames or locks, and the protocol needs none: a move is a copy and
a delete, a link is a copy, and times are those of the server's clock. Connections and errors: `cloud.py`.
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
from .folder import THREADS, Folder, ManifestFiles, checked
from .mapped import Fetched, Mapped
from .stamps import Stat

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import ObjectStore

__all__ = ["ObjectFolder"]

T = TypeVar("T")

WRITE_ID = "mizarrwrite"
"""Metadata key of the write id. Letters only, as Azure allows no other characters."""
_CONCURRENT_REQUESTS = 16
_ATTEMPTS = 3  # attempts of ours; obstore retries within each of them
_PAUSE = 0.2  # seconds before the second attempt; four times as long before the third
_CACHE_SECONDS = 2.0  # seconds for which cached metadata is valid; own writes invalidate it at once
_CACHE_ENTRIES = 100_000  # entries of that cache
_MOST_PUT_BYTES = 5 << 30  # limit of S3 for one PUT


class ObjectFolder(Folder):
    """The files of a store below one prefix of a bucket. Safe for any number of threads.

    Arguments:
        address: s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, az://CONTAINER/PREFIX, or memory://NAME, which lives
            in this process and is shared by all folders of the same name.
        read_only: Whether writes raise ReadOnlyStore.
        is_store: Whether every write requires `store.json`.

    Raises:
        StoreFormatError: The address is none of these.
        MissingExtra: obstore is not installed.
    """

    def __init__(self, address: str, read_only: bool = False, is_store: bool = False) -> None:
        self.read_only, self.is_store = read_only, is_store
        self._address = normalised(address)
        self._is_memory = self._address.startswith("memory://")
        # Without this cache every read of a shard would cost three requests (zarr.json, shard, group) for
        # being unchanged. Objects are never modified, so the worst case is seeing a new one two seconds late.
        self._stats: dict[str, tuple[float, Stat | None]] = {}
        self._listings: dict[str, tuple[float, list[tuple[str, Stat]]]] = {}
        self._lock = threading.Lock()
        self._store: ObjectStore = connected(self._address)

    def __reduce__(self) -> tuple[type[ObjectFolder], tuple[str, bool, bool]]:
        return type(self), (self._address, self.read_only, self.is_store)

    def as_store(self) -> ObjectFolder:
        """A copy that requires `store.json` before every write."""
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
        """URL of the store, valid as an argument of `open_store`."""
        return self._address

    def where(self, name: str) -> str:
        """URL of an object, for error messages."""
        return f"{self._address}/{name}" if name else self._address

    @property
    def free_bytes(self) -> None:
        """Free space in bytes: always None, as buckets have no known limit."""
        return

    @property
    def index_path(self) -> Path | None:
        """Local path of the store's SQLite index, in the user's cache folder; None for memory:// stores."""
        if self._is_memory:
            return None
        # SQLite needs a real file with locks, so the index cannot be an object.
        folder = cache_folder() / "indices"
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{self._cache_name}.sqlite"

    @property
    def _cache_name(self) -> str:
        """Name of this store in the user's cache folder."""
        return hashlib.sha256(self._address.encode()).hexdigest()[:32]

    def now(self) -> float:
        """Seconds since the epoch by the server's clock, or this machine's if the store is read-only."""
        return time.monotonic() + self._clock

    @cached_property
    def _clock(self) -> float:
        """Offset of the server's clock from `time.monotonic`, in seconds, measured with a temporary
        object."""
        local_offset = time.time() - time.monotonic()
        # A read-only store may not create the probe object, so its clock is only as good as this machine's.
        if self._is_memory or self.read_only:
            return local_offset
        name = f"leases/.clock-{secrets.token_hex(4)}"
        self._put(name, b"")
        stat = self.stat(name)
        self.delete(name)
        return local_offset if stat is None else stat.modified - time.monotonic()

    # -- reading

    def get(self, name: str) -> bytes | None:
        """Whole content of an object; None for a missing object."""
        import obstore

        with suppress(FileNotFoundError):
            return self._ask(name, lambda: bytes(obstore.get(self._store, name).bytes()))
        return None

    def get_range(self, name: str, start: int, stop: int | None) -> bytes | None:
        """Read the bytes from `start` to `stop` of an object, negative ones from the end; None if missing."""
        if (stat := self.glance(name)) is None:
            return None
        begin, end, _ = slice(start, stop).indices(stat.size)
        with suppress(FileNotFoundError):
            return self._ranges(name, [(begin, end)])[0] if begin < end else b""
        return None

    def _ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Download byte ranges (start, stop) of an object in one request."""
        import obstore

        starts, ends = [start for start, _ in ranges], [stop for _, stop in ranges]
        parts = self._ask(name, lambda: obstore.get_ranges(self._store, name, starts=starts, ends=ends))
        return [bytes(part) for part in parts]

    def stat(self, name: str) -> Stat | None:
        """Size, modification time and stamp of an object, by a HEAD request; None for a missing object."""
        import obstore

        status = None
        with suppress(FileNotFoundError):
            status = _stat(self._ask(name, lambda: obstore.head(self._store, name)))
        self._remember(name, status)
        return status

    def glance(self, name: str) -> Stat | None:
        """Size, modification time and stamp of an object, cached for two seconds; None for a missing object.

        Writes of this process are visible at once.
        """
        cached = self._stats.get(name)
        if cached is not None and time.monotonic() - cached[0] < _CACHE_SECONDS:
            return cached[1]
        return self.stat(name)

    def sizes(self, folder: str, names: Iterable[str]) -> dict[str, int | None]:
        """Sizes in bytes of several objects below `folder`, by one LIST request; None for missing ones."""
        sizes = {name.removeprefix(f"{folder}/"): stat.size for name, stat in self.walk(folder)}
        return {name: sizes.get(name) for name in names}

    def measure(self, name: str) -> tuple[int, str]:
        """Size in bytes and checksum "sha256:…" of an object, which is streamed; FileNotFoundError if it is
        missing."""
        import obstore

        def read() -> tuple[int, str]:
            state, size = hashlib.sha256(), 0
            for part in obstore.get(self._store, name).stream():
                state.update(part)
                size += len(part)
            return size, f"sha256:{state.hexdigest()}"

        return self._ask(name, read)

    def mapped(self, name: str) -> Mapped:
        """Open an object as memory that is downloaded on demand; FileNotFoundError for a missing object."""
        if (stat := self.glance(name)) is None:
            raise FileNotFoundError(self.where(name))
        handle = self.cache.open(self.where(name), stat.stamp, stat.size)
        return Fetched(
            handle, stat.size, self.where(name), lambda ranges: self._ranges(name, ranges), self.cache
        )

    @cached_property
    def cache(self) -> ReadCache:
        """Cache of downloaded byte ranges on this machine; it keeps nothing for memory:// stores."""
        return ReadCache(Path(), 0) if self._is_memory else ReadCache.of_user()

    def zarr(self, folder: str) -> Any:
        """Read-only `zarr.abc.store.Store` over the objects below `folder`, for zarr and xarray."""
        from .zarr_store import FolderStore

        return FolderStore(self, folder)

    # -- listing

    def children(self, folder: str) -> Iterator[str]:
        """Names of objects and prefixes directly below `folder`, without temporary ones."""
        folders, objects = self._level(folder)
        yield from (name for name in [*folders, *(name for name, _ in objects)] if not name.startswith("."))

    def subfolders(self, folder: str) -> Iterator[str]:
        """Names of prefixes directly below `folder`, without temporary ones."""
        yield from (name for name in self._level(folder)[0] if not name.startswith("."))

    def stamps(self, folder: str) -> Iterator[tuple[str, Stat]]:
        """Name and `Stat` of each object directly below `folder`, cached for two seconds."""
        cached = self._listings.get(folder)
        if cached is None or time.monotonic() - cached[0] > _CACHE_SECONDS:
            cached = time.monotonic(), self._level(folder)[1]
            with self._lock:
                self._listings[folder] = cached
        yield from (entry for entry in cached[1] if not entry[0].startswith("."))

    def _level(self, folder: str) -> tuple[list[str], list[tuple[str, Stat]]]:
        """List what lies directly below `folder`: names of prefixes, and (name, `Stat`) of objects."""
        import obstore

        prefix = folder or None
        listing = self._ask(folder, lambda: obstore.list_with_delimiter(self._store, prefix))
        folders = [path.rpartition("/")[2] for path in listing["common_prefixes"]]
        return folders, [(meta["path"].rpartition("/")[2], _stat(meta)) for meta in listing["objects"]]

    def list(self, folder: str) -> Iterator[str]:
        """Paths of all objects below `folder`, relative to the root, without temporary ones."""
        yield from (name for name, _ in self.walk(folder) if not name.rpartition("/")[2].startswith("."))

    def walk(self, folder: str) -> Iterator[tuple[str, Stat]]:
        """Path and `Stat` of all objects below `folder`, temporary ones included."""
        import obstore

        prefix = folder or None
        metas = self._ask(
            folder, lambda: [meta for page in obstore.list(self._store, prefix) for meta in page]
        )
        yield from ((meta["path"], _stat(meta)) for meta in metas)

    # -- writing

    def put_all(
        self,
        files: Mapping[str, Sequence[Buffer]],
        *,
        threads: int = 1,
        handed_over: Callable[[], None] = lambda: None,
    ) -> set[str]:
        """Create several objects; a name that exists stays as it is. `*.json` objects appear last.

        Arguments:
            files: Path -> buffers that are concatenated to the object's content.
            threads: Ignored, as requests wait for the network and not for the processor.
            handed_over: Called at once, as only the network is waited for.

        Returns:
            The paths that were created by this call.
        """
        records = [name for name in files if name.endswith(".json")]
        arrays = [name for name in files if not name.endswith(".json")]
        created: set[str] = set()
        handed_over()
        # A JSON file describes arrays, so its object must appear after theirs.
        with ThreadPoolExecutor(min(_CONCURRENT_REQUESTS, max(1, len(arrays)))) as pool:
            new = pool.map(lambda name: self._put(name, _joined(files[name])), arrays)
            created.update(name for name, is_new in zip(arrays, new, strict=True) if is_new)
        created.update(name for name in records if self._put(name, _joined(files[name])))
        return created

    def mark(self, name: str, data: bytes) -> bool:
        """Create a small object, such as a lease; False if the name is taken."""
        return self._put(name, data)

    def touch(self, name: str) -> None:
        """Rewrite an object with unchanged content; object stores have no other way to renew a timestamp.

        The PUT is conditional on the version read, so a concurrent writer is never overwritten.
        """
        import obstore
        from obstore.exceptions import NotSupportedError, PreconditionError

        with self.writing(name), suppress(FileNotFoundError, PreconditionError, NotSupportedError):
            current = obstore.get(self._store, name)
            identity = {"e_tag": current.meta["e_tag"], "version": current.meta["version"]}
            version = {name: value for name, value in identity.items() if value is not None}
            data = bytes(current.bytes())
            obstore.put(self._store, name, data, mode=version, use_multipart=False)  # type: ignore[arg-type]
        self._forget(name)

    def link_all(self, names: Mapping[str, str]) -> set[str]:
        """Copy objects (new path -> existing path), as an object cannot have two names; returns the new
        paths."""
        created: set[str] = set()
        for name, existing in names.items():
            if (data := self.get(existing)) is None:
                raise FileNotFoundError(self.where(existing))
            if self._put(name, data):
                created.add(name)
        return created

    def build(self, folder: str, fill: Callable[[Path], None]) -> ManifestFiles:
        """Let `fill` write files into a local temporary folder, then upload them below `folder`.

        Returns:
            Size and checksum of each file, by path relative to the folder.

        Raises:
            FileExistsError: There are objects below `folder` already.
        """
        with self.writing(folder):
            is_taken = next(self.walk(folder), None) is not None
        if is_taken:
            raise FileExistsError(self.where(folder))
        with tempfile.TemporaryDirectory(prefix="mizarr-", ignore_cleanup_errors=True) as scratch:
            folder_path = Path(scratch)
            fill(folder_path)
            names = sorted(
                str(path.relative_to(folder_path)) for path in folder_path.rglob("*") if path.is_file()
            )
            # Metadata last, as in put_all: a reader that meets it finds the chunks.
            names.sort(key=lambda name: name.endswith(".json"))

            def upload(name: str) -> list[int | str]:
                data = (folder_path / name).read_bytes()
                self._put(f"{folder}/{name}", data)
                return [len(data), content_digest(data)]

            with ThreadPoolExecutor(THREADS) as pool:
                return dict(sorted(zip(names, pool.map(upload, names), strict=True)))

    def scratch(self, folder: str) -> Path:
        """Local path for temporary files that belong to `folder`, in the user's cache folder."""
        return cache_folder() / "scratch" / self._cache_name / folder

    def move(self, source: str, target: str) -> None:
        """Move an object, or all objects below a prefix: copy them and delete the originals."""
        import obstore

        # No rename in object stores. A crash between copy and delete leaves both, which the next call
        # repairs.
        names = {source} if self.stat(source) is not None else {name for name, _ in self.walk(source)}
        with self.writing(source):
            for name in sorted(names):
                obstore.copy(self._store, name, f"{target}{name.removeprefix(source)}")
            self._delete(names)

    def delete(self, name: str) -> None:
        """Delete an object, if it exists."""
        with self.writing(name):
            self._delete([name])

    def remove_tree(self, folder: str) -> None:
        """Delete all objects below a prefix; objects that cannot be deleted are left for `gc`."""
        if self.read_only:
            return
        with suppress(StoreError):
            # Records first: a reader then sees a missing entry instead of a record of missing arrays.
            names = [name for name, _ in self.walk(folder)]
            self._delete([name for name in names if name.endswith(".json")])
            self._delete([name for name in names if not name.endswith(".json")])

    @contextmanager
    def writing(self, name: str) -> Iterator[None]:
        """Context manager around a write: refuses a read-only or vanished store, translates errors."""
        if self.read_only:
            raise ReadOnlyStore(
                f"cannot write {name}: the store {self._address} was opened with mode='r'; open it with "
                "mode='a'"
            )
        self.require_store()
        with self._translated_errors(name):
            yield

    def _put(self, name: str, data: Buffer) -> bool:
        """Create an object by a conditional PUT; False if another writer created it before."""
        import obstore
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        if len(data) > _MOST_PUT_BYTES:
            raise StoreError(
                f"{self.where(name)} would have {len(data)} bytes, and an object has at most 5 GiB; capture "
                "with smaller segment_tokens, or compute in smaller chunks"
            )
        token = secrets.token_hex(16)

        def put() -> bool:
            try:
                obstore.put(
                    self._store,
                    name,
                    bytes(data),
                    mode="create",
                    # A multipart upload cannot be conditional on all providers; one PUT is atomic and takes
                    # up to 5 GiB.
                    use_multipart=False,
                    attributes={WRITE_ID: token},
                )
            except (AlreadyExistsError, PreconditionError):
                return self._write_id(name) == token  # our own first attempt, whose reply was lost
            except FileNotFoundError as error:
                raise as_store_error(error, self._address) from None
            return True

        with self.writing(name):
            try:
                return self._ask(name, put)
            finally:
                self._forget(name)

    def _write_id(self, name: str) -> str | None:
        """Random id that the writer of an object put into its metadata; None if the object or id is
        missing."""
        import obstore

        with suppress(FileNotFoundError):
            attributes = self._ask(
                name, lambda: obstore.get(self._store, name, options={"head": True}).attributes
            )
            return dict(attributes).get(WRITE_ID)
        return None

    def _delete(self, names: Iterable[str]) -> None:
        """Delete objects, in one request if all of them exist; missing ones are ignored."""
        import obstore

        paths = list(names)

        def delete(name: str) -> None:
            with suppress(FileNotFoundError):
                self._ask(name, lambda: obstore.delete(self._store, name))

        if paths:
            try:
                self._ask(paths[0], lambda: obstore.delete(self._store, paths))
            except FileNotFoundError:
                # A missing object stops the bulk delete on Google, and on Azure after its batch of 256; S3
                # ignores it.
                with ThreadPoolExecutor(_CONCURRENT_REQUESTS) as pool:
                    list(pool.map(delete, paths))
        for name in paths:
            self._forget(name)

    # -- requests

    def _ask(self, name: str, request: Callable[[], T]) -> T:
        """Send a request about an object, with retries, and return its answer.

        Arguments:
            name: Path of the object.
            request: Sends the request.

        Raises:
            FileNotFoundError: The object does not exist.
            StoreError: Every attempt failed.
        """
        checked(name)
        for attempt in range(_ATTEMPTS):
            try:
                with self._translated_errors(name):
                    return request()
            except StoreError as error:
                cause = error.__cause__
                # Errors without a cause are our own (read-only store, checks), for which a retry is
                # pointless.
                if cause is None or attempt == _ATTEMPTS - 1 or not is_worth_a_retry(cause):
                    raise
                time.sleep(_PAUSE * 4**attempt)
        raise AssertionError("the last attempt returns or raises")

    @contextmanager
    def _translated_errors(self, name: str) -> Iterator[None]:
        """Context manager: translate errors of obstore to StoreErrors, except FileNotFoundError."""
        from obstore.exceptions import BaseError

        try:
            yield
        except FileNotFoundError as error:
            # A missing bucket is reported as FileNotFoundError like a missing object, but is a wrong address,
            # not a cache miss.
            if "NoSuchBucket" in str(error) or "ContainerNotFound" in str(error):
                raise as_store_error(error, self._address) from error
            raise
        except StoreError:
            raise
        except (BaseError, PermissionError, OSError, ValueError) as error:
            raise as_store_error(error, self.where(name)) from error

    def _remember(self, name: str, stat: Stat | None) -> None:
        with self._lock:
            if len(self._stats) > _CACHE_ENTRIES:
                self._stats.clear()
            self._stats[name] = time.monotonic(), stat

    def _forget(self, name: str) -> None:
        with self._lock:
            self._stats.pop(name, None)
            self._listings.pop(name.rpartition("/")[0], None)


def _stat(meta: ObjectMeta) -> Stat:
    """Convert an object's metadata, with a stamp that is equal whether it came from LIST, HEAD or GET.

    These answers differ: LIST omits the quotes of ETags on Azure and the version on Google and versioned S3
    buckets, and has milliseconds on Google where single answers have whole seconds. So the stamp has the bare
    ETag, the size and the whole second.
    """
    modified = meta["last_modified"].timestamp()
    # Weak markers and quotes differ between LIST, HEAD and GET, see above.
    tag = (meta["e_tag"] or "").removeprefix("W/").strip('"')
    return Stat(meta["size"], modified, (tag, meta["size"], int(modified)), True)


def _joined(parts: Sequence[Buffer]) -> Buffer:
    return parts[0] if len(parts) == 1 else b"".join(parts)
