"""Crosscoders: features planted in one model or in both are told apart; twins have none of their own."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np
import pytest
import torch

from mizarr.stages.features.crosscoder import Crosscoder, CrosscoderPlace, place_figures
from mizarr.stages.features.layers.activations import JumpReLU, ReLU, TopK
from mizarr.stages.features.training.settings import TrainingSettings
from mizarr.stages.features.training.trainer import Training
from mizarr.stages.training_data.several import SideBySide
from mizarr.stages.training_data.stored import StoredActivations
from mizarr.store.errors import ConfigError, DictionaryError
from tests.stored_rows import write_rows

WIDTH, SHARED, ALONE, ROWS = 24, 12, 6, 16_384
SETTINGS = TrainingSettings(
    kind="crosscoder",
    features=48,
    k=4,
    steps=500,
    batch=512,
    lr=3e-3,
    window=4096,
    block=256,
    skip_positions=0,
    start="samples",
)


@pytest.fixture(autouse=True)
def one_thread():
    """Sums are split over threads; and small matrices lose by it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def directions(draw, count):
    """Unit vectors [count, WIDTH]."""
    made = draw.standard_normal((count, WIDTH))
    return made / np.linalg.norm(made, axis=1, keepdims=True)


def planted(seed):
    """(what each planted feature writes to both models [feature, 2, WIDTH], states of both [2, row, WIDTH]):
    shared features, with a direction of their own in each model, those of the first alone, of the second."""
    draw = np.random.default_rng(seed)
    count = SHARED + 2 * ALONE
    written = np.stack([directions(draw, count), directions(draw, count)], axis=1)
    written[SHARED : SHARED + ALONE, 1] = 0
    written[SHARED + ALONE :, 0] = 0
    active = (draw.random((ROWS, count)) < 3 / count) * (0.5 + draw.random((ROWS, count)))
    # The second model is ten times as large: what is told must not follow the scale.
    return written, np.einsum("rf,fpw->prw", active, written) * np.array([1, 10])[:, None, None]


