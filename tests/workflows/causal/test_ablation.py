"""Ablation of every head and layer, from a prompt to tables, figures and JSON."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

import mizarr
from mizarr import HookSpec, Replace, Zero
from mizarr.store.errors import ConfigError
from mizarr.workflows import build, compute
from mizarr.workflows.subject import shipped_facts
from tests.known_facts import compute_as_known

PROMPT, TARGET = "it was the season of", " light"
REFERENCES = ["we had everything before us", "it was the epoch of belief"]


def ablated(tiny_model: Path, where: Path, **given):
    return compute("ablation", store=where, model=str(tiny_model), prompt=PROMPT, **{"facts": 1, **given})


def log_probabilities(model, spec: HookSpec | None = None) -> torch.Tensor:
    return model.forward(PROMPT, spec).logits[0, -1].double().log_softmax(-1)


def divergence(p: torch.Tensor, q: torch.Tensor) -> float:
    return float((p.exp() * (p - q)).sum())


def test_zero_is_a_plain_pass_with_the_head_or_part_silenced(model, tiny_model: Path, tmp_path: Path):
    done = ablated(tiny_model, tmp_path, how="zero", target=TARGET)
    document = json.loads(json.dumps(done.to_json(), allow_nan=False))
    clean, answer = log_probabilities(model), document["target_token_id"]
    without = log_probabilities(model, HookSpec().intervene("blocks.1.attn.hook_z", Zero(heads=(1,))))
    assert document["heads"]["kl"][1][1] == pytest.approx(divergence(clean, without), rel=1e-4)
    assert document["heads"]["probability"][1][1] == pytest.approx(float(without[answer].exp()), abs=1e-6)
    assert document["clean_probability"] == pytest.approx(float(clean[answer].exp()), abs=1e-6)
    without = log_probabilities(model, HookSpec().intervene("blocks.2.hook_mlp_out", Zero()))
    assert document["layers"]["kl"][2][1] == pytest.approx(divergence(clean, without), rel=1e-4)


def test_the_mean_is_that_of_all_positions_of_the_references(model, tiny_model: Path, tmp_path: Path):
    done = ablated(tiny_model, tmp_path, references=REFERENCES)
    point = "blocks.0.hook_attn_out"
    states = [model.forward(text, HookSpec().capture(point), want=None)[point][0] for text in REFERENCES]
    mean = torch.cat(states).double().mean(0).float()
    length = len(model.tokenizer.encode(PROMPT))
    spec = HookSpec().intervene(point, Replace(mean.expand(length, -1)))
    expected = divergence(log_probabilities(model), log_probabilities(model, spec))
    assert done.to_json()["layers"]["kl"][0][0] == pytest.approx(expected, rel=1e-3)
    assert "probability" not in done.to_json()["heads"], "without a target nothing is said of one"


def test_resampled_is_the_mean_over_other_prompts_of_as_many_tokens(model, tiny_model: Path, tmp_path: Path):
    """Every reference drawn, put into the prompt by a plain pass; none of them is the prompt."""
    done = ablated(tiny_model, tmp_path, how="resample", seed=3)
    experiment, point = done.nodes["layers"].experiment, "blocks.1.hook_mlp_out"
    assert {len(ids) for ids in experiment.references} == {len(experiment.tokens)}
    assert experiment.tokens not in experiment.references
    clean, losses = log_probabilities(model), []
    for number in experiment.drawn():
        other = model.forward([list(experiment.references[number])], HookSpec().capture(point), want=None)
        spec = HookSpec().intervene(point, Replace(other[point][0]))
        losses.append(divergence(clean, log_probabilities(model, spec)))
    assert len(losses) == 10
    assert done.to_json()["layers"]["kl"][1][1] == pytest.approx(np.mean(losses), rel=1e-3)


def test_the_heads_that_count_are_listed_from_the_largest_loss(tiny_model: Path, tmp_path: Path, capsys):
    done = ablated(tiny_model, tmp_path / "store", target=TARGET, top=3)
    document = done.to_json()
    losses = np.array(document["heads"]["kl"])
    assert [one["kl"] for one in document["most"]] == sorted(losses.ravel(), reverse=True)[:3]
    first = document["most"][0]
    assert losses[first["layer"], first["head"]] == losses.max()
    change = document["heads"]["probability"][first["layer"]][first["head"]] - document["clean_probability"]
    assert first["probability_change"] == pytest.approx(change)
    (path,) = done.render(Console(width=120), tmp_path)
    assert path.name == "ablation.png"
    assert "KL(unchanged run || ablated run)" in capsys.readouterr().out


def test_of_facts_that_a_model_does_not_know_nothing_is_claimed(tiny_model: Path, tmp_path: Path):
    done = ablated(tiny_model, tmp_path, facts=2)
    (told,) = (view for view in done.shown if view.kind == "findings")
    assert done.to_json()["findings"] == []
    assert "of 2 facts to choose on and " in told.caption and "; a claim needs 2 of each." in told.caption
    assert list(done.nodes) == ["general_facts", "heads", "layers", "known"], "no other fact was run"
    without = ablated(tiny_model, tmp_path, facts=2, controls=0)
    assert list(without.nodes) == ["heads", "layers"]
    assert without.to_json()["not_claimed"] == "Nothing is claimed, as no control was run (controls=0)."
    assert without.to_json()["heads"] == done.to_json()["heads"]


def test_which_facts_are_known_is_what_a_plain_pass_says(tmp_path: Path):
    done = compute("ablation", store=tmp_path, how="zero", facts=10)
    specimen = mizarr.Model.from_pretrained("specimen")
    said = [
        int(specimen.forward(each["prompt"]).logits[0, -1].argmax())
        == specimen.tokenizer.encode(f" {each['target']}", add_special=False).ids[0]
        for each in shipped_facts()[50:70]
    ]
    known = [done.is_known(group) for group in ("to choose on", "to score on")]
    assert np.concatenate(known).tolist() == said
    assert sum(said) >= 18


def test_the_head_told_is_chosen_on_facts_and_scored_on_others(model, tiny_model: Path, tmp_path: Path):
    """Choice, effects and nulls again, by plain passes over the heads of the facts and of the prompt."""
    given = {"model": str(tiny_model), "prompt": PROMPT, "how": "zero", "facts": 2, "controls": 9}
    done = compute_as_known("ablation", store=tmp_path, data="shipped", **given)
    document = done.to_json()

    def losses(ids) -> np.ndarray:
        clean = model.forward(ids).logits[0, -1].double().log_softmax(-1)
        found = np.zeros((3, 2))
        for layer, head in np.ndindex(3, 2):
            spec = HookSpec().intervene(f"blocks.{layer}.attn.hook_z", Zero(heads=(head,)))
            without = model.forward(ids, spec).logits[0, -1].double().log_softmax(-1)
            found[layer, head] = divergence(clean, without)
        return found

    limit = model.config.context_length
    encoded = [model.tokenizer.encode(each["prompt"]).ids for each in shipped_facts()[50:]]
    facts = np.array([losses(ids) for ids in [ids for ids in encoded if len(ids) <= limit][:4]])
    here, mean = losses(model.tokenizer.encode(PROMPT).ids), facts[:2].mean(0)
    most, least = (np.unravel_index(pick, mean.shape) for pick in (mean.argmax(), mean.argmin()))
    over, in_prompt, quiet = document["findings"]
    assert f"head {most[1]} of layer {most[0]}" in over["claim"]
    assert f"head {least[1]} of layer {least[0]}" in quiet["claim"]
    scored = facts[2:, most[0], most[1]]
    assert over["effect"] == pytest.approx(scored.mean(), rel=1e-3)
    assert over["interval_95"] == pytest.approx([scored.min(), scored.max()], rel=1e-3)
    assert (over["prompts"], over["held_out"]) == (2, True)
    for found, cell in ((in_prompt, most), (quiet, least)):
        others = np.delete(here.ravel(), np.ravel_multi_index(cell, here.shape))
        assert found["effect"] == pytest.approx(here[cell], rel=1e-3)
        assert found["null"]["draws"] == 5, "all there are, though 9 were asked for"
        assert found["null"]["median"] == pytest.approx(np.median(others), rel=1e-3)
        assert found["null"]["as_large"] == (others >= here[cell]).sum()
    others = np.delete(facts[2:].reshape(2, -1), np.ravel_multi_index(most, mean.shape), axis=1)
    means = np.add.outer(others[0], others[1]) / 2
    assert over["null"]["draws"] == 9
    assert np.abs(means - over["null"]["median"]).min() < 1e-3 * means.max(), "one of what can be drawn"
    given |= {"controls": 4, "seed": 1}
    again = compute_as_known("ablation", store=tmp_path, **given).to_json()["findings"]
    assert [each["null"]["draws"] for each in again] == [4, 4, 4]
    assert again[0]["null"]["median"] != over["null"]["median"]


def test_the_specimen_needs_few_of_its_heads(tmp_path: Path):
    found = np.array(compute("ablation", store=tmp_path / "store").to_json()["heads"]["kl"])
    assert found.shape == (6, 6)
    assert found.max() > 10 * np.median(found)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"how": "zero", "references": REFERENCES}, "found 2 with how=zero"),
        ({"how": "resample", "references": REFERENCES}, "found 2 with how=resample"),
        ({"how": "means"}, "did you mean 'mean'"),
        ({"target": "x", "prompt": None}, "expected a prompt for the target"),
    ],
)
def test_settings_that_cannot_be_are_refused(given, match, tiny_model: Path):
    with pytest.raises(ConfigError, match=match):
        build("ablation", **{"model": str(tiny_model), "prompt": PROMPT, **given})


def test_facts_of_a_file_are_single_ones_or_the_two_of_a_pair(tmp_path: Path):
    pair = {
        "original_prompt": "Nicholas Fairbairn worked in the city of",
        "counterfactual_prompt": "Georg Joseph Beer worked in the city of",
        "gt_original_target": "London",
        "gt_counterfactual_target": "Vienna",
    }
    facts = [{"prompt": each["prompt"], "target": each["target"]} for each in shipped_facts()[200:203]]
    path = tmp_path / "facts.json"
    path.write_text(json.dumps([facts[0], pair, *facts[1:]]))
    done = build("ablation", data=str(path), how="zero")
    assert (done.prompt, done.target) == (facts[0]["prompt"], facts[0]["target"])
    expected = [pair["original_prompt"], pair["counterfactual_prompt"], *(one["prompt"] for one in facts[1:])]
    encode = done.subject.tokenizer.encode
    run = [list(each.tokens) for each in done.nodes["facts"].experiment.experiments]
    assert run == [encode(text).ids for text in expected]
    assert done.groups == {"to choose on": 2, "to score on": 2}
    more = build("ablation", data=[str(path), "shipped"], how="zero", facts=3)
    run = [list(each.tokens) for each in more.nodes["facts"].experiment.experiments]
    assert run == [encode(text).ids for text in (*expected, *(one["prompt"] for one in shipped_facts()[:2]))]
    path.write_text(json.dumps([facts[0], {"prompt": "x", "target": ""}]))
    with pytest.raises(ConfigError, match=r"record 1 of .*: expected the field target to be a text that"):
        build("ablation", data=str(path))
    path.write_text(json.dumps(facts[:2]))
    with pytest.raises(
        ConfigError, match="expected 2 facts in data on which to choose and score a head, found 1"
    ):
        build("ablation", data=str(path))
