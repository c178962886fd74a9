"""Claims: lease files by which workers agree who computes a segment (range of tokens) of a run.

A claim only saves time. Correctness rests on the first writer of a shard winning, so a lost or stolen claim
costs a duplicate computation and never a wrong result.

A claim is a file created exclusively and touched by its holder at intervals. It expires after `ttl` seconds
without a touch, and at once if its process on this machine is gone, so that a restarted run does not wait.
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
"""Seconds until a claim expires: longer than a network disk stalls, short enough to wait for after a
crash."""
_EMPTY_TTL = 2.0
"""Seconds after which an empty claim expires: creation and writing of the holder's name are two steps."""
_owned: set[str] = set()
"""Contents ("host pid random") of all claim files that this process holds."""


class SegmentClaim:
    """Lease on one segment of a run, so that two workers do not compute the same tokens.

    Use it as `with claim as acquired:`, or call `acquire` before and `release` after the work.
    """

    def __init__(self, folder: Folder, name: str, ttl: float = TTL) -> None:
        self._folder = folder
        self._name = name
        self._ttl = ttl
        self._token = f"{platform.node()} {os.getpid()} {secrets.token_hex(4)}"
        self._renewal: Repeated | None = None

    def acquire(self) -> bool:
        """Try to acquire the lease; one that another worker no longer renews is taken over.

        Returns:
            True if this process holds the lease now, False if another worker does.

        Raises:
            ReadOnlyStore: The store cannot be written.
            StoreFull: The disk is full.
        """
        status = self._folder.stat(self._name)
        if status is not None:
            holder = (self._folder.get(self._name) or b"").decode(errors="replace")
            # The holder's name is written after creation; a kill in between leaves an empty file.
            ttl = self._ttl if holder else min(self._ttl, _EMPTY_TTL)
            # abs: a claim from the future is one made before the clock was set back; nobody touches it any
            # more.
            if abs(self._folder.now() - status.modified) > ttl or _is_orphan(holder):
                self._folder.delete(self._name)
        try:
            # Added before the file exists: an interrupt between the two must not leave a claim that this
            # process disowns.
            _owned.add(self._token)
            if not self._folder.mark(self._name, self._token.encode()):
                _owned.discard(self._token)
                return False
            keep_alive = partial(_touch, self._folder, self._name)
            # Three renewals per ttl, so that one late renewal on a busy machine does not lose the claim.
            self._renewal = Repeated(self._ttl / 3, keep_alive, "mizarr-claim")
            self._renewal.start()
            return True
        except BaseException:
            self.release()  # interrupted (Ctrl-C): the caller will never learn that it holds the claim
            raise

    def release(self) -> None:
        """Release the lease; may be called again, and has no effect after another worker took it over."""
        if self._renewal is not None:
            self._renewal.stop()
        if self._token not in _owned:
            return
        if self._folder.get(self._name) == self._token.encode():
            self._folder.delete(self._name)
        self._renewal = None
        # last, so that a release that was interrupted is repeated by the next call
        _owned.discard(self._token)

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
    """Renew the modification time of a claim file."""
    with suppress(OSError):  # it expired during a long pause of this process: harmless
        folder.touch(name)


def _is_orphan(token: str) -> bool:
    """Whether the process that holds a claim is certainly gone; False if it runs on another machine.

    A claim of this very process that it has no record of is an orphan as well: the process was interrupted
    between creating the file and noting so.

    Arguments:
        token: Content of the claim file, "host pid random".
    """
    host, _, remainder = token.partition(" ")
    pid = remainder.partition(" ")[0]
    if host != platform.node() or not pid.isdigit():
        return False
    if int(pid) == os.getpid():
        return token not in _owned
    try:
        # Signal 0 only tests whether the process exists.
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False  # somebody else's process, but alive
    return _is_zombie(pid)


def _is_zombie(pid: str) -> bool:
    """Whether a process has exited but is still listed, because its parent did not wait for it.

    This is common in containers without an init process.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text("ascii", errors="replace")
    except OSError:
        return False
    # "pid (name) state …"; the name may itself contain parentheses and spaces.
    return fields.rpartition(")")[2].split()[:1] == ["Z"]
