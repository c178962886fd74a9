"""Features of a place, and features of a word."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import mizarr
from mizarr.stages.features.dictionary import Dictionary
from mizarr.stages.features.effects.alignment import align_over_targets
from mizarr.workflows import build, compute
from tests.random_dictionaries import save_random_clt

PROMPT = "The mother tongue of Danielle Darrieux is"


@pytest.fixture(scope="module")
def clt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_clt(tmp_path_factory.mktemp("clt"), layers=6, hidden=192)


@pytest.fixture(scope="module")
def probe(clt: Path, tmp_path_factory: pytest.TempPathFactory):
    store = tmp_path_factory.mktemp("probe") / "store"
    settings = {
        "dictionary": str(clt),
        "prompt": PROMPT,
        "word": "OF",
        "search": "French",
        "top_k": 3,
        "top": 8,
    }
    return compute("clt_probe", store=store, **settings)


def test_the_features_of_a_place_are_those_the_encoder_finds(probe, clt: Path):
    told = probe.to_json()
    model, dictionary = mizarr.Model.from_pretrained("specimen"), Dictionary.from_pretrained(clt)
    assert told["probed_token"].strip() == "of"
    hooks = mizarr.HookSpec().capture("blocks.*.hook_resid_mid")
    cache = model.forward([PROMPT], hooks)
    every = []
    for row in told["layers"]:
        layer = row["layer"]
        x = cache[f"blocks.{layer}.hook_resid_mid"][0, told["probed_position"]]
        values = dictionary.layer(layer).encode(x).numpy()
        order = np.argsort(-values, kind="stable")[: min(3, int((values > 0).sum()))]
        assert [feature["index"] for feature in row["features"]] == order.tolist()
        found = [feature["activation"] for feature in row["features"]]
        np.testing.assert_allclose(found, values[order], rtol=1e-4)
        every += [(-value, layer, i) for i, value in enumerate(values.tolist()) if value > 0]
    expected = [(layer, index) for _, layer, index in sorted(every)[:8]]
    assert [(row["layer"], row["index"]) for row in told["aggregate"]] == expected
    layers = [layer for _, layer, _ in sorted(every)]
    assert [int(name[1]) for name in told["suppress_candidates"]] == list(dict.fromkeys(layers))[:3]


def test_the_features_of_a_word_are_those_that_write_its_embedding(probe, clt: Path):
    told = probe.to_json()
    model = mizarr.Model.from_pretrained("specimen")
    (expected,) = align_over_targets(
        Dictionary.from_pretrained(clt), model.embedding_vector(told["token_id"])[None], 8
    )
    assert model.tokenizer.decode_token(told["token_id"]) == " French"
    assert [(row["layer"], row["index"]) for row in told["features"]] == [
        (one.feature.layer, one.feature.index) for one in expected
    ]


def test_a_figure_and_a_document_come_out(probe, tmp_path: Path):
    (file,) = probe.draw(tmp_path)
    assert file.read_bytes().startswith(b"\x89PNG")
    assert len(probe.tables()) == 2
    json.dumps(probe.to_json(), allow_nan=False)


@pytest.mark.parametrize(("changed", "said"), [
    ({"word": "verse"}, "expected word to be a token of the prompt, found 'verse'"),
    ({"search": "Darrieux"}, "a word that is one token"),
    ({"top": 0}, "expected top to be int of at least 1"),
])  # fmt: skip
def test_what_does_not_fit_is_told(changed, said: str, clt: Path):
    with pytest.raises(mizarr.MizarrError, match=said):
        build("clt_probe", dictionary=str(clt), prompt=PROMPT, **changed)


def test_another_model_needs_a_dictionary(tiny_model: Path):
    with pytest.raises(
        mizarr.MizarrError, match=r"expected a dictionary of features for .*name one: dictionary="
    ):
        build("clt_probe", model=str(tiny_model), prompt="it was")
