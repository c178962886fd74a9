"""Causal tracing from a prompt to tables, figures and JSON."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from scipy import stats

import mizarr
from mizarr.stages.causal.grids.tracing import CausalTracing, embedding_deviation
from mizarr.store.errors import ConfigError, PromptError
from mizarr.workflows import build, compute
from mizarr.workflows.material.facts.fact_pairs import pairs_of_facts
from mizarr.workflows.subject import shipped_facts

GIVEN = {"prompt": "it was the season of", "target": " light", "subject": "season", "facts": 2}


@pytest.fixture(scope="module")
def done(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory):
    store = tmp_path_factory.mktemp("tracing") / "store"
    return compute("causal_tracing", store=store, model=str(tiny_model), samples=2, window=2, **GIVEN)


def test_cells_are_means_over_noised_passes_with_clean_states_of_a_window_put_back(done, tiny_model: Path):
    model = mizarr.Model.from_pretrained(tiny_model)
    document = json.loads(json.dumps(done.to_json(), allow_nan=False))
    ids, answer = model.tokenizer.encode(GIVEN["prompt"]).ids, document["target_token_id"]
    subject, last = document["subject_positions"], len(ids) - 1
    assert "".join(document["tokens"][place] for place in subject).strip() == "season"
    points = [f"blocks.{layer}.hook_attn_out" for layer in range(3)]
    clean = model.forward([ids], mizarr.HookSpec().capture(*points))
    assert document["clean_probability"] == pytest.approx(
        float(clean.logits[0, -1].double().softmax(-1)[answer]), abs=1e-6
    )
    drawn = CausalTracing(tokens=tuple(ids), subject=tuple(subject), kinds=("attn_out",), metrics=())
    noised, restored = [], []
    for sample in range(2):
        noise = drawn.noise(sample, 32) * (3.0 * embedding_deviation(model))
        for found, layers in ((noised, ()), (restored, (0, 1))):
            spec = mizarr.HookSpec().intervene("hook_embed", mizarr.Add(noise, positions=tuple(subject)))
            for layer in layers:
                state = clean[points[layer]][0, last : last + 1]
                spec = spec.intervene(points[layer], mizarr.Replace(state, positions=(last,)))
            logits = model.forward([ids], spec).logits[0, -1].double()
            found.append(float(logits.softmax(-1)[answer]))
    assert document["noised_probability"] == pytest.approx(np.mean(noised), abs=1e-6)
    told = document["attn_out"]
    assert told["probability"][1][last] == pytest.approx(np.mean(restored), abs=1e-6)
    assert told["std"][1][last] == pytest.approx(np.std(restored), abs=1e-6)
    np.testing.assert_allclose(document["resid_post"]["probability"][-1][last], document["clean_probability"])


def test_the_best_place_of_each_kind_is_told_and_framed_where_noise_was(done, tmp_path: Path, capsys):
    document = done.to_json()
    for best in document["best"]:
        grid = np.array(document[best["kind"]]["probability"])
        assert best["probability"] == grid.max() == grid[best["layer"], best["position"]]
    (path,) = done.render(Console(width=140), tmp_path)
    assert path.name == "causal_tracing.png" and path.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "State after the layer" in printed and "with noise on 'season'" in printed
    places = document["subject_positions"]
    frames = {view.framed for view in done.shown if view.kind == "heatmap"}
    assert frames == {((0, places[0], 2, places[-1]),)}


def test_one_noise_has_no_spread(tiny_model: Path, tmp_path: Path):
    one = compute(
        "causal_tracing", store=tmp_path, model=str(tiny_model), samples=1, kinds=["mlp_out"], **GIVEN
    )
    assert one.to_json()["mlp_out"]["std"] is None
    assert list(one.nodes) == ["general_facts", "known", "mlp_out"], (
        "of facts that nobody knows none is traced"
    )
    planned = build("causal_tracing", model=str(tiny_model), kinds=["mlp_out"], **GIVEN)
    assert list(planned.nodes) == ["general_facts", "known", "mlp_out", "choice_mlp_out", "scored_mlp_out"]


FEW = {"facts": 2, "fact_samples": 2, "controls": 30}


@pytest.fixture(scope="module")
def recalled(tmp_path_factory: pytest.TempPathFactory):
    """The specimen on its fact, and on four others."""
    store = tmp_path_factory.mktemp("recalled") / "store"
    return compute("causal_tracing", store=store, kinds=["resid_post", "mlp_out"], samples=3, **FEW)


def test_the_place_chosen_restores_in_other_facts_what_plain_forwards_say(recalled):
    document, model = recalled.to_json(), mizarr.Model.from_pretrained("specimen")
    found = document["findings"][1]
    site = document["choice"]["mlp_out"]
    assert f"mlp_out of layer {site['layer']} at {site['role']}" in found["claim"]
    names = ("the subject's last token", "the token after it", "the last token")
    point = f"blocks.{site['layer']}.hook_mlp_out"
    rises = []
    for pair in [
        pair
        for pair in pairs_of_facts(recalled.subject, shipped_facts())
        if (ids := model.tokenizer.encode(pair["original_prompt"]).ids) != list(recalled.tokens)
        and len(ids) - differing(model, pair)[0] >= 6
    ][2:4]:
        ids, (start, end) = model.tokenizer.encode(pair["original_prompt"]).ids, differing(model, pair)
        (answer, *_) = model.tokenizer.encode(f" {pair['gt_original_target']}", add_special=False).ids
        place = (end - 1, end, len(ids) - 1)[names.index(site["role"])]
        noised = tuple(range(start, end))
        clean = model.forward([ids], mizarr.HookSpec().capture(point))[point][0, place : place + 1]
        drawn = CausalTracing(tokens=tuple(ids), subject=noised, kinds=("mlp_out",), metrics=())
        for sample in range(2):
            noise = drawn.noise(sample, model.config.hidden_size) * (3.0 * embedding_deviation(model))
            spec = mizarr.HookSpec().intervene("hook_embed", mizarr.Add(noise, positions=noised))
            both = [model.forward([ids], spec).logits[0, -1]]
            spec = spec.intervene(point, mizarr.Replace(clean, positions=(place,)))
            both.append(model.forward([ids], spec).logits[0, -1])
            before, after = (float(each.double().softmax(-1)[answer]) for each in both)
            rises.append(after - before)
    assert found["effect"] == pytest.approx(np.mean(rises), abs=1e-5)
    assert (found["prompts"], found["held_out"], found["noises"]) == (2, True, 2)
    assert found["null"]["draws"] == 30


def differing(model: mizarr.Model, pair: dict[str, str]) -> tuple[int, int]:
    """First and behind the last position at which a pair's first prompt differs from its second."""
    one, other = (
        model.tokenizer.encode(pair[name]).ids for name in ("original_prompt", "counterfactual_prompt")
    )
    at = [i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b]
    return at[0], at[-1] + 1


