"""Writes to a state knocked out and steered: every number against a recurrence written down by hand."""

from __future__ import annotations

import json

import numpy as np
import pytest

from mizarr.pipeline import run
from mizarr.stages.causal.controls import random_directions
from mizarr.stages.causal.state_writes import RandomWrites, StateKnockout, StateSteering
from mizarr.stages.forward.hooks.interventions import Scale
from mizarr.stages.forward.hooks.spec import HookSpec
from mizarr.stages.forward.models.model import Model
from mizarr.store import open_store
from mizarr.store.errors import InterventionError, StageError

from ..forward.literal_rwkv6 import forward
from ..forward.random_rwkv import save_random_rwkv

IDS = (7, 42, 3, 99, 120, 5, 61)
LAST = len(IDS) - 1
TARGET = (17, 40)
ROUNDING = 1e-12
"""KL in nats of two passes that are equal but for the order of sums."""
SCALES = (-1.0, 0.0, 1.0, 2.5)


def log_softmax(logits):
    return (
        logits
        - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
        - logits.max(-1, keepdims=True)
    )


def kl(before, after):
    one, other = log_softmax(before), log_softmax(after)
    return float((np.exp(one) * (one - other)).sum())


def computed(experiment, model, folder):
    store = open_store(folder)
    node = experiment.on(model)
    run(node, store)
    return node.open(store).load()


@pytest.fixture(scope="module")
def rwkv6(tmp_path_factory):
    """A model, its tensors and its config.json."""
    folder = tmp_path_factory.mktemp("rwkv6")
    tensors = save_random_rwkv(folder, "rwkv6", seed=1)
    return Model.from_pretrained(str(folder)), tensors, json.loads((folder / "config.json").read_text())


