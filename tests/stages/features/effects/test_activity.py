"""Activity of one prompt, stored as a result."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import mizarr
from mizarr.pipeline import run
from mizarr.stages.features.dictionary import Dictionary
from mizarr.stages.features.effects.activity import FeatureActivity, as_rows
from tests.random_dictionaries import save_random_clt

PROMPT = (5, 9, 2, 31, 7, 4)


@pytest.fixture(scope="module")
def clt(tmp_path_factory: pytest.TempPathFactory) -> Dictionary:
    return Dictionary.from_pretrained(save_random_clt(tmp_path_factory.mktemp("clt"), layers=6, hidden=192))


def test_what_is_stored_is_what_dense_arithmetic_gives(clt: Dictionary, tmp_path: Path):
    model, store = mizarr.Model.from_pretrained("specimen"), mizarr.open_store(tmp_path / "store")
    node = FeatureActivity(PROMPT, clt.name, clt.identity, zero_positions=1).on(model)
    run(node, store, quiet=True)
    found = node.open(store).load()
    cache = model.forward(
        [list(PROMPT)], mizarr.HookSpec().capture("blocks.*.hook_resid_mid", "blocks.*.hook_mlp_out")
    )
    written = torch.zeros(6, len(PROMPT), 192)
    for layer in range(6):
        part = clt.layer(layer)
        pre = cache[f"blocks.{layer}.hook_resid_mid"][0] @ part.W_enc.T + part.b_enc
        acts = pre * (pre > part.activation.threshold)
        acts[0] = 0
        here = found["active_layer"].values == layer
        dense = np.zeros(acts.shape, np.float32)
        dense[found["active_position"].values[here], found["active_feature"].values[here]] = found[
            "activation"
        ].values[here]
        np.testing.assert_allclose(dense, acts, atol=1e-4)
        for target, rows in part.W_dec.items():
            written[target] += acts @ rows
        written[layer] += part.b_dec
        chosen = found["active_feature"].values[here]
        norms = sum(rows[chosen].square().sum(1) for rows in part.W_dec.values()).sqrt()
        np.testing.assert_allclose(found["decoder_norm"].values[here], norms, rtol=1e-5)
        left = cache[f"blocks.{layer}.hook_mlp_out"][0] - written[layer]
        np.testing.assert_allclose(found["error"].sel(layer=layer), left.square().mean(-1), rtol=1e-4)


def test_heads_lie_side_by_side():
    z = torch.arange(12.0).reshape(2, 3, 2)  # head, position, d_head
    assert as_rows(z).tolist() == [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11]]
    assert as_rows(z[0]).tolist() == z[0].tolist()
