"""From an address (a local path or the URL of an object store) to its `Folder`.

Whether a store exists there is not checked here.
"""

from __future__ import annotations

import stat
from pathlib import Path

from ..errors import StoreError
from .folder import Folder
from .local import LocalFolder

__all__ = ["folder_at", "is_remote", "open_folder"]


def open_folder(address: str | Path, durability: str = "disk", read_only: bool = False) -> Folder:
    """Open the files at an address, without checking whether a store exists there.

    Arguments:
        address: A local path, or a URL that starts with s3://, gs://, az:// or memory://.
        durability: "disk" syncs files before they get their names, "process" leaves that to the kernel.
        read_only: Whether writes raise ReadOnlyStore.

    Raises:
        StoreError: The path is not one of a folder, or the URL not one of a store.
        MissingExtra: The address is a URL and obstore is not installed.
    """
    if not isinstance(address, str | Path) or not str(address):
        raise StoreError(
            f"expected the folder or URL of a store as a text or Path, found {address!r:.80}; write for "
            "example 'activations' or 's3://BUCKET/PREFIX'"
        )
    if is_remote(address):
        from .objects import ObjectFolder

        return ObjectFolder(str(address), read_only)
    return LocalFolder(_local(Path(address)), durability, read_only)


def _local(address: Path) -> Path:
    """The absolute path of a folder that exists or can be created. StoreError for any other address."""
    try:
        path = address.expanduser().absolute()
        # mkdir on a dangling link fails with an error that does not mention the link.
        if path.is_symlink() and not path.exists():
            raise StoreError(
                f"expected the folder of a store at {path}, found a link to {path.readlink()}, which does "
                "not exist; create that folder, or name another"
            )
        is_folder = stat.S_ISDIR(path.stat().st_mode)
    except FileNotFoundError:
        return path
    except StoreError:
        raise
    # RuntimeError: expanduser of an unknown user; ValueError: a NUL in the path.
    except (OSError, RuntimeError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise StoreError(
            f"{str(address)!r:.200} cannot be the folder of a store ({reason}); name another folder"
        ) from error
    if not is_folder:
        raise StoreError(
            f"expected the folder of a store at {path}, found a file; name a folder, which need not exist yet"
        )
    return path


def folder_at(source: str | Path) -> tuple[Folder, str]:
    """Split the address of a run or result into the store (opened for reading) and the path within it.

    Arguments:
        source: Path or URL of the folder of a run or result: ".../data/ab/<digest>".

    Raises:
        ValueError: The address has another form.
    """
    root, *folder = str(source).rstrip("/").rsplit("/", 3)
    if len(folder) < 3 or folder[0] != "data" or not root:
        raise ValueError(
            f"expected the folder of a stored run or result, STORE/data/35/35be…, found {str(source)!r}"
        )
    return open_folder(root, read_only=True), "/".join(folder)


def is_remote(address: str | Path) -> bool:
    """Whether an address is a URL rather than a local path."""
    return "://" in str(address)
