"""Figures, against numpy over all rows at once."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mizarr.stages.features.layers.activations import ReLU
from mizarr.stages.features.layers.layer import LayerFeatures
from mizarr.stages.features.training.control import random_features
from mizarr.stages.features.training.evaluate import decoder_likeness, measure, summary
from mizarr.store.errors import DictionaryError


def features_of(layer, targets, width=5, count=7):
    draw = torch.Generator().manual_seed(layer)
    return LayerFeatures(
        layer,
        torch.randn(count, width, generator=draw),
        {m: torch.randn(count, width, generator=draw) for m in targets},
        ReLU(),
        b_enc=torch.randn(count, generator=draw) - 1,
        b_dec=torch.randn(width, generator=draw),
    )


@pytest.fixture
def clt():
    return {0: features_of(0, (0, 1)), 1: features_of(1, (1,))}


@pytest.fixture
def blocks():
    draw = torch.Generator().manual_seed(9)
    cells = [(kind, layer) for kind in ("resid_mid", "mlp_out") for layer in (0, 1)]
    return [{cell: torch.randn(n, 5, generator=draw) + 2 for cell in cells} for n in (30, 1, 69)]


def test_figures_are_those_of_all_rows_at_once(clt, blocks):
    found = measure(clt, blocks, "resid_mid", "mlp_out")
    whole = {cell: torch.cat([block[cell] for block in blocks]).double().numpy() for cell in blocks[0]}
    a = {
        n: np.maximum(whole["resid_mid", n] @ it.W_enc.double().numpy().T + it.b_enc.double().numpy(), 0)
        for n, it in clt.items()
    }
    made = {
        m: sum(a[n] @ clt[n].W_dec[m].double().numpy() for n in clt if m in clt[n].W_dec)
        + clt[m].b_dec.double().numpy()
        for m in clt
    }
    for m in (0, 1):
        wanted = whole["mlp_out", m]
        error = ((made[m] - wanted) ** 2).sum()
        assert found.fvu.sel(target=m).item() == pytest.approx(
            error / ((wanted - wanted.mean(0)) ** 2).sum(), rel=1e-5
        )
        assert found.mse.sel(target=m).item() == pytest.approx(error / wanted.size, rel=1e-5)
        assert found.l0.sel(layer=m).item() == pytest.approx((a[m] > 0).sum(1).mean())
        assert np.allclose(found.density.sel(layer=m), (a[m] > 0).mean(0))
        assert (
            found.l0_count.sel(layer=m).values.tolist()
            == np.bincount((a[m] > 0).sum(1), minlength=8).tolist()
        )
    assert found.density_count.sum("log_density").values.tolist() == [7, 7]
    assert summary(found)["fvu"] == pytest.approx(found.fvu.values.tolist(), abs=1e-5)


def test_no_rows_are_refused(clt):
    with pytest.raises(DictionaryError, match="found none; give prompts"):
        measure(clt, [], "resid_mid", "mlp_out")


def test_likeness_is_the_largest_cosine_with_another_over_all_targets():
    it = features_of(0, (0, 1), count=6)
    it.W_dec[0][5], it.W_dec[1][5] = 2 * it.W_dec[0][2], 2 * it.W_dec[1][2]
    rows = torch.cat([it.W_dec[0], it.W_dec[1]], dim=1)
    cosines = torch.cosine_similarity(rows[:, None], rows[None], dim=2).fill_diagonal_(-1)
    found = decoder_likeness(it)
    assert torch.allclose(found, cosines.max(1).values, atol=1e-6)
    assert found[[2, 5]].tolist() == pytest.approx([1.0, 1.0])


def test_the_control_is_as_sparse_and_its_decoders_are_the_best_there_are(clt, blocks):
    seen = [blocks[2], blocks[0]]
    made = random_features(clt, lambda: iter(seen), "resid_mid", "mlp_out", seed=0)
    found, wanted = (measure(it, seen, "resid_mid", "mlp_out") for it in (made, clt))
    assert np.allclose(found.l0, wanted.l0, atol=0.05)
    assert {layer: it.targets for layer, it in made.items()} == {0: (0, 1), 1: (1,)}
    best = measure(made, seen, "resid_mid", "mlp_out").fvu
    worse = {
        n: LayerFeatures(**{**vars(it), "W_dec": {m: w * 1.1 for m, w in it.W_dec.items()}})
        for n, it in made.items()
    }
    assert (best < measure(worse, seen, "resid_mid", "mlp_out").fvu).all()
    assert (best < 1).all()


def test_an_unfitted_control_writes_as_much_in_random_directions(clt, blocks):
    made = random_features(clt, lambda: iter(blocks), "resid_mid", "mlp_out", seed=0, fitted=False)
    found, wanted = (measure(it, blocks, "resid_mid", "mlp_out") for it in (made, clt))
    assert np.allclose(found.l0, wanted.l0, atol=0.05)
    for layer, it in made.items():
        x = torch.cat([block["resid_mid", layer] for block in blocks])
        assert float(it.encode(x).sum()) == pytest.approx(float(clt[layer].encode(x).sum()), rel=1e-3)
        for target in it.targets:
            ours, theirs = (each.decoder_rows(slice(None), target) for each in (it, clt[layer]))
            assert torch.allclose(ours.norm(dim=1), theirs.norm(dim=1))
            assert float(torch.cosine_similarity(ours, theirs).abs().max()) < 0.99
