"""From an address to the folder it names: a path of this machine, or the URL of an object store.

Border: addresses; whether a store lies there is not asked.
"""

from __future__ import annotations

import stat
from pathlib import Path

from ..errors import StoreError
from .folder import Folder
from .local import LocalFolder

__all__ = ["folder_at", "is_remote", "open_folder"]


def open_folder(address: str | Path, durability: str = "disk", read_only: bool = False) -> Folder:
    """The folder at an address: a path, or s3://, gs://, az:// or memory:// and what follows.

    Raises StoreError for a path that cannot be a folder's and a URL that cannot be one of a store,
    MissingExtra where what speaks to object stores is not installed.
    """
    if not isinstance(address, str | Path) or not str(address):
        raise StoreError(
            f"expected the folder of a store, or its URL, found {address!r:.80}; give its path as a text"
        )
    if is_remote(address):
        from .objects import ObjectFolder

        return ObjectFolder(str(address), read_only)
    return LocalFolder(_local(Path(address)), durability, read_only)


def _local(address: Path) -> Path:
    """The absolute path of a folder that is there, or may be made. StoreError for any other."""
    try:
        path = address.expanduser().absolute()
        if path.is_symlink() and not path.exists():
            raise StoreError(
                f"expected a folder at {path}, found a link to {path.readlink()}, which is not there; make "
                "that folder, or name another"
            )
        is_folder = stat.S_ISDIR(path.stat().st_mode)
    except FileNotFoundError:
        return path
    except StoreError:
        raise
    # RuntimeError: no home of that user; ValueError: a NUL.
    except (OSError, RuntimeError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise StoreError(
            f"expected a folder at {str(address)!r:.200}, found {reason}; name another"
        ) from error
    if not is_folder:
        raise StoreError(f"expected a folder at {path}, found a file; name a folder, which may be a new one")
    return path


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
