"""`mizarr site`: files whose links all lead somewhere, within limits that are told, whole or not at all."""

from __future__ import annotations

import json
import re
import time
from html import unescape
from urllib.parse import unquote

import pytest

from mizarr.store import open_store
from mizarr.workflows.browse.site import Limits, write_site
from mizarr.workflows.cli import run
from tests.browser import chromium, opened


@pytest.fixture(scope="module")
def site(made, tmp_path_factory):
    folder = tmp_path_factory.mktemp("site") / "pages"
    return folder, write_site(open_store(made.folder, mode="r"), folder, Limits(60, 4, 3))


def links(file):
    found = re.findall(r'(?:href|src)="([^"#]+)"', file.read_text())
    return [unquote(unescape(each)) for each in found if not each.startswith("data:")]


def test_every_link_leads_to_a_file_of_the_site(site):
    folder, written = site
    files = list(folder.rglob("*.html"))
    assert len(files) == written.pages + 1 > 30  # and the page about what was left out
    for file in files:
        for link in links(file):
            target = (file.parent / link).resolve()
            assert target.is_file() and target.is_relative_to(folder.resolve()), (file, link)


def test_limits_hold_and_are_told(site, made):
    folder, written = site
    assert written.pages <= 60 and written.left_out > 0
    assert len(list((folder / "run" / made.run / "prompt").iterdir())) <= 4
    for text in (page.read_text() for page in folder.rglob("*.html")):
        assert "at most 60 pages, 4 prompts per run and 3 tokens" in text
    assert "beyond the limits" in (folder / "left-out.html").read_text()
    assert written.bytes >= sum(file.stat().st_size for file in folder.rglob("*.html"))


def test_a_site_is_the_same_when_it_is_written_again(site, made, tmp_path, monkeypatch):
    folder, _ = site
    later = time.time() + 3600
    with monkeypatch.context() as context:  # a run is used in between, which is nothing a page says
        context.setattr("mizarr.store.index.time.time", lambda: later)
        made.store.index.touch(open_store(made.folder, mode="r").folders()[0])
    write_site(open_store(made.folder, mode="r"), tmp_path / "again", Limits(60, 4, 3))
    one, other = (
        {file.relative_to(top): file.read_bytes() for file in top.rglob("*") if file.is_file()}
        for top in (folder, tmp_path / "again")
    )
    assert one.keys() == other.keys()
    assert [str(name) for name in one if one[name] != other[name]] == []


def test_a_site_is_replaced_and_other_folders_are_refused(made, tmp_path, capsys):
    command = ["site", "--store", str(made.folder), "--pages", "5", "--json", "--quiet"]
    assert run([*command, str(tmp_path / "pages")]) == 0
    assert json.loads(capsys.readouterr().out)["pages"] == 5
    (tmp_path / "pages" / "run" / "old.html").parent.mkdir(exist_ok=True)
    (tmp_path / "pages" / "run" / "old.html").write_text("old")
    assert run([*command, str(tmp_path / "pages")]) == 0
    assert not (tmp_path / "pages" / "run" / "old.html").exists()
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("years of work")
    (tmp_path / "file").write_text("")
    capsys.readouterr()
    for wrong, remedy in (
        (mine, "name a new or empty folder"),
        (tmp_path / "file", "name a folder that does not exist yet"),
    ):
        assert run([*command, str(wrong)]) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and str(wrong) in said and remedy in said
    assert [each.name for each in mine.iterdir()] == ["thesis.txt"]
    assert not [each for each in tmp_path.iterdir() if each.name.startswith(".")]


def test_a_site_that_fails_leaves_what_was_there(made, tmp_path, monkeypatch):
    store, folder = open_store(made.folder, mode="r"), tmp_path / "pages"
    write_site(store, folder, Limits(3, 1, 1))
    before = sorted(folder.rglob("*"))

    def fail(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_site(store, folder, Limits(9, 1, 1), fail)
    assert sorted(folder.rglob("*")) == before and list(tmp_path.iterdir()) == [folder]


@pytest.mark.browser
def test_files_draw_themselves_and_filter_prompts_in_a_browser(site, made):
    folder, _ = site
    with chromium() as browser:
        token = next((folder / "run" / made.run / "token").iterdir())
        with opened(browser, token) as here:
            here.page.wait_for_selector("[data-drawn] svg")
            assert here.page.evaluate("getComputedStyle(document.body).maxWidth") == "1120px"
            assert here.complaints == []
            assert all(request.startswith("file:") for request in here.requests)
        with opened(browser, folder / "search.html") as here:
            rows = here.page.locator("tbody tr:visible")
            assert rows.count() == 70
            here.page.get_by_label("Filter the prompts").fill("NUMBER 33 ")
            assert rows.count() == 1 and "number 33" in rows.first.inner_text()
            assert here.page.evaluate("window.hacked") is None and here.complaints == []
