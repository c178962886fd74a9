"""Contrastive vectors and steering convergence, against the reference with the vector added by hand."""

from __future__ import annotations

import numpy as np
import pytest

from mizarr.pipeline import run
from mizarr.stages.causal.convergence import (
    ContrastiveVectors,
    PushedStates,
    best_layer,
    cosine,
)
from mizarr.stages.forward.runs.run import stream
from mizarr.store import open_store
from mizarr.store.errors import InterventionError, PromptError, StageError

from ..forward.attention_models import FAMILIES, IDS, both
from ..forward.attention_reference import kl, logits, pushed, states

pytest.importorskip("transformers")
LAST = len(IDS) - 1
OTHER = (0, 31, 99, 14, 45, 11, 150, 90, 3, 77, 260, 18)
SHORT = (0, 5, 6)
TARGET = (42, 17)


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request, tmp_path_factory):
    return both(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return both(tmp_path_factory.mktemp("llama"), "llama")


def computed(experiment, model, folder):
    store = open_store(folder)
    node = experiment.on(model)
    run(node, store)
    return node.open(store).load()


def similar(a, b):
    return a @ b / np.sqrt((a @ a) * (b @ b))


@pytest.mark.parametrize("position", [LAST, 3])
def test_every_push_agrees_with_the_reference(pair, tmp_path, position):
    model, reference = pair
    experiment = PushedStates(
        IDS,
        (IDS,),
        (OTHER,),
        (position,),
        (position,),
        position=position,
        strengths=(0.5, 2.0),
        target=TARGET,
    )
    found = computed(experiment, model, tmp_path)
    ids = (*IDS, TARGET[0])
    base, counter, plain = states(reference, IDS), states(reference, OTHER), logits(reference, ids)
    layers = model.config.num_layers
    for layer in range(layers):
        vector = (base[layer] - counter[layer])[position]
        assert float(found["vector_norm"][layer]) == pytest.approx(np.linalg.norm(vector), rel=1e-4)
        for number, strength in enumerate((0.5, 2.0)):
            with pushed(reference, layer, position, strength * vector):
                steered, after = logits(reference, ids), states(reference, IDS)
            here = found.isel(layer=layer, strength=number)
            assert float(here["kl"]) == pytest.approx(kl(plain[LAST], steered[LAST]), rel=2e-3, abs=1e-6)
            logprob = steered - np.log(np.exp(steered).sum(-1, keepdims=True))
            both_pieces = logprob[LAST, TARGET[0]] + logprob[LAST + 1, TARGET[1]]
            assert float(here["target_logprob"]) == pytest.approx(both_pieces, abs=5e-4)
            for read in range(layers):
                expected = similar(base[read][LAST], after[read][LAST])
                assert float(here["similarity"][read]) == pytest.approx(expected, abs=1e-4)


def test_a_push_of_no_strength_changes_nothing(pair, tmp_path):
    experiment = PushedStates(IDS, (IDS,), (OTHER,), strengths=(0.0,))
    found = computed(experiment, pair[0], tmp_path)
    np.testing.assert_allclose(found["similarity"], 1, atol=1e-6)
    assert (found["kl"] < 1e-9).all()


def test_layers_before_the_push_are_untouched_and_an_early_position_spares_its_own_layer(llama, tmp_path):
    experiment = PushedStates(IDS, (IDS,), (OTHER,), (3,), (3,), position=3)
    similarity = computed(experiment, llama[0], tmp_path)["similarity"][:, 0].values
    assert (similarity[np.tril_indices(3)] > 1 - 1e-9).all()
    assert (similarity[np.triu_indices(3, 1)] < 1 - 1e-6).any()


def test_means_over_lists_of_prompts_at_positions_of_their_own(pair, tmp_path):
    model, reference = pair
    experiment = ContrastiveVectors((IDS, OTHER, IDS), (SHORT,), (-1, 4, 2), (1,))
    found = computed(experiment, model, tmp_path)
    a, b, c = (states(reference, ids) for ids in (IDS, OTHER, SHORT))
    for layer in range(model.config.num_layers):
        positive = (a[layer][-1] + b[layer][4] + a[layer][2]) / 3
        np.testing.assert_allclose(found["vector"][layer], positive - c[layer][1], atol=2e-4)
        length = np.linalg.norm(positive - c[layer][1])
        assert float(found["norm"][layer]) == pytest.approx(length, rel=1e-4)
    assert found["prompts"].values.tolist() == [3, 1]
    assert found["vector"].attrs["units"] == "activation"


def test_a_normalised_vector_has_length_one_and_the_same_direction(llama, tmp_path):
    model, _ = llama
    plain = ContrastiveVectors((IDS,), (OTHER,)).computed(model)
    unit = computed(ContrastiveVectors((IDS,), (OTHER,), normalised=True), model, tmp_path)
    np.testing.assert_allclose(np.linalg.norm(unit["vector"], axis=-1), 1, rtol=1e-5)
    np.testing.assert_allclose(unit["vector"] * unit["norm"], plain["vector"], rtol=1e-4, atol=1e-5)
    with pytest.raises(StageError, match="cannot be normalised"):
        ContrastiveVectors((IDS,), (IDS,), normalised=True).computed(model)


def test_one_more_layer_computes_one_and_a_killed_experiment_goes_on(llama, tmp_path, monkeypatch):
    model, _ = llama
    store = open_store(tmp_path)

    def experiment(layers):
        return PushedStates(IDS, (IDS,), (OTHER,), strengths=(1.0, 2.0), layers=layers)

    def dying(model, runs, **options):
        for number, done in enumerate(stream(model, runs, **options)):
            if number == 3:
                raise KeyboardInterrupt
            yield done

    node = experiment((0, 1)).on(model)
    with monkeypatch.context() as patch:
        patch.setattr("mizarr.stages.forward.runs.experiment.stream", dying)
        with pytest.raises(KeyboardInterrupt):
            run(node, store)
    left = len(node.missing(store))
    assert left < 2
    asked = []

    def counted(model, runs, **options):
        asked.append(len(runs))
        return stream(model, runs, **options)

    monkeypatch.setattr("mizarr.stages.forward.runs.experiment.stream", counted)
    run(node, store)
    run(experiment(None).on(model), store)
    assert asked == [2 * left] * bool(left) + [2]


BASE = {"tokens": IDS, "positive": (IDS,), "negative": (OTHER,)}


@pytest.mark.parametrize(
    "changed",
    [
        {"tokens": OTHER},
        {"positive": (IDS, SHORT)},
        {"negative": (SHORT,)},
        {"positive_positions": (0,)},
        {"negative_positions": (0,)},
        {"normalised": True},
        {"position": 0},
        {"strengths": (2.0,)},
        {"layers": (1,)},
        {"target": (4,)},
        {"top_k": 3},
    ],
)
def test_the_key_moves_with_every_parameter(llama, tmp_path, changed):
    store = open_store(tmp_path)
    keys = [PushedStates(**given).on(llama[0]).key(store) for given in (BASE, BASE | changed)]
    assert keys[0].digest != keys[1].digest


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"position": 12}, PromptError, "vector from -12 to 11"),
        ({"strengths": ()}, StageError, "found none"),
        ({"strengths": (1.0, 1.0)}, StageError, "each strength once"),
        ({"strengths": (float("inf"),)}, StageError, "finite strengths"),
        ({"negative": ()}, PromptError, "at least one negative prompt"),
        ({"positive": ((),)}, PromptError, "at least one token"),
        (
            {"negative": (SHORT,), "negative_positions": (3,)},
            PromptError,
            "from -3 to 2 .* in negative prompt 0",
        ),
        ({"positive_positions": (1, 2)}, PromptError, "one for each of the 1, found 2"),
        ({"layers": (9,)}, InterventionError, "layers from 0 to 2"),
    ],
)
def test_wrong_input_is_refused_before_anything_runs(llama, tmp_path, given, error, message):
    with pytest.raises(error, match=message) as found:
        PushedStates(**BASE | given).on(llama[0]).status(open_store(tmp_path))
    assert "\n" not in str(found.value)


# -- on paper


def test_cosines():
    assert cosine(np.array([1.0, 0]), np.array([0, 2.0])) == 0
    assert cosine(np.array([1.0, 1]), np.array([2.0, 2])) == pytest.approx(1)
    assert cosine(np.zeros(2), np.ones(2)) == 0


def test_the_best_layer_is_the_deepest_near_again_or_the_one_that_hurts_least():
    rows = {0: [0.5, 0.97, 0.2], 1: [1.0, 0.5, 0.96], 2: [1.0, 1.0, 0.99]}
    assert best_layer(rows, {0: 0.1, 1: 0.2, 2: 0.0}) == 1
    assert best_layer(rows, {0: 0.3, 1: 0.2, 2: 0.2}, near=0.98) == 1
    assert best_layer(rows, {0: 0.3, 1: 0.2, 2: 0.1}, near=0.965) == 0
