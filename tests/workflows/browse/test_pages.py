"""What pages of a store say is what is in the store, worked out here without mizarr's reading."""

from __future__ import annotations

import os
import shutil
import time

import numpy as np
import pytest
import xarray as xr

from mizarr import capture, compute
from mizarr.stages.logits.lens import format_token
from mizarr.store import ResultKey, RunKey, open_store
from mizarr.workflows.browse import addresses
from mizarr.workflows.browse.finding import find_news, find_page
from mizarr.workflows.browse.lineage import Lineage
from mizarr.workflows.browse.opened import open_run
from mizarr.workflows.browse.page import HarvestProgress, PageLinks, TokenLinks
from mizarr.workflows.browse.pages.search import match_range, search_prompts
from mizarr.workflows.browse.render import render
from mizarr.workflows.browse.similar import most_similar, stretches
from mizarr.workflows.holdings import Holdings
from mizarr.workflows.views import Heatmap, Lines, Note, Values
from tests.workflows.browse.conftest import HIDDEN, LAYERS, put_run, random_tokens, spec


@pytest.fixture(scope="module")
def held(made):
    return Holdings(open_store(made.folder, mode="r")).look()


def text(cell):
    return "".join(run.text for run in cell)


def views(page, kind):
    return [view for view in page.views if isinstance(view, kind)]


def titled(page, title):
    return next(view for view in page.views if view.title.startswith(title))


def test_the_first_page_counts_what_is_there(made, held):
    page = find_page(held, "index.html")
    values = dict(views(page, Values)[0].pairs)
    on_disk = sum(file.stat().st_size for file in (made.folder / "data").rglob("*") if file.is_file())
    assert (values["runs"], values["prompts"], values["results"]) == ("2", "73", "4")
    assert int(values["tokens"]) == made.tokens.n_tokens + random_tokens(1, 3).n_tokens
    assert sum(each.usage.bytes for each in held.folders.values()) == on_disk
    rows = [[text(cell) for cell in row] for row in titled(page, "Models").rows]
    assert {row[0] for row in rows} == {"large", "small"} and rows[0][6] == "resid_post"


@pytest.mark.parametrize("token", [0, 7, 16, 17, 100, -1])
def test_norms_of_a_token_are_those_of_its_states(made, held, token):
    token %= made.tokens.n_tokens
    (lines,) = views(find_page(held, addresses.token(made.run, token)), Lines)
    (line,) = lines.lines
    np.testing.assert_allclose(line.values, np.linalg.norm(made.states[:, token], axis=1), rtol=1e-6)
    assert line.name == "resid_post" and lines.x == (0.0, 1.0, 2.0)
    assert ("attention sink" in lines.caption) == (made.tokens.position_of(token) == 0)


def test_norms_of_a_prompt_are_those_of_its_states(made, held):
    for prompt in (0, 3, 69):
        choice = titled(find_page(held, addresses.prompt(made.run, prompt)), "Norms")
        ((name, heatmap),) = choice.options
        expected = np.linalg.norm(made.states[:, made.tokens.row(prompt)], axis=2)
        assert name == "resid_post" and isinstance(heatmap, Heatmap)
        np.testing.assert_allclose(heatmap.values, expected, rtol=1e-6)


@pytest.mark.parametrize("token", [0, 5, 33, 200])
def test_the_most_similar_tokens_are_those_of_largest_cosine(made, held, token):
    page = find_page(held, addresses.token(made.run, token))
    choice = titled(page, "Most similar")
    assert [label for label, _ in choice.options] == ["layer 1", "layer 2"]
    for layer, (_, table) in zip((1, 2), choice.options, strict=True):
        rows = made.states[layer].astype(np.float64)
        length = np.linalg.norm(rows, axis=1)
        with np.errstate(invalid="ignore", divide="ignore"):
            cosine = np.nan_to_num(rows @ rows[token] / length / length[token])
        others = np.delete(cosine, token)
        shown = [float(text(row[1])) for row in table.rows]
        np.testing.assert_allclose(shown, np.sort(others)[::-1][: len(shown)], atol=6e-5)
        links = [int(row[0][0].link.rpartition("/")[2].removesuffix(".html")) for row in table.rows]
        np.testing.assert_allclose(cosine[links], shown, atol=6e-5)
        assert f"{np.median(others):.4f}" in table.caption and "all" in table.caption


