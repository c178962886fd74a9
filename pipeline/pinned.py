"""Pinned resources: what must not change while a command runs, such as the files of a checkpoint.

A key holds the digest of such files as they were when a command was planned; they are read later. So every
node names its resources (`pinned`): each is opened once, and checked when the node is looked up and before
anything computed from it is published. The promise: a result that was computed from files which changed under
the command is never published under the old key.

Border: files and what the system says of them; what is in them is their reader's business.
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
"""Resources that stay open in a process for the next cell or command."""


class Pinned(Protocol):
    """Protocol of a resource (files, or weights in memory) that must not change while a command runs."""

    def check(self) -> None:
        """Raise SourceChanged if its content is no longer that in the keys of the command."""
        ...


@runtime_checkable
class PinnedResource(Pinned, Protocol):
    """A pinned resource that a stage's function gets, such as a dictionary of features: it has an identity,
    which enters the key, and a place, which does not. Sent to workers it is names and digests."""

    def identity(self) -> dict[str, Any]:
        """Plain values that stand for it among the parameters of a key."""
        ...

    def open(self) -> AbstractContextManager[Any]:
        """The object that the function gets, opened once per process. Raises SourceChanged unless it is the
        one of the identity."""
        ...


class _Noted(NamedTuple):
    """Fingerprint of a file."""

    state: str
    """Stamp (device, inode, size, mtime, ctime) and a digest of blocks of it."""
    content: str | None
    """Digest of the whole file, if a later change might leave `state` as it is; else None."""


class PinnedFiles:
    """Files that must not change until `check`. Each is fingerprinted before its first read, so everything
    read of it until then is of one content: also a change that was undone moves the stamp."""

    def __init__(self, name: str, advice: str = "start again with the files as they are now") -> None:
        """name: whose files they are, for messages. advice: what to do once one has changed."""
        self.name, self.advice = name, advice
        self._noted: dict[Path, _Noted] = {}
        self._digests: dict[Path, str] = {}

    def note(self, path: Path) -> Path:
        """The path of a file that is about to be read. One that cannot be is its reader's business. Raises
        OSError for a file that is being written."""
        if path not in self._noted and (current := _state(path)) is not None:
            state, is_settled = current
            self._noted[path] = _Noted(state, None if is_settled else file_digests().digest(path))
        return path

    def digest(self, path: Path) -> str:
        """`sha256:…` of a file's bytes, read once; OSError when it cannot be read."""
        noted = self._noted.get(self.note(path))
        if path not in self._digests:
            content = None if noted is None else noted.content
            self._digests[path] = content or file_digests().digest(path)
        return self._digests[path]

    @property
    def are_settled(self) -> bool:
        """Whether every change would show without reading the files."""
        return all(noted.content is None for noted in self._noted.values())

    def check(self) -> None:
        """Raise SourceChanged, naming a file, unless all are as they were when they were noted."""
        if (path := self._first_changed()) is not None:
            raise SourceChanged(f"expected {self.name} as it was, found another {path.name}: {self.advice}")

    @property
    def have_changed(self) -> bool:
        """Whether `check` would raise."""
        return self._first_changed() is not None

    def _first_changed(self) -> Path | None:
        return next((path for path, noted in list(self._noted.items()) if not _is_same(path, noted)), None)


def _is_same(path: Path, noted: _Noted) -> bool:
    current = _state(path)
    if current is None or current[0] != noted.state:
        return False
    with suppress(OSError):
        return noted.content is None or noted.content == file_digests().digest(path)
    return False


def _state(path: Path) -> tuple[str, bool] | None:
    """`FileDigests.state` of a regular file; None for an unreadable file, a folder or a pipe."""
    with suppress(OSError):
        return FileDigests.state(path) if path.is_file() else None
    return None


class OpenResource(NamedTuple):
    """An object that was opened from files."""

    value: Any
    files: PinnedFiles


_OPEN: OrderedDict[FileResource, OpenResource] = OrderedDict()
"""What is open in this process, the newest last: equal resources share one object."""
_OPENING = threading.RLock()
"""Held while a resource is opened: threads that want the same one wait for the first."""


class FileResource(ABC):
    """A `PinnedResource` that lies in files, opened once per process. Subclasses are frozen dataclasses of
    names and digests."""

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """See `PinnedResource`."""

    @abstractmethod
    def opened_anew(self) -> OpenResource:
        """Open it. Raises SourceChanged unless it is the one of the identity."""

    def opened_as(self, opened: OpenResource) -> Self:
        """This resource, which whoever plans with it has open already; nobody else may hold the object."""
        self._share(lambda: opened)
        return self

    @contextmanager
    def open(self) -> Iterator[Any]:
        """The object. Raises SourceChanged as `check`, before and behind the block."""
        self.check()
        yield self._opened.value
        self.check()

    def check(self) -> None:
        """Raise SourceChanged unless its files are as they were when this resource was opened."""
        self._opened.files.check()

    @property
    def _opened(self) -> OpenResource:
        return vars(self).get("_open") or self._share(self.opened_anew)

    def _share(self, make: Callable[[], OpenResource]) -> OpenResource:
        with _OPENING:
            opened = _OPEN.pop(self, None)
            if opened is None or opened.files.have_changed:
                opened = make()
            _OPEN[self] = vars(self)["_open"] = opened
            while len(_OPEN) > MOST_OPEN:
                _OPEN.popitem(last=False)
        return opened

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_open"}
