"""Questions answered off weights, and the evaluation of a model: what they say of the specimen, and of
others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mizarr.store.errors import ConfigError
from mizarr.workflows import build, compute
from tests.stages.evaluation.test_evaluation import exchanged
from tests.stages.forward.random_hybrids import save_random_hybrid
from tests.stages.forward.random_models import save_random_model

from ..test_claims import random_model

FEW = {"limit": 12, "sequences": 6, "length": 30, "facts": 30, "controls": 200}


def verdicts(document: dict[str, Any]) -> list[bool]:
    return [each["verdict"] == "beyond chance" for each in document["findings"]]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("weights")


def test_the_induction_head_is_found_to_read_the_previous_token_head_as_key(store, tmp_path):
    """The guided specimen's L3H0 and L1H0, which training asked for: nobody tells the workflow."""
    done = compute("composition", store=store, model="specimen-guided", controls=20)
    found = json.loads(json.dumps(done.to_json()))
    assert found["modes"] == ["Q", "K", "V"] and all(verdicts(found))
    best = next(row for row in found["pairs"] if row["mode"] == "K")
    assert (best["source_layer"], best["source_head"], best["layer"], best["head"]) == (1, 0, 3, 0)
    assert best["share_as_large"] == pytest.approx(1 / 21)
    scores = np.array(found["scores"]["score"], float)
    assert best["score"] == np.nanmax(scores[1]) and scores.shape == (3, 6, 6, 6, 6)
    assert [path.name for path in done.draw(tmp_path)] == ["composition.png"]
    assert "Read as key" in done.report(tmp_path / "page.html").read_text()


def test_plain_matrices_and_one_mode_are_another_result(store):
    folded = compute("composition", store=store, controls=2, modes=["V"])
    plain = compute("composition", store=store, controls=2, modes=["V"], folded=False)
    one, other = (done.scores["score"].values for done in (folded, plain))
    assert one.shape == other.shape == (1, 6, 6, 6, 6)
    assert np.nanmax(np.abs(one - other)) > 1e-3


def test_the_induction_head_is_found_to_copy_and_its_directions_are_told(store, tmp_path):
    done = compute("ov_qk", store=store, model="specimen-guided")
    found = json.loads(json.dumps(done.to_json()))
    best, *_, last = found["heads"]
    assert (best["layer"], best["head"]) == (3, 0) and best["copying"] > 0.8 and best["quantile"] == 1
    assert last["copying"] < -0.8 and all(verdicts(found))
    for circuit in ("ov", "qk"):
        told = found[circuit]
        assert (told["layer"], told["head"], len(told["directions"])) == (3, 0, 5)
        assert all(len(each["read"]) == len(each["written"]) == 5 for each in told["directions"])
    named = compute("ov_qk", store=store, layer=1, head=2, directions=2).to_json()
    assert (named["ov"]["layer"], named["ov"]["head"], len(named["ov"]["directions"])) == (1, 2, 2)
    assert [path.name for path in done.draw(tmp_path)] == ["ov_qk.png"]
    assert "Singular directions of OV of L3H0" in done.report(tmp_path / "page.html").read_text()


def test_a_model_with_learned_positions_is_asked_where_they_look(tmp_path):
    save_random_hybrid(tmp_path / "gpt2", "gpt2", 0)
    found = compute("ov_qk", store=tmp_path / "store", model=str(tmp_path / "gpt2"), controls=5).to_json()
    rows = found["positions"]
    assert rows == sorted(rows, key=lambda row: -row["weight"][1])
    assert all(len(row["weight"]) == 5 and sum(row["weight"]) > 0 for row in rows)