def test_a_large_run_is_sampled_and_says_so(made, held, monkeypatch):
    monkeypatch.setattr("mizarr.workflows.browse.similar.SAMPLE_BYTES", 4 * HIDDEN * 120)
    run = open_run(held.store, held.folders[f"data/{made.run[:2]}/{made.run}"])
    found = most_similar(run, "resid_post", 2, 40)
    looked = np.concatenate([np.arange(*each) for each in stretches(made.tokens.n_tokens, 4 * HIDDEN)])
    assert found.n_compared == len(looked) == 120 and found.n_tokens == made.tokens.n_tokens
    assert set(found.tokens) <= set(looked) - {40} and len(set(looked)) == 120
    table = titled(find_page(held, addresses.token(made.run, 40)), "Most similar").options[0][1]
    assert f"120 of {made.tokens.n_tokens} tokens" in table.caption


def test_the_lens_of_a_token_is_the_normed_state_through_the_unembedding(made, held):
    table = titled(find_page(held, addresses.token(made.run, 21)), "Logit lens")
    state = made.states[:, 21].astype(np.float64)
    normed = state / np.sqrt((state**2).mean(1, keepdims=True) + 1e-5) * made.readout["norm_weight"].values
    logits = normed @ made.readout["unembed"].values.T.astype(np.float64)
    share = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    for row, layer in zip(table.rows, (2, 1, 0), strict=True):
        best = int(share[layer].argmax())
        assert text(row[0]) == str(layer)
        assert text(row[1]).startswith(f"'{format_token(made.words[best])}'")
        assert f"{100 * share[layer, best]:.1f}%" in text(row[1])


def test_active_features_are_the_strongest_of_the_stored_encoding(made, held):
    ptr, feature, value = (made.features[name].values for name in ("token_ptr", "feature", "value"))
    token = int(np.diff(ptr).argmax())
    choice = titled(find_page(held, addresses.token(made.run, token)), "Active")
    ((label, table),) = choice.options
    here = slice(ptr[token], ptr[token + 1])
    order = np.argsort(-value[here])
    assert [int(text(row[0])) for row in table.rows] == feature[here][order].tolist()
    assert label.endswith("layer 1")


def test_a_run_without_a_readout_or_features_says_what_makes_them(held):
    folder = next(each for each in held.runs if each.run.model == "small")
    page = find_page(held, addresses.token(folder.data[-64:], 0))
    assert "mizarr compute logit_lens" in titled(page, "Logit lens").text
    assert isinstance(titled(page, "Active"), Note)


def test_a_result_shows_its_numbers_its_recipe_and_its_lineage(made, held):
    page = find_page(held, addresses.result(made.lens))
    (heatmap,) = views(page, Heatmap)
    stored = made.store.open_result(made.lens)["entropy"].values
    np.testing.assert_allclose(heatmap.values, stored[:, :256])
    (drawing,) = views(page, Lineage)
    boxes = {box.name: box for box in drawing.boxes}
    assert set(boxes) == {"run of large", "readout/1", "lens/2", "share/1"}
    assert boxes["lens/2"].is_self and len(drawing.paths) == 3
    assert boxes["run of large"].x == boxes["readout/1"].x < boxes["lens/2"].x < boxes["share/1"].x
    numbers = dict(titled(find_page(held, addresses.result(made.share)), "Numbers").pairs)
    assert numbers == {"share": "0.25"}
    recipe = {text(row[0]): text(row[1]) for row in titled(page, "How this result").rows}
    assert recipe["stage"] == "lens/2" and "hacked" in recipe["parameter note"]


def test_a_relative_stands_one_column_behind_the_last_that_reads_it(tmp_path):
    """a -> b -> c and a -> c: c is two columns from a, or the line from b to c would run upward."""
    store = open_store(tmp_path / "store")
    a, b, c = "abc"
    found = {}
    for name, reads in ((a, ""), (b, a), (c, a + b)):
        inputs = {each: found[each].content for each in reads}
        found[name] = store.put_result(ResultKey(name, 1, {}, inputs), xr.Dataset({name: ((), ord(name))}))
    held = Holdings(open_store(tmp_path / "store", mode="r")).look()
    for about in found.values():
        (drawing,) = views(find_page(held, addresses.result(about.key)), Lineage)
        places = [box.x for box in sorted(drawing.boxes, key=lambda box: box.name)]
        assert places == sorted(set(places)) and len(places) == 3
        assert len(drawing.paths) == 3


