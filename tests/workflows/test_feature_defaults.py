"""Feature workflows as they come: offline, on the specimen and its dictionaries, an effect to be seen."""

from __future__ import annotations

from pathlib import Path

import pytest

from mizarr.workflows import compute

pytestmark = pytest.mark.wide


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("defaults") / "store"


def test_a_feature_injected_at_the_end_of_the_line_changes_the_rhyme(store: Path):
    told = compute("planning_in_poems", store=store).to_json()
    assert (told["model"], told["clt_repo"]) == ("specimen", "specimen/clt")
    assert told["kind"] == "couplet"
    site = told["tokens"].index("\n") - 1
    assert told["max_position"] == site, "the end of the first line"
    assert told["max_prob"] > 1000 * told["baseline_prob"]
    best = told["sweep"][site]
    assert best["suppress_word_prob"] < 0.1 * told["sweep"][0]["suppress_word_prob"]
    assert max(row["prob"] for row in told["sweep"] if row["position"] != site) < 0.1 * told["max_prob"]
    here, elsewhere = told["findings"]
    assert here["verdict"] == "no more than chance", "one of 211 that were looked at"
    assert elsewhere["verdict"] == "beyond chance" and elsewhere["held_out"]
    assert elsewhere["null"]["as_large"] == 0 and elsewhere["prompts"] == 8


def test_heads_that_read_the_end_of_the_line_look_no_further_away_than_with_other_features(store: Path):
    told = compute("attention_routing", store=store).to_json()
    strongest = told["top_heads"][0]
    assert strongest["baseline_attn"] > 0.2
    assert strongest["steered_attn"] < strongest["baseline_attn"]
    assert {each["verdict"] for each in told["findings"]} == {"no more than chance"}


def test_a_correction_brings_the_rhyme_back(store: Path):
    told = compute("correction_test", store=store).to_json()
    first, last = told["correction_sweep"][0], told["correction_sweep"][-1]
    assert (told["commit_word"], told["correct_word"]) == ("run", "quite")
    assert first["top1_token"] == " run"
    assert last["top1_token"] == " quite"
    elsewhere = told["findings"][1]
    assert elsewhere["verdict"] == "beyond chance" and elsewhere["held_out"]


def test_the_probe_finds_features_of_the_answer(store: Path):
    told = compute("clt_probe", store=store).to_json()
    assert told["search_word"] == "light"
    active = {(row["layer"], row["index"]) for layer in told["layers"] for row in layer["features"]}
    writes = told["features"][0]
    assert (writes["layer"], writes["index"]) in active, "what writes the answer best is among the active"


def test_the_autoencoder_explains_most_of_the_state(store: Path):
    told = compute("sae_features", store=store).to_json()
    assert told["dictionary"] == "specimen/sae"
    assert told["fraction_of_variance_unexplained"] < 0.5
    assert all(row["active"] for row in told["positions"][1:])


def test_both_kinds_of_transcoders_are_compared(store: Path):
    told = compute("clt_vs_plt", store=store).to_json()
    assert {arm: found["transcoder_repo"] for arm, found in told["arms"].items()} == {
        "clt": "specimen/clt",
        "plt": "specimen/plt",
    }
    assert told["step_a"]["max_prob"] > 20 * told["baseline_prob"]
    assert told["sanity_gates"] == {}
