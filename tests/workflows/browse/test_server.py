"""`mizarr browse` over a socket: who is answered, what is refused, how it ends."""

from __future__ import annotations

import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import numpy as np
import pytest

from mizarr.store import RunKey, open_store
from mizarr.workflows.browse import addresses
from mizarr.workflows.browse.finding import find_page
from mizarr.workflows.browse.lineage import LETTERS
from mizarr.workflows.browse.render import render
from mizarr.workflows.cli import run
from mizarr.workflows.holdings import Holdings
from tests.browser import CUT, chromium
from tests.torch_free import without_torch
from tests.workflows.browse.conftest import HIDDEN, LAYERS, random_tokens, spec

pytestmark = pytest.mark.wide

CODE = "import sys; from mizarr.workflows.cli import main; main(sys.argv[1:])"

NAMELESS = "each => !(each.textContent.trim() || each.getAttribute('aria-label') || each.labels?.length)"
"""Of what can be used or is drawn: nothing that a screen reader could say."""
BOXED = """name => [...document.querySelectorAll(".lineage .box")].every((box) => {
  const [text, right] = [box.querySelector("text"), box.querySelector("rect").getBoundingClientRect().right];
  text.textContent = name;
  return [...box.querySelectorAll("text")].every((each) => each.getBoundingClientRect().right <= right);
})"""
"""Whether the longest name that a box of a lineage may hold ends within it."""