def test_a_state_at_the_last_token_is_no_candidate_as_it_is_the_answer(recalled):
    document = recalled.to_json()
    assert document["choice"]["resid_post"]["role"] != "the last token"
    held = {claim["claim"]: claim["null"] for claim in document["findings"] if claim["prompts"] == 1}
    (state,) = (null for claim, null in held.items() if "resid_post" in claim)
    grid = np.array(document["resid_post"]["probability"])[:, document["subject_positions"][0] : -1]
    assert state["draws"] == min(30, grid.size - 1)
    assert state["high_95"] <= grid.max() - document["noised_probability"] + 1e-9


def test_what_is_found_in_the_prompt_has_the_spread_of_its_noises(recalled):
    document = recalled.to_json()
    found = document["findings"][-1]
    site = document["choice"]["mlp_out"]
    places = {
        "the subject's last token": document["subject_positions"][-1],
        "the token after it": document["subject_positions"][-1] + 1,
        "the last token": len(document["tokens"]) - 1,
    }
    mean, deviation = (
        document["mlp_out"][name][site["layer"]][places[site["role"]]] for name in ("probability", "std")
    )
    assert found["effect"] == pytest.approx(mean - document["noised_probability"], abs=1e-9)
    half = stats.t.ppf(0.975, 2) * deviation / np.sqrt(2)
    low, high = found["interval_95"]
    assert (high - low) / 2 == pytest.approx(half, rel=0.04)
    assert "95 % interval over 3 noises: " in found["sentence"]
    assert "chosen on other prompts)" in found["sentence"]


