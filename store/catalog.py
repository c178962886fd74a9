"""`Catalog`: the published records, pins and data folders of a store. Base class of `Store`.

Runs, results and maintenance take a Catalog, so that they need not import `Store`, which imports them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .arrays import shown
from .errors import EntryNotFound, StoreError
from .files import Folder, LocalFolder
from .index import StoreIndex
from .keys import ActivationKey, ResultKey
from .records import Record, key_path, now
from .sealed import sealed, unsealed

Key = ActivationKey | ResultKey | str


class Catalog:
    """Lookup of records, pins and data folders in a store."""

    def __init__(self, files: Folder) -> None:
        self.files = files
        self.index = StoreIndex(files.index_path, read_only=files.read_only)

    @property
    def address(self) -> str:
        """Path or URL, as `open_store` takes it."""
        return self.files.address

    @property
    def path(self) -> Path:
        """Local folder of the store; StoreError for a store in a bucket or in memory."""
        if not isinstance(self.files, LocalFolder):
            raise StoreError(f"expected a store in a folder, found {self.address}; its address is no path")
        return self.files.root

    @property
    def read_only(self) -> bool:
        """Whether the store was opened with mode="r"."""
        return self.files.read_only

    # -- records

    def lookup(self, key: Key) -> Record | None:
        """Published record of a key (or of its 64 hex digits); None means a cache miss."""
        name = key if isinstance(key, str) else _digest_of(key)
        text = self.files.get(key_path(name))
        return None if text is None else Record.from_bytes(name, text)

    def records(self) -> Iterator[Record]:
        """All published records, in order of key."""
        for name in self.key_names(""):
            if (record := self.lookup(name)) is not None:
                yield record

    def record(self, key: Key) -> Record:
        """Published record of a key or unique key prefix; EntryNotFound on a miss."""
        if not isinstance(key, str):
            name = _digest_of(key)
        else:
            name = unique_name(key, self.key_names(key), "key", self)
        if (record := self.lookup(name)) is None:
            self.files.require_store()
            raise EntryNotFound(f"nothing is stored under {key!r} in {self.address}; compute it first")
        return record

    def key_names(self, prefix: str) -> list[str]:
        """Published keys that start with `prefix`, sorted."""
        if not may_begin_digest(prefix):
            return []
        folder = f"keys/{prefix[:2]}" if len(prefix) >= 2 else "keys"
        # A prefix of two digits or more needs only one of the 256 subfolders.
        names = (Path(name).stem for name in self.files.list(folder))
        return sorted(name for name in names if name.startswith(prefix))

    def folders(self) -> list[str]:
        """Folders of all runs and results, complete or not, relative to the store, sorted."""
        # Other folders may be there, left by people or other programs.
        tops = [top for top in self.files.subfolders("data") if re.fullmatch("[0-9a-f]{2}", top)]
        folder_names = ((top, name) for top in tops for name in self.files.subfolders(f"data/{top}"))
        return sorted(f"data/{top}/{name}" for top, name in folder_names if name[0] in "0123456789abcdef")

    # -- pins

    def pin(self, name: str, key: Key | Record) -> None:
        """Protect a run or result, and all its inputs, from garbage collection.

        Arguments:
            name: Name of the pin.
            key: Key, key prefix or record.

        Raises:
            ValueError: The name is invalid, or is taken by another key.
        """
        record = key if isinstance(key, Record) else self.record(key)
        _check_pin(name)
        pin = {"key": record.key, "created": now()}
        if not self.files.put_new(f"pins/{name}.json", sealed(pin)):
            existing = self.pins().get(name)
            if existing != record.key:
                raise ValueError(
                    f"pin {name!r} already names {existing}; unpin it first, or take another name"
                )

    def unpin(self, name: str) -> None:
        """Remove a pin; EntryNotFound if it does not exist."""
        if self.files.get(f"pins/{name}.json") is None:
            raise EntryNotFound(f"no pin {name!r}; there are {', '.join(self.pins()) or 'none'}")
        self.files.delete(f"pins/{name}.json")

    def pins(self) -> dict[str, str]:
        """Pinned key digests by pin name. CorruptEntry for a damaged pin."""
        names = sorted(f"pins/{name}" for name in self.files.children("pins"))
        texts = {name: self.files.get(name) for name in names}
        return {
            Path(name).stem: str(unsealed(name, text, ("key",))["key"])
            for name, text in texts.items()
            if text is not None
        }


def may_begin_digest(prefix: str) -> bool:
    """Whether a text could be the start of a digest, as it consists of hex digits."""
    return not prefix.strip("0123456789abcdef")


def _check_pin(name: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise ValueError(f"expected a pin name of letters, digits, '.', '_' and '-', found {name!r}")


def unique_name(prefix: str, names: list[str], kind: str, catalog: Catalog) -> str:
    """Resolve a prefix to a unique name.

    Arguments:
        prefix: Start of the name.
        names: All names with this prefix.
        kind: What the names are called in messages.
        catalog: The store, for messages.

    Raises:
        EntryNotFound: There are several names, or none.
    """
    if len(names) == 1:
        return names[0]
    if prefix in names:
        return prefix
    if not names:
        catalog.files.require_store()
        raise EntryNotFound(
            f"no {kind} in {catalog.address} starts with {prefix!r}; `mizarr ls` shows what is there"
        )
    examples = ", ".join(name[: len(prefix) + 4] for name in names[:4])
    raise EntryNotFound(f"{len(names)} {kind}s start with {prefix!r} ({examples}, …); give more digits")


def _digest_of(key: Any) -> str:
    """Digest of a key object; EntryNotFound for any other value."""
    digest = getattr(key, "digest", None)
    if not isinstance(digest, str):
        raise EntryNotFound(
            f"expected a key, or the start of one as a text, found {shown(key)}; `mizarr ls` lists them"
        )
    return digest
