"""What features write and where they fire: against plain products, of features named, ranked and found."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import xarray as xr

import mizarr
from mizarr.pipeline import run
from mizarr.stages.features.dictionary import Dictionary
from mizarr.stages.features.effects.activity import FeatureTrace
from mizarr.stages.features.effects.words import feature_words, words_of_active, words_of_ranked
from mizarr.stages.logits.readout import readout
from tests.random_dictionaries import save_random_clt

PROMPT = (5, 9, 2, 31, 7, 4)
VOCAB = 40


@pytest.fixture(scope="module")
def clt(tmp_path_factory: pytest.TempPathFactory) -> Dictionary:
    return Dictionary.from_pretrained(save_random_clt(tmp_path_factory.mktemp("clt"), layers=6, hidden=192))


@pytest.fixture(scope="module")
def table() -> xr.Dataset:
    rng = np.random.default_rng(0)
    return readout(rng.normal(size=(VOCAB, 192)), rng.normal(size=192), norm="rms", eps=1e-5)


def raised(clt: Dictionary, table: xr.Dataset, layer: int, index: int) -> list[int]:
    """Tokens by what the last layer the feature writes to gives them, largest first."""
    row = clt.decoder_vector((layer, index), 5).double().numpy() * table["norm_weight"].values
    logits = table["unembed"].transpose("vocab", "hidden").values @ row
    return np.argsort(-logits, kind="stable")[:3].tolist()


def agree(found: xr.Dataset, expected: set[tuple[int, int]], clt: Dictionary, table: xr.Dataset) -> None:
    """Every feature once, in order, each with its tokens."""
    pairs = list(zip(found["layer"].values.tolist(), found["feature"].values.tolist(), strict=True))
    assert pairs == sorted(expected)
    for tokens, pair in zip(found["raised"].values.tolist(), pairs, strict=True):
        assert tokens == raised(clt, table, *pair)


def test_features_named_in_advance_raise_what_their_decoders_say(clt: Dictionary, table: xr.Dataset):
    found = feature_words(table, dictionary=clt, chosen=[[3, 7], [0, 11], [3, 7]])
    agree(found, {(0, 11), (3, 7)}, clt, table)


def test_features_of_a_ranking_are_read_from_it(clt: Dictionary, table: xr.Dataset):
    ranked = xr.Dataset(coords={"source_layer": ("rank", [4, 1, 4]), "feature": ("rank", [2, 0, 9])})
    agree(words_of_ranked(ranked, table, dictionary=clt), {(1, 0), (4, 2), (4, 9)}, clt, table)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"most": 1}, {(0, 3), (0, 5), (2, 8)}),
        ({"most": 2}, {(0, 3), (0, 4), (0, 5), (2, 8)}),
        ({"most": 5, "position": 1}, {(0, 5), (2, 8)}),
        ({"most": 5, "position": 2}, set()),
    ],
)
def test_of_a_prompt_the_strongest_of_every_layer_and_position_count(clt, table, given, expected):
    rows = [(0, 0, 3, 2.0), (0, 0, 4, 1.0), (0, 1, 5, 0.5), (2, 1, 8, 0.1)]
    layer, place, feature, value = zip(*rows, strict=True)
    active = xr.Dataset(
        {"activation": ("active", np.array(value))},
        {
            "active_layer": ("active", np.array(layer)),
            "active_position": ("active", np.array(place)),
            "active_feature": ("active", np.array(feature)),
        },
    )
    agree(words_of_active(active, table, dictionary=clt, **given), expected, clt, table)


def test_a_trace_is_the_activation_of_the_features_named_alone(clt: Dictionary, tmp_path: Path):
    model, store = mizarr.Model.from_pretrained("specimen"), mizarr.open_store(tmp_path / "store")
    chosen = ((3, 7), (0, 11), (3, 2))
    node = FeatureTrace(PROMPT, clt.name, clt.identity, chosen).on(model)
    run(node, store, quiet=True)
    found = node.open(store).load()
    cache = model.forward([list(PROMPT)], mizarr.HookSpec().capture("blocks.*.hook_resid_mid"))
    for row, (layer, index) in enumerate(chosen):
        part = clt.layer(layer)
        pre = cache[f"blocks.{layer}.hook_resid_mid"][0] @ part.W_enc[index] + part.b_enc[index]
        expected = pre * (pre > part.activation.threshold[index])
        np.testing.assert_allclose(found["trace"].values[row], expected, atol=1e-4)
        assert (int(found["source_layer"][row]), int(found["feature"][row])) == (layer, index)
    assert found["trace"].values.max() > 0
