"""A server that speaks S3, started by the tests, and a proxy before it that loses, delays and refuses."""

from __future__ import annotations

import http.client
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import boto3
from moto.moto_server.werkzeug_app import MotoRequestHandler, create_backend_app
from werkzeug.serving import make_server

KEYS = {"AWS_ACCESS_KEY_ID": "AKIDTESTONLY", "AWS_SECRET_ACCESS_KEY": "SECRETTESTONLY"}
Fault = Callable[[str, str], str | None]
"""From method and path of a request to what happens to it: "503", "403" (denied), "lost" (done, but no
reply), "slow", "before" (cut before it is done), "half" (the reply breaks off), or None."""


@contextmanager
def s3_server() -> Iterator[str]:
    """The endpoint of a server with no bucket in it.

    Not `ThreadedMotoServer`, which lists the folders of all its services for each request: a quarter of it.
    """
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    app = create_backend_app("s3")
    server = make_server("127.0.0.1", 0, app, threaded=True, request_handler=MotoRequestHandler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def new_bucket(endpoint: str) -> str:
    """The name of a new bucket."""
    name = f"bucket-{secrets.token_hex(4)}"
    client = boto3.client(
        "s3",
        endpoint_url=endpoint,
        region_name="us-east-1",
        aws_access_key_id=KEYS["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=KEYS["AWS_SECRET_ACCESS_KEY"],
    )
    client.create_bucket(Bucket=name)
    return name


class Proxy:
    """Passes requests on to a server, but for those a fault is asked for. seen: (method, path, fault); sent:
    bytes of all answers.
    """

    def __init__(self, endpoint: str) -> None:
        self.fault: Fault = lambda method, path: None
        self.seen: list[tuple[str, str, str | None]] = []
        self.sent = 0
        self._target = endpoint.removeprefix("http://")
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def _pass_on(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                what = outer.fault(self.command, self.path)
                outer.seen.append((self.command, self.path, what))
                if what in ("503", "403"):
                    text = b"<Error><Code>%s</Code></Error>" % (
                        b"SlowDown" if what == "503" else b"AccessDenied"
                    )
                    self.send_response(int(what))
                    self.send_header("Content-Length", str(len(text)))
                    self.end_headers()
                    self.wfile.write(b"" if self.command == "HEAD" else text)
                    return
                if what == "before":
                    self.close_connection = True
                    return
                if what == "slow":
                    time.sleep(2.5)
                there = http.client.HTTPConnection(outer._target)
                there.request(self.command, self.path, body, dict(self.headers))
                answer = there.getresponse()
                found = answer.read()
                there.close()
                outer.sent += len(found)
                if what == "lost":
                    self.close_connection = True
                    return
                self.send_response(answer.status)
                for name, value in answer.getheaders():
                    if name.lower() not in ("connection", "transfer-encoding", "server", "date"):
                        self.send_header(name, value)
                if answer.getheader("Content-Length") is None:
                    self.send_header("Content-Length", str(len(found)))
                self.end_headers()
                self.wfile.write(found[: len(found) // 2] if what == "half" else found)
                self.close_connection = what == "half"

            do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = _pass_on

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> Proxy:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
