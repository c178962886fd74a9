"""HTTP server of `mizarr browse`, accessible only on this machine and only with its secret address.

* It listens on 127.0.0.1 and requires this address in the `Host` header, which prevents DNS rebinding: a page
  of another site whose host name resolves to this machine is refused.
* Every address begins with a random word, which other users of the machine do not know.
* Connections of clients that are slow to send or to read are closed.
* Only GET and HEAD are allowed; the store is opened read-only, and no requested path becomes a file path.
* A content security policy allows a page to load its own styles and scripts only.
"""

from __future__ import annotations

import hmac
import html
import re
import secrets
import socket
from collections.abc import Collection
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from ...stages.extras import require
from ...store import Store
from ...store.errors import ConfigError, MizarrError
from ..holdings import Holdings, Snapshot
from .finding import NUMBER, find_news, find_page
from .page import Page
from .pages.search import search_page
from .render import STATIC, render, static_files

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

__all__ = ["HOST", "address_of", "application", "listening", "new_word", "serve"]

HOST = "127.0.0.1"
"""Address that the server listens on."""
POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; img-src data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
"""Content security policy of all pages."""
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    # The address contains the secret word: no other site is told where a link was followed.
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""Headers of every response."""
FOOT = "Read from the store just now. These pages are served to this machine alone, and change nothing."
"""Text at the end of every page."""
PATIENCE = 0.2
"""Seconds for which a request waits until the store is read; then the page shows the entries read so far."""
SEND_BUFFER = 1 << 18
"""Size, in bytes, of the send buffer of a connection.

The server notices only in steps of this size that a client reads. With the system's default of up to 4 MB a
slow client would look like one that does not read at all.
"""
LONGEST = 400
"""Largest number of characters of a searched text."""


def new_word() -> str:
    """A random word of 24 characters (144 bits) that makes the server's address secret."""
    return secrets.token_urlsafe(18)


def address_of(port: int, word: str) -> str:
    """URL of the first page.

    Arguments:
        port: Port of the server.
        word: The secret word, as `new_word` makes it.
    """
    return f"http://{HOST}:{port}/{word}/index.html"


def listening(port: int) -> socket.socket:
    """Open a listening socket on this machine only.

    Arguments:
        port: Port number; 0 for any free port.

    Raises:
        ConfigError: The port is in use, or not allowed for this user.
    """
    server_socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    # So that a restarted server can use the same port at once.
    server_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server_socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
    try:
        server_socket.bind((HOST, port))
        # Connections of a browser that is opened before the server runs wait in this queue.
        server_socket.listen(128)
    except OSError as error:
        server_socket.close()
        raise ConfigError(
            f"cannot listen on port {port}: {error.strerror}; leave out --port, so that a free port is chosen"
        ) from error
    return server_socket


def serve(app: Starlette, server_socket: socket.socket) -> None:
    """Serve an application on a listening socket until Ctrl-C is pressed.

    Arguments:
        app: The application.
        server_socket: Socket that it listens on.
    """
    import uvicorn

    from .connections import TimedProtocol

    config = uvicorn.Config(
        app,
        http=TimedProtocol,
        # The pages use neither websockets nor the startup events of ASGI.
        ws="none",
        lifespan="off",
        # uvicorn's log could print text of the store without escaping terminal control characters.
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
    )
    with suppress(KeyboardInterrupt):  # uvicorn raises it again after an orderly shutdown
        uvicorn.Server(config).run(sockets=[server_socket])


