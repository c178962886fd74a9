"""Causal tracing: every cell against full forwards of the reference, same noise, one state restored."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import mizarr
from mizarr.pipeline import run
from mizarr.stages.causal.grids.patching_metrics import KL, Probability, Recovery
from mizarr.stages.causal.grids.tracing import CausalTracing, embedding_deviation
from mizarr.stages.forward.runs.run import plan
from mizarr.store.errors import InterventionError, StageError

from ...forward.random_models import save_random_model
from ...reference_runs import Reference, put

TOKENS, SUBJECT, ANSWER = (0, 7, 42, 99, 5), (1, 2), 17
LAYERS, SAMPLES = 3, 3


@pytest.fixture(scope="module")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Reference]:
    """A random Llama of 3 layers, on disk and as the reference."""
    path = tmp_path_factory.mktemp("llama")
    reference = save_random_model(path, "llama", 5, num_hidden_layers=LAYERS)
    return path, Reference(reference.eval())


def tracing(**given) -> CausalTracing:
    base = {"tokens": TOKENS, "subject": SUBJECT, "kinds": ("resid_post",), "samples": SAMPLES}
    return CausalTracing(**(base | {"metrics": (Probability(ANSWER),), "multiplier": 1.0} | given))


def compute(experiment, folder: Path, where: Path):
    store = mizarr.open_store(where)
    node = experiment.on(str(folder))
    run(node, store)
    return node.open(store).load()


def noised(experiment: CausalTracing, reference: Reference, sample: int):
    """The edit that adds the noise of one sample, written out."""
    embedding = reference.model.get_input_embeddings().weight.detach().double()
    deviation = float(embedding.std(correction=0)) * experiment.multiplier
    drawn = np.random.default_rng([experiment.seed, sample]).standard_normal(
        (len(SUBJECT), embedding.shape[1]), np.float32
    )

    def edit(x: torch.Tensor) -> torch.Tensor:
        x[list(SUBJECT)] += torch.as_tensor(drawn * np.float32(deviation))
        return x

    return edit


@pytest.mark.parametrize(("kind", "window"), [("resid_post", 1), ("attn_out", 2), ("mlp_out", 3)])
def test_every_cell_is_the_noised_forward_with_clean_states_of_a_window_put_back(
    kind, window, random_model, tmp_path
):
    folder, reference = random_model
    experiment = tracing(kinds=(kind,), window=window)
    found = compute(experiment, folder, tmp_path)
    _, clean = reference.run(TOKENS)
    windows = {1: [(0,), (1,), (2,)], 2: [(0,), (0, 1), (1, 2)], 3: [(0, 1), (0, 1, 2), (1, 2)]}[window]
    for layer, layers in enumerate(windows):
        for position in range(len(TOKENS)):
            values = []
            for sample in range(SAMPLES):
                edits = {(kind, at): put(clean[kind, at], None, position) for at in layers}
                edits["embed", -1] = noised(experiment, reference, sample)
                values.append(float(reference.run(TOKENS, edits)[0].double().softmax(-1)[ANSWER]))
            cell = found.sel(layer=layer, position=position)
            assert float(cell["probability"]) == pytest.approx(np.mean(values), abs=1e-5)
            assert float(cell["probability_std"]) == pytest.approx(np.std(values), abs=1e-5)


def test_the_runs_nothing_was_restored_in_are_given_too(random_model, tmp_path):
    folder, reference = random_model
    experiment = tracing(layers=(0,))
    found = compute(experiment, folder, tmp_path)
    clean = float(reference.run(TOKENS)[0].softmax(-1)[ANSWER])
    noise = [
        float(reference.run(TOKENS, {("embed", -1): noised(experiment, reference, i)})[0].softmax(-1)[ANSWER])
        for i in range(SAMPLES)
    ]
    assert found["unpatched"].sel(metric="probability").values == pytest.approx(
        [clean, np.mean(noise)], abs=1e-5
    )
    assert found.attrs["subject"] == list(SUBJECT)
    assert found["token"].size == len(TOKENS)


def test_recovery_is_one_when_every_noised_position_is_restored_and_zero_before_the_subject(
    random_model, tmp_path
):
    folder, _ = random_model
    found = compute(
        tracing(kinds=("resid_pre",), subject=(1,), layers=(0,), metrics=(Recovery(KL()),)), folder, tmp_path
    )["recovery"]
    assert float(found.sel(layer=0, position=1)) == pytest.approx(1, abs=1e-4)
    assert float(found.sel(layer=0, position=0)) == pytest.approx(0, abs=1e-4)


def test_the_mean_is_rescaled_by_the_mean_of_the_noised_runs(random_model, tmp_path):
    folder, _ = random_model
    found = compute(tracing(metrics=(Probability(ANSWER), Recovery(Probability(ANSWER)))), folder, tmp_path)
    clean, noise = found["unpatched"].sel(metric="probability").values
    np.testing.assert_allclose(found["recovery"], (found["probability"] - noise) / (clean - noise), atol=1e-9)
    np.testing.assert_allclose(
        found["recovery_std"], found["probability_std"] / abs(clean - noise), atol=1e-9
    )


def test_noise_scales_with_the_embeddings(random_model):
    folder, reference = random_model
    model = mizarr.Model.from_pretrained(folder)
    weight = reference.model.get_input_embeddings().weight.detach().double()
    assert embedding_deviation(model) == pytest.approx(float(weight.std(correction=0)), rel=1e-6)


def test_a_sample_is_the_same_whatever_their_number():
    np.testing.assert_array_equal(tracing(samples=2).noise(1, 8), tracing(samples=5).noise(1, 8))
    assert not np.array_equal(tracing().noise(0, 8), tracing().noise(1, 8))
    assert not np.array_equal(tracing(seed=1).noise(0, 8), tracing().noise(0, 8))


def test_noise_is_planned_without_the_model(random_model, tmp_path):
    folder, _ = random_model
    experiment = tracing()
    model = mizarr.Model.from_pretrained(folder)
    prepared = experiment.prepare(model)
    runs = [each for cell in experiment.cells(model.config) for each in experiment.runs(prepared, cell)]
    sketched = experiment.on(str(folder)).plan(mizarr.open_store(tmp_path))
    assert sketched.positions == plan(model, runs).positions < sketched.naive


def test_keys_move_with_every_parameter(random_model, tmp_path):
    folder, _ = random_model
    store = mizarr.open_store(tmp_path)
    variants = [
        {},
        {"tokens": (0, 7, 42, 99, 6)},
        {"subject": (1,)},
        {"multiplier": 3.0},
        {"samples": 4},
        {"seed": 1},
        {"window": 2},
        {"kinds": ("mlp_out",)},
        {"metrics": (KL(),)},
    ]
    keys = {tracing(**each).on(str(folder)).key(store).digest for each in variants}
    assert len(keys) == len(variants)


@pytest.mark.parametrize(
    ("given", "error", "match"),
    [
        ({"subject": ()}, StageError, "positions of the subject"),
        ({"subject": (5,)}, InterventionError, "position from 0 to 4 .*found 5"),
        ({"samples": 0}, StageError, "samples=0"),
        ({"multiplier": 0.0}, StageError, r"multiplier=0.0"),
        ({"multiplier": float("nan")}, StageError, "a multiplier above 0"),
        ({"kinds": ("pattern",), "over": "edge"}, StageError, "EdgeKnockout"),
    ],
)
def test_noise_that_cannot_be_is_refused(given, error, match, random_model):
    folder, _ = random_model
    with pytest.raises(error, match=match):
        tracing(**given).on(str(folder)).cells()