def test_heads_that_are_no_matrices_are_refused_when_the_question_is_asked(tmp_path):
    save_random_model(tmp_path / "qwen3", "qwen3", 0)
    asked = {"model": str(tmp_path / "qwen3")}
    assert build("composition", **asked).modes == ("V",)
    assert "qk" not in build("ov_qk", **asked).nodes
    with pytest.raises(ConfigError, match="expected modes=V for qwen3, which has no QK matrix"):
        build("composition", modes=["K"], **asked)
    with pytest.raises(ConfigError, match=r"expected a head in 0\.\.5 of layer 1, found 6"):
        build("ov_qk", layer=1, head=6)
    with pytest.raises(ConfigError, match=r"expected a layer in 0\.\.5 of llama, found layer 6"):
        build("ov_qk", layer=6)
    save_random_hybrid(tmp_path / "gated", "qwen3_next", 0)
    for name in ("composition", "ov_qk"):
        with pytest.raises(ConfigError, match="multiplied by gates"):
            build(name, model=str(tmp_path / "gated"))
    save_random_hybrid(tmp_path / "bloom", "bloom", 0)
    with pytest.raises(
        ConfigError, match="those of bloom pass through a norm; compute circuits between heads"
    ):
        build("ov_qk", model=str(tmp_path / "bloom"))


def test_the_specimen_is_whole(store, tmp_path):
    whole = compute("evaluate", store=store, **FEW)
    found = json.loads(json.dumps(whole.to_json()))
    assert found["order"]["is_sound"] and found["order"]["best"] > 0 and verdicts(found) == [True] * 4
    measures = {row["measure"]: row["value"] for row in found["measures"]}
    assert measures["loss on text"] < 0.6 * found["uniform_loss"] < found["shuffled_text_loss"]
    assert measures["induction loss"] < 0.1 < measures["loss on random tokens"]
    assert measures["facts said"] >= 0.9, "as its card says"
    assert [path.name for path in whole.draw(tmp_path)] == ["evaluate.png"]
    assert "Loss on text, by position" in whole.report(tmp_path / "page.html").read_text()


PAIRS = [(1, 2), *(pytest.param(pair, marks=pytest.mark.slow) for pair in ((0, 5), (3, 4), (4, 5)))]


@pytest.mark.parametrize("pair", PAIRS)
def test_a_model_with_two_layers_exchanged_is_noticed_and_the_layers_named(pair, tmp_path):
    model = exchanged(tmp_path / "exchanged", *pair)
    few = FEW | {"limit": 8, "sequences": 2, "facts": 4}
    done = compute("evaluate", store=tmp_path / "store", model=str(model), **few)
    order = done.to_json()["order"]
    assert not order["is_sound"] and tuple(order["exchanged"]) == pair and order["best"] < 0
    assert not verdicts(done.to_json())[-1]
    assert f"better with layers {pair[0]} and {pair[1]} exchanged" in done.shown[0].caption


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 6))])
def test_a_model_that_learned_nothing_is_not_said_to_have_its_layers_mixed_up(seed, tmp_path):
    model = random_model(tmp_path / "model", seed)
    few = FEW | {"limit": 8, "sequences": 2, "facts": 4}
    done = compute("evaluate", store=tmp_path / "store", model=str(model), **few)
    assert done.to_json()["order"]["is_sound"] and not done.shown[0].caption


TINY = {"limit": 2, "sequences": 2, "length": 12, "facts": 4, "controls": 20, "swapped": 0}
ANSWERS = "log-probability of answers"