def test_what_gc_would_free_is_what_gc_says(made, tmp_path):
    folder = tmp_path / "store"
    shutil.copytree(made.folder, folder)
    store = open_store(folder)
    store.pin("figure", made.lens)
    old = time.time() - 40 * 24 * 3600
    for file in folder.rglob("*"):
        os.utime(file, (old, old))
    (folder / "index.sqlite").unlink()
    held = Holdings(open_store(folder, mode="r")).look()
    removals = {data: held.removal(each) for data, each in held.folders.items()}
    report = open_store(folder, mode="r").gc(quota=0, dry_run=True)
    removed = {data for data, removal in removals.items() if removal != "never"}
    assert removed == set(report.removed) and len(removed) == 3  # the other run, features, share
    assert {removals[data] for data in removed} == {"with a quota"}
    assert removed == {data for data, each in held.folders.items() if held.fate(each).startswith("goes")}
    assert held.fate(held.folders[store.record(made.lens).data]) == "stays: pinned as figure"


def test_text_of_others_is_text(made, held):
    for address in (
        addresses.run(made.run),
        addresses.prompt(made.run, 1),
        addresses.result(made.lens),
        addresses.token(made.run, int(np.flatnonzero(made.tokens.ids == 7)[0])),
        "search.html",
    ):
        written = render(find_page(held, address))
        assert "<script>window" not in written and "<img src=x" not in written
    assert "&lt;script&gt;window.hacked" in render(find_page(held, addresses.prompt(made.run, 1)))


def test_long_lists_are_cut_into_pages_that_lead_to_each_other(made, held):
    first, second = (find_page(held, addresses.run(made.run, n)) for n in (1, 2))
    links = {link.text: link.href for link in views(first, PageLinks)[0].links}
    assert links == {"next": "2.html", "last": "2.html"}
    assert [len(titled(page, "Prompts").rows) for page in (first, second)] == [50, 20]
    assert find_page(held, addresses.run(made.run, 3)) is None
    (strip,) = views(find_page(held, addresses.prompt(made.run, 69)), TokenLinks)
    assert len(strip.tokens) == made.tokens.row_size[69]


@pytest.mark.parametrize(
    "address",
    [
        "../store.json", "store.json", "data/../store.json", "run/../../etc/passwd",
        "run/%2e%2e/prompts/1.html", "runs/0.html", "runs/2.html", "result/abc.html",
        f"result/{'0' * 64}.html", f"run/{'0' * 64}/token/0.html",
        "static/../index.html", "run/{run}/token/99999999.html", "run/{run}/token/-1.html",
        "run/{run}/prompt/70/1.html", "run/{run}/prompt/0/2.html", "run/{run}/token/007.html",
        "run/{run}/token/1.html\n", "index.html/", "run/{run}/token/1٣.html",
    ],
)  # fmt: skip
def test_what_the_catalog_does_not_list_is_no_page(made, held, address):
    assert find_page(held, address.replace("{run}", made.run)) is None


def test_a_search_finds_words_whatever_their_case_and_goes_on_where_it_stopped(made, held, monkeypatch):
    assert [hit.prompt for hit in search_prompts(held, "NUMBER 6").hits] == [6, *range(60, 70)]
    found = search_prompts(held, "cats")
    assert len(found.hits) == 69 and found.resume_at is None and found.n_without_texts == 1
    monkeypatch.setattr("mizarr.workflows.browse.pages.search.MOST", 30)
    first = search_prompts(held, "cats")
    second = search_prompts(held, "cats", first.resume_at)
    third = search_prompts(held, "cats", second.resume_at)
    prompts = [hit.prompt for part in (first, second, third) for hit in part.hits]
    assert prompts == [0, *range(2, 70)] and third.resume_at is None
    assert search_prompts(held, "script").hits[0].prompt == 1


@pytest.mark.parametrize(
    ("text", "words", "match"),
    [
        ("Die Straße ist lang", "IST", "ist"),
        ("Die Straße ist lang", "strasse", "Straße"),
        ("Die Straße ist lang", "ras", "raß"),
        ("a Straße, then GRASS", "Grass", "GRASS"),
        ("ﬁne Straße", "ine str", "ﬁne Str"),
        ("İstanbul and Ankara", "ankara", "Ankara"),
        ("plain words", "WORDS", "words"),
        ("Straße", "", ""),
    ],
)
def test_a_match_covers_the_words_even_if_case_folding_lengthens_the_text(text, words, match):
    start, stop = match_range(text, words.casefold())
    assert text[start:stop] == match


