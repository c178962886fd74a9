"""Feature workflows as they come: offline, on the specimen and its dictionaries, an effect to be seen."""

from __future__ import annotations

from pathlib import Path

import pytest

from mizarr.workflows import compute


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("defaults") / "store"


def test_a_feature_injected_at_the_name_changes_the_fact(store: Path):
    told = compute("planning_in_poems", store=store).to_json()
    assert (told["model"], told["clt_repo"]) == ("specimen", "specimen/clt")
    last = told["tokens"].index(" is")
    assert told["max_position"] == last - 1, "the end of the name"
    assert told["max_prob"] > 20 * told["baseline_prob"]
    best = told["sweep"][told["max_position"]]
    assert best["suppress_word_prob"] < 0.5 * told["sweep"][1]["suppress_word_prob"]
    assert max(row["prob"] for row in told["sweep"][: last - 1]) < 5 * told["baseline_prob"]


def test_a_head_that_read_the_name_looks_away(store: Path):
    told = compute("attention_routing", store=store).to_json()
    strongest = told["top_heads"][0]
    assert strongest["baseline_attn"] > 0.2
    assert strongest["steered_attn"] < 0.5 * strongest["baseline_attn"]


def test_a_correction_brings_the_fact_back(store: Path):
    told = compute("correction_test", store=store).to_json()
    first, last = told["correction_sweep"][0], told["correction_sweep"][-1]
    assert (told["commit_word"], told["correct_word"]) == ("English", "French")
    assert first["top1_token"] == " English"
    assert last["top1_token"] == " French"


def test_the_probe_finds_features_of_the_answer(store: Path):
    told = compute("clt_probe", store=store).to_json()
    assert told["search_word"] == "French"
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