def test_what_a_change_costs_stands_beside_every_other_of_its_size(store):
    asked = {**TINY, "zero": ["blocks.0.attn.hook_z"]}
    done = compute("evaluate", store=store, **asked)
    found = json.loads(json.dumps(done.to_json()))
    rows = {row["measure"]: row for row in found["measures"]}
    cost, others = found["cost"], found["cost"]["others"]["costs"]
    assert cost["repetitions"] == rows["induction loss"]["changed"] - rows["induction loss"]["value"] > 1
    assert cost["facts"] == rows[ANSWERS]["value"] - rows[ANSWERS]["changed"]
    named = {f"blocks.{layer}.attn.hook_z" for layer in (1, 2, 3, 4, 5)}
    assert {each["change"] for each in others} == named
    for of, where, sign in (
        ("loss on text", "text", 1),
        ("induction loss", "repetitions", 1),
        (ANSWERS, "facts", -1),
    ):
        beside = [rows[of]["value"] + sign * each[where] for each in others]
        assert rows[of]["others_median"] == pytest.approx(np.median(beside))
    alone = compute("evaluate", store=store, **TINY, zero=[others[0]["change"]]).to_json()["cost"]
    assert [alone[of] for of in ("text", "repetitions", "facts")] == pytest.approx(
        [others[0][of] for of in ("text", "repetitions", "facts")], abs=1e-6
    )
    assert len(found["findings"]) == 3, "of five others nothing can be told from chance"
    assert "5 other choices of layers" in done.shown[0].caption
    costs = next(view for view in done.shown if view.title.startswith("Cost of the intervention"))
    assert len(costs.rows) == 6 and sum(row[0][0].style == "bold" for row in costs.rows) == 1


def test_what_has_no_other_of_its_size_is_measured_and_claims_nothing(store):
    done = compute("evaluate", store=store, **TINY, zero=["blocks.*.hook_mlp_out"])
    found = done.to_json()
    assert len(found["findings"]) == 3 and found["cost"]["text"] > 0.5
    assert "There is no other choice of layers" in done.shown[0].caption
    assert "others_median" not in found["measures"][0]
    few = compute("evaluate", store=store, **TINY, zero=["blocks.3.hook_mlp_out"], draws=2)
    assert "2 control interventions cannot give a p-value of 0.05" in few.shown[0].caption


@pytest.mark.parametrize(
    "change",
    [
        {"dictionary": "specimen/clt"},
        pytest.param({"mean": ["blocks.[135].attn.hook_z"]}, marks=pytest.mark.slow),
    ],
    ids=lambda each: next(iter(each)),
)
def test_a_cost_is_claimed_where_others_of_its_size_cost_less(change, store, tmp_path):
    done = compute("evaluate", store=store, **TINY, **change)
    found = json.loads(json.dumps(done.to_json()))
    claims = [each for each in found["findings"] if " increases the model's loss on " in each["claim"]]
    own, others = found["cost"], found["cost"]["others"]["costs"]
    for claim, where in zip(claims, ("text", "repetitions", "facts"), strict=True):
        drawn = np.array([each[where] for each in others])
        assert claim["effect"] == own[where] and claim["null"]["draws"] == len(drawn) >= 19
        assert claim["null"]["share_as_large"] == (1 + (drawn >= own[where] - 1e-9).sum()) / (1 + len(drawn))
    page = done.report(tmp_path / "page.html").read_text()
    assert claims[0]["null"]["of"] in page and "95 % from" in page


def test_means_are_of_text_that_is_not_scored(store):
    asked = build("evaluate", **TINY, mean=["blocks.0.hook_mlp_out"])
    scored = asked.nodes["text"].experiment.prompts
    taken = asked.nodes["changed_facts"].experiment.mean
    assert len(taken.references) == len(scored) == 2 and not set(taken.references) & set(scored)
    with pytest.raises(ConfigError, match="text beyond the prompts that are scored"):
        build("evaluate", **TINY | {"limit": 10_000}, mean=["blocks.0.hook_mlp_out"])
    with pytest.raises(ConfigError, match="expected hook points with a position axis"):
        build("evaluate", **TINY, mean=["blocks.0.attn.hook_pattern"])


def test_questions_that_make_no_sense_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="one of zero, mean and dictionary, found zero and dictionary"):
        build("evaluate", zero=["hook_embed"], dictionary="specimen/clt")
    with pytest.raises(ConfigError, match="expected length to be int of at least 2, found 1"):
        build("evaluate", length=1)
