"""What features are called in tables and documents, worked out again from weights and forwards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

import mizarr
from mizarr.stages.features.dictionary import Dictionary
from mizarr.stages.features.layers.layout import FeatureId
from mizarr.stages.logits.lens import format_token
from mizarr.workflows import compute
from mizarr.workflows.material.feature_labels import FeatureLabels

pytestmark = pytest.mark.wide

ONE, TWO = FeatureId(0, 3), FeatureId(1, 4)


@pytest.fixture(scope="module", autouse=True)
def two_facts() -> Iterator[None]:
    """A choice is scored on two other facts: nothing here is about how many they are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mizarr.workflows.feature_exchange.exchange.HELD_OUT", 2)
        yield


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("labels") / "store"


def label(dictionary: str, layer: int, index: int, prompt: str) -> str:
    """A feature's label, by its decoder row times the unembedding and by a plain pass over the prompt."""
    model, features = mizarr.Model.from_pretrained("specimen"), Dictionary.from_pretrained(dictionary)
    row = features.decoder_vector((layer, index), max(features.targets(layer))).double()
    weights = load_file(
        Path(mizarr.__file__).parent / "stages" / "forward" / "specimen" / "model.safetensors"
    )
    gain, embedding = (weights[f"model.{name}.weight"].double() for name in ("norm", "embed_tokens"))
    token = int((embedding @ (row * gain)).argmax())
    ids, hook = model.tokenize([prompt])[0], str(features.read_hook(layer))
    states = model.forward([ids], mizarr.HookSpec().capture(hook))[hook][0]
    values = features.layer(layer).encode(states)[:, index]
    told = f"writes '{format_token(model.tokenizer.decode_token(token))}', "
    if not values.max() > 0:
        return told + "silent here"
    return told + f"fires on '{format_token(model.tokenizer.decode_token(ids[int(values.argmax())]))}'"


def test_a_label_is_what_is_known_of_a_feature():
    known = FeatureLabels({ONE: " a"}, {ONE: None, TWO: " b"})
    assert known.label(ONE) == "writes ' a', silent here"
    assert known.label(TWO) == "fires on ' b'"
    assert known.label(FeatureId(2, 0)) == ""
    assert known.several([ONE, TWO]) == "L0:3 (' a'), L1:4 (' b')"
    assert known.short(FeatureId(2, 0)) == "L2:0"
    assert known.json(ONE) == {"layer": 0, "index": 3, "label": "writes ' a', silent here"}


def test_features_that_are_exchanged_are_called_by_what_they_write_and_where_they_fire(store: Path):
    done = compute("correction_test", store=store, controls=2, steps=1)
    told = done.to_json()
    named = [*told["suppress_features"], told["commit_feature"], told["correct_feature"]]
    for each in named:
        assert each["label"] == label("specimen/clt", each["layer"], each["index"], told["prompt"])
    assert "silent here" in named[-1]["label"]
    claim = told["findings"][0]["claim"]
    assert claim.startswith(f"injecting L1:177 ({named[-1]['label'].split(chr(39))[1]!r}) into layers")


def test_features_found_in_a_prompt_are_called_so_too(store: Path):
    for name, top in (
        ("sae_features", lambda told: told["positions"][told["position"]]["top"]),
        ("clt_probe", lambda told: told["aggregate"]),
    ):
        told = compute(name, store=store).to_json()
        for each in top(told)[:4]:
            dictionary = {"sae_features": "specimen/sae", "clt_probe": "specimen/clt"}[name]
            assert each["label"] == label(dictionary, each["layer"], each["index"], told["prompt"])


def test_features_that_write_a_word_are_called_by_it(store: Path):
    told = compute("clt_probe", store=store).to_json()
    for each in told["features"][:5]:
        assert each["label"] == label("specimen/clt", each["layer"], each["index"], told["prompt"])


def test_ranked_features_are_called_so_in_both_arms(store: Path):
    told = compute("clt_vs_plt", store=store, controls=1).to_json()
    for arm, dictionary in (("clt", "specimen/clt"), ("plt", "specimen/plt")):
        first = told["arms"][arm]["top_20_features_same_layer"][0]
        layer, index = (int(part) for part in first["feature"].removeprefix("L").split(":"))
        assert first["label"] == label(dictionary, layer, index, told["prompt"])
        swept = told["arms"][arm]["suppress_inject"]["inject_feature"]
        assert swept["label"] == label(dictionary, swept["layer"], swept["index"], told["prompt"])
