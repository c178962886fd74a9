"""HTTP connections of `mizarr browse` with a time limit, and how a browser learns the address.

Border: uvicorn's protocol and a file; knows no page. Importing this module imports uvicorn.
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
"""Seconds for which a connection may be without a whole request, or leave an answer unread."""


class TimedProtocol(H11Protocol):
    """HTTP/1.1 as uvicorn speaks it, on connections that are closed when the client is too slow.

    uvicorn itself limits only the silence behind an answer: a client that connects and sends nothing, or a
    byte of a header now and then, would hold its socket for as long as the server runs.
    """

    _timer: asyncio.TimerHandle | None = None
    """Looks at the connection when the client had its time."""
    _unsent = 0
    """Bytes of answers that waited for the client when its time began."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """The time for the first request begins."""
        super().connection_made(transport)
        self._begin()

    def on_response_complete(self) -> None:
        """The time for the next request begins."""
        self._begin()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """No time runs any more."""
        super().connection_lost(exc)
        if self._timer is not None:
            self._timer.cancel()

    def _begin(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._unsent = self.transport.get_write_buffer_size()
        self._timer = self.loop.call_later(PATIENCE, self._look)

    def _look(self) -> None:
        unsent = self.transport.get_write_buffer_size()
        is_computing = not unsent and self.cycle is not None and not self.cycle.response_complete
        if is_computing or unsent != self._unsent:
            self._begin()
        else:
            self.transport.abort()


@contextmanager
def redirecting_file(address: str) -> Iterator[Path]:
    """A page that leads a browser to an address, readable by this user alone; it is removed at the end.

    The address is a secret, and the command line that opens a browser can be read by every user.
    """
    # The module tempfile gives its files mode 0600.
    with NamedTemporaryFile("w", prefix="mizarr-browse-", suffix=".html", encoding="utf-8") as file:
        goal = html.escape(address)
        file.write(
            '<!doctype html><meta charset="utf-8"><meta name="referrer" content="no-referrer">'
            f'<meta http-equiv="refresh" content="0; url={goal}"><title>mizarr</title>'
            f'<a href="{goal}">to the store</a>'
        )
        file.flush()
        yield Path(file.name)
