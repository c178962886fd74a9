"""A store: the folder that keeps what runs and stages leave behind, and the one object through which it is
used.

Border: keys and labelled data; which stage made them, and when it should run, is decided in the pipeline.

    store.json            format version; its presence makes a folder a store
    keys/<ab>/<K>.json    what has been published (`records.py`); readers start here and nowhere else
    data/<ab>/<D>/        one run: shards on a packed token axis (`entries.py`)
    data/<ab>/<K>.<x>/    one attempt at a derived result (`results.py`)
    pins/<name>.json      keys that gc must keep
    quarantine/           what `verify` found damaged
    vocabularies/         token strings by tokenizer digest
    index.sqlite          a cache of lookups (`index.py`); may be deleted at any time

Any number of processes and threads may use one store at once. Small files are created, never changed; whoever
comes second finds the first one's and takes it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from .errors import EntryNotFound, StoreFormatError
from .files import Folder
from .index import StoreIndex
from .keys import ActivationKey, ResultKey
from .provenance import as_json, get_provenance
from .records import Record, key_path, now

if TYPE_CHECKING:
    import xarray as xr

FORMAT = 1

Key = ActivationKey | ResultKey | str
Mode = Literal["a", "r"]
Durability = Literal["disk", "process"]


def open_store(path: str | Path, mode: Mode = "a", durability: Durability = "disk") -> Store:
    """Open the store in a folder, or create it there.

    mode: "a" reads, writes and creates; "r" only reads and leaves no trace in the folder.
    durability: "disk" survives a power cut; "process" skips fsync and survives any kill of the process.
    Raises StoreFormatError when the folder holds something else, or a store of a newer format.
    """
    if mode not in ("a", "r"):
        raise ValueError(f"expected mode 'a' (read, write, create) or 'r' (read only), found {mode!r}")
    if durability not in ("disk", "process"):
        raise ValueError(f"expected durability 'disk' or 'process', found {durability!r}")
    files = Folder(Path(path).expanduser().absolute(), durability, mode == "r")
    _check_format(files)
    return Store(files)


class Store:
    """Runs and results by key. Made by `open_store`; cheap to send to another process."""

    def __init__(self, files: Folder) -> None:
        self.files = files
        self.index = StoreIndex(files.path("index.sqlite"), read_only=files.read_only)

    @property
    def path(self) -> Path:
        """The folder."""
        return self.files.root

    @property
    def read_only(self) -> bool:
        """Whether it was opened with mode="r"."""
        return self.files.read_only

    def __repr__(self) -> str:
        return f"Store({str(self.path)!r}, mode={'r' if self.read_only else 'a'!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Store) and self.files == other.files

    def __hash__(self) -> int:
        return hash(self.files)

    # -- what is there
    # ------------------------------------------------------------------------------------------

    def lookup(self, key: Key) -> Record | None:
        """The record published under a key (or its 64 hex digits); None when it has to be computed."""
        name = key if isinstance(key, str) else key.digest
        text = self.files.get(key_path(name))
        return None if text is None else Record.from_bytes(name, text)

    def records(self) -> Iterator[Record]:
        """Everything published, in order of key."""
        for name in self._key_names(""):
            if (found := self.lookup(name)) is not None:
                yield found

    def record(self, key: Key) -> Record:
        """The record under a key, or under a unique prefix of one; EntryNotFound otherwise."""
        if not isinstance(key, str):
            name = key.digest
        else:
            name = _unique(key, self._key_names(key), "key", self)
        if (found := self.lookup(name)) is None:
            raise EntryNotFound(f"nothing is stored under {key!r} in {self.path}; compute it first")
        return found

    def __getitem__(self, key: Key) -> xr.Dataset:
        """The labelled data under a key or a unique prefix of one, lazy."""
        record = self.record(key)
        return self.open_result(record)

    # -- results
    # ------------------------------------------------------------------------------------------------

    def put_result(
        self, key: ResultKey, dataset: xr.Dataset, *, provenance: Mapping[str, Any] | None = None
    ) -> Record:
        """Store a labelled result; returns the record that stands, which is the first one ever published.

        Chunked variables are computed and written chunk by chunk, in bounded memory. Text may be any kind of
        string array; times are refused (numbers with a unit in attrs["units"] instead).
        provenance: plain values on how it came about (code hash, seconds); recorded beside it, never
        digested.
        """
        from .results import write_result

        return write_result(self.files, key, dataset, provenance or {})

    def open_result(self, key: Key | Record) -> xr.Dataset:
        """A stored result, labelled and lazy; large ones come chunked."""
        from .results import read_result

        record = key if isinstance(key, Record) else self.record(key)
        self.index.touch(record.data)
        return read_result(self.files, record)

    # -- where it came from
    # -------------------------------------------------------------------------------------

    def provenance(self, key: Key | Record) -> list[dict[str, Any]]:
        """What is noted about the data under a key, oldest first: requests, parents, versions, times."""
        record = key if isinstance(key, Record) else self.record(key)
        return get_provenance(self.files, record.data)

    def _key_names(self, prefix: str) -> list[str]:
        folder = f"keys/{prefix[:2]}" if len(prefix) >= 2 else "keys"
        names = (Path(name).stem for name in self.files.list(folder))
        return sorted(name for name in names if name.startswith(prefix))


def _unique(prefix: str, names: list[str], kind: str, store: Store) -> str:
    if len(names) == 1:
        return names[0]
    if prefix in names:
        return prefix
    if not names:
        raise EntryNotFound(
            f"no {kind} in {store.path} starts with {prefix!r}; `mizarr ls` shows what is there"
        )
    some = ", ".join(name[: len(prefix) + 4] for name in names[:4])
    raise EntryNotFound(f"{len(names)} {kind}s start with {prefix!r} ({some}, …); give more digits")


def _check_format(files: Folder) -> None:
    """Make sure the folder is a store of a format we read, creating it where that is allowed."""
    text = files.get("store.json")
    if text is None:
        if files.read_only:
            raise StoreFormatError(f"expected a store in {files.root}, found no store.json; check the path")
        # Hidden names are ignored: they may be another process's store.json on its way.
        other = [p.name for p in files.root.iterdir() if p.name[0] != "."] if files.root.is_dir() else []
        if other and "store.json" not in other:
            raise StoreFormatError(
                f"expected a store or an empty folder at {files.root}, found {len(other)} other things "
                f"({', '.join(sorted(other)[:3])}); name a new folder"
            )
        files.put_new("store.json", as_json({"format": FORMAT, "digest": "sha256", "created": now()}))
        text = files.get("store.json") or b""
    try:
        found = int(json.loads(text)["format"])
    except (ValueError, KeyError, TypeError) as error:
        raise StoreFormatError(
            f"{files.root / 'store.json'} is not the description of a store ({error}); "
            'name another folder, or restore the file: {"format": 1, "digest": "sha256"}'
        ) from error
    if found > FORMAT:
        raise StoreFormatError(
            f"expected a store of format {FORMAT} or older, found format {found} in {files.root}; "
            "it was written by a newer mizarr: upgrade (pip install -U mizarr), or use another folder"
        )