def runs(tmp_path, states):
    """Each model's states as a stored run of the same prompts."""
    prompts = [[n % 100] * 16 for n in range(ROWS // 16)]
    return SideBySide(
        tuple(
            StoredActivations(
                write_rows(
                    tmp_path / str(n), {"resid_post": {0: rows}}, prompts, segment=2048 << n, model=str(n)
                )
            )
            for n, rows in enumerate(states)
        )
    )


def trained(source, folder, **changed):
    training = Training(replace(SETTINGS, **changed), source, folder, validate_every=0)
    training.run()
    return training


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_features_of_one_model_alone_are_found_and_of_twins_there_are_none(tmp_path, seed):
    written, states = planted(seed)
    training = trained(runs(tmp_path / "two", states), tmp_path / "t", seed=seed)
    found = training.crosscoder(["base", "tuned"])
    decoders = (found.W_dec * torch.tensor([1, 0.1])[:, None, None]).transpose(0, 1).flatten(1)
    unit = torch.nn.functional.normalize(decoders, dim=1)
    known = torch.nn.functional.normalize(torch.tensor(written).float().flatten(1), dim=1)
    likeness = known @ unit.T
    assert (likeness.max(1).values > 0.9).float().mean() >= 0.9
    relative = found.relative_norm()[likeness.argmax(1)]
    recovered = likeness.max(1).values > 0.9
    kinds = torch.tensor([0.5] * SHARED + [0.0] * ALONE + [1.0] * ALONE)
    # Nearer to what was planted than to either other kind, every one; measured: most within 0.1.
    assert ((relative - kinds).abs() < 0.25)[recovered].all()
    assert ((relative - kinds).abs() < 0.15)[recovered].float().mean() >= 0.9
    figures = place_figures(found, training.states(training.held_out))
    assert (figures.fvu < 0.05).all()
    assert figures.attrs["first_alone"] >= ALONE / 2
    assert figures.attrs["second_alone"] >= ALONE / 2

    twins = trained(runs(tmp_path / "twins", states[[0, 0]]), tmp_path / "same", seed=seed)
    control = place_figures(twins.crosscoder(["base", "base"]), twins.states(twins.held_out))
    assert control.attrs["alive"] >= SHARED
    assert (control.attrs["first_alone"], control.attrs["second_alone"]) == (0, 0)
    alive = control.density.values > 0
    assert np.abs(control.relative_norm.values[alive] - 0.5).max() < 0.1


def test_layers_of_one_run_are_places_as_well(tmp_path):
    states = planted(3)[1]
    rows = {"resid_post": {1: states[0], 4: states[1]}}
    entry = write_rows(tmp_path / "s", rows, [[1] * 16] * (ROWS // 16), segment=2048)
    training = trained(StoredActivations(entry), tmp_path / "t", steps=150)
    found = training.crosscoder(["model"])
    assert [place.hook for place in found.places] == ["blocks.1.hook_resid_post", "blocks.4.hook_resid_post"]
    block = next(training.states(training.held_out))
    figures = place_figures(found, [block])
    # By the definition, place by place.
    made = found.decode(found.encode(block)).numpy()
    for n in range(2):
        wanted = block[:, n].numpy().astype("f8")
        expected = ((made[:, n] - wanted) ** 2).sum() / ((wanted - wanted.mean(0)) ** 2).sum()
        assert float(figures.fvu[n]) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("activation", ["relu", "topk", "jumprelu"])
def test_every_activation_trains_and_its_files_give_the_same_numbers(tmp_path, activation):
    source = runs(tmp_path / "s", planted(5)[1])
    training = trained(source, tmp_path / "t", steps=30, activation=activation)
    made = training.crosscoder(["a", "b"])
    block = next(training.states(training.held_out))
    opened = Crosscoder.load(made.save(tmp_path / "out"))
    assert opened.places == made.places
    assert torch.equal(opened.encode(block), made.encode(block))
    assert torch.equal(opened.decode(opened.encode(block)), made.decode(made.encode(block)))
    # The joined features, which training measures, say the same.
    joined = training.layers[0].encode(block.flatten(1))
    torch.testing.assert_close(made.encode(block), joined, rtol=1e-4, atol=1e-5)
    with pytest.raises(ConfigError, match="expected a new folder"):
        made.save(tmp_path / "out")


def test_the_penalty_of_relu_weighs_a_feature_by_the_norms_of_its_places(tmp_path):
    training = Training(
        replace(SETTINGS, activation="relu"), runs(tmp_path / "s", planted(0)[1]), tmp_path / "t"
    )
    weights = training.model.W_dec["0"].detach()[:, 0]
    expected = weights[:, :WIDTH].norm(dim=1) + weights[:, WIDTH:].norm(dim=1)
    torch.testing.assert_close(training.model.norms(0), expected)


def test_an_interrupted_crosscoder_ends_with_the_bits_of_one_that_was_not(tmp_path):
    source = runs(tmp_path / "s", planted(1)[1])

    def bits(training):
        return hashlib.sha256(training.layers[0].W_enc.numpy().tobytes()).hexdigest()

    whole = bits(trained(source, tmp_path / "whole", steps=40))
    steps = iter(range(1000))
    part = Training(replace(SETTINGS, steps=40), source, tmp_path / "part")
    assert not part.run(stop=lambda: next(steps) == 16)
    assert bits(trained(source, tmp_path / "part", steps=40)) == whole


def test_relative_norms_are_shares_of_the_norms_in_units_of_the_states():
    places = (CrosscoderPlace("a", "h", 1.0), CrosscoderPlace("b", "h", 0.1))
    W_dec = torch.tensor([[[3.0, 4], [0, 0], [1, 0]], [[0, 0], [0, 2], [30, 0]]])
    found = Crosscoder(places, torch.zeros_like(W_dec), torch.zeros(3), W_dec, torch.zeros(2, 2), ReLU())
    assert found.relative_norm().tolist() == pytest.approx([0, 1, 0.75])


def test_what_does_not_fit_is_told(tmp_path):
    made = Crosscoder(
        (CrosscoderPlace("a", "h", 1.0),),
        torch.ones(1, 2, 3), torch.zeros(2), torch.ones(1, 2, 3), torch.zeros(1, 3),
        JumpReLU(torch.zeros(2)),
    )  # fmt: skip
    with pytest.raises(DictionaryError, match="expected states"):
        made.encode(torch.ones(4, 2, 3))
    with pytest.raises(DictionaryError, match="found that they cannot be read"):
        Crosscoder.load(tmp_path)
    assert isinstance(
        Crosscoder.load(replace(made, activation=TopK(1)).save(tmp_path / "k")).activation, TopK
    )
    narrow = {"resid_post": {0: np.ones((64, 3))}}
    wide = {"resid_post": {0: np.ones((64, 4))}}
    source = SideBySide(
        tuple(
            StoredActivations(write_rows(tmp_path / name, rows, [[1] * 16] * 4, model=name))
            for name, rows in (("n", narrow), ("w", wide))
        )
    )
    with pytest.raises(ConfigError, match=r"expected hook points of one width .*, found widths \[3, 4\]"):
        Training(replace(SETTINGS, batch=16), source, tmp_path / "t")
