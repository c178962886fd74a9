"""HTTP connections with a time limit for `mizarr browse`, and the file that passes its address to a browser.

Importing this module imports uvicorn.
"""

from __future__ import annotations

import asyncio
import html
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile

from uvicorn.protocols.http.h11_impl import H11Protocol

__all__ = ["TimedProtocol", "redirecting_file"]

PATIENCE = 10.0
"""Seconds after which a connection without a complete request, or with an unread response, is closed."""


class TimedProtocol(H11Protocol):
    """HTTP/1.1 protocol of uvicorn that closes the connections of clients which are too slow.

    uvicorn limits only the idle time after a response: a client that connects and sends nothing, or one byte
    of a header now and then, could keep its socket as long as the server runs (a slowloris attack).
    """

    _timer: asyncio.TimerHandle | None = None
    """Timer that calls `_check` PATIENCE seconds after the last progress of the connection."""
    _unsent = 0
    """Number of bytes that waited to be sent when the timer was started."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Called by asyncio for a new connection: starts the timer for its first request."""
        super().connection_made(transport)
        self._restart_timer()

    def on_response_complete(self) -> None:
        """Called by uvicorn after a response: starts the timer for the next request on the connection."""
        self._restart_timer()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by asyncio when the connection is closed: cancels the timer."""
        super().connection_lost(exc)
        if self._timer is not None:
            self._timer.cancel()

    def _restart_timer(self) -> None:
        """Start the timer anew, and note how many bytes wait to be sent."""
        if self._timer is not None:
            self._timer.cancel()
        self._unsent = self.transport.get_write_buffer_size()
        self._timer = self.loop.call_later(PATIENCE, self._check)

    def _check(self) -> None:
        """Close the connection if no response is being computed and the client read no bytes since the last
        check."""
        unsent = self.transport.get_write_buffer_size()
        # `cycle` is uvicorn's current request and response; nothing to send yet: the page is being computed.
        is_computing = not unsent and self.cycle is not None and not self.cycle.response_complete
        has_read_a_part = unsent != self._unsent
        if is_computing or has_read_a_part:
            self._restart_timer()
        else:
            # abort, not close: close would wait until the client has read the buffer.
            self.transport.abort()


@contextmanager
def redirecting_file(address: str) -> Iterator[Path]:
    """Temporary HTML file that redirects a browser to an address; removed at the end of the `with` block.

    The address is secret, but every user of the machine can read the command line that opens a browser.
    Therefore that command line names this file, which only this user can read.
    """
    # The module tempfile creates its files with mode 0600.
    with NamedTemporaryFile("w", prefix="mizarr-browse-", suffix=".html", encoding="utf-8") as file:
        escaped = html.escape(address)
        file.write(
            '<!doctype html><meta charset="utf-8"><meta name="referrer" content="no-referrer">'
            f'<meta http-equiv="refresh" content="0; url={escaped}"><title>mizarr</title>'
            f'<a href="{escaped}">to the store</a>'
        )
        # The browser opens the file by name: buffered bytes must be on disk.
        file.flush()
        yield Path(file.name)
