"""Steered texts: numbers of literal passes, a choice that never sees what is scored, and resumed cells."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr

import mizarr
from mizarr import Add, HookSpec, Model
from mizarr.pipeline import run
from mizarr.stages.causal.controls import random_directions
from mizarr.stages.causal.pushes.steered_texts import ContrastPair, SteeredTexts
from mizarr.store.errors import InterventionError, MizarrError, PromptError, StageError

from ..forward.random_models import VOCAB, save_random_model


def drawn_pairs(count: int, seed: int) -> tuple[ContrastPair, ...]:
    """Prompts of several lengths whose positive continuations have tokens of the upper half."""
    rng = np.random.default_rng(seed)

    def ids(low: int, high: int) -> tuple[int, ...]:
        return tuple(rng.integers(low, high, rng.integers(2, 6)).tolist())

    return tuple((ids(2, VOCAB), ids(VOCAB // 2, VOCAB), ids(2, VOCAB // 2)) for _ in range(count))


CHOSEN_ON, SCORED_ON = drawn_pairs(5, 0), drawn_pairs(3, 1)
STEERED = SteeredTexts(CHOSEN_ON, SCORED_ON, strengths=(0.5, 2.0), draws=3, max_tokens=4)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("model")
    save_random_model(folder, "llama", 1)
    return Model.from_pretrained(folder)


@pytest.fixture(scope="module")
def found(model: Model, tmp_path_factory: pytest.TempPathFactory) -> xr.Dataset:
    store, node = mizarr.open_store(tmp_path_factory.mktemp("store")), STEERED.on(model)
    run(node, store, quiet=True)
    return node.open(store).load()


def logprob(model: Model, prompt, target, hooks: HookSpec | None = None) -> float:
    """Mean log-probability per token, by one plain pass."""
    logits = model.forward((*prompt, *target), hooks, want=mizarr.logits()).logits[0].double()
    rows = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    return float(rows[torch.arange(len(target)), list(target)].mean())


def difference(model: Model, layer: int) -> np.ndarray:
    """Difference of the mean states of the continuations chosen on, text by text."""
    point = f"blocks.{layer}.hook_resid_post"
    hooks = HookSpec().capture(point)

    def mean(prompt, ids) -> np.ndarray:
        states = model.forward((*prompt, *ids), hooks, want=None)[point][0]
        return states[len(prompt) :].double().mean(0).numpy()

    sides = [np.mean([mean(pair[0], pair[side]) for pair in CHOSEN_ON], axis=0) for side in (1, 2)]
    return sides[0] - sides[1]


def adding(layer: int, vector: np.ndarray) -> HookSpec:
    return HookSpec().intervene(f"blocks.{layer}.hook_resid_post", Add(vector.astype(np.float32)))


def test_the_choice_is_the_largest_mean_gain_of_literal_passes(model, found):
    for layer in range(model.config.num_layers):
        vector = difference(model, layer)
        assert found["norm"].sel(layer=layer) == pytest.approx(np.linalg.norm(vector), rel=1e-4)
        for strength in STEERED.strengths:
            gains = [
                logprob(model, prompt, positive, adding(layer, strength * vector))
                - logprob(model, prompt, positive)
                for prompt, positive, _ in CHOSEN_ON
            ]
            assert found["gain"].sel(layer=layer, strength=strength) == pytest.approx(
                np.mean(gains), abs=1e-4
            )
    best = found["gain"].stack(candidate=("layer", "strength")).idxmax().item()
    assert best == (found["chosen_layer"], found["chosen_strength"])


def test_held_out_texts_are_steered_along_the_direction_and_along_random_ones(model, found):
    layer, strength = int(found["chosen_layer"]), float(found["chosen_strength"])
    vector = strength * difference(model, layer)
    random = random_directions(vector, STEERED.draws, seed=0)
    for number, (prompt, positive, _) in enumerate(SCORED_ON):
        row = found.sel(pair=number)
        assert row["plain"] == pytest.approx(logprob(model, prompt, positive), abs=1e-5)
        steered = logprob(model, prompt, positive, adding(layer, vector))
        assert row["steered"] == pytest.approx(steered, abs=1e-4)
        for draw, other in enumerate(random):
            assert np.linalg.norm(other) == pytest.approx(np.linalg.norm(vector), rel=1e-4)
            expected = logprob(model, prompt, positive, adding(layer, other))
            assert row["random"][draw] == pytest.approx(expected, abs=1e-4)


def test_texts_are_generated_with_and_without_steering_and_read_by_the_unsteered_model(model, found):
    layer, vector = (
        int(found["chosen_layer"]),
        float(found["chosen_strength"]) * difference(model, int(found["chosen_layer"])),
    )
    for name, hooks in (("plain", None), ("steered", adding(layer, vector))):
        for number, (prompt, *_) in enumerate(SCORED_ON):
            (made,) = mizarr.generate(model, [prompt], hooks, max_tokens=4, eos=())
            ids = made.token_ids[len(prompt) :]
            assert len(ids) == 4
            assert found[f"{name}_text"].values[number] == (made.generated_text or "")
            assert found[f"{name}_loss"][number] == pytest.approx(-logprob(model, prompt, ids), abs=1e-4)


def test_what_is_scored_chooses_nothing(model, found):
    others = SteeredTexts(CHOSEN_ON, drawn_pairs(3, 7), strengths=(0.5, 2.0), draws=3)
    prepared = others.prepare(model)
    np.testing.assert_allclose(prepared.gain, found["gain"].values, atol=1e-6)
    assert prepared.layer == found["chosen_layer"] and prepared.strength == found["chosen_strength"]


def test_a_killed_run_computes_the_missing_pairs(model, tmp_path: Path, monkeypatch, found):
    store, node = mizarr.open_store(tmp_path), STEERED.on(model)
    dataset = SteeredTexts.dataset

    def killed(self, prepared, cell, measured):
        if cell["pair"] == 2:
            raise KeyboardInterrupt
        return dataset(self, prepared, cell, measured)

    monkeypatch.setattr(SteeredTexts, "dataset", killed)
    with pytest.raises(KeyboardInterrupt):
        run(node, store, quiet=True)
    monkeypatch.undo()
    again = STEERED.on(model)
    missing = again.missing(store)
    assert 0 < len(missing) < 3
    run(again, store, quiet=True)
    xr.testing.assert_allclose(again.open(store).load(), found, rtol=1e-6)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"strengths": ()}, StageError, "at least one strength, and each once, found none"),
        ({"strengths": (1.0, 1.0)}, StageError, "each once"),
        ({"strengths": (float("nan"),)}, StageError, "finite strengths"),
        ({"method": "median"}, StageError, "a method among mean, pca, logistic, lda, found 'median'"),
        ({"draws": -1}, StageError, "found draws=-1"),
        ({"chosen_on": ()}, PromptError, "at least one pair in chosen_on, found none"),
        ({"scored_on": (((1,), (), (2,)),)}, PromptError, "at least one token"),
        ({"layers": (9,)}, InterventionError, "expected layers from 0 to"),
    ],
)
def test_what_cannot_be_steered_is_refused_before_a_pass(model, change, error, message):
    given = {"chosen_on": CHOSEN_ON, "scored_on": SCORED_ON} | change
    with pytest.raises(MizarrError, match=message) as raised:
        SteeredTexts(**given).on(model).cells()
    assert raised.type is error and "\n" not in str(raised.value)