def application(store: Store, word: str, port: int) -> Starlette:
    """The ASGI application that serves the pages of a store.

    Arguments:
        store: The store, opened read-only.
        word: Secret first part of every path.
        port: Port of the server, which requests name in their `Host` header.

    Raises:
        MissingExtra: The extra `browse` is not installed.
    """
    require("browse", "mizarr browse")
    # These imports take seconds: made now, so that they do not delay the first page with an array.
    import dask.array  # noqa: F401
    import xarray  # noqa: F401
    import zarr  # noqa: F401
    from starlette.applications import Starlette
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route

    from ...stages.logits import lens  # noqa: F401

    holdings, static = Holdings(store), static_files()
    # Starts the thread that reads the store, before the first request.
    holdings.look(PATIENCE)
    hosts = {f"{HOST}:{port}", f"localhost:{port}"}

    def answer(request: Request) -> Response:
        # In constant time: the duration must not tell how many characters of a guess are correct.
        if not hmac.compare_digest(request.path_params["word"].encode(), word.encode()):
            return error_page(403, "Wrong address", "Use the address that `mizarr browse` printed.")
        path = request.path_params["path"]
        if path.startswith(f"{STATIC}/") and (asset := static.get(path.removeprefix(f"{STATIC}/"))):
            media_type, content = asset
            return Response(content, media_type=media_type)
        try:
            snapshot = holdings.look(PATIENCE)
            if (news := find_news(snapshot, path)) is not None:
                return JSONResponse(news)
            if path == "search.html":
                page: Page | None = search_results(snapshot, request)
            else:
                page = find_page(snapshot, path)
        # FileNotFoundError: `mizarr gc` may remove an entry after the snapshot was taken.
        except (MizarrError, FileNotFoundError) as error:
            return error_page(500, "This entry cannot be read", str(error))
        if page is None and snapshot.unread:
            text = f"{_unread_sentence(snapshot)} Reload this page in a moment."
            return error_page(503, "This entry has not been read yet", text)
        if page is None:
            text = (
                "The run or result may have been removed from the store; the first page lists all that exist."
            )
            return error_page(404, "Page not found", text)
        foot = f"{_unread_sentence(snapshot)} {FOOT}" if snapshot.unread else FOOT
        return Response(render(page, foot), media_type="text/html")

    def search_results(snapshot: Snapshot, request: Request) -> Page:
        query = request.query_params
        run, prompt = (
            int(text) if re.fullmatch(NUMBER, text := query.get(name, "")) else 0
            for name in ("run", "prompt")
        )
        return search_page(snapshot, query.get("q", "")[:LONGEST], (run, prompt))

    def error_page(status: int, title: str, text: str) -> Response:
        head = f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(title)}</title>"
        # Not with 403: the link would contain the secret word.
        link = (
            f'<p><a href="/{quote(word)}/index.html">to the store</a></p>'
            if status in (404, 500, 503)
            else ""
        )
        body = f"{head}<h1>{html.escape(title)}</h1><p>{html.escape(text)}</p>{link}"
        return Response(body, status, media_type="text/html")

    # starlette adds HEAD to a route for GET.
    routes = [Route("/{word}/{path:path}", answer, methods=["GET"])]
    app = Starlette(routes=routes, middleware=[_guard(hosts)])
    # starlette would redirect "/x" to "/x/", which matches the route, before the word is checked.
    app.router.redirect_slashes = False
    return app


def _unread_sentence(snapshot: Snapshot) -> str:
    """Sentence, for pages shown while the store is being read, with the number of entries not read yet."""
    return f"The store is still being read: {snapshot.unread:,} of its runs and results are not read yet."


def _guard(hosts: Collection[str]) -> Any:
    """Middleware that refuses requests for other hosts, and adds HEADERS to every response, errors included.

    Arguments:
        hosts: Accepted values of the `Host` header, "name:port".
    """
    from starlette.datastructures import Headers, MutableHeaders
    from starlette.middleware import Middleware
    from starlette.responses import PlainTextResponse

    class Guard:
        def __init__(self, app: Any) -> None:
            self.app = app

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            async def send_with_headers(message: Any) -> None:
                if message["type"] == "http.response.start":
                    MutableHeaders(scope=message).update(HEADERS)
                await send(message)

            host = Headers(scope=scope).get("host", "").lower()
            # 421 Misdirected Request: this server does not answer for that host.
            accepted = " or ".join(sorted(hosts))
            refusal = PlainTextResponse(f"expected {accepted} as the Host header of the request\n", 421)
            await (self.app if host in hosts else refusal)(scope, receive, send_with_headers)

    return Middleware(Guard)