@pytest.fixture(scope="module")
def rwkv7(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rwkv7")
    save_random_rwkv(folder, "rwkv7", seed=2)
    return Model.from_pretrained(str(folder))


def test_the_recurrence_written_by_hand_is_the_models(rwkv6):
    model, tensors, config = rwkv6
    ours = model.forward(list(IDS)).logits[0].numpy()
    assert np.abs(ours - forward(tensors, config, IDS).logits).max() < 2e-5


def agrees(here, plain, cut):
    """One cell with the logits [position, vocab] of both passes over prompt and first piece."""
    assert float(here["kl"]) == pytest.approx(kl(plain[LAST], cut[LAST]), rel=1e-3, abs=1e-7)
    difference = plain[LAST, TARGET[0]] - cut[LAST, TARGET[0]]
    assert float(here["logit_diff"]) == pytest.approx(difference, abs=5e-5)
    pieces = log_softmax(cut)
    both = pieces[LAST, TARGET[0]] + pieces[LAST + 1, TARGET[1]]
    assert float(here["target_logprob"]) == pytest.approx(both, abs=5e-5)
    assert float(here["first_probability"]) == pytest.approx(np.exp(pieces[LAST, TARGET[0]]), rel=1e-3)
    change = np.abs(np.exp(log_softmax(cut[LAST])) - np.exp(log_softmax(plain[LAST])))
    assert change[here["changed_id"].values[0]] == pytest.approx(change.max(), rel=1e-2, abs=1e-7)


@pytest.mark.parametrize("window", [1, 2])
def test_each_write_of_each_layer_agrees_with_the_recurrence(rwkv6, window, tmp_path):
    model, tensors, config = rwkv6
    found = computed(StateKnockout(IDS, target=TARGET, window=window), model, tmp_path)
    layers = config["num_hidden_layers"] - window + 1
    assert dict(found["kl"].sizes) == {"layer": layers, "position": len(IDS)}
    ids = (*IDS, TARGET[0])
    plain = forward(tensors, config, ids).logits
    assert float(found["kl"].isel(position=0).max()) > 1e-5, "or nothing is shown"
    for layer in range(layers):
        for place in range(len(IDS)):
            writes = {(layer + i, place): 0.0 for i in range(window)}
            cut = forward(tensors, config, ids, writes=writes).logits
            agrees(found.sel(layer=layer, position=place), plain, cut)


def test_each_scale_agrees_with_the_recurrence(rwkv6, tmp_path):
    model, tensors, config = rwkv6
    positions = (1, -3)
    steered = StateSteering(IDS, positions, SCALES, target=TARGET)
    found = computed(steered, model, tmp_path)
    ids = (*IDS, TARGET[0])
    plain = forward(tensors, config, ids).logits
    for layer in found["layer"].values.tolist():
        for scale in SCALES:
            writes = {(layer, place % len(IDS)): scale for place in positions}
            cut = forward(tensors, config, ids, writes=writes).logits
            agrees(found.sel(layer=layer, dose=scale), plain, cut)


def test_a_token_of_rwkv6_does_not_read_its_own_write_and_one_of_rwkv7_does(rwkv6, rwkv7, tmp_path):
    own = StateKnockout(IDS, (-1,))
    six, seven = (
        computed(own, model, tmp_path / model.config.model_type)["kl"].values for model in (rwkv6[0], rwkv7)
    )
    assert abs(six).max() < ROUNDING < 1e-9 < seven.min()


def test_a_scale_of_one_changes_nothing_and_of_nought_is_the_knockout(rwkv7, tmp_path):
    steered = computed(StateSteering(IDS, (2,), (0.0, 1.0)), rwkv7, tmp_path)
    cut = computed(StateKnockout(IDS, (2,)), rwkv7, tmp_path)
    assert abs(steered["kl"].sel(dose=1.0)).max() < ROUNDING
    knocked_out = cut["kl"].isel(position=0).values
    assert steered["kl"].sel(dose=0.0).values == pytest.approx(knocked_out, rel=1e-4)


def test_heads_are_cut_by_themselves(rwkv7, tmp_path):
    """The same run with the intervention written out, as the planner computes it."""
    found = computed(StateKnockout(IDS, (1,), heads=(1,), layers=(0,)), rwkv7, tmp_path)
    hooks = HookSpec().intervene("blocks.0.rwkv.hook_write", Scale(0.0, positions=(1,), heads=(1,)))
    plain, cut = (rwkv7.forward(list(IDS), spec).logits[0].double().numpy() for spec in (None, hooks))
    assert found["kl"].item() == pytest.approx(kl(plain[LAST], cut[LAST]), rel=1e-3, abs=1e-9)
    every = computed(StateKnockout(IDS, (1,), layers=(0,)), rwkv7, tmp_path)
    assert abs(every["kl"].item() / found["kl"].item() - 1) > 0.01


def test_random_writes_are_as_long_stand_where_the_write_stood_and_are_left_out(rwkv6, tmp_path):
    """Against the recurrence gone on from S + k (u - v)^T, u as long as v in every head."""
    model, tensors, config = rwkv6
    found = computed(
        RandomWrites(IDS, positions=(2, -2), draws=3, seed=5, layers=(1,), target=TARGET), model, tmp_path
    )
    assert dict(found["kl"].sizes) == {"layer": 1, "position": 2, "draw_of_write": 3}
    ids = (*IDS, TARGET[0])
    plain = forward(tensors, config, ids)
    for place in found["position"].values.tolist():
        key, value, state = (each[1, place] for each in (plain.keys, plain.values, plain.states))
        (seed,) = np.random.SeedSequence([5, 1, place]).generate_state(1).tolist()
        drawn = random_directions(value, 3, seed=seed).astype(np.float64)
        lengths = np.linalg.norm(drawn, axis=-1), np.linalg.norm(value, axis=-1)
        assert lengths[0] == pytest.approx(np.stack([lengths[1]] * 3))
        without = forward(tensors, config, ids, writes={(1, place): 0.0}).logits
        for number, other in enumerate(drawn):
            put = {(1, place): state + key[:, :, None] * (other - value)[:, None, :]}
            written = forward(tensors, config, ids, states=put).logits
            agrees(found.sel(layer=1, position=place, draw_of_write=number), written, without)
    assert found["kl"].std("draw_of_write").min() > 0, "or draws are one"


def test_its_own_value_left_out_is_the_knockout(rwkv6, monkeypatch, tmp_path):
    model = rwkv6[0]
    itself = "mizarr.stages.causal.state_writes.random_directions"
    monkeypatch.setattr(itself, lambda like, count, seed: np.stack([like] * count))
    drawn = computed(RandomWrites(IDS, positions=(3,), draws=1), model, tmp_path / "drawn")
    cut = computed(StateKnockout(IDS, (3,)), model, tmp_path / "cut")
    assert drawn["kl"].values.ravel() == pytest.approx(cut["kl"].values.ravel(), rel=1e-3, abs=1e-9)


def test_a_layer_more_leaves_the_others_stored(rwkv7, tmp_path):
    store = open_store(tmp_path)
    run(StateKnockout(IDS, layers=(0,)).on(rwkv7), store)
    node = StateKnockout(IDS).on(rwkv7)
    assert [cell["layer"] for cell in node.missing(store)] == list(range(1, rwkv7.config.num_layers))


@pytest.mark.parametrize(
    ("experiment", "kind", "complaint"),
    [
        (StateKnockout(IDS, (9,)), InterventionError, "positions in 0..6"),
        (StateKnockout(IDS, ()), InterventionError, "at least one position"),
        (StateKnockout(IDS, heads=(40,)), InterventionError, "expected heads in 0.."),
        (StateKnockout(IDS, window=9), InterventionError, "window from 1 to 3"),
        (RandomWrites(IDS, positions=(0,), draws=0), StageError, "at least one draw"),
        (RandomWrites(IDS, positions=(7,)), InterventionError, "positions in 0..6"),
        (StateSteering(IDS, (0,), ()), StageError, "at least one dose"),
        (StateSteering(IDS, (0,), (2.0, 2.0)), StageError, "each dose once"),
        (StateSteering(IDS, (0,), (float("nan"),)), InterventionError, "finite"),
    ],
)
def test_what_cannot_be_is_refused_before_it_runs(experiment, kind, complaint, rwkv7):
    with pytest.raises(kind, match=complaint):
        experiment.cells(rwkv7.config)


@pytest.mark.parametrize("model_type", ["rwkv", "specimen"])
def test_a_model_without_such_a_state_is_refused_in_one_line(model_type, tmp_path):
    if model_type == "rwkv":
        save_random_rwkv(tmp_path, model_type)
    model = Model.from_pretrained("specimen" if model_type == "specimen" else str(tmp_path))
    with pytest.raises(InterventionError, match=f"with a recurrent state .*found {model.config.model_type}"):
        StateKnockout(IDS).cells(model.config)
