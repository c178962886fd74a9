"""The workflow `steering`, from contrast pairs to texts side by side and a claim."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from mizarr.stages.causal.controls import CHANCE, by_sign
from mizarr.store.errors import ConfigError, MizarrError
from mizarr.workflows import build, compute
from mizarr.workflows.material import sizes
from mizarr.workflows.material.samples.contrasts import PRESETS
from mizarr.workflows.steering.steering import Steering
from tests.workflows.test_claims import SMALL, random_model

FEW = {"pairs": 5, "layers": [1, 4], "strengths": [0.5, 1.0], "controls": 4, "max_tokens": 4}
PAIR = {"prompt": "The film was", "positive": "great.", "negative": "bad."}


@pytest.fixture(scope="module")
def steered(tmp_path_factory: pytest.TempPathFactory) -> Steering:
    return compute("steering", store=tmp_path_factory.mktemp("store"), preset="sentiment", **FEW)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_enough_pairs_of_texts_that_differ(name):
    pairs = PRESETS[name].pairs
    assert len(pairs) >= 40
    assert len({prompt for prompt, *_ in pairs}) == len(pairs)
    for prompt, *ends in pairs:
        assert prompt == prompt.strip() and all(end[0] == " " and end.strip() for end in ends)
    assert not {end for _, end, _ in pairs} & {end for *_, end in pairs}


def test_pairs_alternate_between_choosing_and_scoring(steered):
    experiment = steered.nodes["steered"].experiment
    assert len(experiment.chosen_on) == len(experiment.scored_on) == 5
    assert not set(experiment.chosen_on) & set(experiment.scored_on)
    assert [prompt for prompt, *_ in steered.scored] == [
        pair[0] for pair in PRESETS["sentiment"].pairs[1:10:2]
    ]
    encode = steered.subject.tokenizer.encode
    for (prompt, positive, _), ids in zip(steered.scored, experiment.scored_on, strict=True):
        assert [*ids[0], *ids[1]] == encode(prompt + positive).ids


def test_the_claim_is_the_gain_on_held_out_texts_beside_random_directions(steered):
    result = steered.result("steered").load()
    (claim,) = steered.claims()
    gains = (result["steered"] - result["plain"]).values
    assert claim.effect == pytest.approx(gains.mean()) and claim.held_out and claim.prompts == 5
    draws = (result["random"] - result["plain"]).values.mean(0)
    np.testing.assert_allclose(claim.null.values, draws)
    assert claim.levels[1] - claim.levels[0] == pytest.approx(claim.effect)
    if by_sign(result["order"].values) > CHANCE:
        assert "better than their tokens in random order, no more than chance" in steered.not_claimed


def test_a_document_has_the_texts_side_by_side_and_the_candidates(steered):
    document = steered.to_json()
    assert [row["prompt"] for row in document["texts"]] == [prompt for prompt, *_ in steered.scored]
    assert {"plain_text", "steered_text", "plain_loss", "steered_loss", "gain"} <= document["texts"][0].keys()
    assert [row["layer"] for row in document["candidates"]] == [1, 4]
    assert document["chosen_layer"] in (1, 4) and document["chosen_strength"] in (0.5, 1.0)
    gains = {
        (row["layer"], strength): gain
        for row in document["candidates"]
        for strength, gain in zip((0.5, 1.0), row["gain"], strict=True)
    }
    assert max(gains, key=gains.__getitem__) == (document["chosen_layer"], document["chosen_strength"])


def test_a_page_shows_the_texts(steered, tmp_path: Path):
    page = steered.report(tmp_path / "page.html").read_text("utf-8")
    assert steered.scored[0][0] in page and "Candidates by layer" in page


def test_random_models_claim_nothing(tmp_path: Path):
    """Heads that are the embedding, too, where a direction may raise single tokens."""
    for seed, tied in product(range(3), (True, False)):
        model = random_model(tmp_path / f"{seed}{tied}", seed, **SMALL, tie_word_embeddings=tied)
        settings = {"pairs": 8, "layers": [0], "strengths": [0.5, 1.0], "controls": 19, "max_tokens": 1}
        found = compute("steering", store=tmp_path / f"s{seed}{tied}", model=str(model), **settings)
        verdicts = [finding["verdict"] for finding in found.to_json()["findings"]]
        assert "beyond chance" not in verdicts


def test_sizes_fall_with_the_operations_of_a_run(monkeypatch):
    def counts() -> list[int]:
        experiment = build("steering").nodes["steered"].experiment
        return [len(experiment.chosen_on), len(experiment.scored_on)]

    assert counts() == [20, 20]
    monkeypatch.setattr(sizes, "OPERATIONS", sizes.OPERATIONS / 40)
    chosen, scored = counts()
    assert 20 >= chosen > scored > 5, "a scored pair takes more runs than one that chooses"
    monkeypatch.setattr(sizes, "OPERATIONS", 1.0)
    assert counts() == [5, 5]


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([PAIR] * 9, "at least ten contrast pairs .*, five of which are held out, found 9 records; write"),
        ({"prompt": "a"}, "found dict"),
        ([{"prompt": "The film was", "positive": "great."}] * 10, "record 0 .* found none in negative;"),
        ([*[PAIR] * 9, {**PAIR, "positive": " "}], "record 9 .* both sides .* found none in positive"),
        ([{**PAIR, "negative": " great."}] * 10, "two continuations that differ, found 'great.' on both"),
    ],
)
def test_files_without_two_sides_are_refused_in_one_line(records, message, tmp_path: Path):
    file = tmp_path / "pairs.json"
    file.write_text(json.dumps(records))
    with pytest.raises(ConfigError, match=message) as error:
        build("steering", data=str(file))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"preset": "frensh"}, "did you mean 'french'"),
        ({"preset": "french", "data": "pairs.json"}, "expected a preset or data"),
        ({"pairs": 21}, "pairs of at most 20, half of the 40 contrast pairs, found 21"),
        ({"pairs": 4}, "pairs of at least 5, .* found 4; ask for 5 or more, or for no claim: controls=0"),
        ({"layers": [6]}, "expected layers from 0 to 5"),
        ({"max_tokens": 600}, "reads at most"),
    ],
)
def test_settings_that_do_not_fit_are_refused_in_one_line(settings, message):
    with pytest.raises(MizarrError, match=message) as error:
        build("steering", **settings)
    assert "\n" not in str(error.value)


def pairs_file(folder: Path, n: int) -> str:
    """A file of contrast pairs with different prompts."""
    words = ("film", "book", "soup", "song", "town", "play", "room", "wine", "game", "trip")
    file = folder / "pairs.json"
    file.write_text(json.dumps([{**PAIR, "prompt": f"The {word} was"} for word in words[:n]]))
    return str(file)


@pytest.mark.parametrize("pairs", [0, 5])
def test_the_smallest_accepted_file_can_pass_the_sign_test(tmp_path: Path, monkeypatch, pairs):
    with pytest.raises(ConfigError, match="at least ten contrast pairs"):
        build("steering", data=pairs_file(tmp_path, 9))
    monkeypatch.setattr(sizes, "OPERATIONS", 1.0)
    experiment = build("steering", data=pairs_file(tmp_path, 10), pairs=pairs).nodes["steered"].experiment
    assert by_sign(np.ones(len(experiment.scored_on))) <= CHANCE < by_sign(np.ones(4))


def test_pairs_of_a_file_are_steered(tmp_path: Path):
    given = FEW | {"pairs": 2, "controls": 0}
    found = compute(
        "steering", store=tmp_path / "store", data=pairs_file(tmp_path, 10), method="pca", **given
    )
    assert [prompt for prompt, *_ in found.scored] == ["The book was", "The song was"]
    (finding,) = found.to_json()["findings"]
    assert "of the positive continuation" in finding["claim"]
    assert finding["verdict"] == "nothing is claimed, as no control was run"
