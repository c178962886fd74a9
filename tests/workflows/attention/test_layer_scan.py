"""The layer scan from samples in characters to the viewer's JSON."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from scipy.stats import ttest_ind

import mizarr
from mizarr.store.errors import ConfigError, MizarrError, PromptError
from mizarr.workflows import build, compute
from mizarr.workflows.material.samples.marker_samples import (
    Conversion,
    Sample,
    place,
    read_samples,
    repeated_samples,
)
from mizarr.workflows.subject import Subject, shipped_prose

FIELDS = {
    "model": str,
    "corpus_format": str,
    "n_layers": int,
    "scanned_layers": list,
    "best_layer": int,
    "best_p_value": float,
    "position_conversion_stats": dict,
    "results": list,
}
CONVERSION = ["total_samples", "successful_conversions", "failed_conversions", "fuzzy_matches"]
ROW = [
    *("layer", "python_mean", "python_std", "python_n", "rust_mean", "rust_std", "rust_n"),
    *("ratio", "t_statistic", "df", "p_value"),
]


def sample(name: str, code: str, marker: str, *targets: str) -> dict:
    return {
        "id": name,
        "code": code,
        "marker_char_pos": code.index(marker),
        "marker_pattern": marker,
        "target_char_positions": [code.index(target) for target in targets],
    }


CORPUS = {
    "_format_version": "2.0",
    "python_doctest": [
        sample("one", "it was the best of times, we had nothing", "had", "was", "best"),
        sample("two", "it was the age of wisdom, we were all", "were", "age"),
        sample("three", "we had everything before us, it was", "it", "had"),
    ],
    "rust_test": [
        sample("four", "it was the winter of despair, it was", "despair", "winter", "was"),
        sample("five", "all going direct to Heaven, we were", "we", "going"),
    ],
    "rust_baseline": [sample("six", "we had nothing before us", "had", "nothing", "we")],
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("corpus") / "samples.json"
    path.write_text(json.dumps(CORPUS))
    return str(path)


@pytest.fixture(scope="module")
def done(tiny_model: Path, corpus: str, tmp_path_factory: pytest.TempPathFactory):
    store = tmp_path_factory.mktemp("scan") / "store"
    return compute("layer_scan", store=store, model=str(tiny_model), corpus=corpus)


def attention(model, tokenizer, one: dict, layer: int) -> float:
    """By a plain pass: from the token over the marker's first character to those over the targets'."""
    encoding = tokenizer.encode(one["code"])
    hooks = mizarr.HookSpec().capture("blocks.*.attn.hook_pattern")
    weights = model.forward(one["code"], hooks, want=None)[f"blocks.{layer}.attn.hook_pattern"][0].numpy()
    query = encoding.char_to_token(one["marker_char_pos"])
    keys = [encoding.char_to_token(char) for char in one["target_char_positions"]]
    return float(weights.mean(0)[query, keys].mean())


def test_the_viewers_json_has_its_fields_and_no_others(done):
    document = json.loads(json.dumps(done.viewer_json(), allow_nan=False))
    assert list(document) == list(FIELDS)
    assert all(isinstance(document[name], kind) for name, kind in FIELDS.items())
    assert list(document["position_conversion_stats"]) == CONVERSION
    assert all(list(row) == ROW for row in document["results"])
    assert document["corpus_format"] == "universal_v2.0"
    assert (document["n_layers"], document["scanned_layers"]) == (3, [1, 2])
    whole = json.loads(json.dumps(done.to_json(), allow_nan=False))
    assert {name: whole[name] for name in FIELDS} == document
    assert whole["conditions"] == {"A": "python_doctest", "B": "rust_test"}


def test_numbers_are_those_of_plain_passes_and_of_scipy(done, tiny_model):
    model = mizarr.Model.from_pretrained(tiny_model)
    tokenizer = done.subject.tokenizer
    for row in done.viewer_json()["results"]:
        a, b = (
            [attention(model, tokenizer, one, row["layer"]) for one in CORPUS[name]]
            for name in ("python_doctest", "rust_test")
        )
        assert row["python_mean"] == pytest.approx(np.mean(a), rel=1e-5)
        assert row["python_std"] == pytest.approx(np.std(a, ddof=1), rel=1e-4)
        assert (row["python_n"], row["rust_n"]) == (3, 2)
        assert row["ratio"] == pytest.approx(np.mean(a) / np.mean(b), rel=1e-5)
        expected = ttest_ind(a, b, equal_var=False)
        found = (row["t_statistic"], row["df"], row["p_value"])
        np.testing.assert_allclose(found, (expected.statistic, expected.df, expected.pvalue), rtol=1e-3)


def test_the_headline_is_the_best_t_of_plain_passes_among_random_deals(done, tiny_model):
    model, tokenizer = mizarr.Model.from_pretrained(tiny_model), done.subject.tokenizer
    samples = [*CORPUS["python_doctest"], *CORPUS["rust_test"]]
    weight = [[attention(model, tokenizer, one, layer) for one in samples] for layer in (1, 2)]

    def best(is_b):
        is_b = np.array(is_b, bool)
        tests = (ttest_ind(row[~is_b], row[is_b], equal_var=False) for row in np.array(weight))
        return max(each.statistic for each in tests)

    (claim,) = done.to_json()["findings"]
    assert claim["effect"] == pytest.approx(best([0, 0, 0, 1, 1]), rel=1e-3)
    rng = np.random.default_rng(0)
    null = [best(rng.permutation(np.array([0, 0, 0, 1, 1]) == 1)) for _ in range(50)]
    (finding,) = next(view for view in done.shown if view.kind == "findings").findings
    np.testing.assert_allclose(finding.null.values, null, rtol=1e-3)
    assert not finding.is_beyond_chance, "five samples are too few"


def test_conditions_and_layers_can_be_chosen_and_targets_behind_the_marker_count_nothing(
    tiny_model, corpus, tmp_path
):
    chosen = {"condition_a": "rust_baseline", "condition_b": "rust_test", "start_layer": 2, "end_layer": 2}
    found = compute("layer_scan", store=tmp_path / "s", model=str(tiny_model), corpus=corpus, **chosen)
    document = found.to_json()
    assert document["scanned_layers"] == [2]
    assert document["targets_behind_marker"] == 1
    assert "1 targets come after their marker" in found.tables()[1].caption
    (first,) = (one for one in document["samples"] if one["id"] == "six")
    model = mizarr.Model.from_pretrained(tiny_model)
    seen = {**CORPUS["rust_baseline"][0], "target_char_positions": [0]}
    assert first["attention"] == [pytest.approx(attention(model, found.subject.tokenizer, seen, 2) / 2)]


def test_characters_between_tokens_go_to_the_nearest_and_are_counted():
    """As with tokenizers that drop white space."""
    from mizarr.stages.forward.text.tokens import Encoding

    pieces, spans = ["<s>", "ab", "cd"], [(0, 0), (0, 2), (3, 5)]
    encoding = Encoding([0, 1, 2], pieces, spans, [True, False, False], "ab cd")
    told = Conversion()
    placed = place(Sample("x", "ab cd", 3, "", (2, 0)), encoding, told)
    assert placed is not None
    assert (placed.marker, placed.targets) == (2, (1, 1))
    assert told.to_json() == dict(zip(CONVERSION, (1, 1, 0, 1), strict=True))
    empty = Encoding([0], ["<s>"], [(0, 0)], [True], "")
    assert place(Sample("y", "", 0, "", (0,)), empty, told) is None
    assert told.to_json() == dict(zip(CONVERSION, (2, 1, 1, 1), strict=True))


def test_bytes_become_characters_and_a_marker_elsewhere_is_refused(tmp_path):
    one = sample("née", "née was the best", "best", "was")
    in_bytes = {**one, "marker_char_pos": 13, "target_char_positions": [5]}
    path = tmp_path / "bytes.json"
    path.write_text(json.dumps({"a": [in_bytes]}))
    version, [[found]] = read_samples(str(path), ["a"], unit="bytes")
    assert (version, found.marker_char_pos, found.target_char_positions) == ("1.0", 12, (4,))
    with pytest.raises(PromptError, match=r"marker 'best' at character 13, found 'est'.*unit=bytes"):
        read_samples(str(path), ["a"], unit="characters")


def test_samples_of_prose_say_the_beginning_of_one_of_two_sentences_again():
    repeated, unrepeated = repeated_samples(shipped_prose(), 5)
    assert len(repeated) == len(unrepeated) == 5
    for one in repeated:
        again = one.code[one.code.rindex(one.code[:8]) :]
        assert one.code.startswith(again)
        # The word behind the beginning said again.
        assert one.code[: one.target_char_positions[0]] == f"{again} "
    for one in unrepeated:
        assert one.code[:12] not in one.code[12:]
        assert one.code[one.target_char_positions[0] - 1] == " "
    assert not {one.code[:20] for one in repeated} & {one.code[:20] for one in unrepeated}
    with pytest.raises(PromptError, match="expected 3000 sentences"):
        repeated_samples(shipped_prose(), 1000)


def test_the_specimen_looks_behind_what_it_reads_again(tmp_path):
    """It was trained to copy: in some layer the word that came next is looked at more, after the sentence
    itself than after another one; by how much belongs to the weights."""
    found = compute("layer_scan", store=tmp_path / "store")
    layer, p = found.best
    assert p < 0.01
    row = found.scan.sel(layer=layer)
    assert float(row["mean"].sel(condition="A")) > 2 * float(row["mean"].sel(condition="B"))


def test_table_and_figure_show_every_layer_and_name_the_result(done, tmp_path, capsys):
    (path,) = done.render(Console(width=100), tmp_path)
    printed = " ".join(capsys.readouterr().out.split())
    assert "python_doctest (A) and rust_test (B)" in printed and "over 3 samples of A and 2 of B" in printed
    assert done.to_json()["provenance"]["keys"]["scan"][:12].encode() in path.read_bytes()


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"condition_a": "python_test"}, ConfigError, "did you mean 'python_doctest'"),
        ({"corpus": "nowhere.json"}, ConfigError, r"the file nowhere\.json: No such file .* samples as JSON"),
        ({"corpus": None, "condition_a": "x"}, ConfigError, "set corpus=FILE"),
        ({"unit": "byte"}, ConfigError, "unit to be characters or bytes, found 'byte'"),
        ({"start_layer": 3}, ConfigError, r"both in 0\.\.2, found 3 and 2"),
        ({"samples": 0}, ConfigError, "samples to be int of at least 1"),
    ],
)
def test_wrong_input_gives_one_clear_line_before_anything_runs(tiny_model, corpus, given, error, message):
    with pytest.raises(error, match=message) as found:
        build("layer_scan", **{"model": str(tiny_model), "corpus": corpus} | given)
    assert isinstance(found.value, MizarrError)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"marker_char_pos": 99, "marker_pattern": ""}, PromptError, r"positions in 0\.\.39, found 99"),
        ({"target_char_positions": [-1]}, PromptError, "found -1"),
        ({"target_char_positions": None}, ConfigError, "with id, code, marker_char_pos"),
        ({"marker_pattern": "is"}, PromptError, "its marker 'is' at character"),
    ],
)
def test_a_sample_that_does_not_fit_its_text_is_an_error(change, error, message, tmp_path):
    path = tmp_path / "corpus.json"
    path.write_text(json.dumps({"a": [CORPUS["python_doctest"][0] | change]}))
    with pytest.raises(error, match=message):
        read_samples(str(path), ["a"], unit="characters")


def test_conversion_uses_the_models_own_tokens(tiny_model):
    """A marker of several tokens is read at the token over its first character."""
    one = CORPUS["rust_test"][0]
    encoding = Subject(str(tiny_model)).tokenizer.encode(one["code"])
    marker, targets = one["marker_char_pos"], tuple(one["target_char_positions"])
    placed = place(Sample("four", one["code"], marker, "despair", targets), encoding, Conversion())
    assert placed is not None
    start, end = encoding.offsets[placed.marker]
    assert start <= marker < end
