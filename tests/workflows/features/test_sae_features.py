"""An autoencoder on one prompt: the numbers are those of the arithmetic done by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import mizarr
from mizarr.store.errors import PromptError
from mizarr.workflows import build, compute
from tests.random_dictionaries import save_random_clt, save_random_sae

PROMPT = "The mother tongue of Danielle Darrieux is"


@pytest.fixture(scope="module")
def sae(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_sae(tmp_path_factory.mktemp("sae"), layer=3, hidden=192)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sae_features") / "store"


def test_the_features_and_the_error_are_those_of_the_arithmetic(sae: Path, store: Path):
    told = compute("sae_features", store=store, dictionary=str(sae), prompt=PROMPT, top_k=5).to_json()
    model = mizarr.Model.from_pretrained("specimen")
    hooks = mizarr.HookSpec().capture("blocks.3.hook_resid_post")
    x = model.forward([PROMPT], hooks)["blocks.3.hook_resid_post"][0]
    w = load_file(sae / "sae_weights.safetensors")
    acts = torch.relu((x - w["b_dec"]) @ w["W_enc"] + w["b_enc"])
    assert told["hook"] == "blocks.3.hook_resid_post"
    for row, here in zip(told["positions"], acts, strict=True):
        values, indices = here.sort(descending=True, stable=True)
        assert row["active"] == int((here > 0).sum())
        assert [feature["index"] for feature in row["top"]] == indices[:5].tolist()
        np.testing.assert_allclose(
            [feature["activation"] for feature in row["top"]], values[:5], rtol=1e-4, atol=1e-4
        )
        norms = w["W_dec"][indices[:5]].norm(dim=1)
        np.testing.assert_allclose([feature["decoder_norm"] for feature in row["top"]], norms, rtol=1e-5)
    left = x - (acts @ w["W_dec"] + w["b_dec"])
    assert told["mse"] == pytest.approx(float(left.square().mean()), rel=1e-4)
    unexplained = left.square().sum() / (x - x.mean(0)).square().sum()
    assert told["fraction_of_variance_unexplained"] == pytest.approx(float(unexplained), rel=1e-4)


def test_positions_without_features_are_left_out_of_the_error(sae: Path, store: Path):
    given: dict[str, Any] = {"store": store, "dictionary": str(sae), "prompt": PROMPT}
    whole, rest = (compute("sae_features", **given, zero_positions=n) for n in (0, 2))
    error = whole.activity["error"].values
    assert rest.to_json()["mse"] == pytest.approx(float(error[2:].mean()), rel=1e-6)
    assert rest.to_json()["mse"] != pytest.approx(float(error.mean()), rel=1e-3)
    share = error[2:].sum() / whole.activity["size"].values[2:].sum()
    assert rest.to_json()["fraction_of_variance_unexplained"] == pytest.approx(float(share), rel=1e-6)
    assert any("over positions from 2 on" in view.caption for view in rest.shown)
    with pytest.raises(PromptError, match="more than 99 tokens"):
        build("sae_features", dictionary=str(sae), prompt=PROMPT, zero_positions=99)


def test_a_layer_of_transcoders_can_be_told(store: Path, tmp_path: Path):
    clt = save_random_clt(tmp_path / "clt", layers=6, hidden=192)
    done = compute("sae_features", store=store, dictionary=str(clt), prompt=PROMPT, layer=2, position="of")
    assert done.to_json()["hook"] == "blocks.2.hook_resid_mid"
    assert done.tokens[done.position].strip() == "of"
    (file,) = done.draw(tmp_path)
    assert file.read_bytes().startswith(b"\x89PNG")
    json.dumps(done.to_json(), allow_nan=False)


def test_a_layer_it_does_not_read_is_refused(sae: Path):
    with pytest.raises(mizarr.MizarrError, match=r"that the dictionary .* reads \(layer 3\), found layer 2"):
        build("sae_features", dictionary=str(sae), layer=2)
