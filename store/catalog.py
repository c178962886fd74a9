"""What a store holds under which key: records of what is published, pins, and the folders they lie in.

Border: names and small files. Bytes of arrays are the business of runs and results, what may go or is damaged
that of upkeep/; all of these ask here.
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
    """The keys of a store, and what lies under them."""

    def __init__(self, files: Folder) -> None:
        self.files = files
        self.index = StoreIndex(files.index_path, read_only=files.read_only)

    @property
    def address(self) -> str:
        """Where it lies, as `open_store` takes it: a path or a URL."""
        return self.files.address

    @property
    def path(self) -> Path:
        """The folder of this machine; StoreError for a store that lies elsewhere."""
        if not isinstance(self.files, LocalFolder):
            raise StoreError(f"expected a store in a folder, found {self.address}; its address is no path")
        return self.files.root

    @property
    def read_only(self) -> bool:
        """Whether it was opened with mode="r"."""
        return self.files.read_only

    # -- records

    def lookup(self, key: Key) -> Record | None:
        """The record published under a key (or its 64 hex digits); None when it has to be computed."""
        name = key if isinstance(key, str) else _digest_of(key)
        text = self.files.get(key_path(name))
        return None if text is None else Record.from_bytes(name, text)

    def records(self) -> Iterator[Record]:
        """Everything published, in order of key."""
        for name in self.key_names(""):
            if (found := self.lookup(name)) is not None:
                yield found

    def record(self, key: Key) -> Record:
        """The record under a key, or under a unique prefix of one; EntryNotFound otherwise."""
        if not isinstance(key, str):
            name = _digest_of(key)
        else:
            name = unique_name(key, self.key_names(key), "key", self)
        if (found := self.lookup(name)) is None:
            self.files.require_store()
            raise EntryNotFound(f"nothing is stored under {key!r} in {self.address}; compute it first")
        return found

    def key_names(self, prefix: str) -> list[str]:
        """Keys that are published and start so, in order."""
        if not may_begin_digest(prefix):
            return []
        folder = f"keys/{prefix[:2]}" if len(prefix) >= 2 else "keys"
        names = (Path(name).stem for name in self.files.list(folder))
        return sorted(name for name in names if name.startswith(prefix))

    def folders(self) -> list[str]:
        """Every folder of a run or a result, finished or not, relative to the store."""
        tops = [top for top in self.files.subfolders("data") if re.fullmatch("[0-9a-f]{2}", top)]
        found = ((top, name) for top in tops for name in self.files.subfolders(f"data/{top}"))
        return sorted(f"data/{top}/{name}" for top, name in found if name[0] in "0123456789abcdef")

    # -- pins

    def pin(self, name: str, key: Key | Record) -> None:
        """Keep what is under a key, and all it was made from, from gc; ValueError if the name is taken."""
        record = key if isinstance(key, Record) else self.record(key)
        _check_pin(name)
        pin = {"key": record.key, "created": now()}
        if not self.files.put_new(f"pins/{name}.json", sealed(pin)):
            there = self.pins().get(name)
            if there != record.key:
                raise ValueError(f"pin {name!r} already names {there}; unpin it first, or take another name")

    def unpin(self, name: str) -> None:
        """Remove a pin; EntryNotFound if there is none of that name."""
        if self.files.get(f"pins/{name}.json") is None:
            raise EntryNotFound(f"no pin {name!r}; there are {', '.join(self.pins()) or 'none'}")
        self.files.delete(f"pins/{name}.json")

    def pins(self) -> dict[str, str]:
        """Digest of the key that each pin names, by name. Raises CorruptEntry for a pin that is damaged."""
        names = sorted(f"pins/{name}" for name in self.files.children("pins"))
        texts = {name: self.files.get(name) for name in names}
        return {
            Path(name).stem: str(unsealed(name, text, ("key",))["key"])
            for name, text in texts.items()
            if text is not None
        }


def may_begin_digest(prefix: str) -> bool:
    """Whether a text holds nothing but hex digits, as the start of a digest does."""
    return not prefix.strip("0123456789abcdef")


def _check_pin(name: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise ValueError(f"expected a pin name of letters, digits, '.', '_' and '-', found {name!r}")


def unique_name(prefix: str, names: list[str], kind: str, catalog: Catalog) -> str:
    """The one name that starts so; EntryNotFound for none or several, kind: what they are called."""
    if len(names) == 1:
        return names[0]
    if prefix in names:
        return prefix
    if not names:
        catalog.files.require_store()
        raise EntryNotFound(
            f"no {kind} in {catalog.address} starts with {prefix!r}; `mizarr ls` shows what is there"
        )
    some = ", ".join(name[: len(prefix) + 4] for name in names[:4])
    raise EntryNotFound(f"{len(names)} {kind}s start with {prefix!r} ({some}, …); give more digits")


def _digest_of(key: Any) -> str:
    """The digest of a key; EntryNotFound for what is none."""
    digest = getattr(key, "digest", None)
    if not isinstance(digest, str):
        raise EntryNotFound(
            f"expected a key, or the start of one as a text, found {shown(key)}; `mizarr ls` lists them"
        )
    return digest
