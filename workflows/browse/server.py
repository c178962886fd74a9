"""The pages over HTTP, to this machine and to who has the address alone.

* It listens on 127.0.0.1 and answers requests that name it so in `Host`: a page of another site whose name
  was made to lead here (DNS rebinding) is refused.
* Every address begins with a random word, which other users of the machine do not know.
* Clients that are slow to ask, or to read, are dropped.
* GET and HEAD, nothing else; the store is opened for reading, and no path asked for becomes that of a file.
* What a browser may do with a page is told in its content security policy: its own styles and script.

Border: requests in, pages out; what is on them is known elsewhere.
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
POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; img-src data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
FOOT = "Read from the store just now. These pages are served to this machine alone, and change nothing."
PATIENCE = 0.2
"""Seconds for which a page waits for a store to be read; then it tells what was found so far."""
SEND_BUFFER = 1 << 18
"""Bytes the system holds for one client. What a slow client reads is noticed in steps of this size; the
system's own choice, up to 4 MB, would make a client that reads slowly look like one that does not read."""
LONGEST = 400
"""Characters of words that are searched for."""


def new_word() -> str:
    """A random word for the address."""
    return secrets.token_urlsafe(18)


def address_of(port: int, word: str) -> str:
    """The address of the first page."""
    return f"http://{HOST}:{port}/{word}/index.html"


def listening(port: int) -> socket.socket:
    """A socket on this machine alone; port 0: any that is free. Raises ConfigError for one that is taken."""
    found = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
    try:
        found.bind((HOST, port))
        found.listen(128)  # a browser that is quicker than the server waits
    except OSError as error:
        found.close()
        raise ConfigError(
            f"expected a free port, found that {port} cannot be had ({error.strerror}); leave --port out to "
            "take any that is free"
        ) from error
    return found


def serve(app: Starlette, held: socket.socket) -> None:
    """Answer until interrupted. held: a socket that is bound."""
    import uvicorn

    from .connections import TimedProtocol

    config = uvicorn.Config(
        app,
        http=TimedProtocol,
        ws="none",
        lifespan="off",
        log_config=None,  # its own would print what is in a store past the escapes of the command line
        log_level="warning",
        access_log=False,
        server_header=False,
    )
    with suppress(KeyboardInterrupt):  # raised again by uvicorn when it has ended
        uvicorn.Server(config).run(sockets=[held])


def application(store: Store, word: str, port: int) -> Starlette:
    """The ASGI application. word: first part of every address; port: that it is reached at."""
    require("browse", "mizarr browse")
    import dask.array  # noqa: F401 - these take seconds, which would be those of the first page with an array
    import xarray  # noqa: F401
    import zarr  # noqa: F401
    from starlette.applications import Starlette
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route

    from ...stages.logits import lens  # noqa: F401

    holdings, static = Holdings(store), static_files()
    holdings.look(PATIENCE)
    hosts = {f"{HOST}:{port}", f"localhost:{port}"}

    def answer(request: Request) -> Response:
        if not hmac.compare_digest(request.path_params["word"].encode(), word.encode()):
            return told(403, "Not the address", "Use the one that mizarr browse printed.")
        path = request.path_params["path"]
        if path.startswith(f"{STATIC}/") and (found := static.get(path.removeprefix(f"{STATIC}/"))):
            return Response(found[1], media_type=found[0])
        try:
            held = holdings.look(PATIENCE)
            if (news := find_news(held, path)) is not None:
                return JSONResponse(news)
            if path == "search.html":
                page: Page | None = searched(held, request)
            else:
                page = find_page(held, path)
        except (MizarrError, FileNotFoundError) as error:
            return told(500, "This cannot be read", str(error))
        if page is None and held.unread:
            return told(503, "Not read yet", f"{_unread(held)} Load this page again in a moment.")
        if page is None:
            return told(
                404, "Not here", "It may have been removed meanwhile; the first page shows what is there."
            )
        foot = f"{_unread(held)} {FOOT}" if held.unread else FOOT
        return Response(render(page, foot), media_type="text/html")

    def searched(held: Snapshot, request: Request) -> Page:
        asked = request.query_params
        start = tuple(
            int(text) if re.fullmatch(NUMBER, text := asked.get(name, "")) else 0
            for name in ("run", "prompt")
        )
        return search_page(held, asked.get("q", "")[:LONGEST], (start[0], start[1]))

    def told(status: int, title: str, text: str) -> Response:
        words = f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(title)}</title>"
        back = (
            f'<p><a href="/{quote(word)}/index.html">to the store</a></p>'
            if status in (404, 500, 503)
            else ""
        )
        body = f"{words}<h1>{html.escape(title)}</h1><p>{html.escape(text)}</p>{back}"
        return Response(body, status, media_type="text/html")

    routes = [Route("/{word}/{path:path}", answer, methods=["GET"])]
    found = Starlette(routes=routes, middleware=[_guarded(hosts)])
    found.router.redirect_slashes = False
    return found


def _unread(held: Snapshot) -> str:
    """How far the first look at a store is."""
    return f"The store is still being read: {held.unread:,} of its runs and results were not looked at yet."


def _guarded(hosts: Collection[str]) -> Any:
    """Refuses requests that name another host; headers on every response, those of errors too."""
    from starlette.datastructures import Headers, MutableHeaders
    from starlette.middleware import Middleware
    from starlette.responses import PlainTextResponse

    class Guard:
        def __init__(self, app: Any) -> None:
            self.app = app

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            async def sent(message: Any) -> None:
                if message["type"] == "http.response.start":
                    MutableHeaders(scope=message).update(HEADERS)
                await send(message)

            host = Headers(scope=scope).get("host", "").lower()
            refused = PlainTextResponse(f"expected one of {', '.join(sorted(hosts))} as host\n", 421)
            await (self.app if host in hosts else refused)(scope, receive, sent)

    return Middleware(Guard)
