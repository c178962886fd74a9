"""Logit attribution from prompts to figures, against the model's own logits; stored, it needs no torch."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import mizarr
from mizarr.store.errors import ConfigError
from mizarr.workflows import build, compute
from tests.torch_free import without_torch

from ...stages.attribution_corpus import FAMILIES
from ...stages.forward.random_hybrids import save_random_hybrid
from ...stages.forward.random_models import save_random_model

PROMPTS = ["The capital of France is", "It was the best of"]
ANSWERS = ["Paris", "times"]
slow = functools.partial(pytest.param, marks=pytest.mark.slow)
"""Of a family that differs in nothing that the others leave out."""


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A random model of a family; the store of its results lies beside it."""

    @functools.cache
    def made(family: str) -> Path:
        found = tmp_path_factory.mktemp(family) / "model"
        save_random_model(found, family, 1, **FAMILIES[family])
        return found

    return made


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, folder_of: Callable[[str], Path]) -> Path:
    return folder_of(request.param)


@pytest.fixture(scope="module")
def done(folder: Path):
    return computed(folder)


def computed(folder: Path, **settings):
    given = {"prompts": PROMPTS, "answers": ANSWERS, **settings}
    return compute("logit_attribution", store=folder.parent / "store", model=str(folder), **given)


def own_logits(folder: Path, ids: list[int]) -> np.ndarray:
    """Of the reference implementation at the last token, before its soft cap."""
    model = AutoModelForCausalLM.from_pretrained(folder).float().eval()
    with torch.no_grad():
        return model.lm_head(model.model(torch.tensor([ids])).last_hidden_state)[0, -1].numpy()


def test_shares_sum_to_what_the_model_says_of_answer_and_strongest_rival(done, folder: Path):
    for i, (prompt, answer) in enumerate(zip(PROMPTS, ANSWERS, strict=True)):
        own = own_logits(folder, done.subject.tokenizer.encode(prompt).ids)
        target = done.subject.answer_id(prompt, answer)
        rival = int(np.argmax(np.where(np.arange(len(own)) == target, -np.inf, own)))
        found = json.loads(json.dumps(done.to_json(), allow_nan=False))["results"][i]
        assert (found["target_id"], found["other_id"]) == (target, rival)
        difference = own[target] - own[rival]
        assert found["attributed"] == pytest.approx(difference, abs=1e-4)
        assert sum(part["share"] for part in found["components"]) == pytest.approx(difference, abs=1e-4)
        assert found["target_logit"] - found["other_logit"] == pytest.approx(difference, abs=1e-4)


def test_heads_and_their_bias_sum_to_the_share_of_each_layer(done):
    for found in done.to_json()["results"]:
        shares = {part["component"]: part["share"] for part in found["components"]}
        for layer, heads in enumerate(found["heads"]):
            whole = sum(heads) + found["attn_bias"][layer]
            assert whole == pytest.approx(shares[f"{layer}_attn_out"], abs=1e-4)


def test_all_neurons_sum_to_the_share_of_each_mlp(folder: Path):
    found = computed(folder, neurons=1000).shares
    whole = found["neuron_share"].sum("rank") + found["mlp_bias_share"]
    np.testing.assert_allclose(whole, found["mlp_share"], atol=1e-4)


def test_neurons_are_listed_by_magnitude_with_their_layer(done):
    row = done.shares.isel(prompt=0)
    top = done.top_neurons(0)
    assert [abs(share) for *_, share in top] == sorted((abs(share) for *_, share in top), reverse=True)
    layer, neuron, share = top[0]
    here = row.sel(layer=layer)
    assert float(here["neuron_share"][here["neuron_id"].values.tolist().index(neuron)]) == pytest.approx(
        share
    )


def test_a_stored_corpus_gives_the_same_numbers_without_torch(folder_of: Callable[[str], Path]):
    """Of every family, in one process."""
    program = """
from mizarr.workflows import compute
asked = json.loads(sys.argv[1])
print(json.dumps([compute("logit_attribution", **given).to_json() for given in asked]))
"""
    folders = [folder_of(family) for family in FAMILIES]
    # The second question to the same activations: nothing of it is stored, and nothing needs a model.
    questions = [{"answers": ANSWERS}, {"answers": ["myself"], "difference": False}]
    asked = [
        {"store": str(folder.parent / "store"), "model": str(folder), "prompts": PROMPTS, **question}
        for folder in folders
        for question in questions
    ]
    known = [computed(folder, **questions[0]).to_json() for folder in folders]
    told = without_torch(program, json.dumps(asked))
    assert told[::2] == json.loads(json.dumps(known))
    others = [computed(folder, **questions[1]).to_json() for folder in folders]
    assert told[1::2] == json.loads(json.dumps(others))


@pytest.fixture(scope="module")
def plain_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory):
    """What computes on one small Llama, in one store."""
    store = tmp_path_factory.mktemp("plain") / "store"
    return lambda **given: compute("logit_attribution", store=store, model=str(tiny_model), **given)


def test_without_answers_the_most_likely_token_is_attributed(plain_model, tiny_model: Path):
    done = plain_model(prompts=["it was the age of"])
    own = own_logits(tiny_model, done.subject.tokenizer.encode("it was the age of").ids)
    first, second = np.argsort(-own)[:2].tolist()
    (found,) = done.to_json()["results"]
    assert (found["target_id"], found["other_id"], found["answer"]) == (first, second, None)
    assert found["attributed"] == pytest.approx(own[first] - own[second], abs=1e-4)


