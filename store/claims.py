"""Claims: "I am computing this segment", so that two workers do not do the same work.

Only a courtesy: correctness rests on first-wins publication, and a lost or stolen claim costs time, never a result. A claim is a file
created exclusively; its holder touches it now and then, and one that has not been touched for `ttl` seconds may be taken over.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from pathlib import Path

TTL = 60.0


class Claim:
    """One claim; `acquire`, and `release` when the work is committed (from any thread)."""

    def __init__(self, path: Path, ttl: float = TTL) -> None:
        self._path = path
        self._ttl = ttl
        self._stop = threading.Event()
        self._beat: threading.Thread | None = None

    def acquire(self) -> bool:
        """Whether the claim is ours now; an abandoned one is taken over."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):
            if time.time() - self._path.stat().st_mtime > self._ttl:
                self._path.unlink(missing_ok=True)
        try:
            os.close(os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
        except FileExistsError:
            return False
        self._beat = threading.Thread(target=self._keep_alive, name="mizarr-claim", daemon=True)
        self._beat.start()
        return True

    def release(self) -> None:
        """Let others have it."""
        self._stop.set()
        if self._beat is not None:
            self._beat.join()
            self._beat = None
            self._path.unlink(missing_ok=True)

    def _keep_alive(self) -> None:
        while not self._stop.wait(self._ttl / 3):
            with suppress(FileNotFoundError):  # taken over after a long pause of this process: harmless
                os.utime(self._path)
