"""Rankings of features by what they write."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import mizarr
from mizarr.pipeline import run
from mizarr.stages.features.dictionary import Dictionary
from mizarr.stages.features.effects.alignment import DecoderSearch, align, align_over_targets
from mizarr.stages.features.layers.layout import FeatureId
from tests.random_dictionaries import save_random_clt


@pytest.fixture
def clt(tmp_path: Path) -> Dictionary:
    """Four layers, 12 features; L1:4 is zero and L2:3 equals L0:7 at layer 3."""
    folder = save_random_clt(tmp_path / "clt", layers=4, hidden=10)
    rows = load_file(folder / "W_dec_1.safetensors")
    rows["W_dec_1"][4] = 0
    save_file(rows, folder / "W_dec_1.safetensors")
    later, earlier = load_file(folder / "W_dec_2.safetensors"), load_file(folder / "W_dec_0.safetensors")
    later["W_dec_2"][3, 1] = earlier["W_dec_0"][7, 3]
    save_file(later, folder / "W_dec_2.safetensors")
    return Dictionary.from_pretrained(folder)


def by_hand(
    clt: Dictionary, direction: torch.Tensor, target: int, cosine: bool
) -> list[tuple[float, int, int]]:
    found = []
    for layer in range(target + 1):
        for index in range(12):
            row = clt.layer(layer).W_dec[target][index]
            if cosine and row.norm() == 0:
                continue
            score = row @ direction / (row.norm() * direction.norm() if cosine else 1)
            found.append((float(score), layer, index))
    return sorted(found, key=lambda one: (-one[0], one[1], one[2]))


@pytest.mark.parametrize("cosine", [True, False])
@pytest.mark.parametrize("target", [0, 3])
def test_scores_are_products_and_cosines_of_what_is_written(clt: Dictionary, cosine: bool, target: int):
    direction = torch.randn(10, generator=torch.Generator().manual_seed(1))
    (found,) = align(clt, direction[None], target, 1000, cosine=cosine)
    expected = by_hand(clt, direction, target, cosine)
    assert len(found) == len(expected)
    np.testing.assert_allclose([one.score for one in found], [one[0] for one in expected], atol=1e-6)
    assert {one.feature for one in found} == {FeatureId(layer, index) for _, layer, index in expected}


def test_equal_scores_come_by_layer_and_index(clt: Dictionary):
    direction = clt.layer(0).W_dec[3][7]
    (found,) = align(clt, direction[None], 3, 2)
    assert [str(one.feature) for one in found] == ["L0:7", "L2:3"]
    assert found[0].score == found[1].score == pytest.approx(1, abs=1e-6)


def test_several_directions_rank_as_each_alone(clt: Dictionary):
    directions = torch.randn(3, 10, generator=torch.Generator().manual_seed(2))
    together = align(clt, directions, 2, 7)
    assert together == [align(clt, direction[None], 2, 7)[0] for direction in directions]


def test_the_best_over_targets_keeps_each_feature_once(clt: Dictionary):
    direction = torch.randn(1, 10, generator=torch.Generator().manual_seed(3))
    (found,) = align_over_targets(clt, direction, 6)
    best: dict[FeatureId, float] = {}
    for target in range(4):
        for one in align(clt, direction, target, 6)[0]:
            best[one.feature] = max(one.score, best.get(one.feature, -9))
    expected = sorted(best.items(), key=lambda pair: (-pair[1], pair[0]))[:6]
    assert [(one.feature, one.score) for one in found] == expected


def test_blocks_of_rows_change_nothing(clt: Dictionary, monkeypatch: pytest.MonkeyPatch):
    direction = torch.randn(1, 10, generator=torch.Generator().manual_seed(4))
    whole = align(clt, direction, 3, 20)
    monkeypatch.setattr("mizarr.stages.features.effects.alignment.ROWS", 5)
    for ours, theirs in zip(align(clt, direction, 3, 20)[0], whole[0], strict=True):
        assert ours.feature == theirs.feature
        assert ours.score == pytest.approx(theirs.score, abs=1e-6)


def test_a_search_is_stored_with_its_features(tmp_path: Path):
    model, store = mizarr.Model.from_pretrained("specimen"), mizarr.open_store(tmp_path / "store")
    clt = Dictionary.from_pretrained(save_random_clt(tmp_path / "clt", layers=6, hidden=192))
    node = DecoderSearch(300, clt.name, clt.identity, top_k=4).on(model)
    run(node, store, quiet=True)
    found = node.open(store)
    (expected,) = align_over_targets(clt, model.embedding_vector(300)[None], 4)
    assert found["source_layer"].values.tolist() == [one.feature.layer for one in expected]
    assert found["feature"].values.tolist() == [one.feature.index for one in expected]
    np.testing.assert_allclose(found["score"], [one.score for one in expected], atol=1e-6)


def test_directions_of_another_width_are_refused(clt: Dictionary):
    with pytest.raises(mizarr.MizarrError, match=r"directions of shape \[direction, 10\]"):
        align(clt, torch.zeros(1, 9), 2, 3)
    with pytest.raises(mizarr.MizarrError, match=r"clt write to \(layers 0 to 3\), found target=4"):
        align(clt, torch.zeros(1, 10), 4, 3)
