"""Probes from wrapped prose, or labelled texts, to tables, figure and JSON."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from rich.console import Console

import mizarr
from mizarr.stages.geometry.probe import probe
from mizarr.store import PackedTokens
from mizarr.store.errors import ConfigError, HookPointNotFound, MizarrError, PromptError, TokenizerError
from mizarr.workflows import build, compute
from mizarr.workflows.material.line_corpus import wrapped_prose
from mizarr.workflows.material.probe_targets import (
    Target,
    read_labels,
    thinned,
    wrapped_targets,
)
from mizarr.workflows.subject import Subject

TEXTS = [
    "it was the best of times",
    "it was the age of wisdom",
    "we had everything before us",
    "it was the winter of despair",
    "we had nothing before us",
    "it was the season of Light",
    "we were all going direct to Heaven",
    "it was the epoch of belief",
]


@pytest.fixture(scope="module")
def subject(tiny_model: Path) -> Subject:
    return Subject(str(tiny_model))


@pytest.fixture
def labelled(tmp_path: Path):
    def write(entries, *, lines: bool = True) -> str:
        path = tmp_path / "mood.jsonl"
        path.write_text("\n".join(map(json.dumps, entries)) if lines else json.dumps(entries))
        return str(path)

    return write


@pytest.fixture(scope="module")
def prose(tmp_path_factory: pytest.TempPathFactory, prose_file: Path) -> str:
    path = tmp_path_factory.mktemp("long") / "prose.txt"
    words = prose_file.read_text().split()
    rng = np.random.default_rng(0)
    path.write_text(" ".join(rng.choice(words, 1200)))
    return str(path)


@pytest.fixture(scope="module")
def done(tiny_model: Path, prose: str, tmp_path_factory: pytest.TempPathFactory):
    store = tmp_path_factory.mktemp("probe") / "store"
    return compute("probe", store=store, model=str(tiny_model), text=prose, widths=[20, 30])


def test_counts_and_breaks_of_a_line_are_those_on_paper():
    """BOS, "ab", " c", newline, "de": the newline takes no part, nor does the last token as a break."""
    spans = [(0, 0), (0, 2), (2, 4), (4, 5), (5, 7)]
    tokens = PackedTokens.from_lists([[0, 1, 2, 3, 4]], ["ab c\nde"], [spans])
    count, line_break = wrapped_targets(tokens, ["character_count", "line_break"])
    nan = np.nan
    np.testing.assert_array_equal(count.values, [nan, 0, 2, nan, 0])
    np.testing.assert_array_equal(line_break.values, [nan, 0, 1, nan, nan])
    assert (count.kind, line_break.kind) == ("number", "label")
    assert line_break.classes == ("other", "line break")


def test_prose_is_read_once_at_changing_widths(subject, prose):
    tokens = wrapped_prose(subject, [Path(prose).read_text()], (20, 30), 40)
    assert tokens.row_size.max() <= 40
    whole = " ".join(" ".join(text.split()) for text in tokens.texts)
    assert whole == " ".join(Path(prose).read_text().split())
    widest = [max(map(len, text.split("\n"))) for text in tokens.texts]
    assert {width <= 20 for width in widest} == {True, False}


def test_numbers_are_those_of_the_stage_on_the_captured_states(done, tiny_model, tmp_path):
    tokens, _, _ = done._targets()
    store = mizarr.open_store(tmp_path)
    states = mizarr.capture(str(tiny_model), tokens, "blocks.*.hook_resid_post", store=store, progress=False)[
        "resid_post"
    ]
    prompt = xr.DataArray(tokens.prompt_of(slice(None)), dims="token")
    for target in done.targets:
        own = probe(states, xr.DataArray(target.values, dims="token"), prompt, kind=target.kind)
        found = done.results_by_target[target.name]
        for name in ("score", "low", "high", "penalty"):
            np.testing.assert_allclose(found[name], own[name], rtol=1e-6, atol=1e-9)


def test_json_has_every_layer_with_interval_and_control(done):
    document = json.loads(json.dumps(done.to_json(), allow_nan=False))
    count, line_break = document["results"]
    assert (count["target"], count["measure"], count["classes"]) == ("character_count", "R2", [])
    assert line_break["classes"] == ["other", "line break"]
    for told in (count, line_break):
        assert [row["layer"] for row in told["layers"]] == [0, 1, 2]
        for row in told["layers"]:
            for which in ("true", "shuffled"):
                assert row[which]["low"] <= row[which]["score"] <= row[which]["high"]
        scores = [row["true"]["score"] for row in told["layers"]]
        assert told["best_layer"] == int(np.argmax(scores))
    assert document["provenance"]["keys"].keys() == {"character_count", "line_break"}


def test_the_specimen_holds_the_count_and_the_break_where_shuffled_ones_are_not_found(tmp_path):
    """The numbers belong to the weights; that they are far from the control does not."""
    done = compute("probe", store=tmp_path / "store", layers=[0, 3], examples=2000)
    for target in done.targets:
        score = done.results_by_target[target.name]["score"].sel(layer=3)
        low, high = (done.results_by_target[target.name][name].sel(layer=3) for name in ("low", "high"))
        assert float(low.sel(targets="true")) > float(high.sel(targets="shuffled"))
        assert float(score.sel(targets="true")) > float(
            done.results_by_target[target.name]["high"].sel(layer=0, targets="true")
        )


def test_labels_of_texts_are_read_off_the_last_token(subject, labelled):
    tokens, target, _ = read_labels(
        subject, labelled([{"text": text, "label": "it" in text} for text in TEXTS]), "auto"
    )
    last = np.cumsum(tokens.row_size) - 1
    assert np.flatnonzero(~np.isnan(target.values)).tolist() == last.tolist()
    assert target.classes == ("false", "true")
    assert target.values[last].tolist() == [1, 1, 0, 1, 0, 1, 0, 1]
    assert (target.name, target.kind) == ("mood", "label")


def test_labels_of_spans_are_read_off_every_token_they_overlap(subject, labelled):
    entry = {
        "text": TEXTS[0],
        "spans": [{"start": 11, "end": 15, "label": 2.5}, {"start": 0, "end": 2, "label": 1}],
    }
    tokens, target, _ = read_labels(subject, labelled([entry], lines=False), "auto")
    encoding = subject.tokenizer.encode(TEXTS[0])
    expected = np.full(len(encoding), np.nan)
    expected[encoding.char_range_to_tokens(11, 15)] = 2.5
    expected[encoding.char_range_to_tokens(0, 2)] = 1
    np.testing.assert_array_equal(target.values, expected)
    assert target.kind == "number" and tokens.n_prompts == 1


def test_numbers_may_be_meant_as_labels_and_null_is_none(subject, labelled):
    entries = [{"text": text, "label": label} for text, label in zip(TEXTS, [1, 10, 2, None], strict=False)]
    _, target, _ = read_labels(subject, labelled(entries), "label")
    assert target.classes == ("1", "10", "2")
    assert (~np.isnan(target.values)).sum() == 3


def test_labelled_texts_run_to_a_table(tiny_model, labelled, tmp_path, capsys):
    path = labelled([{"text": f"{text} {i}", "label": text[:2]} for i in range(3) for text in TEXTS])
    found = compute("probe", store=tmp_path / "store", model=str(tiny_model), labels=path, balance=False)
    document = found.to_json()
    (told,) = document["results"]
    assert (told["target"], told["classes"]) == ("mood", ["it", "we"])
    assert told["n_train"] + told["n_test"] == 24
    (file,) = found.render(Console(width=100), tmp_path / "figures")
    assert "Linear probe of mood on resid_post of" in capsys.readouterr().out
    assert document["provenance"]["keys"]["mood"][:12].encode() in file.read_bytes()


def test_texts_of_a_group_are_all_train_or_all_test(tiny_model, labelled, tmp_path):
    """Documents of five copies of one text, with labels of no pattern: copies in both parts would leak."""
    entries = [
        {"text": f"{TEXTS[i % 8]} {TEXTS[i // 8]}", "label": "ab"[(i * i // 3) % 2], "document": i}
        for i in range(16)
        for _ in range(5)
    ]
    given = {"model": str(tiny_model), "labels": labelled(entries), "balance": False, "layers": [1]}
    done = build("probe", **given, groups="document")
    _, _, group = done._targets()
    assert len(np.unique(group)) == 16
    assert all(len(set(group[start : start + 5].tolist())) == 1 for start in range(0, 80, 5))
    settings = (given, given | {"groups": "document"})
    scores = [compute("probe", store=tmp_path / "store", **each) for each in settings]
    by_text, by_document = (one.to_json()["results"][0]["layers"][0]["true"]["score"] for one in scores)
    # Of copies in the train part the label is known; a document that was not read is a guess.
    assert by_text > 0.95 > by_document + 0.1
    with pytest.raises(ConfigError, match=r"entry 0 .*'page'.*found 'text', 'label', 'document'"):
        build("probe", **given, groups="page")
    with pytest.raises(ConfigError, match="labels=FILE beside groups=page"):
        build("probe", model=str(tiny_model), groups="page")
    few = labelled([entry | {"document": i % 2} for i, entry in enumerate(entries)])
    with pytest.raises(PromptError, match=r"at least 3 groups of the field 'document'.*found 2"):
        build("probe", **given | {"labels": few}, groups="document")


def test_examples_are_thinned_evenly_or_not():
    values = np.array([0.0] * 60 + [1.0] * 15 + [np.nan] * 25)
    target = Target("x", values, ("a", "b"))
    even = thinned(target, examples=0, balance=True, seed=1)
    assert np.bincount(even.values[~np.isnan(even.values)].astype(int)).tolist() == [15, 15]
    few = thinned(target, examples=20, balance=True, seed=1)
    assert np.bincount(few.values[~np.isnan(few.values)].astype(int)).tolist() == [10, 10]
    some = thinned(target, examples=30, balance=False, seed=1)
    kept = ~np.isnan(some.values)
    assert kept.sum() == 30 and (some.values[kept] == values[kept]).all()
    assert (
        thinned(Target("x", values), examples=0, balance=True, seed=1).values.tolist()[:75]
        == values.tolist()[:75]
    )
    rare = Target("x", np.array([0.0] * 50 + [1.0] * 9), ("a", "b"))
    with pytest.raises(PromptError, match=r"found 9 of 'b'.*balance=false"):
        thinned(rare, examples=0, balance=True, seed=1)


def test_one_label_only_or_too_few_prompts_are_refused_before_anything_runs(tiny_model, labelled):
    path = labelled([{"text": text, "label": "same"} for text in TEXTS])
    with pytest.raises(PromptError, match="in 'mood', found 'same' alone"):
        build("probe", model=str(tiny_model), labels=path)
    path = labelled([{"text": text, "label": text[:2]} for text in TEXTS[1:3]])
    with pytest.raises(PromptError, match=r"at least 3 prompts.*found 2"):
        build("probe", model=str(tiny_model), labels=path, balance=False)


@pytest.mark.parametrize(
    ("entry", "error", "message"),
    [
        ({"text": "it was", "spans": [{"start": 3, "end": 9, "label": 1}]}, TokenizerError, r"found 3\.\.9"),
        ({"text": "it was", "spans": [{"start": 3, "label": 1}]}, ConfigError, "start, end and label"),
        ({"text": "it was"}, ConfigError, "entry 1 of"),
        ({"txt": "it was", "label": 1}, ConfigError, "entry 1 of"),
        ({"text": "it was", "label": 1}, PromptError, "found both; set kind=label"),
    ],
)
def test_a_file_of_another_form_is_one_clear_line(subject, labelled, entry, error, message):
    path = labelled([{"text": "we had", "label": "a"}, entry])
    with pytest.raises(error, match=message) as found:
        read_labels(subject, path, "auto")
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"targets": ["line_breaks"]}, ConfigError, "did you mean 'line_break'"),
        ({"targets": []}, ConfigError, "expected targets that is not empty"),
        (
            {"labels": "nowhere.json"},
            ConfigError,
            r"cannot read the file nowhere\.json: No such .*; correct it, or name another",
        ),
        ({"kind": "classes"}, ConfigError, "auto, label or number"),
        ({"point": "resid"}, ConfigError, "found 'resid'"),
        ({"layers": [7]}, HookPointNotFound, "7"),
        ({"widths": [1]}, ConfigError, "a list of int of at least 2"),
        ({"examples": -1}, ConfigError, "examples to be int of at least 0"),
    ],
)
def test_wrong_input_gives_one_clear_line_before_anything_runs(tiny_model, prose, given, error, message):
    with pytest.raises(error, match=message) as found:
        build("probe", **{"model": str(tiny_model), "text": prose} | given)
    assert isinstance(found.value, MizarrError)
    assert "\n" not in str(found.value)
