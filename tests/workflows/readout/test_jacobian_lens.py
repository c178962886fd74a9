"""The Jacobian lens from prose to claims: its ranks against plain passes, its sizes, what it refuses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import mizarr
from mizarr.store.errors import ConfigError
from mizarr.workflows import build, compute

PROMPTS = ["The mother tongue of John Calvin is", "Saudi Arabia is located in the continent"]
ANSWERS = ["French", "Asia"]
FEW = {"fit_prompts": 3, "context": 16, "controls": 5}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lens") / "store"


@pytest.fixture(scope="module")
def done(store: Path):
    return compute("jacobian_lens", store=store, prompts=PROMPTS, answers=ANSWERS, **FEW)


def test_ranks_are_those_of_transported_states_decoded_by_the_model(done):
    model, lens = mizarr.Model.from_pretrained("specimen"), done.result("fit").load()
    last = model.config.num_layers - 1
    for i, (prompt, answer) in enumerate(zip(PROMPTS, ANSWERS, strict=True)):
        points = [f"blocks.{layer}.hook_resid_post" for layer in range(last + 1)]
        cache = model.forward(prompt, mizarr.HookSpec().capture(*points))
        token = done.subject.answer_id(prompt, answer)
        for name in ("jacobian", "logit"):
            for layer, point in enumerate(points):
                state = cache[point][0, -1]
                if name == "jacobian" and layer < last:
                    state = torch.as_tensor(lens["jacobian"].sel(layer=layer).values) @ state
                logits = model.project_to_vocab(state[None])[0]
                rank = 1 + int((logits > logits[token]).sum())
                found = done.ranks["target_rank"].sel(lens=name, layer=layer).isel(token=i)
                # Logits closer than rounding may change places.
                assert abs(int(found) - rank) <= 1 + 0.01 * rank


def test_random_lenses_agree_with_the_model_at_its_last_layer_and_differ_from_each_other_below(done):
    ranks = done.ranks["target_rank"]
    assert ranks.sizes["lens"] == 2 + FEW["controls"]
    assert (ranks.isel(layer=-1) == ranks.isel(layer=-1, lens=0)).all()
    below = ranks.isel(layer=slice(-1), lens=slice(1, None)).values.reshape(1 + FEW["controls"], -1)
    assert len(np.unique(below, axis=0)) == len(below)


def test_claims_tables_and_json_say_how_the_lens_was_fitted(done):
    document = done.to_json()
    assert len(document["findings"]) == 2
    assert all("Control: 5 " in claim["sentence"] for claim in document["findings"])
    assert "exactly on 3 prompts of prose" in document["fit"]
    assert [row["is_known"] for row in document["prompts"]] == [True, True]
    assert len(document["prompts"][0]["jacobian_ranks"]) == len(document["layers"])


def test_a_model_that_knows_no_answer_claims_nothing(store):
    done = compute("jacobian_lens", store=store, prompts=PROMPTS, answers=["wisdom", "light"], **FEW)
    assert done.to_json()["findings"] == []
    assert "predicts 0 of 2 answers" in done.not_claimed
    assert list(done.views())


def test_a_large_model_gets_fewer_cotangents_and_the_specimen_an_exact_fit():
    node = build("jacobian_lens").nodes["fit"]
    assert node.experiment.cotangents is None
    assert len(node.experiment.prompts) == 16
    assert build("jacobian_lens", cotangents=8).nodes["fit"].experiment.cotangents == 8


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"prompts": PROMPTS}, "expected the answers of the prompts, found none"),
        ({"context": 6, "skip": 5}, "expected context to be at least 7"),
    ],
)
def test_settings_that_do_not_fit_are_one_line(settings, said):
    with pytest.raises(ConfigError, match=said) as caught:
        build("jacobian_lens", **settings)
    assert "\n" not in str(caught.value)