@dataclass
class Served:
    """A server in a process of its own. address: as it printed it."""

    address: str
    process: subprocess.Popen[str]

    @property
    def port(self) -> int:
        return urlsplit(self.address).port or 0

    @property
    def word(self) -> str:
        return urlsplit(self.address).path.split("/")[1]

    def asked(self, path: str, method: str = "GET", host: str | None = None, body: str | None = None):
        """Status, headers and text of an answer; path as it is, nothing normalised."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.putrequest(method, path, skip_host=True)
        connection.putheader("Host", host or f"127.0.0.1:{self.port}")
        if body is not None:
            connection.putheader("Content-Length", str(len(body)))
        connection.endheaders(body.encode() if body else None)
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        return answer.status, answer.headers, text


@pytest.fixture(scope="module")
def served(made) -> Iterator[Served]:
    command = [sys.executable, "-c", CODE, "browse", "--no-open", "--store", str(made.folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        yield Served(process.stdout.readline().strip(), process)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0, "Ctrl-C ends it as it should"


@pytest.fixture(scope="module")
def before(made):
    return sorted((str(file), file.stat().st_mtime_ns) for file in made.folder.rglob("*"))


def test_pages_are_served_with_headers_that_confine_them(before, served, made):
    for path in ("index.html", addresses.run(made.run), addresses.token(made.run, 9), "search.html?q=cats"):
        status, headers, text = served.asked(f"/{served.word}/{path}")
        assert status == 200 and headers["content-type"].startswith("text/html")
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["content-security-policy"].startswith("default-src 'none'")
        assert headers["x-content-type-options"] == "nosniff"
        assert "<script>" not in text, "scripts come from files alone"
    assert re.search("69 of the 7[03] searched prompts in", text)
    status, headers, text = served.asked(f"/{served.word}/live.json")
    assert (status, json.loads(text)) == (200, {"progress": []})


@pytest.mark.parametrize("name", ["run", "prompt"])
@pytest.mark.parametrize(
    "number", ["9" * 5_000, "9" * 19, "-1", "1e9", "\u0663", "\u00b2", "NaN", "1_0", "+1", " 1", ""]
)
def test_numbers_of_an_address_that_are_none_are_answered(served, name, number):
    status, _, text = served.asked(f"/{served.word}/search.html?{urlencode({'q': 'cats', name: number})}")
    assert status == 200 and "Traceback" not in text


@pytest.mark.parametrize("number", ["9" * 5_000, "9" * 19, "-1", "1e9", "00"])
def test_pages_with_numbers_that_are_none_are_not_here(served, made, number):
    path = addresses.token(made.run, 9).replace("/9.html", f"/{number}.html")
    assert path != addresses.token(made.run, 9)
    assert served.asked(f"/{served.word}/{path}")[0] == 404


def test_nobody_without_the_word_is_answered(served):
    for path in (
        "/",
        "/index.html",
        "/wrong/index.html",
        f"/{served.word[:-1]}/index.html",
        "/wrong/static/views.js",
    ):
        status, headers, text = served.asked(path)
        assert status in (403, 404) and "large" not in text
        assert headers["content-security-policy"]
    assert len(served.word) >= 22


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1:1", "[::1]:{port}"]
)
def test_another_host_is_refused(served, host):
    status, _, text = served.asked(f"/{served.word}/index.html", host=host.format(port=served.port))
    assert status == 421 and "large" not in text


def test_localhost_is_this_host(served):
    assert served.asked(f"/{served.word}/index.html", host=f"localhost:{served.port}")[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "MKCOL"])
def test_what_would_write_is_refused(served, method):
    assert served.asked(f"/{served.word}/index.html", method, body="x")[0] == 405


def test_heads_are_answered_without_a_body(served):
    status, headers, text = served.asked(f"/{served.word}/index.html", "HEAD")
    assert (status, text) == (200, "") and int(headers["content-length"]) > 1000


@pytest.mark.parametrize(
    "path",
    [
        "../store.json", "..%2fstore.json", "%2e%2e/%2e%2e/etc/passwd", "static/../../store.json",
        "static/..%2f..%2fpage.py", "static//etc/passwd", "store.json", "index.sqlite", "data/", "keys/",
        "run/..%2f..%2f/prompts/1.html", "static/browse.html", "run/%00/prompts/1.html", "/etc/passwd",
    ],
)  # fmt: skip
def test_no_path_leads_to_a_file(served, path):
    status, _, text = served.asked(f"/{served.word}/{path}")
    assert status == 404 and "root:" not in text and "format" not in text


def test_it_listens_on_this_machine_alone(served):
    for family, address in ((socket.AF_INET, "127.0.0.2"), (socket.AF_INET6, "::1")):
        with socket.socket(family) as other:
            other.settimeout(2)
            with pytest.raises(OSError):
                other.connect((address, served.port))


def test_nothing_in_the_store_changes(served, made, before):
    found = sorted((str(file), file.stat().st_mtime_ns) for file in made.folder.rglob("*"))
    assert found == before


def test_a_port_that_is_taken_is_one_clear_line(served, made, capsys):
    assert run(["browse", "--no-open", "--port", str(served.port), "--store", str(made.folder)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and str(served.port) in said and "--port" in said


def test_a_folder_that_is_no_store_is_one_clear_line(tmp_path, capsys):
    assert run(["browse", "--no-open", "--store", str(tmp_path)]) == 2
    assert "found no store.json" in capsys.readouterr().err


def test_without_the_extra_it_is_named(made, capsys, monkeypatch):
    monkeypatch.setattr("mizarr.stages.extras.missing_modules", lambda extra: ["starlette"])
    assert run(["browse", "--no-open", "--store", str(made.folder)]) == 2
    assert "pip install 'mizarr[browse]'" in capsys.readouterr().err


@pytest.mark.browser
@pytest.mark.parametrize(("width", "dark"), [(1400, False), (400, True)])
def test_pages_draw_themselves_quietly_and_are_walked_by_keys(served, made, width, dark):
    with chromium() as browser:
        scheme = "dark" if dark else "light"
        context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 900})
        page, complaints, asked = context.new_page(), [], []
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        kinds = [
            addresses.run(made.run),
            addresses.prompt(made.run, 1),
            addresses.token(made.run, 9),
            addresses.result(made.lens),
        ]
        for path in ["index.html", *kinds, "search.html?q=script"]:
            page.goto(served.address.replace("index.html", path))
            page.wait_for_selector("html[data-ready]")
            inside, outside = page.evaluate("[innerWidth, document.documentElement.scrollWidth]")
            assert outside <= inside, path
            assert page.evaluate(CUT) == [], path
            assert page.evaluate(BOXED, "W" * LETTERS), path
            assert page.evaluate("window.hacked") is None
            assert page.locator("h1").count() == 1 and page.locator("main").count() == 1
            unnamed = "a, button, input:not([type=radio]), progress, svg[role]"
            nameless = page.locator(unnamed).evaluate_all(f"all => all.filter({NAMELESS}).length")
            assert nameless == 0, path
        page.goto(served.address.replace("index.html", addresses.token(made.run, 9)))
        page.wait_for_selector("[data-drawn] svg")
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.className") == "skip"
        page.locator(".places a[aria-current]").focus()
        page.keyboard.press("Shift+Tab")
        page.keyboard.press("Enter")
        page.wait_for_url("**/token/8.html")
        dim = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(int(part) for part in dim[4:-1].split(",")) < 300) == dark
        assert complaints == []
        home = served.address.removesuffix("index.html")
        assert all(url.startswith((home, "data:")) for url in asked)
        context.close()


@pytest.mark.browser
def test_a_harvest_is_followed_without_loading_the_page_again(tmp_path):
    from playwright.sync_api import expect

    store, tokens = open_store(tmp_path / "store"), random_tokens(9, 12)
    entry = store.create_entry(
        RunKey("m", tokens.digest, "none"), tokens, [spec("resid_post")], segment_tokens=16
    )
    cells = [("resid_post", layer) for layer in range(LAYERS)]

    def write(n):
        rows = np.ones((len(entry.segments[n]), HIDDEN), np.float32)
        entry.write_segment(n, dict.fromkeys(cells, rows))

    write(0)
    command = [sys.executable, "-c", CODE, "browse", "--no-open", "--store", str(tmp_path / "store")]
    with chromium() as browser, subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            address = process.stdout.readline().strip()
            page = browser.new_page()
            with entry.claim(1):
                page.goto(address.replace("index.html", addresses.run(entry.digest)))
                bar = page.locator(".harvest progress")
                assert bar.get_attribute("value") == "1"
                write(1)
                expect(bar).to_have_attribute("value", "2", timeout=30_000)
                assert "2 of" in page.locator(".harvest .told").inner_text()
            for n in range(2, len(entry.segments)):
                write(n)
            entry.publish(cells)
            told = page.locator(".harvest .told")
            expect(told).to_contain_text("finished", timeout=30_000)
            assert "finished" in page.locator("[role=status]").text_content()
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(60)


def test_pages_need_no_torch(made):
    program = """
