"""Claims: "I am computing this segment", so that two workers do not do the same work.

Border: one small file; what is computed under it is known elsewhere.

Only a courtesy: correctness rests on first-wins publication; a lost or stolen claim costs time, never a
result. A claim is a file created exclusively; its holder touches it now and then, and one that has not been
touched for `ttl` seconds was left by a dead process and may be taken over. One whose process is gone from
this machine is taken over at once: whoever starts a killed run again does not wait.
"""

from __future__ import annotations

import os
import platform
import secrets
import threading
from contextlib import suppress

from ..files import Folder

TTL = 60.0
"""Seconds: long enough for a stalled network disk, short enough to wait for after a crash."""


class Claim:
    """One claim: `with claim as mine:`, or `acquire` before the work and `release` after it."""

    def __init__(self, folder: Folder, name: str, ttl: float = TTL) -> None:
        self._folder = folder
        self._name = name
        self._ttl = ttl
        self._token = f"{platform.node()} {os.getpid()} {secrets.token_hex(4)}".encode()
        self._stop = threading.Event()
        self._beat: threading.Thread | None = None

    def acquire(self) -> bool:
        """Whether the claim is ours now; an abandoned one is taken over. Raises ReadOnlyStore, StoreFull."""
        there = self._folder.stat(self._name)
        if there is not None:
            holder = self._folder.get(self._name) or b""
            if self._folder.now() - there.modified > self._ttl or _is_orphan(holder.decode(errors="replace")):
                self._folder.delete(self._name)
        if not self._folder.mark(self._name, self._token):
            return False
        self._stop.clear()
        self._beat = threading.Thread(target=self._keep_alive, name="mizarr-claim", daemon=True)
        self._beat.start()
        return True

    def release(self) -> None:
        """Let others have it; harmless when it is not, or no longer, ours."""
        if self._beat is None:
            return
        self._stop.set()
        self._beat.join()
        self._beat = None
        if self._folder.get(self._name) == self._token:
            self._folder.delete(self._name)

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def _keep_alive(self) -> None:
        while not self._stop.wait(self._ttl / 3):
            with suppress(OSError):  # taken over after a long pause of this process: harmless
                self._folder.touch(self._name)


def _is_orphan(token: str) -> bool:
    """Whether a claim's holder ran on this machine and is gone; False where that cannot be known."""
    host, _, rest = token.partition(" ")
    pid = rest.partition(" ")[0]
    if host != platform.node() or not pid.isdigit():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False  # somebody else's process, but alive
    return False
