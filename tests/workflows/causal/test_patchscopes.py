"""The workflow `patchscopes`, from prompts to layers chosen on one half and claims about the other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mizarr.store.errors import ConfigError, MizarrError
from mizarr.workflows import build, compute
from mizarr.workflows.causal.patchscopes import PatchscopesWorkflow
from mizarr.workflows.material import sizes
from mizarr.workflows.material.samples.entities import ENTITIES
from tests.workflows.test_claims import SMALL, most, random_model

FEW: dict[str, Any] = {"facts": 6, "layers": [0, 4], "target_layers": [1, 3, 4], "controls": 9}


@pytest.fixture(scope="module")
def identity(tmp_path_factory: pytest.TempPathFactory) -> PatchscopesWorkflow:
    return compute("patchscopes", store=tmp_path_factory.mktemp("store"), **FEW)


@pytest.fixture(scope="module")
def entity(tmp_path_factory: pytest.TempPathFactory) -> PatchscopesWorkflow:
    given = FEW | {"preset": "entity", "facts": 14, "max_tokens": 3}
    return compute("patchscopes", store=tmp_path_factory.mktemp("store"), **given)


def test_layers_lead_over_the_lens_on_the_first_half_and_are_scored_on_the_other(identity):
    readings = identity.result("readings").load()
    is_read, lens = (readings[name] == readings["own_id"] for name in ("top_id", "lens_top_id"))
    chosen_on = [i for i, known in enumerate(identity.is_known("to choose on")) if known]
    scored = [6 + i for i, known in enumerate(identity.is_known("to score on")) if known]
    lead = (is_read.astype(float) - lens).isel(source=chosen_on).mean("source")
    layer, target_layer = identity.chosen
    assert float(lead.sel(layer=layer, target_layer=target_layer)) == pytest.approx(float(lead.max()))
    read, beyond = identity.claims()
    place = {"layer": layer, "target_layer": target_layer}
    assert read.effect == pytest.approx(float(is_read.isel(source=scored).sel(place).mean()))
    expected = is_read.sel(place).astype(float) - lens.sel(layer=layer)
    assert beyond.effect == pytest.approx(float(expected.isel(source=scored).mean()))
    assert read.held_out and beyond.held_out and read.prompts == len(scored)


def test_controls_are_states_that_want_another_token(identity, entity):
    for workflow in (identity, entity):
        readings = workflow.readings
        members = workflow._members("to score on")
        wanted = workflow._wanted(readings, members)
        scores = workflow._scores(readings, "to score on")
        assert scores.others.shape[1] == min(int((wanted != token).sum()) for token in wanted) > 0
        for i, token in enumerate(wanted):
            others = [member for member, other in zip(members, wanted, strict=True) if other != token]
            part = readings.isel(source=others)
            read = part["top_id"] == token if workflow is identity else part["logprob"].sel(word=token)
            values = read.transpose("source", "layer", "target_layer").values.astype(float)
            for row in scores.others[i]:
                assert any(np.array_equal(row, value) for value in values)


def test_the_claim_about_entities_is_relative_to_other_kinds(entity):
    (claim,) = entity.claims()
    scores = entity._scores(entity.readings, "to score on")
    layer, target_layer = entity.chosen
    place = (slice(None), FEW["layers"].index(layer), FEW["target_layers"].index(target_layer))
    relative = scores.own[place] - scores.others.mean(1)[place]
    assert claim.effect == pytest.approx(relative.mean()) and claim.unit == "nats" and claim.prompts == 14


def test_both_halves_of_the_entities_have_all_kinds(entity):
    kinds = {kind for _, kind in ENTITIES}
    assert {kind for _, kind in ENTITIES[::2]} == {kind for _, kind in ENTITIES[1::2]} == kinds
    halves = [{prompt.wanted for prompt in part} for part in (entity.sources[:14], entity.sources[14:])]
    assert halves[0] == halves[1]


def test_held_out_entities_are_described_from_every_source_layer(entity):
    texts = entity.result("texts").load()
    assert texts["text"].dims == ("source", "layer", "target_layer")
    assert texts["layer"].values.tolist() == [0, 4] and texts["target_layer"].item() == entity.chosen[1]
    document = entity.to_json()
    assert [row["prompt"] for row in document["descriptions"][::2]] == [
        prompt.text for prompt in entity.sources[14:17]
    ]
    assert all(isinstance(row["description"], str) for row in document["descriptions"])


def test_documents_and_pages_show_tokens_curves_and_pairs(identity, tmp_path: Path):
    document = identity.to_json()
    assert json.dumps(document, allow_nan=False)
    assert {"prompt", "next", "read", "lens", "kl", "lens_kl"} == document["read"][0].keys()
    assert set(document["by_layer"]) == {"layer", "target prompt", "logit lens", "other states"}
    assert document["chosen_layer"] in (0, 4) and document["chosen_target_layer"] in (1, 3, 4)
    page = identity.report(tmp_path / "page.html").read_text("utf-8")
    assert "Pairs of layers" in page and "Next tokens read from the states" in page


def test_random_models_claim_nothing(tmp_path: Path):
    found = []
    for seed in range(3):
        model = random_model(tmp_path / str(seed), seed, **SMALL)
        for preset in ("identity", "entity"):
            given = {"preset": preset, "facts": 6 if preset == "identity" else 14, "max_tokens": 1}
            given |= {"layers": [0], "target_layers": [0], "controls": 19, "seed": seed}
            done = compute("patchscopes", store=tmp_path / f"{seed} {preset}", model=str(model), **given)
            findings = done.to_json()["findings"]
            if preset == "identity":
                assert not findings, "it knows no fact"
                assert "The model knows the answer of 0 of 6 facts to choose on" in done.not_claimed
            found += [finding["verdict"] == "beyond chance" for finding in findings]
    assert len(found) == 3 and sum(found) <= most(3)


def test_sizes_fall_with_the_operations_of_a_prompt(monkeypatch):
    def half() -> int:
        return len(build("patchscopes").sources) // 2

    assert half() == 32
    monkeypatch.setattr(sizes, "OPERATIONS", 1.0)
    assert half() == sizes.FEWEST_FACTS


def test_texts_of_a_file_are_read_in_a_prompt_of_ones_own(tmp_path: Path):
    file = tmp_path / "facts.json"
    names = {"Rome": "city", "Peru": "country", "Oslo": "city", "Cuba": "country"}
    records = [{"prompt": f"We speak of {name}", "target": kind} for name, kind in names.items()]
    # The halves are every other record.
    file.write_text(json.dumps([records[i] for i in (0, 2, 1, 3)]))
    given = {"preset": "entity", "data": str(file), "target_prompt": "Bonn: city, thing:", "max_tokens": 2}
    done = compute(
        "patchscopes", store=tmp_path / "store", placeholder="thing", layers=[1], target_layers=[0], **given
    )
    assert [prompt.text[-4:] for prompt in done.sources] == ["Rome", "Peru", "Oslo", "Cuba"]
    (claim,) = done.claims()
    assert claim.prompts == 2 and "at 'thing' of the target prompt" in claim.text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"preset": "entities"}, "identity or entity"),
        ({"placeholder": "dog"}, "dog"),
        ({"target_prompt": "cat -> cat; dog -> dog;"}, r"'\?'"),
        ({"layers": [6]}, "expected layers from 0 to 5"),
        ({"target_layers": [-1]}, "expected layers from 0 to 5"),
        ({"facts": 100000}, "found .* prompts; give more with data=FILE, or ask for fewer: facts=2"),
        ({"preset": "entity", "facts": 29}, "two halves of 29 prompts"),
        ({"max_tokens": 600}, "reads at most"),
    ],
)
def test_settings_that_do_not_fit_are_refused_in_one_line(settings, message):
    with pytest.raises(MizarrError, match=message) as error:
        build("patchscopes", **settings)
    assert "\n" not in str(error.value)


def test_prompts_of_one_answer_are_refused(tmp_path: Path):
    file = tmp_path / "facts.json"
    file.write_text(
        json.dumps([{"prompt": f"{name} is a", "target": "city"} for name in ("A", "B", "C", "D")])
    )
    with pytest.raises(ConfigError, match="each with different answers, found 4 prompts"):
        build("patchscopes", data=str(file))
