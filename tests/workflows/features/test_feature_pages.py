"""Pages of features: the files say what was computed; in a browser, in Neuronpedia's rows, with labels."""

from __future__ import annotations

import base64
import gzip
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import mizarr
from mizarr.stages.features.dictionary import Dictionary
from mizarr.stages.features.labels import labels_of, set_labels
from mizarr.stages.features.layers.layout import FeatureId
from mizarr.store.errors import ConfigError, MizarrError
from mizarr.workflows import build, compute
from mizarr.workflows.cli.group import run as cli
from mizarr.workflows.features.feature_pages import FeaturePages
from mizarr.workflows.features.page_files import PER_FILE, PageFiles
from mizarr.workflows.views import Lines
from tests.browser import chromium, opened

HOSTILE = "</script><img src=x onerror='window.hacked = 1'> & \"quoted\""
FEW: dict[str, Any] = {"corpus_tokens": 3000, "strongest": 6, "intervals": 5, "per_interval": 2}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return mizarr.open_store(tmp_path_factory.mktemp("pages") / "store")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    prose = (Path(mizarr.__file__).parent / "stages/forward/specimen/prose.txt").read_text("utf-8")
    path = tmp_path_factory.mktemp("corpus") / "corpus.txt"
    path.write_text(f"{HOSTILE}\n\n{prose[:12000]}", "utf-8")
    return str(path)


@pytest.fixture(scope="module")
def done(store: Any, corpus: str) -> FeaturePages:
    set_labels(store, Dictionary.from_pretrained("specimen/sae"), {"L3:7": HOSTILE}, author="ada")
    found = compute("feature_pages", store=store, corpus=corpus, **FEW)
    assert isinstance(found, FeaturePages)
    return found


def handed_over(script: bytes) -> tuple[str, Any]:
    """What a data script pushes: read without a browser."""
    text = script.decode().removeprefix("(window.mizarr=window.mizarr||[]).push(").removesuffix(");\n")
    name, value = json.loads(text)
    return name, value


def array(block: dict[str, Any]) -> np.ndarray:
    return np.frombuffer(base64.b64decode(block["data"]), block["dtype"]).reshape(block["shape"])


def test_files_say_what_was_computed(done: FeaturePages):
    files = done.pages
    name, overview = handed_over(files.read("data/features.js"))
    _, words = handed_over(files.read("data/vocabulary.js"))
    stats, windows = (done.result(each).load() for each in ("statistics", "windows"))
    assert name == "features"
    np.testing.assert_array_equal(array(overview["count"]), stats["firing_count"])
    np.testing.assert_array_equal(array(overview["largest"]), stats["max_activation"].astype(np.float32))
    assert overview["labels"]["7"][:2] == [HOSTILE, "ada"]
    token_id, prompt = done.material.token_id, done.material.prompt
    for shard in range(2):
        _, told = handed_over(files.read(f"data/{shard:05d}.js"))
        ids, levels, value = (array(told[each]) for each in ("ids", "levels", "value"))
        here = slice(shard * PER_FILE, (shard + 1) * PER_FILE)
        np.testing.assert_array_equal(value, windows["activation"].sel(window=0).values[here])
        active = windows["activation"].values[here]
        np.testing.assert_array_equal(levels > 0, active > 0)
        largest = stats["max_activation"].values[here][:, None, None]
        assert np.abs(levels / 255 * largest - active).max() <= largest.max() / 255
        for feature, example in ((0, 0), (100, 3), (255, 10)):
            token = int(windows["token"].values[here][feature, example])
            if token < 0:
                assert not ids[feature, example].any()
                continue
            window = token + windows["window"].values
            inside = [t for t in window if 0 <= t < len(prompt) and prompt[t] == prompt[token]]
            assert [i - 1 for i in ids[feature, example] if i] == token_id[inside].tolist()
            assert words[token_id[token]] == done.subject.tokenizer.decode_token(int(token_id[token]))
    assert set(files.names) == {f"data/{n}.js" for n in ("features", "vocabulary", "00000", "00001")} | {
        "index.html"
    }
    with pytest.raises(KeyError):
        files.read("../store.json")