def test_one_may_name_the_token_it_is_told_from_or_none(plain_model, tiny_model: Path):
    given = {"prompts": ["it was the age of"], "answers": ["wisdom"]}
    done = plain_model(**given, against=["us"])
    own = own_logits(tiny_model, done.subject.tokenizer.encode(given["prompts"][0]).ids)
    target, other = (done.subject.answer_id(given["prompts"][0], word) for word in ("wisdom", "us"))
    assert done.to_json()["results"][0]["attributed"] == pytest.approx(own[target] - own[other], abs=1e-4)
    alone = plain_model(**given, difference=False).to_json()["results"][0]
    assert alone["attributed"] == pytest.approx(own[target], abs=1e-4)
    assert "other_id" not in alone


def test_without_neurons_their_activations_and_weights_are_left_alone(plain_model):
    done = plain_model(prompts=["it was the age of"], neurons=0)
    assert "neurons" not in done.nodes
    assert "neurons" not in done.to_json()["results"][0]
    assert done.top_neurons(0) == []


def test_tables_say_what_is_told_from_what(done, capsys):
    from rich.console import Console

    done.render(Console(width=110))
    printed = capsys.readouterr().out
    assert "rather than" in printed
    assert "0_attn_out" in printed
    assert ("before the soft cap" in printed) == (done.subject.config.final_logit_softcapping is not None)


def test_figures_name_the_results(done, tmp_path: Path):
    files = done.draw(tmp_path)
    assert [path.name for path in files] == ["logit_attribution_0.png", "logit_attribution_mean.png"]
    for path in files:
        assert path.read_bytes().startswith(b"\x89PNG")
        assert done.to_json()["provenance"]["keys"]["layers"][:12].encode() in path.read_bytes()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"prompts": PROMPTS, "answers": ["a", "b", "c"]}, "one per prompt"),
        ({"prompts": PROMPTS, "against": ["a"], "difference": False}, "difference=true"),
        ({"neurons": -1}, "neurons to be int of at least 0, found -1"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(wrong, message):
    with pytest.raises(ConfigError, match=message):
        build("logit_attribution", **wrong)


def test_a_stream_that_is_normed_itself_is_no_sum_and_is_told(tmp_path: Path):
    save_random_hybrid(tmp_path / "model", "minimax", 0)
    with pytest.raises(
        ConfigError, match="sum of the outputs of all layers, found minimax, which normalises"
    ):
        computed(tmp_path / "model")


@pytest.mark.parametrize(
    "family", ["gemma3_text", "gpt2", "gpt_neox", "granite", *map(slow, ["cohere2", "olmo2"])]
)
def test_shares_sum_where_layers_differ(family: str, tmp_path: Path):
    """Parallel layers, norms around and behind, learned positions, multipliers, fused projections."""
    caps = {"final_logit_softcapping": None} if family == "gemma3_text" else {}
    save_random_hybrid(tmp_path / "model", family, 1, **caps)
    found = computed(tmp_path / "model", neurons=1000)
    model = mizarr.Model.from_pretrained(tmp_path / "model")
    for prompt, told in zip(PROMPTS, found.to_json()["results"], strict=True):
        logits = model.forward(prompt).logits[0, -1].double()
        difference = float(logits[told["target_id"]] - logits[told["other_id"]])
        assert told["attributed"] == pytest.approx(difference, abs=1e-4)
        assert sum(part["share"] for part in told["components"]) == pytest.approx(difference, abs=1e-4)
        shares = {part["component"]: part["share"] for part in told["components"]}
        for layer, heads in enumerate(told["heads"]):
            whole = sum(heads) + told["attn_bias"][layer]
            assert whole == pytest.approx(shares[f"{layer}_attn_out"], abs=1e-4)
    whole = found.shares["neuron_share"].sum("rank") + found.shares["mlp_bias_share"]
    np.testing.assert_allclose(whole, found.shares["mlp_share"], atol=1e-4)


@pytest.mark.parametrize("family", ["mamba2", "bamba", *map(slow, ["mamba", "gla"])])
def test_shares_sum_where_layers_have_no_heads_or_no_mlps(family: str, tmp_path: Path):
    save_random_hybrid(tmp_path / "model", family, 1)
    found = computed(tmp_path / "model")
    model = mizarr.Model.from_pretrained(tmp_path / "model")
    for prompt, told in zip(PROMPTS, found.to_json()["results"], strict=True):
        logits = model.forward(prompt).logits[0, -1].double()
        difference = float(logits[told["target_id"]] - logits[told["other_id"]])
        assert sum(part["share"] for part in told["components"]) == pytest.approx(difference, abs=1e-4)
        assert "heads" not in told
    assert found.report(tmp_path / "page.html").stat().st_size > 10_000
    assert found.tables()


def test_neurons_of_experts_are_told_to_be_left_out(tmp_path: Path):
    save_random_hybrid(tmp_path / "model", "mixtral", 1)
    with pytest.raises(ConfigError, match="found one in 0 of 3 of mixtral; leave neurons out: neurons=0"):
        computed(tmp_path / "model")
    assert computed(tmp_path / "model", neurons=0).to_json()["results"]
