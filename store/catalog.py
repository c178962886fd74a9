"""`Catalog`: records of published data, pins and data folders of a store. Base class of `Store`.

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
    """Lookup of published records, pins and data folders in a store; base class of `Store`."""

    def __init__(self, files: Folder) -> None:
        self.files = files
        self.index = StoreIndex(files.index_path, read_only=files.read_only)

    @property
    def address(self) -> str:
        """Path or URL of the store, as `open_store` takes it."""
        return self.files.address

    @property
    def path(self) -> Path:
        """Local folder of the store; StoreError for a store in a bucket or in memory."""
        if not isinstance(self.files, LocalFolder):
            raise StoreError(f"the store {self.address} is not in a local folder; use store.address instead")
        return self.files.root

    @property
    def read_only(self) -> bool:
        """Whether the store was opened with mode="r"."""
        return self.files.read_only

    # -- records

    def lookup(self, key: Key) -> Record | None:
        """Record of the data published under a key (or its 64 hex digits); None if nothing is."""
        name = key if isinstance(key, str) else _digest_of(key)
        text = self.files.get(key_path(name))
        return None if text is None else Record.from_bytes(name, text)

    def records(self) -> Iterator[Record]:
        """Iterate over the records of all published data, in order of their keys."""
        for name in self.key_names(""):
            if (record := self.lookup(name)) is not None:
                yield record

    def record(self, key: Key) -> Record:
        """Record of the data published under a key, or under the only key with these first hex digits.

        Raises:
            EntryNotFound: Nothing is published under the key, or several keys start with these digits.
        """
        if not isinstance(key, str):
            name = _digest_of(key)
        else:
            name = unique_name(key, self.key_names(key), "key", self)
        if (record := self.lookup(name)) is None:
            self.files.require_store()
            raise EntryNotFound(
                f"nothing is stored under the key {key!r} in {self.address}; compute it first, or list what "
                "is stored with `mizarr ls`"
            )
        return record

    def key_names(self, prefix: str) -> list[str]:
        """Published keys (64 hex digits) that start with `prefix`, sorted."""
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
        """Protect a run or result, and all that it was computed from, from garbage collection.

        Arguments:
            name: Name of the pin, by which `unpin` removes it.
            key: Key, its first hex digits, or record of the data.

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
                    f"the pin {name!r} already protects {existing}; remove it first (`mizarr pin {name} "
                    "--remove`), or take another name"
                )

    def unpin(self, name: str) -> None:
        """Remove a pin; EntryNotFound if it does not exist."""
        if self.files.get(f"pins/{name}.json") is None:
            raise EntryNotFound(f"there is no pin {name!r}; pins are {', '.join(self.pins()) or 'none'}")
        self.files.delete(f"pins/{name}.json")

    def pins(self) -> dict[str, str]:
        """Names of the pins -> the keys (64 hex digits) that they protect. CorruptEntry for a damaged pin."""
        names = sorted(f"pins/{name}" for name in self.files.children("pins"))
        texts = {name: self.files.get(name) for name in names}
        return {
            Path(name).stem: str(unsealed(name, text, ("key",))["key"])
            for name, text in texts.items()
            if text is not None
        }


def may_begin_digest(prefix: str) -> bool:
    """Whether a text could be the start of a digest: it consists of lower-case hex digits, or is empty."""
    return not prefix.strip("0123456789abcdef")


def _check_pin(name: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise ValueError(
            f"expected the name of a pin as letters, digits, '.', '_' and '-', with a letter or digit first, "
            f"found {name!r}"
        )


def unique_name(prefix: str, names: list[str], kind: str, catalog: Catalog) -> str:
    """Find the only key or run whose name starts with a prefix.

    Arguments:
        prefix: Start of the name, as hex digits.
        names: All names with this prefix.
        kind: Word for the names in messages: "key" or "run".
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
            f"no {kind} in {catalog.address} starts with {prefix!r}; `mizarr ls` lists what is stored"
        )
    examples = ", ".join(name[: len(prefix) + 4] for name in names[:4])
    raise EntryNotFound(f"{len(names)} {kind}s start with {prefix!r} ({examples}, …); give more digits")


def _digest_of(key: Any) -> str:
    """Digest of a key object; EntryNotFound for any other value."""
    digest = getattr(key, "digest", None)
    if not isinstance(digest, str):
        raise EntryNotFound(
            f"expected a key, or the first hex digits of one as a text, found {shown(key)}; `mizarr ls` "
            "lists keys"
        )
    return digest