from mizarr.store import open_store
from mizarr.workflows.browse.finding import find_page
from mizarr.workflows.holdings import Holdings
from mizarr.workflows.browse.render import render
held = Holdings(open_store(sys.argv[1], mode="r")).look()
print(json.dumps([len(render(find_page(held, address))) for address in sys.argv[2:]]))
"""
    paths = ["index.html", addresses.run(made.run), addresses.token(made.run, 3), addresses.result(made.lens)]
    sizes = without_torch(program, made.folder, *paths)
    held = Holdings(made.store).look()
    assert len(sizes) == 4 and min(sizes) > 1000 and find_page(held, paths[2]) is not None


def test_a_store_that_is_not_read_yet_is_told_as_such_and_an_empty_one_is_whole(
    made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    assert Holdings(open_store(tmp_path / "empty")).look().unread == 0
    begun, go_on = threading.Event(), threading.Event()
    store = open_store(made.folder, mode="r")
    real = store.folders

    def slow() -> Any:
        begun.set()
        go_on.wait(30)
        return real()

    monkeypatch.setattr(store, "folders", slow)
    holdings = Holdings(store)
    assert holdings.look(0.01).unread > 0 and begun.is_set()
    go_on.set()
    assert holdings.look().unread == 0


def test_a_label_stands_beside_the_number_of_an_active_feature(made):
    ptr, feature = (made.features[name].values for name in ("token_ptr", "feature"))
    token = int(np.flatnonzero(np.diff(ptr))[0])
    address, name = addresses.token(made.run, token), f"L1:{feature[ptr[token]]}"
    plain = render(find_page(Holdings(made.store).look(), address))
    made.store.annotate("d1c7" * 16, {name: "towards <b>"})
    try:
        labelled = render(find_page(Holdings(made.store).look(), address))
        assert "towards &lt;b&gt;" in labelled and "towards" not in plain
    finally:
        made.store.annotate("d1c7" * 16, {name: ""})
    assert render(find_page(Holdings(made.store).look(), address)) == plain
