"""Monitors: labelled texts to claims, tables and figure; what files of labels may look like."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from mizarr.pipeline import run
from mizarr.store import open_store
from mizarr.store.errors import ConfigError, MizarrError, PromptError
from mizarr.workflows import build, compute
from mizarr.workflows.material.monitor_texts import (
    last_words,
    read_labelled_texts,
    shuffled_clauses,
    word_features,
)
from mizarr.workflows.subject import shipped_prose

FEW = {"layers": [0, 2], "controls": 19, "poolings": ["last"], "methods": ["logistic", "lda"]}


@pytest.fixture
def write(tmp_path: Path):
    def written(content, name: str = "mood.jsonl") -> str:
        path = tmp_path / name
        path.write_text(content if isinstance(content, str) else "\n".join(map(json.dumps, content)))
        return str(path)

    return written


def moods(n: int, seed: int = 0, ends: tuple[str, ...] = ("light", "dark"), **more):
    """Texts whose label is one word of them, in pairs that share all others."""
    rng = np.random.default_rng(seed)
    words = ["it", "was", "the", "best", "of", "times", "we", "had", "nothing", "before", "us"]
    rows = []
    for i in range(n):
        text = " ".join(rng.choice(words, 6))
        rows += [{"text": f"{text} {end}", "label": end, "pair": i} | more for end in ends]
    return rows


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """The shipped texts, on the specimen."""
    store = tmp_path_factory.mktemp("monitor") / "store"
    return compute("monitor", store=store, layers=[0, 5], controls=19, poolings=["last"], examples=140)


def test_word_order_is_read_from_states_and_not_from_words(done):
    first, second = done.claims()
    assert first.is_beyond_chance and first.effect > 0.6
    # Both texts of a pair have the same words, so every pair of groups is a tie.
    assert done.text_baseline["auroc"][0] == pytest.approx(0.5)
    assert second.is_beyond_chance
    assert first.prompts == int((done.result(done.chosen["node"])["fold"].values == -1).sum())
    assert first.null.values.mean() == pytest.approx(0.5, abs=0.1)


def test_the_choice_is_that_of_the_train_part(done):
    own = [record for record in done.detectors if not record["baseline"]]
    assert len(own) == 2 * 3
    assert done.chosen["cv_auroc"] == max(record["cv_auroc"] for record in own)
    result = done.result(done.chosen["node"])
    assert float(result["cv_auroc"].max()) == done.chosen["cv_auroc"]


def test_the_answer_is_said_in_tables_json_and_figure(done, tmp_path):
    document = json.loads(json.dumps(done.to_json(), allow_nan=False))
    assert document["chosen"]["layer"] in (0, 5)
    assert document["n_train"] + document["n_test"] == 140
    assert {record["baseline"] for record in document["detectors"]} == {
        "",
        "embedding",
        "counts of words",
        "tf-idf of words",
    }
    assert len(document["findings"]) == 2
    (figure,) = done.draw(tmp_path)
    assert figure.name == "monitor.png"
    page = done.report(tmp_path / "page.html").read_text()
    assert "Detectors of" in page and "selectivity" in page
    assert f"{done.chosen['auroc'][0]:.3f}" in done.summary


def test_labels_in_the_words_are_read_from_them_and_transfer(tiny_model, write, tmp_path):
    """The label is the last word: words and states both tell, so the probe tells no more than words."""
    labels, other = write(moods(40)), write(moods(20, seed=1), "other.jsonl")
    given = {"labels": labels, "groups": "pair", "transfer": other, "positive": "dark", **FEW}
    done = compute("monitor", store=tmp_path / "store", model=str(tiny_model), **given)
    first, second, third = done.claims()
    assert first.effect > 0.9 and third.effect > 0.9
    assert not second.is_beyond_chance
    assert (third.prompts, third.is_beyond_chance) == (40, True)
    assert done.result("transfer_last").sizes["example"] == 40
    assert (done.examples.positive, done.examples.negative) == ("dark", "light")


def test_labels_of_transfer_are_permuted_by_group(tiny_model, write, tmp_path):
    """With one group per label, a permutation keeps all labels or exchanges both."""
    other = [row | {"pair": row["label"]} for row in moods(20, seed=1)]
    given = {"labels": write(moods(40)), "groups": "pair", "transfer": write(other, "other.jsonl"), **FEW}
    done = compute("monitor", store=tmp_path / "store", model=str(tiny_model), **given)
    claim = list(done.claims())[2]
    assert claim.effect > 0.9
    is_kept = np.isclose(claim.null.values, claim.effect)
    assert 0 < is_kept.sum() < 19
    np.testing.assert_allclose(claim.null.values[~is_kept], 1 - claim.effect)
    assert not claim.is_beyond_chance


def test_the_label_to_detect_is_the_same_in_transfer(tiny_model, write):
    """By itself the other file would give its own last label, "zinc"."""
    given = {"model": str(tiny_model), "labels": write(moods(20)), **FEW}
    other = write(moods(10, ends=("light", "zinc")), "other.jsonl")
    workflow = build("monitor", transfer=other, **given)
    assert (workflow.examples.positive, workflow.transferred.positive) == ("light", "light")
    assert [text.endswith("light") for text in workflow.transferred.texts] == (
        workflow.transferred.is_positive.tolist()
    )
    other = write(moods(10, ends=("tin", "zinc")), "other.jsonl")
    with pytest.raises(
        ConfigError, match=r"'light', in .*other.jsonl', found tin, zinc; set positive"
    ) as caught:
        build("monitor", transfer=other, **given)
    assert "\n" not in str(caught.value)


def test_without_controls_nothing_is_claimed(tiny_model, write, tmp_path):
    given = {"labels": write(moods(40)), **FEW, "controls": 0, "layers": [1]}
    done = compute("monitor", store=tmp_path / "store", model=str(tiny_model), **given)
    assert [claim.verdict[:18] for claim in done.claims()] == ["nothing is claimed"] * 2
    json.dumps(done.to_json(), allow_nan=False)


def test_shipped_clauses_are_pairs_with_the_same_words():
    texts = shuffled_clauses(shipped_prose())
    assert len(texts.texts) == 300 and texts.is_positive.sum() == 150
    for first, second in zip(texts.texts[::2], texts.texts[1::2], strict=True):
        assert sorted(first.split()) == sorted(second.split())
    assert (texts.group[::2] == texts.group[1::2]).all()
    some = texts.some(41, 0)
    assert len(some.texts) == 40 and some.is_positive.sum() == 20


def test_text_features_are_those_of_scikit_learn():
    text = pytest.importorskip("sklearn.feature_extraction.text")
    texts = ["The cat sat", "the dog and the cat", "A dog sat: down", "unique words only", ""]
    counts, weighted = word_features(texts)
    shared = ["cat", "dog", "sat", "the"]
    peer = text.CountVectorizer(vocabulary=shared, token_pattern=r"\w+").fit_transform(texts).toarray()
    order = np.lexsort((shared, [-2, -2, -2, -2]))
    np.testing.assert_array_equal(counts, peer[:, order])
    peer = text.TfidfVectorizer(vocabulary=shared, token_pattern=r"\w+").fit_transform(texts).toarray()
    np.testing.assert_allclose(weighted, peer[:, order], atol=1e-12)
    assert last_words(["in the Box", "a box.", "an ox"]).tolist() == [0, 0, 1]


def test_tables_of_other_programs_are_read(write):
    path = write('prompt,prompt_len,target\n"one,\ntwo",3,1\nthree\u2028four,1,0\n', "5_set.csv")
    texts = read_labelled_texts(path, "", "")
    assert texts.texts == ("one,\ntwo", "three\u2028four")
    assert (texts.is_positive.tolist(), texts.positive, texts.negative) == ([True, False], "1", "0")
    path = write("text,label,origin\na,no,x\nb,yes,x\nc,maybe,y\n", "words.csv")
    texts = read_labelled_texts(path, "no", "origin")
    assert (texts.group.tolist(), texts.negative) == ([0, 0, 1], "other")


@pytest.mark.parametrize(
    ("content", "given", "error", "words"),
    [
        (moods(3, label="same"), {}, PromptError, "'same' at all 6 texts"),
        ([*moods(8), {"text": "no label", "label": None}], {}, PromptError, "entry 16 .* found none"),
        ([*moods(8), {"text": "no label"}], {}, ConfigError, "entry 16"),
        (moods(4), {}, PromptError, "positive ones in 4 groups"),
        (moods(20), {"folds": 19}, PromptError, "fewer folds"),
        (moods(8), {"positive": "ligth"}, ConfigError, "did you mean 'light'"),
        (moods(8), {"groups": "document"}, ConfigError, "entry 0 .*'document'"),
        ([*moods(8), {"text": "three", "label": "three"}], {}, ConfigError, "set positive=LABEL"),
        (moods(8), {"test_share": 1.0}, ConfigError, "test_share"),
        (moods(8), {"methods": ["svm"]}, ConfigError, "logistic, mass_mean or lda"),
    ],
)
def test_bad_files_and_settings_are_one_line(tiny_model, write, tmp_path, content, given, error, words):
    with pytest.raises(error, match=words) as caught:
        build("monitor", model=str(tiny_model), labels=write(content), **given)
    assert isinstance(caught.value, MizarrError)
    assert "\n" not in str(caught.value)


def test_settings_of_labelled_texts_need_a_file(tiny_model):
    for name in ("positive", "groups", "transfer"):
        with pytest.raises(ConfigError, match="expected labels=FILE beside"):
            build("monitor", model=str(tiny_model), **{name: "x"})


def test_layers_are_kept_one_by_one(tiny_model, write, tmp_path):
    """What a killed run has trained is not trained again: a layer is a cell of its own."""
    given = {"model": str(tiny_model), "labels": write(moods(20)), **FEW, "methods": ["mass_mean"]}
    store = open_store(tmp_path / "store", durability="process")
    build("monitor", **given | {"layers": [2]}).run(store, quiet=True)
    whole = build("monitor", **given | {"layers": [0, 2]})
    run(whole.nodes["probes_last"].inputs, store, quiet=True)
    status = whole.nodes["probes_last"].status(store)
    assert (status.is_cached, status.cells, status.cells_cached) == (False, 2, 1)
