"""Slow clients of `mizarr browse` are dropped; a browser learns the address from a file."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mizarr.store import open_store

PATIENCE = 2.0
LARGE = 50_000_000
STEP = 1 << 20
"""Bytes a slow client reads between two pauses."""
SERVER = f"""
import sys
from mizarr.workflows.browse import connections, server

connections.PATIENCE = {PATIENCE}

async def app(scope, receive, send):
    body = b"x" * ({LARGE} if scope["path"] == "/large" else 4)
    head = [(b"content-length", str(len(body)).encode())]
    await send({{"type": "http.response.start", "status": 200, "headers": head}})
    await send({{"type": "http.response.body", "body": body}})

held = server.listening(0)
print(held.getsockname()[1], flush=True)
server.serve(app, held)
"""
REQUEST = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    command = [sys.executable, "-c", SERVER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        yield int(process.stdout.readline())
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0


@pytest.fixture
def connected(port) -> Iterator[Callable[..., socket.socket]]:
    """Connects to the server, and sends what is given; closed behind the test."""
    with contextlib.ExitStack() as stack:

        def connect(sent: bytes = b"") -> socket.socket:
            client = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
            client.sendall(sent)
            return client

        yield connect


def answer(client: socket.socket) -> bytes:
    got = b""
    while not got.endswith(b"xxxx"):
        part = client.recv(4096)
        assert part, "the answer comes whole"
        got += part
    return got


def still_open(clients: list[socket.socket]) -> list[socket.socket]:
    """Those clients the server has not closed; what it sent is read."""
    left = []
    for client in clients:
        try:
            while select.select([client], [], [], 0)[0]:
                if not client.recv(1 << 16):
                    break
            else:
                left.append(client)
        except ConnectionError:
            pass
    return left


def test_half_open_and_dripping_clients_are_dropped_and_others_answered_meanwhile(connected):
    answered = connected(REQUEST)
    answer(answered)
    silent = [connected() for _ in range(100)]
    in_a_header = [connected(REQUEST[: 5 + i % 20]) for i in range(100)]
    in_a_body = [connected(REQUEST[:-2] + b"Content-Length: 9\r\n\r\nx") for _ in range(50)]
    second = [connected(REQUEST + REQUEST[:10]) for _ in range(50)]
    slow = [*silent, *in_a_header, *in_a_body, *second]
    started = time.monotonic()
    answer(connected(REQUEST))
    while slow and time.monotonic() < started + 10 * PATIENCE:
        time.sleep(0.1)
        for client in in_a_header:
            with contextlib.suppress(OSError):
                client.sendall(b"a")  # a byte now and then wins no time
        slow = still_open(slow)
    assert not slow
    answer(connected(REQUEST))


def test_a_client_that_asks_again_in_time_keeps_its_connection(connected):
    client = connected()
    for _ in range(8):
        time.sleep(PATIENCE / 4)
        client.sendall(REQUEST)
        answer(client)


def test_a_client_that_does_not_read_its_answer_is_dropped(connected):
    client = connected(REQUEST.replace(b"/ ", b"/large "))
    time.sleep(4 * PATIENCE)
    got = 0
    with contextlib.suppress(ConnectionError):
        while part := client.recv(1 << 20):
            got += len(part)
    assert got < LARGE


def test_a_client_that_reads_slowly_gets_all_of_its_answer(connected):
    client = connected(REQUEST.replace(b"/ ", b"/large "))
    got, pauses = 0, 8
    while got < LARGE:
        part = client.recv(1 << 20)
        assert part, f"the connection was closed after {got:,} bytes"
        before, got = got, got + len(part)
        if pauses and before // STEP < got // STEP:
            time.sleep(PATIENCE / 2)
            pauses -= 1


def command_lines() -> str:
    """Those of all processes, as every user of the machine can read them."""
    found = b""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found += path.read_bytes()
    return found.decode(errors="replace")


OPENER = """#!{python}
import os, sys, time
path = sys.argv[1]
with open({told!r} + ".part", "w") as file:
    file.write(repr((sys.argv[1:], os.stat(path).st_mode, open(path).read())))
os.replace({told!r} + ".part", {told!r})
"""


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_secret_word_is_on_no_command_line(ending, tmp_path):
    open_store(tmp_path / "store", durability="process")
    opener, told, folder = tmp_path / "bin" / "xdg-open", tmp_path / "told", tmp_path / "temporary"
    opener.parent.mkdir(), folder.mkdir()
    opener.write_text(OPENER.format(python=sys.executable, told=str(told)))
    opener.chmod(0o755)
    code = "import sys; from mizarr.workflows.cli import main; main(sys.argv[1:])"
    found = {"PATH": f"{opener.parent}:{os.environ['PATH']}", "TMPDIR": str(folder)}
    with subprocess.Popen(
        [sys.executable, "-c", code, "browse", "--store", str(tmp_path / "store")],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | found,
    ) as process:
        address = process.stdout.readline().strip()
        word = re.search("/([^/]{20,})/index.html", address)[1]
        while not told.exists():
            time.sleep(0.05)
        commands = command_lines()
        time.sleep(0.5)
        process.send_signal(ending)
        code = process.wait(60)
    arguments, mode, page = eval(told.read_text())
    assert word not in commands and not any(word in argument for argument in arguments)
    assert stat.S_IMODE(mode) == 0o600 and f'content="0; url={address}"' in page
    assert code == (0 if ending == signal.SIGINT else 128 + ending)
    assert list(folder.iterdir()) == []
