"""The dictionaries that ship: they open by name, are small, and do what their card says, on text unseen."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mizarr
from mizarr.stages.features.dictionary import Dictionary
from mizarr.stages.features.download import fetch
from mizarr.stages.features.layers.files import SPECIMEN_FOLDER, resolve
from mizarr.stages.features.training.control import random_features
from mizarr.stages.features.training.evaluate import measure
from mizarr.stages.features.training.replacement import replacement_loss
from mizarr.stages.features.training.settings import TrainingSettings
from mizarr.stages.features.training.trained import as_dictionary
from tests.specimen_training.dictionary_card import card
from tests.specimen_training.dictionary_figures import EVALUATION, graph_prompts, prose_prompts

NAMES = ("clt", "plt", "sae")


@pytest.fixture(scope="module")
def model() -> mizarr.Model:
    return mizarr.Model.from_pretrained("specimen")


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    """The figures that the card is made of."""
    found: dict[str, Any] = json.loads((SPECIMEN_FOLDER / EVALUATION).read_text("utf-8"))
    return found


@pytest.fixture(scope="module")
def prose() -> list[list[int]]:
    """Some of the held-out text, spread over it."""
    return prose_prompts()[::10]


@pytest.fixture(scope="module")
def blocks(model: mizarr.Model, prose: list[list[int]]) -> list[dict[Any, torch.Tensor]]:
    """What the model holds there, a block per prompt, first positions left out."""
    hooks = mizarr.HookSpec().capture("blocks.*.hook_resid_mid", "blocks.*.hook_mlp_out")
    hooks = hooks.capture("blocks.3.hook_resid_post")
    caches = [model.forward([ids], hooks) for ids in prose]
    return [{(point.kind, point.layer): cache[point][0, 1:] for point in cache} for cache in caches]


def settings_of(figures: dict[str, Any]) -> TrainingSettings:
    plain = {name: tuple(v) if isinstance(v, list) else v for name, v in figures["settings"].items()}
    return TrainingSettings(**plain)


def layers_of(dictionary: Dictionary) -> dict[int, Any]:
    return {layer: dictionary.layer(layer) for layer in dictionary.layers}


@pytest.fixture(scope="module")
def control(told, blocks) -> Callable[..., dict[int, Any]]:
    """control(name, fitted=True): random features in place of a dictionary's, made from half of the text."""

    def half() -> Iterator[dict[Any, torch.Tensor]]:
        return iter(blocks[::2])

    @cache
    def made(name: str, *, fitted: bool = True) -> dict[int, Any]:
        it = settings_of(told[name])
        layers = layers_of(Dictionary.from_pretrained(f"specimen/{name}"))
        return random_features(layers, half, it.read, it.writes, seed=1, fitted=fitted)

    return made


def test_all_of_it_is_at_most_six_megabytes():
    assert sum(path.stat().st_size for path in SPECIMEN_FOLDER.rglob("*") if path.is_file()) <= 6_000_000


@pytest.mark.parametrize("name", NAMES)
def test_a_dictionary_opens_by_name_and_fits_the_specimen(name: str, model: mizarr.Model, tmp_path: Path):
    dictionary = Dictionary.from_pretrained(f"specimen/{name}")
    dictionary.require_fit(model.config, model.name)
    assert (dictionary.kind, dictionary.name) == (name, f"specimen/{name}")
    assert dictionary.model_name == "specimen"
    shutil.copytree(SPECIMEN_FOLDER / name, tmp_path / "copy")
    assert Dictionary.from_pretrained(tmp_path / "copy").identity == dictionary.identity


def test_nothing_is_fetched_of_what_ships():
    assert fetch("specimen/clt").directory == SPECIMEN_FOLDER / "clt"


def test_another_name_is_told_which_there_are():
    with pytest.raises(mizarr.MizarrError, match=r"specimen/clt, specimen/plt, specimen/sae.*'specimen/clt'"):
        resolve("specimen/cl")


def test_the_card_tells_what_was_measured(told):
    assert (SPECIMEN_FOLDER / "README.md").read_text("utf-8") == card(told)
    for name in NAMES:
        held = sum(path.stat().st_size for path in (SPECIMEN_FOLDER / name).iterdir())
        assert told[name]["bytes"] == held


@pytest.mark.parametrize("name", NAMES)
def test_what_is_unexplained_is_what_the_card_says_and_far_less_than_at_random(
    name: str, told, blocks, control
):
    it, figures = settings_of(told[name]), told[name]["prose"]
    dictionary = Dictionary.from_pretrained(f"specimen/{name}")
    found = measure(layers_of(dictionary), blocks, it.read, it.writes)
    np.testing.assert_allclose(found.fvu, figures["fvu"], rtol=0.25)
    np.testing.assert_allclose(found.l0, figures["l0"], rtol=0.25)
    random = measure(control(name), blocks[1::2], it.read, it.writes)
    assert (found.fvu < 0.8 * random.fvu).all()
    assert found.fvu.mean() < 0.6 * random.fvu.mean()


@pytest.mark.parametrize("name", NAMES)
def test_the_loss_recovered_is_what_the_card_says_and_more_than_at_random(
    name: str, told, prose, model: mizarr.Model, control
):
    it, figures = settings_of(told[name]), told[name]["prose"]["loss"]["places"]["all"]
    texts = [ids[:160] for ids in prose[1::4]]

    def recovered(layers: Any) -> float:
        lost = replacement_loss(model, layers, it.read, it.writes, texts)
        return float(lost.ce_recovered.sel(place="all", ablation="zero"))

    found = recovered(layers_of(Dictionary.from_pretrained(f"specimen/{name}")))
    assert found == pytest.approx(figures["ce_recovered_zero"], abs=0.05)
    assert 1 - found < 0.6 * (1 - recovered(control(name)))


@pytest.mark.parametrize("name", ["clt", "plt"])
def test_graphs_are_explained_as_the_card_says_and_more_than_at_random(
    name: str, told, model: mizarr.Model, control
):
    dictionary = Dictionary.from_pretrained(f"specimen/{name}")
    random = as_dictionary(control(name, fitted=False), settings_of(told[name]), model_name="specimen")
    rows, prompts = told[name]["graphs"], graph_prompts()
    assert len(rows) == len(prompts)
    shortest = int(np.argmin([len(ids) for ids in prompts]))
    ours, theirs = (mizarr.attribution_graph(model, each, prompts[shortest]) for each in (dictionary, random))
    row = rows[shortest]["trained"]
    assert ours.replacement_score == pytest.approx(row["replacement"], abs=1e-3)
    assert ours.completeness_score == pytest.approx(row["completeness"], abs=1e-3)
    assert ours.replacement_score > theirs.replacement_score + 0.1
    assert ours.completeness_score > theirs.completeness_score + 0.05


def test_the_card_shows_the_margin_over_random_dictionaries(told):
    for score, least in (("replacement", 0.2), ("completeness", 0.05)):
        ours, theirs = (
            np.mean([row[way][score] for row in told["clt"]["graphs"]]) for way in ("trained", "random")
        )
        assert ours > theirs + least
