"""Causal tracing from a prompt to tables, figures and JSON."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

import mizarr
from mizarr.stages.causal.grids.tracing import CausalTracing, embedding_deviation
from mizarr.store.errors import ConfigError, PromptError
from mizarr.workflows import build, compute

GIVEN = {"prompt": "it was the season of", "target": " light", "subject": "season"}


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
                spec.intervene(points[layer], mizarr.Replace(state, positions=(last,)))
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
    assert list(one.nodes) == ["mlp_out"]


def test_the_specimen_recalls_a_fact_where_its_subject_was(tmp_path: Path):
    done = compute("causal_tracing", store=tmp_path / "store", kinds=["resid_post"], samples=3)
    document = done.to_json()
    assert document["noised_probability"] < document["clean_probability"]
    (best,) = document["best"]
    assert best["restored"] > 0.9
    grid = np.array(document["resid_post"]["probability"])
    early = [int(np.argmax(row)) for row in grid[:2]]
    assert set(early) <= set(document["subject_positions"]), "early layers hold it where the subject is"
    assert int(np.argmax(grid[-1])) == len(document["tokens"]) - 1


def test_windows_are_a_fifth_of_the_layers_and_never_of_the_stream():
    planned = build("causal_tracing")
    assert planned.window == 1
    wide = build("causal_tracing", window=4)
    assert {kind: node.experiment.window for kind, node in wide.nodes.items()} == {
        "resid_post": 1,
        "attn_out": 4,
        "mlp_out": 4,
    }


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"prompt": "it was the season of"}, "found prompt$"),
        ({"subject": "season"}, "or none of them, found subject"),
        ({**GIVEN, "kinds": ["z"]}, "expected kinds among"),
        ({**GIVEN, "kinds": []}, "at least one of kinds"),
        ({**GIVEN, "samples": 0}, "at least 1"),
        ({**GIVEN, "multiplier": 0.0}, "more than 0"),
    ],
)
def test_settings_that_cannot_be_are_refused(given, match, tiny_model: Path):
    with pytest.raises(ConfigError, match=match):
        build("causal_tracing", model=str(tiny_model), **given)


def test_a_subject_that_is_not_in_the_prompt_is_refused(tiny_model: Path):
    with pytest.raises(PromptError, match="winter"):
        build("causal_tracing", model=str(tiny_model), **{**GIVEN, "subject": "winter"})
