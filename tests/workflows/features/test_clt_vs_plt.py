"""Two kinds of transcoders on one word: rankings, traces and sweeps against arithmetic by hand."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mizarr
from mizarr.stages.features.dictionary import Dictionary
from mizarr.stages.features.effects.alignment import align, align_over_targets
from mizarr.stages.features.effects.injection import Injection, injected
from mizarr.workflows import build, compute
from tests.random_dictionaries import save_random_clt, save_random_plt

PROMPT = "The mother tongue of Danielle Darrieux is"


@pytest.fixture(scope="module", autouse=True)
def two_facts() -> Iterator[None]:
    """A choice is scored on two other facts: nothing here is about how many they are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mizarr.workflows.feature_exchange.exchange.HELD_OUT", 2)
        yield


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("dictionaries")
    return {
        "preset": "gemma2-2b-426k",
        "model": "specimen",
        "dictionary": str(save_random_clt(folder / "clt", layers=6, hidden=192)),
        "per_layer": str(save_random_plt(folder / "plt", layers=6, hidden=192)),
        "prompt": PROMPT,
        "suppress": ("1:3",),
        "inject": "2:7",
        "suppress_word": "French",
        "inject_word": "London",
        "strength": 2.0,
        "controls": 3,
    }


@pytest.fixture(scope="module")
def done(settings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory):
    return compute("clt_vs_plt", store=tmp_path_factory.mktemp("arms") / "store", **settings)


@pytest.fixture(scope="module")
def model() -> mizarr.Model:
    return mizarr.Model.from_pretrained("specimen")


def test_each_arm_suppresses_its_own_best_features(done, settings: dict[str, Any], model: mizarr.Model):
    told = done.to_json()
    direction = model.embedding_vector(told["inject_token_id"])[None]
    ids = model.tokenize([PROMPT + " "])[0]
    for arm, name, over, inject in (
        ("clt", "suppress_only", False, False),
        ("plt", "suppress_inject", False, True),
        ("clt", "over_targets_suppress_inject", True, True),
    ):
        dictionary = Dictionary.from_pretrained(settings["dictionary" if arm == "clt" else "per_layer"])
        (ranked,) = (
            align_over_targets(dictionary, direction, 5) if over else align(dictionary, direction, 2, 5)
        )
        features = [Injection(one.feature, -2.0) for one in ranked]
        features += [Injection(ranked[0].feature, 2.0)] if inject else []
        found = told["arms"][arm][name]
        assert [(row["layer"], row["index"]) for row in found["suppress_features"]] == [
            (one.feature.layer, one.feature.index) for one in ranked
        ]
        for place in (0, 3, len(ids) - 1):
            logits = model.forward([ids], injected(dictionary, features, [place])).logits[0, -1].double()
            point = found["sweep"][place]
            assert point["logit"] == pytest.approx(float(logits[told["inject_token_id"]]), abs=1e-3)
            probability = logits.softmax(-1)[told["inject_token_id"]]
            assert point["prob"] == pytest.approx(float(probability), rel=1e-3)


def test_traces_and_histograms_are_of_what_each_arm_reads(
    done, settings: dict[str, Any], model: mizarr.Model
):
    told = done.to_json()
    dictionary = Dictionary.from_pretrained(settings["per_layer"])
    hooks = mizarr.HookSpec().capture("blocks.*.mlp.hook_pre")
    cache = model.forward([PROMPT + " "], hooks)
    arm = told["arms"]["plt"]
    x = cache["blocks.2.mlp.hook_pre"][0]
    dense = dictionary.layer(2).encode(x)
    for name, values in zip(
        arm["activation_trace"]["feature_ids"], arm["activation_trace"]["values"], strict=True
    ):
        layer, index = name[1:].split(":")
        assert layer == "2"
        np.testing.assert_allclose(values, dense[:, int(index)], atol=1e-4)
    for layer in (1, 2, 3):
        counts = arm["pre_activation_histograms"][f"layer_{layer}"]["counts"]
        assert (len(counts), sum(counts)) == (32, 12 * len(x))
    direction = model.embedding_vector(told["inject_token_id"])
    skip = x[-1] @ dictionary.layer(2).W_skip.T @ direction / direction.norm()
    assert arm["w_skip_projection_at_spike"] == pytest.approx(float(skip), rel=1e-3)
    assert told["arms"]["clt"]["w_skip_projection_at_spike"] is None


def test_a_figure_and_a_document_come_out(done, tmp_path: Path):
    (file,) = done.draw(tmp_path)
    assert file.read_bytes().startswith(b"\x89PNG")
    told = json.loads(json.dumps(done.to_json(), allow_nan=False))
    assert told["sanity_gates"] == {}  # of a preset that was changed nothing is expected
    assert [table.row_count for table in done.tables()] == [3, 2, 8, 10]


def test_a_preset_without_per_layer_transcoders_asks_for_them(settings: dict[str, Any]):
    with pytest.raises(mizarr.MizarrError, match="name some: per_layer=DIRECTORY"):
        build("clt_vs_plt", **settings | {"preset": "gemma2-2b-2.5m", "per_layer": None})
