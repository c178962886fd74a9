"""Claims: "I am computing this segment", so that two workers do not do the same work.

Border: one small file; what is computed under it is known elsewhere.

Only a courtesy: correctness rests on first-wins publication; a lost or stolen claim costs time, never a
result. A claim is a file created exclusively; its holder touches it now and then, and one that has not been
touched for `ttl` seconds was left by a dead process and may be taken over. One that nobody on this machine
can hold any more is taken over at once: whoever starts a killed or interrupted run again does not wait.
"""

from __future__ import annotations

import os
import platform
import secrets
from contextlib import suppress
from functools import partial
from pathlib import Path

from ..files import Folder
from ..repeated import Repeated

TTL = 60.0
"""Seconds: long enough for a stalled network disk, short enough to wait for after a crash."""
_UNSIGNED = 2.0
"""Seconds for which a claim may be empty: between its creation and its holder's name."""
_held: set[str] = set()
"""Claims of this process."""


class SegmentClaim:
    """One claim: `with claim as mine:`, or `acquire` before the work and `release` after it."""

    def __init__(self, folder: Folder, name: str, ttl: float = TTL) -> None:
        self._folder = folder
        self._name = name
        self._ttl = ttl
        self._token = f"{platform.node()} {os.getpid()} {secrets.token_hex(4)}"
        self._beat: Repeated | None = None

    def acquire(self) -> bool:
        """Whether the claim is ours now; an abandoned one is taken over. Raises ReadOnlyStore, StoreFull."""
        there = self._folder.stat(self._name)
        if there is not None:
            holder = (self._folder.get(self._name) or b"").decode(errors="replace")
            patience = self._ttl if holder else min(self._ttl, _UNSIGNED)
            # One from the future is touched by nobody: a clock was set back.
            if abs(self._folder.now() - there.modified) > patience or _is_orphan(holder):
                self._folder.delete(self._name)
        try:
            _held.add(self._token)
            if not self._folder.mark(self._name, self._token.encode()):
                _held.discard(self._token)
                return False
            keep_alive = partial(_touch, self._folder, self._name)
            self._beat = Repeated(self._ttl / 3, keep_alive, "mizarr-claim")
            self._beat.start()
            return True
        except BaseException:
            self.release()  # interrupted: whoever asked will never know that it is theirs
            raise

    def release(self) -> None:
        """Let others have it; harmless when it is not, or no longer, ours, and when it is asked once more."""
        if self._beat is not None:
            self._beat.stop()
        if self._token not in _held:
            return
        if self._folder.get(self._name) == self._token.encode():
            self._folder.delete(self._name)
        self._beat = None
        _held.discard(self._token)  # last: interrupted before, it is released once more

    def __enter__(self) -> bool:
        try:
            return self.acquire()
        except BaseException:
            self.release()
            raise

    def __exit__(self, *_: object) -> None:
        try:
            self.release()
        except BaseException:  # interrupted
            self.release()
            raise


def _touch(folder: Folder, name: str) -> None:
    """Keep a claim alive."""
    with suppress(OSError):  # taken over after a long pause of this process: harmless
        folder.touch(name)


def _is_orphan(token: str) -> bool:
    """Whether nobody on this machine can hold a claim any more; False where that cannot be known.

    Its process is gone, or is this one, which was interrupted before the claim was known to be its own.
    """
    host, _, rest = token.partition(" ")
    pid = rest.partition(" ")[0]
    if host != platform.node() or not pid.isdigit():
        return False
    if int(pid) == os.getpid():
        return token not in _held
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False  # somebody else's process, but alive
    return _is_zombie(pid)


def _is_zombie(pid: str) -> bool:
    """Whether a process has ended and nobody has asked how: in a container, often nobody ever does."""
    try:
        told = Path(f"/proc/{pid}/stat").read_text("ascii", errors="replace")
    except OSError:
        return False
    return told.rpartition(")")[2].split()[:1] == ["Z"]
