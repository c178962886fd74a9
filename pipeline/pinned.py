"""Pinned resources: files or weights that must not change while a command runs, such as a checkpoint's.

A key holds the digest of such files as they were when a command was planned; they are read later. So every
node names its resources (`pinned`): each is opened once, and checked when the node is looked up and before
anything computed from it is published. The promise: a result that was computed from files which changed under
the command is never published under the old key.

Border: stamps and digests of files; knows no file format.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self, runtime_checkable

from ..store.errors import SourceChanged
from ..store.index import FileDigests, file_digests

__all__ = ["FileResource", "OpenResource", "Pinned", "PinnedFiles", "PinnedResource"]

MOST_OPEN = 2
"""Number of resources that stay open in a process for the next cell or command."""


class Pinned(Protocol):
    """Files, or weights in memory, that must not change while a command runs."""

    def check(self) -> None:
        """Raise SourceChanged if the content differs from the digest in the keys of the running command."""
        ...


@runtime_checkable
class PinnedResource(Pinned, Protocol):
    """A pinned resource that a stage's function uses, such as a dictionary of features.

    Its identity enters the key; its location does not. Pickled for workers, it consists of names and digests.
    """

    def identity(self) -> dict[str, Any]:
        """Plain values that enter the key among the parameters."""
        ...

    def open(self) -> AbstractContextManager[Any]:
        """Context manager that gives the opened object for the stage's function, opened once per process.

        Raises:
            SourceChanged: The files do not have the content that `identity` states.
        """
        ...


class _Fingerprint(NamedTuple):
    """State of a file, by which a later change is noticed."""

    state: str
    """Stamp (device, inode, size, mtime, ctime), and a digest of sixteen blocks of the file."""
    content: str | None
    """Digest of the whole file, if a later change might leave `state` as it is; else None."""


class PinnedFiles:
    """Files that a command reads and that must not change before `check` is called.

    Each file is fingerprinted before it is first read, so everything read until `check` is of one content. A
    change that was undone is detected too, because it moves the file's time stamp.

    Arguments:
        name: Owner of the files, for messages.
        advice: Next step for the user if a file has changed.
    """

    def __init__(self, name: str, advice: str = "start again with the files as they are now") -> None:
        self.name, self.advice = name, advice
        self._fingerprints: dict[Path, _Fingerprint] = {}
        self._digests: dict[Path, str] = {}

    def note(self, path: Path) -> Path:
        """Fingerprint a file that is about to be read, and return its path.

        An unreadable file gets no fingerprint: its reader reports the error.

        Raises:
            OSError: The file is being written.
        """
        if path not in self._fingerprints and (current := _state(path)) is not None:
            state, is_settled = current
            self._fingerprints[path] = _Fingerprint(
                state, None if is_settled else file_digests().digest(path)
            )
        return path

    def digest(self, path: Path) -> str:
        """`sha256:…` of a file's bytes, read once; OSError when it cannot be read."""
        fingerprint = self._fingerprints.get(self.note(path))
        if path not in self._digests:
            content = None if fingerprint is None else fingerprint.content
            self._digests[path] = content or file_digests().digest(path)
        return self._digests[path]

    @property
    def are_settled(self) -> bool:
        """Whether the next change of any file is certain to be noticed without reading the file whole."""
        return all(fingerprint.content is None for fingerprint in self._fingerprints.values())

    def check(self) -> None:
        """Raise SourceChanged, naming a file, if a file no longer has the fingerprint that `note` took."""
        if (path := self._first_changed()) is not None:
            raise SourceChanged(
                f"the file {path.name} of {self.name} changed while the command ran; {self.advice}"
            )

    @property
    def have_changed(self) -> bool:
        """Whether `check` would raise SourceChanged."""
        return self._first_changed() is not None

    def _first_changed(self) -> Path | None:
        """Path of the first changed file; None for unchanged files."""
        fingerprints = list(self._fingerprints.items())
        changed = (path for path, fingerprint in fingerprints if not _is_unchanged(path, fingerprint))
        return next(changed, None)


def _is_unchanged(path: Path, fingerprint: _Fingerprint) -> bool:
    """Whether a file still has its fingerprint; False if it cannot be read."""
    current = _state(path)
    if current is None or current[0] != fingerprint.state:
        return False
    with suppress(OSError):
        return fingerprint.content is None or fingerprint.content == file_digests().digest(path)
    return False


def _state(path: Path) -> tuple[str, bool] | None:
    """State of a file, and whether its next change is certain to change the state; None if it cannot be
    read."""
    with suppress(OSError):
        return FileDigests.state(path) if path.is_file() else None
    return None


class OpenResource(NamedTuple):
    """An object opened from files, such as a dictionary's weights, and the fingerprints of these files."""

    value: Any
    """The opened object."""
    files: PinnedFiles
    """Fingerprints taken before the files were read."""


_OPEN: OrderedDict[FileResource, OpenResource] = OrderedDict()
"""Resources open in this process, the most recent last; equal resources share one object."""
_OPENING = threading.RLock()
"""Lock during opening: threads that open the same resource wait for the thread that came before them."""


class FileResource(ABC):
    """Base class of a resource stored in files, such as a dictionary of features, opened once per process.

    Subclasses are frozen dataclasses of names and digests.
    """

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """Plain values that identify the content of the files, and enter the key of a result."""

    @abstractmethod
    def opened_anew(self) -> OpenResource:
        """Open the files, without a look at resources that are open already.

        Raises:
            SourceChanged: The files do not have the content that `identity` states.
        """

    def opened_as(self, opened: OpenResource) -> Self:
        """Use an object that the planning code has opened already; returns this resource.

        The caller must not share the object with a user, who might edit it.
        """
        self._share(lambda: opened)
        return self

    @contextmanager
    def open(self) -> Iterator[Any]:
        """Context manager that gives the opened object; SourceChanged if a file changed before or during the
        block."""
        self.check()
        yield self._opened.value
        self.check()

    def check(self) -> None:
        """Raise SourceChanged if a file has changed since this resource was opened."""
        self._opened.files.check()

    @property
    def _opened(self) -> OpenResource:
        return vars(self).get("_open") or self._share(self.opened_anew)

    def _share(self, make: Callable[[], OpenResource]) -> OpenResource:
        """Open object of an equal resource in this process, or a new object from `make`."""
        with _OPENING:
            opened = _OPEN.pop(self, None)
            # A resource whose files were replaced is opened again.
            if opened is None or opened.files.have_changed:
                opened = make()
            _OPEN[self] = vars(self)["_open"] = opened
            while len(_OPEN) > MOST_OPEN:
                _OPEN.popitem(last=False)
        return opened

    def __getstate__(self) -> dict[str, Any]:
        # Memory maps cannot be sent to workers, which open the files themselves.
        return {name: value for name, value in vars(self).items() if name != "_open"}