def test_written_files_are_those_read_one_by_one_and_stay(done: FeaturePages, tmp_path: Path):
    folder = tmp_path / "pages"
    done.write_pages(folder)
    times = {}
    for name in done.pages.names:
        assert (folder / name).read_bytes() == done.pages.read(name)
        times[name] = (folder / name).stat().st_mtime_ns
    PageFiles(done.material).write(folder)
    assert times == {name: (folder / name).stat().st_mtime_ns for name in done.pages.names}
    assert b"\\u003c/script" in (folder / "data/features.js").read_bytes()
    assert HOSTILE.encode() not in (folder / "data/features.js").read_bytes()
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"thesis\.txt"):
        done.write_pages(tmp_path / "own")
    assert [each.name for each in (tmp_path / "own").iterdir()] == ["thesis.txt"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as running:
        yield running


@pytest.mark.browser
def test_every_feature_that_is_active_is_in_the_histogram_at_its_share_of_tokens(done: FeaturePages):
    (view,) = [each for each in done.shown if isinstance(each, Lines)]
    stats = done.result("statistics").load()
    exact = stats["log10_frequency"].values[stats["firing_count"].values > 0]
    places, counts = np.log10(view.x), view.lines[0].values
    assert view.log_x and counts.sum() == len(exact)
    width = np.diff(places)
    np.testing.assert_allclose(width, width[0])
    assert np.average(places, weights=counts) == pytest.approx(exact.mean(), abs=width[0] / 2)


@pytest.mark.parametrize(("width", "dark"), [(1400, False), (400, True)])
def test_a_page_in_a_browser(done: FeaturePages, browser: Any, tmp_path: Path, width: int, dark: bool):
    index = done.write_pages(tmp_path / "pages")
    stats = done.result("statistics").load()
    order = np.lexsort((np.arange(512), -stats["firing_count"].values))
    with opened(browser, index, width=width, dark=dark) as visit:
        page = visit.page
        title = page.locator("main h2").first
        page.wait_for_selector("main h2")
        assert title.inner_text() == f"Feature {order[0]}"
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        page.keyboard.press("j")
        page.wait_for_selector(f"main h2:text-is('Feature {order[1]}')")
        page.keyboard.press("ArrowLeft")
        page.wait_for_selector(f"main h2:text-is('Feature {order[0]}')")
        page.keyboard.press("/")
        page.keyboard.type("onerror")
        page.wait_for_selector(".rows li:only-child")
        page.locator(".rows a").click()
        page.wait_for_selector("main h2:text-is('Feature 7')")
        assert page.locator(".label").inner_text().startswith(HOSTILE)
        page.locator("nav input").fill("")
        for feature in (int(order[3]), 300):  # of both files
            page.evaluate(f"location.hash = '#{feature}'")
            page.wait_for_selector(f"main h2:text-is('Feature {feature}')")
            windows = done.result("windows").sel(feature=feature).load()
            shown = [float(text) for text in page.locator(".examples .where").all_inner_texts()]
            values = windows["activation"].sel(window=0).values
            kept = (windows["token"].values >= 0).reshape(-1)
            strongest = values[:6][kept[:6]]
            np.testing.assert_allclose(shown[: len(strongest)], strongest, rtol=6e-3)
            assert len(shown) == kept.sum()
            told = done.result("partners").sel(feature=feature).load()["correlated"].values
            links = page.locator("main .third").nth(1).locator("a").all_inner_texts()
            assert [int(text) for text in links] == told[told >= 0].tolist()
        peak = page.locator(".examples .peak").first
        peak.scroll_into_view_if_needed()
        page.wait_for_timeout(200)  # scrolling hides a tooltip
        assert visit.hover(peak, 0.5, 0.5)["what"].startswith(f"{float(f'{values[0]:.4g}'):g}")
        page.evaluate("location.hash = '#99999'")
        page.wait_for_selector("main .notice")
        assert page.evaluate("window.hacked") is None
        assert not visit.complaints
        assert all(url.startswith("file:") for url in visit.requests)


class NeuronRow(msgspec.Struct, forbid_unknown_fields=True):
    """`model Neuron` of Neuronpedia's Prisma schema: the columns a bulk import fills, and their types."""

    modelId: str
    layer: str
    index: str
    creatorId: str
    createdAt: str
    maxActApprox: float
    hasVector: bool
    vector: list[float]
    vectorLabel: str | None
    hookName: str
    sourceSetName: str
    topkCosSimIndices: list[int]
    topkCosSimValues: list[float]
    neuron_alignment_indices: list[int]
    neuron_alignment_values: list[float]
    neuron_alignment_l1: list[float]
    correlated_neurons_indices: list[int]
    correlated_neurons_pearson: list[float]
    correlated_neurons_l1: list[float]
    correlated_features_indices: list[int]
    correlated_features_pearson: list[float]
    correlated_features_l1: list[float]
    neg_str: list[str]
    neg_values: list[float]
    pos_str: list[str]
    pos_values: list[float]
    frac_nonzero: float
    freq_hist_data_bar_heights: list[float]
    freq_hist_data_bar_values: list[float]
    logits_hist_data_bar_heights: list[float]
    logits_hist_data_bar_values: list[float]
    decoder_weights_dist: list[float]


class ActivationRow(msgspec.Struct, forbid_unknown_fields=True):
    """`model Activation` of the same."""

    id: str
    modelId: str
    layer: str
    index: str
    creatorId: str
    createdAt: str
    tokens: list[str]
    values: list[float]
    maxValue: float
    maxValueTokenIndex: int
    minValue: float
    binMin: float
    binMax: float
    binContains: float
    qualifyingTokenIndex: int
    dataIndex: str | None
    dataSource: str | None
    dfaValues: list[float]
    dfaTargetIndex: int | None
    dfaMaxValue: float | None
    lossValues: list[float]
    logitContributions: str | None


def rows(path: Path, kind: Any) -> list[Any]:
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return [msgspec.json.decode(line, type=kind) for line in text.splitlines()]


def test_neuronpedia_reads_what_was_computed(done: FeaturePages, tmp_path: Path):
    home = done.write_neuronpedia(tmp_path, model="specimen", source_set="res-tiny", creator="me")
    assert home == tmp_path / "specimen" / "3-res-tiny"
    features = [row for n in range(2) for row in rows(home / f"features/batch-{n}.jsonl.gz", NeuronRow)]
    stats = done.result("statistics").load()
    assert [int(row.index) for row in features] == list(range(512))
    for index in (0, 7, 300):
        row = features[index]
        assert (row.modelId, row.layer, row.hookName) == (
            "specimen",
            "3-res-tiny",
            "blocks.3.hook_resid_post",
        )
        count = int(stats["firing_count"][index])
        assert row.frac_nonzero == pytest.approx(count / stats.attrs["n_tokens"], abs=1e-8)
        assert row.maxActApprox == pytest.approx(float(stats["max_activation"][index]), abs=5e-4)
        assert sum(row.freq_hist_data_bar_heights) == count
        for name in ("freq", "logits"):
            heights, values = (getattr(row, f"{name}_hist_data_bar_{what}") for what in ("heights", "values"))
            assert len(heights) == len(values)
        logits = done.result("logits").sel(feature=index).load()
        assert row.pos_str == [done.subject.tokenizer.decode_token(int(t)) for t in logits["raised"].values]
        np.testing.assert_allclose(row.neg_values, logits["lowered_by"].values, atol=5e-4)
    examples = [
        row for n in range(2) for row in rows(home / f"activations/batch-{n}.jsonl.gz", ActivationRow)
    ]
    windows = done.result("windows").load()
    assert len(examples) == int((windows["token"] >= 0).sum())
    assert len({row.id for row in examples}) == len(examples)
    intervals = done.result("intervals").load()
    for row in examples:
        assert len(row.tokens) == len(row.values)
        assert row.maxValue == max(row.values) == row.values[row.maxValueTokenIndex]
        qualifying = row.values[row.qualifyingTokenIndex]
        if row.binContains == -1:
            assert row.binMax == pytest.approx(features[int(row.index)].maxActApprox)
        else:
            assert row.binMin - 2e-3 <= qualifying <= row.binMax + 2e-3
            shares = intervals["interval_count"].sel(feature=int(row.index)).values / stats.attrs["n_tokens"]
            assert np.isclose(shares, row.binContains, atol=1e-8).any()
    (label,) = rows(home / "explanations/batch-0.jsonl.gz", dict[str, Any])
    assert (label["index"], label["description"], label["notes"]) == ("7", HOSTILE, "ada")
    (source,) = rows(home / "source.jsonl", dict[str, Any])
    assert (source["id"], source["num_prompts"]) == ("3-res-tiny", done.tokens.n_prompts)
    with pytest.raises(ConfigError, match="expected a new folder"):
        done.write_neuronpedia(tmp_path, model="specimen", source_set="res-tiny")
    with pytest.raises(ConfigError, match="letters, digits"):
        done.write_neuronpedia(tmp_path, model="../up", source_set="res-tiny")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["specimen"]


def test_the_first_token_of_each_passage_is_left_out_and_pages_say_so(done: FeaturePages):
    counted = done.tokens.n_tokens - done.tokens.n_prompts
    assert done.result("statistics").attrs["n_tokens"] == counted > 0
    assert "without the first token of each passage" in dict(done.about)["corpus"]


def test_a_label_is_in_no_key_and_shown_where_the_feature_is(done: FeaturePages, store: Any, corpus: str):
    again = compute("feature_pages", store=store, corpus=corpus, **FEW)
    before = again.to_json()
    feature = before["features"][0]
    set_labels(store, done.dictionary, {FeatureId(3, feature["index"]): "first of all"}, author="bo")
    after = compute("feature_pages", store=store, corpus=corpus, **FEW).to_json()
    assert after["provenance"] == before["provenance"]
    assert after["features"][0]["label"] == f'"first of all", {feature["label"]}'
    seen = compute("sae_features", store=store)
    there = seen.to_json()["positions"][-1]["top"]
    number, top = next((i, each) for i, each in enumerate(there) if each["index"] != feature["index"])
    set_labels(store, done.dictionary, {f"L3:{top['index']}": "seen in a prompt"})
    told = compute("sae_features", store=store).to_json()["positions"][-1]["top"][number]
    assert told["label"] == f'"seen in a prompt", {top["label"]}'
    said = [each.item for each in store.annotations(done.dictionary.identity)]
    set_labels(store, done.dictionary, dict.fromkeys(said, ""))
    assert labels_of(store, done.dictionary) == {}
    assert (
        compute("feature_pages", store=store, corpus=corpus, **FEW).to_json()["features"]
        == before["features"]
    )
    assert len(store.annotations(done.dictionary.identity)) == 2 * len(said)
    assert not store.verify()


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"intervals": 7}, "divide the 50 bins"),
        ({"layer": 2}, "found layer 2"),
        ({"features": [3, 512]}, "from 0 to 511.*, found 512"),
        ({"features": [3, 3]}, "each feature once, .* found 2 features, 1 of them different"),
        ({"corpus": "none"}, "expected a corpus"),
        ({"corpus": "/no/such/file.txt"}, "expected files of documents at"),
        ({"dictionary": "/no/such/dictionary"}, "dictionary"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_anything_runs(settings: dict[str, Any], told: str):
    with pytest.raises(MizarrError, match=told):
        build("feature_pages", **settings)


def test_features_that_are_chosen_have_the_pages_they_have_among_all(
    done: FeaturePages, store: Any, corpus: str
):
    some = compute("feature_pages", store=store, corpus=corpus, features=[400, 7], **FEW)
    assert isinstance(some, FeaturePages)
    assert some.material.features.tolist() == [7, 400]
    _, told = handed_over(some.pages.read("data/00000.js"))
    for shard, place, row in ((0, 7, 0), (1, 400 - PER_FILE, 1)):
        _, every = handed_over(done.pages.read(f"data/{shard:05d}.js"))
        for name in ("ids", "levels", "histogram", "correlated", "neighbour", "raised"):
            np.testing.assert_array_equal(array(told[name])[row], array(every[name])[place])


def test_the_command_line(corpus: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    where = ["--store", str(tmp_path / "store")]
    asked = [word for pair in {**FEW, "corpus": corpus}.items() for word in ("--set", "{}={}".format(*pair))]
    assert cli(["features", "label", "specimen/sae", "L3:7", "a [bold]label[/bold]", *where]) == 0
    assert cli(["features", "labels", "specimen/sae", *where]) == 0
    assert re.search(r"L3:7 +a \[bold\]label\[/bold\]", capsys.readouterr().out)
    assert cli(["features", "pages", str(tmp_path / "pages"), *asked, *where, "-q"]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "pages" / "index.html")
    np_folder = tmp_path / "np"
    assert (
        cli(["features", "pages", str(np_folder), "--neuronpedia", "m/s", *asked, *where, "-q", "--json"])
        == 0
    )
    assert json.loads(capsys.readouterr().out) == {
        "path": str(np_folder / "m" / "3-s"),
        "features": 512,
        "labels": 1,
    }
    for wrong, told in (
        (["label", "specimen/sae", "L3:512", "x"], "from 0 to 511"),
        (["label", "specimen/sae", "seven", "x"], "layer:index"),
        (["label", "specimen/sae", "L3:7", "two\nlines"], "one line"),
        (["label", "specimen/sae", "L3:7", "\x1b[31mred"], "printable"),
        (["pages", str(tmp_path / "store")], "expected a new folder"),
        (["pages", str(np_folder), "--neuronpedia", "m"], "MODEL/SET"),
    ):
        assert cli(["features", *wrong, *where]) == 2
        assert told in capsys.readouterr().err
    assert cli(["features", "labels", "specimen/sae", "--store", str(tmp_path / "none")]) == 2


def test_a_damaged_label_is_found(store: Any, done: FeaturePages, tmp_path: Path):
    own = mizarr.open_store(tmp_path / "store")
    set_labels(own, done.dictionary, {"L3:1": "one"})
    (path,) = (tmp_path / "store" / "annotations").rglob("*.json")
    path.write_text(path.read_text().replace("one", "two"))
    assert [damage.found for damage in own.verify()] == ["unreadable"]
    with pytest.raises(MizarrError, match="annotations"):
        labels_of(own, done.dictionary)
    own.quarantine(own.verify()[0])
    assert not own.verify()
    assert labels_of(own, done.dictionary) == {}


def test_pages_of_lazy_results_are_the_same(done: FeaturePages, tmp_path: Path):
    """As a large dictionary has them: every variable in chunks of its own."""
    lazy = {
        name: each.assign(
            {
                n: v.chunk(feature=50 + 30 * i)
                for i, (n, v) in enumerate(each.data_vars.items())
                if "feature" in v.dims
            }
        )
        for name, each in done.material.results.items()
    }
    files = PageFiles(replace(done.material, results=lazy))
    index = files.write(tmp_path / "pages")
    for name in files.names:
        assert (index.parent / name).read_bytes() == done.pages.read(name)


def test_pages_of_a_dictionary_that_does_not_write_to_the_stream_say_nothing_of_logits(done: FeaturePages):
    results = {name: each for name, each in done.material.results.items() if name != "logits"}
    files = PageFiles(replace(done.material, results=results))
    _, told = handed_over(files.read("data/00000.js"))
    assert "raised" not in told
    _, overview = handed_over(files.read("data/features.js"))
    assert not array(overview["raises"]).any()
