"""From an address to the folder it names: a path of this machine, or the URL of an object store.

Border: addresses; whether a store lies there is not asked.
"""

from __future__ import annotations

from pathlib import Path

from .folder import Folder
from .local import LocalFolder

__all__ = ["folder_at", "is_remote", "open_folder"]


def open_folder(address: str | Path, durability: str = "disk", read_only: bool = False) -> Folder:
    """The folder at an address: a path, or s3://, gs://, az:// or memory:// and what follows.

    Raises StoreError for a URL that cannot be one of a store, MissingExtra where what speaks to object stores
    is not installed.
    """
    if is_remote(address):
        from .objects import ObjectFolder

        return ObjectFolder(str(address), read_only)
    return LocalFolder(Path(address).expanduser().absolute(), durability, read_only)


def folder_at(source: str | Path) -> tuple[Folder, str]:
    """The store in which the folder of a run or a result lies, for reading, and its name there.

    source: what `Folder.where` said of it. ValueError for what cannot be one.
    """
    root, *place = str(source).rstrip("/").rsplit("/", 3)
    if len(place) < 3 or place[0] != "data" or not root:
        raise ValueError(f"expected the folder of a run or a result, found {str(source)!r}")
    return open_folder(root, read_only=True), "/".join(place)


def is_remote(address: str | Path) -> bool:
    """Whether an address is a URL."""
    return "://" in str(address)
