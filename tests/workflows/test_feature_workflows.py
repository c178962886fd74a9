"""Workflows that inject features: what they tell is what single runs give."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mizarr
from mizarr.stages.features.dictionary import Dictionary
from mizarr.stages.features.effects.injection import Injection, injected
from mizarr.workflows import build, compute
from tests.random_dictionaries import save_random_clt

PROMPT = "The mother tongue of Danielle Darrieux is"


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Settings of an experiment on the specimen with random transcoders."""
    clt = save_random_clt(tmp_path_factory.mktemp("clt"), layers=6, hidden=192)
    return {
        "preset": "gemma2-2b-426k",
        "model": "specimen",
        "dictionary": str(clt),
        "prompt": PROMPT,
        "suppress": ("1:3", "4:0"),
        "inject": "2:7",
        "strength": 3.0,
    }


WORDS = {"suppress_word": "French", "inject_word": "London"}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("features") / "store"


@pytest.fixture(scope="module")
def model() -> mizarr.Model:
    return mizarr.Model.from_pretrained("specimen")


def steered(given: dict[str, Any], strength: float, position: int, *more: Injection) -> mizarr.HookSpec:
    features = [Injection("1:3", -strength), Injection("4:0", -strength), Injection("2:7", strength), *more]
    return injected(Dictionary.from_pretrained(given["dictionary"]), features, [position])


def test_planning_tells_the_probability_at_every_position(given, store: Path, model: mizarr.Model):
    told = compute("planning_in_poems", store=store, **given, **WORDS).to_json()
    french, london = (model.tokenize([f" {word}"])[0][-1] for word in ("French", "London"))
    ids = model.tokenize([PROMPT + " "])[0]
    assert [point["position"] for point in told["sweep"]] == list(range(len(ids)))
    plain = model.forward([ids]).logits[0, -1].double().softmax(-1)
    assert told["baseline_prob"] == pytest.approx(float(plain[london]), rel=1e-4)
    for point in told["sweep"]:
        probability = model.forward([ids], steered(given, 3.0, point["position"])).logits[0, -1].double()
        probability = probability.softmax(-1)
        assert point["prob"] == pytest.approx(float(probability[london]), rel=1e-3)
        assert point["suppress_word_prob"] == pytest.approx(float(probability[french]), rel=1e-3)
    best = max(told["sweep"], key=lambda point: point["prob"])
    assert (told["max_position"], told["max_prob"]) == (best["position"], best["prob"])
    assert [(one["layer"], one["index"]) for one in told["suppress_features"]] == [(1, 3), (4, 0)]


def test_routing_tells_how_every_head_moved(given, store: Path, model: mizarr.Model):
    settings = given | {"site": "of", "max_strength": 6.0, "steps": 2}
    told = compute("attention_routing", store=store, **settings).to_json()
    ids = model.tokenize([PROMPT])[0]
    site, last = told["planning_site"], told["output_position"]
    assert (model.tokenizer.decode_token(ids[site]).strip(), last) == ("of", len(ids) - 1)
    capture = mizarr.HookSpec().capture("blocks.*.attn.hook_pattern")
    before = model.forward([ids], capture)
    deltas = {}
    for strength in (3.0, 6.0):
        after = model.forward([ids], steered(given, strength, site).extend(capture))
        deltas[strength] = np.stack([(after[p] - before[p])[0, :, last, site].numpy() for p in before])
    found = np.array([[row["delta"] for row in layer] for layer in told["head_deltas"]])
    np.testing.assert_allclose(found, deltas[3.0], atol=1e-5)
    sizes = [abs(row["delta"]) for row in told["top_heads"]]
    assert sizes == sorted(sizes, reverse=True)
    for point, strength in zip(told["strength_sweep"], (3.0, 6.0), strict=True):
        assert point["strength"] == strength
        assert point["total_routing_shift"] == pytest.approx(np.abs(deltas[strength]).sum(), abs=1e-4)


def test_a_correction_reaches_only_later_layers(given, store: Path, model: mizarr.Model):
    settings = given | {
        "site": "of",
        "inject_word": "London",
        "correct": "3:1",
        "correct_word": "French",
        "correct_from_layer": 4,
        "max_strength": 4.0,
        "steps": 2,
        "head": "5:1",
    }
    told = compute("correction_test", store=store, **settings).to_json()
    french, london = (model.tokenize([f" {word}"])[0][-1] for word in ("French", "London"))
    ids = model.tokenize([PROMPT + " "])[0]
    assert [point["correct_strength"] for point in told["correction_sweep"]] == [0.0, 2.0, 4.0]
    assert told["commitment_only"] == told["correction_sweep"][0]
    assert told["baseline"]["total_routing_shift"] == 0
    for point in told["correction_sweep"]:
        correction = Injection("3:1", point["correct_strength"], from_layer=4)
        hooks = steered(given, 3.0, told["planning_site"], correction)
        probability = model.forward([ids], hooks).logits[0, -1].double().softmax(-1)
        assert point["p_commit_word"] == pytest.approx(float(probability[london]), rel=1e-3)
        assert point["p_correct_word"] == pytest.approx(float(probability[french]), rel=1e-3)
        top = int(probability.argmax())
        assert point["top1_token"] == model.tokenizer.decode_token(top)


@pytest.mark.parametrize("name", ["planning_in_poems", "attention_routing", "correction_test"])
def test_tables_figures_and_documents_come_out(name: str, given, store: Path, tmp_path: Path):
    settings = given | {"site": "of", "correct": "3:1", "correct_word": "French", "correct_from_layer": 4}
    if name == "planning_in_poems":
        settings = given | WORDS
    elif name == "attention_routing":
        settings = given | {"site": "of"}
    else:
        settings |= {"inject_word": "London"}
    done = compute(name, store=store, **settings)
    (file,) = done.draw(tmp_path)
    assert file.read_bytes().startswith(b"\x89PNG")
    assert done.tables()[-1].row_count > 3
    json.dumps(done.to_json(), allow_nan=False)


@pytest.mark.parametrize(("name", "changed", "said"), [
    ("planning_in_poems", {"preset": "llama3.2-1b"}, "did you mean 'llama3.2-1b-524k'"),
    ("planning_in_poems", {"inject_word": "Danielle"}, "a word that is one token of specimen"),
    ("planning_in_poems", {"inject": "2:99"}, "feature number from 0 to 11 in layer 2 .*, found 99"),
    ("planning_in_poems", {"dictionary": "no/such"}, "mizarr features fetch no/such"),
    ("attention_routing", {"site": "poem"}, "expected a token 'poem' in the prompt"),
    ("attention_routing", {"site": "99"}, "expected a site in 0.."),
    ("correction_test", {"inject_word": "London", "correct": "3:1", "correct_word": "French",
                         "correct_from_layer": 2, "site": "of"}, "correct_from_layer to be at least 3"),
    ("correction_test", {"preset": "gemma2-2b-2.5m"}, "has no correction"),
])  # fmt: skip
def test_what_does_not_fit_is_told_before_anything_runs(name: str, changed, said: str, given):
    words = WORDS if name == "planning_in_poems" else {}
    with pytest.raises(mizarr.MizarrError, match=said):
        build(name, **given | words | changed)