def test_of_facts_that_a_model_does_not_know_nothing_is_claimed(done):
    """Random weights: what is put back moves probabilities, but of no answer that was there."""
    (told,) = (view for view in done.shown if view.kind == "findings")
    assert done.to_json()["findings"] == []
    assert "choice" not in done.to_json()
    said = (
        r"knows the answer of [01] of 2 facts to choose on and [01] of 2 facts to score on; a claim needs 2"
    )
    assert re.search(said, told.caption)
    assert done.to_json()["not_claimed"] == told.caption


def test_the_specimen_recalls_a_fact_where_its_subject_was(recalled):
    document = recalled.to_json()
    assert document["noised_probability"] < document["clean_probability"]
    best, _ = document["best"]
    assert best["restored"] > 0.9
    grid = np.array(document["resid_post"]["probability"])
    first = int(np.argmax(grid[0]))
    assert first in document["subject_positions"], "the first layer holds it where the subject is"
    assert int(np.argmax(grid[-1])) == len(document["tokens"]) - 1


def test_windows_are_a_fifth_of_the_layers_and_never_of_the_stream():
    planned = build("causal_tracing")
    assert planned.window == 1
    wide = build("causal_tracing", window=4)
    assert {kind: wide.nodes[kind].experiment.window for kind in wide.kinds} == {
        "resid_post": 1,
        "attn_out": 4,
        "mlp_out": 4,
    }


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"prompt": "it was the season of"}, "found prompt without target and subject"),
        ({"subject": "season"}, "or none of them, found subject"),
        ({**GIVEN, "kinds": ["z"]}, "expected kinds among"),
        ({**GIVEN, "samples": -1}, "at least 0"),
        ({**GIVEN, "multiplier": 0.0}, "more than 0"),
    ],
)
def test_settings_that_cannot_be_are_refused(given, match, tiny_model: Path):
    with pytest.raises(ConfigError, match=match):
        build("causal_tracing", model=str(tiny_model), **given)


def test_a_subject_that_is_not_in_the_prompt_is_refused(tiny_model: Path):
    with pytest.raises(PromptError, match="winter"):
        build("causal_tracing", model=str(tiny_model), **{**GIVEN, "subject": "winter"})


def test_facts_of_a_file_are_traced_in_place_of_shipped_ones(tmp_path: Path):
    subject = build("causal_tracing").subject
    path = tmp_path / "own.json"
    records = [
        record
        for record in pairs_of_facts(subject, shipped_facts())
        if len(ids := subject.tokenizer.encode(record["original_prompt"]).ids) - ids_differ(subject, record)
        > 5
    ][10:15]
    path.write_text(json.dumps(records))
    done = build("causal_tracing", data=str(path), kinds=["mlp_out"])
    assert (done.prompt, done.target) == (records[0]["original_prompt"], records[0]["gt_original_target"])
    halves = [
        [list(each.tokens) for each in done.nodes[name].experiment.experiments]
        for name in ("choice_mlp_out", "scored_mlp_out")
    ]
    ids = [subject.tokenizer.encode(record["original_prompt"]).ids for record in records[1:]]
    assert halves == [ids[:2], ids[2:]]
    assert list(build("causal_tracing", kinds=["mlp_out"], controls=0).nodes) == ["mlp_out"]


def ids_differ(subject, record: dict[str, str]) -> int:
    """First position at which a pair's first prompt differs from its second."""
    one, other = (
        subject.tokenizer.encode(record[name]).ids for name in ("original_prompt", "counterfactual_prompt")
    )
    return next(i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