def test_words_that_are_not_in_a_text_match_nothing():
    assert match_range("Die Straße ist lang", "gasse") is None


def test_a_harvest_in_progress_tells_what_stands(made, tmp_path):
    store = open_store(tmp_path / "store")
    tokens = random_tokens(9, 12)
    cells = [("resid_post", layer) for layer in range(LAYERS)]
    entry = store.create_entry(
        RunKey("m", tokens.digest, "none"),
        tokens,
        [spec("resid_post")],
        segment_tokens=16,
        attrs={"model": "m"},
    )

    def write(n):
        rows = np.ones((len(entry.segments[n]), HIDDEN), np.float32)
        entry.write_segment(n, dict.fromkeys(cells, rows))

    write(0)
    watching = Holdings(open_store(tmp_path / "store", mode="r"), refresh=0)
    address = f"run/{entry.digest}/live.json"
    assert find_news(watching.look(), "live.json") == {"progress": []}
    with entry.claim(1) as mine:
        assert mine
        (told,) = find_news(watching.look(), "live.json")["progress"]
        assert (told["done"], told["claimed"], told["total"]) == (1, 1, len(entry.segments))
        assert views(find_page(watching.look(), "index.html"), HarvestProgress)
        write(1)
        assert find_news(watching.look(), address)["progress"][0]["done"] == 2
    assert "no process is capturing this run" in find_news(watching.look(), address)["progress"][0]["told"]
    for n in range(2, len(entry.segments)):
        write(n)
    entry.publish(cells)
    assert find_news(watching.look(), address) == {"progress": []}
    (row,) = titled(find_page(watching.look(), "index.html"), "Captured runs").rows
    assert text(row[-1]) == "resid_post 0-2"


def test_an_empty_store_has_a_first_page(tmp_path):
    open_store(tmp_path / "store")
    held = Holdings(open_store(tmp_path / "store", mode="r")).look()
    assert "mizarr capture" in render(find_page(held, "index.html"))
    assert find_page(held, "search.html") is not None


def test_what_cannot_be_read_is_told_and_left_out(made, tmp_path):
    shutil.copytree(made.folder, tmp_path / "store")
    (tmp_path / "store" / "data" / made.run[:2] / made.run / "zarr.json").write_text("{")
    held = Holdings(open_store(tmp_path / "store", mode="r")).look()
    assert len(held.runs) == 1 and len(held.damaged) == 1
    assert "mizarr verify" in render(find_page(held, "index.html"))


def test_what_was_written_meanwhile_is_seen(made, tmp_path):
    store = open_store(tmp_path / "store")
    watching = Holdings(open_store(tmp_path / "store", mode="r"), refresh=0)
    assert watching.look().runs == []
    tokens = random_tokens(4, 5)
    states = np.ones((LAYERS, tokens.n_tokens, HIDDEN), np.float32)
    put_run(store, tokens, states, "new")
    assert [each.run.model for each in watching.look().runs] == ["new"]
    address = addresses.prompt(watching.look().runs[0].data[-64:], 0)
    assert isinstance(find_page(watching.look(), address).views[0], TokenLinks)


def test_workflows_that_were_computed_are_listed_with_their_results_and_pieces(tmp_path):
    store = open_store(tmp_path / "store", durability="process")
    for _ in range(2):
        compute("logit_lens", store=store, prompts=["Alice lives in Paris"])
    found = Holdings(store).look()
    front = find_page(found, "index.html")
    (row,) = titled(front, "Computed workflows").rows
    assert [text(cell) for cell in row[:3]] == [
        "logit_lens",
        "specimen",
        'prompts=["Alice lives in Paris"]',
    ]
    (asked,) = found.questions
    page = find_page(found, f"question/{asked.question.digest}.html")
    assert len(titled(page, "Results").rows) == len(asked.results) == 2
    assert [text(row[0]) for row in titled(page, "Runs that were read").rows] == [found.runs[0].run.run[:12]]
    assert not found.asked_runs and found.other_results == []
    capture("specimen", ["Alice lives in Paris"], "blocks.*.hook_resid_post", store=store, progress=False)
    assert len(Holdings(store).look().asked_runs) == 1
    assert find_page(found, f"question/{'0' * 64}.html") is None
