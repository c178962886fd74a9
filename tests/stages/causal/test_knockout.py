"""Knockout sweeps: every number against the reference implementation with edges masked by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mizarr import Model
from mizarr.pipeline import run
from mizarr.stages.causal.knockout import EdgeKnockout, HeadKnockout
from mizarr.stages.forward.runs.run import stream
from mizarr.store import open_store
from mizarr.store.errors import ConfigError, InterventionError, PromptError

from ..forward.attention_models import FAMILIES, IDS, both
from ..forward.attention_reference import attention, biased, kl, logits
from ..forward.random_hybrids import save_random_hybrid

pytest.importorskip("transformers")
LAST = len(IDS) - 1
CUT = -math.inf
TARGET = (42, 17)


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request, tmp_path_factory):
    return both(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return both(tmp_path_factory.mktemp("llama"), "llama")


def computed(experiment, model, folder):
    """The joined dataset of an experiment."""
    store = open_store(folder)
    node = experiment.on(model)
    run(node, store)
    return node.open(store).load()


def test_each_edge_of_each_layer_agrees_with_the_reference(pair, tmp_path):
    model, reference = pair
    edges = ((-1, 0), (LAST, LAST), (6, 5), (None, 4))
    found = computed(EdgeKnockout(IDS, edges, target=TARGET), model, tmp_path)
    layers = model.config.num_layers
    assert dict(found["kl"].sizes) == {"layer": layers, "edge": 4}
    ids = (*IDS, TARGET[0])
    plain = logits(reference, ids)
    weights = attention(reference, IDS)
    for layer in range(layers):
        for number, pairs in enumerate(
            [[(LAST, 0)], [(LAST, LAST)], [(6, 5)], [(q, 4) for q in range(4, LAST + 1)]]
        ):
            with biased(reference, [layer], pairs, CUT):
                cut = logits(reference, ids)
            here = found.isel(layer=layer, edge=number)
            assert float(here["kl"]) == pytest.approx(kl(plain[LAST], cut[LAST]), rel=1e-3, abs=1e-7)
            difference = plain[LAST, TARGET[0]] - cut[LAST, TARGET[0]]
            assert float(here["logit_diff"]) == pytest.approx(difference, abs=2e-4)
            logprob = cut - np.log(np.exp(cut).sum(-1, keepdims=True))
            both_pieces = logprob[LAST, TARGET[0]] + logprob[LAST + 1, TARGET[1]]
            assert float(here["target_logprob"]) == pytest.approx(both_pieces, abs=2e-4)
            assert float(here["first_probability"]) == pytest.approx(
                math.exp(logprob[LAST, TARGET[0]]), rel=1e-3
            )
            change = np.abs(np.exp(logprob[LAST]) - softmax(plain[LAST]))
            most = change[here["changed_id"].values[0]]
            assert most == pytest.approx(change.max(), rel=1e-2, abs=1e-7)
            own = np.mean([weights[layer][:, q, k].mean() for q, k in pairs])
            assert float(here["attention"]) == pytest.approx(own, abs=1e-5)


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


def test_each_head_agrees_with_the_reference(pair, tmp_path):
    model, reference = pair
    found = computed(HeadKnockout(IDS, ((-1, 2), (-1, LAST)), layers=(1,)), model, tmp_path)
    plain = logits(reference, IDS)[LAST]
    assert found["layer"].values.tolist() == [1]
    for head in range(model.config.num_attention_heads):
        with biased(reference, [1], [(LAST, 2), (LAST, LAST)], CUT, [head]):
            cut = logits(reference, IDS)[LAST]
        assert float(found["kl"][0, head]) == pytest.approx(kl(plain, cut), rel=1e-3, abs=1e-7)
    assert np.isnan(found["logit_diff"]).all(), "no target, no difference"


def test_a_whole_head_knocked_out_writes_nothing(pair, tmp_path):
    """The reference's output projection with the head's columns set to zero says the same."""
    import torch

    model, reference = pair
    found = computed(HeadKnockout(IDS, layers=(0,)), model, tmp_path)
    plain = logits(reference, IDS)[LAST]
    projection = reference.model.layers[0].self_attn.o_proj.weight
    heads = model.config.num_attention_heads
    width = projection.shape[1] // heads
    for head in range(heads):
        before = projection.detach().clone()
        with torch.no_grad():
            projection[:, head * width : (head + 1) * width] = 0
        cut = logits(reference, IDS)[LAST]
        with torch.no_grad():
            projection.copy_(before)
        assert float(found["kl"][0, head]) == pytest.approx(kl(plain, cut), rel=1e-3, abs=1e-7)


def test_some_heads_together_agree_with_the_reference(llama, tmp_path):
    model, reference = llama
    found = computed(EdgeKnockout(IDS, ((-1, 3),), layers=(2,), heads=(0, 3)), model, tmp_path)
    with biased(reference, [2], [(LAST, 3)], CUT, [0, 3]):
        cut = logits(reference, IDS)[LAST]
    assert float(found["kl"][0, 0]) == pytest.approx(kl(logits(reference, IDS)[LAST], cut), rel=1e-3)
    own = attention(reference, IDS)[2][[0, 3], LAST, 3].mean()
    assert float(found["attention"][0, 0]) == pytest.approx(own, abs=1e-6)


def test_an_edge_beyond_the_sliding_window_was_never_there(tmp_path_factory, tmp_path):
    model, _ = both(tmp_path_factory.mktemp("window"), "starcoder2")
    found = computed(EdgeKnockout(IDS, ((-1, 0), (-1, LAST - 1))), model, tmp_path)
    assert (found["attention"][:, 0] == 0).all()
    assert (found["kl"][:, 0] < 1e-9).all()
    assert (found["kl"][:, 1] > 1e-6).all()


def test_cutting_what_the_last_position_never_uses_changes_nothing(llama, tmp_path):
    """In the last layer only the last position's row reaches the logits."""
    model, _ = llama
    found = computed(EdgeKnockout(IDS, ((6, 5), (-1, 5))), model, tmp_path)
    assert float(found["kl"][-1, 0]) < 1e-9
    assert float(found["kl"][-1, 1]) > 1e-6


def test_one_more_layer_computes_one_layer(llama, tmp_path, monkeypatch):
    model, _ = llama
    store = open_store(tmp_path)
    asked = []

    def counted(model, runs, **options):
        asked.append(len(runs))
        return stream(model, runs, **options)

    monkeypatch.setattr("mizarr.stages.forward.runs.experiment.stream", counted)
    edges = ((-1, 0), (-1, 1))
    run(EdgeKnockout(IDS, edges, layers=(0, 1)).on(model), store)
    run(EdgeKnockout(IDS, edges, layers=(0, 1)).on(model), store)
    assert asked == [4], "a second call is a hit"
    node = EdgeKnockout(IDS, edges, layers=(0, 1, 2)).on(model)
    run(node, store)
    assert asked == [4, 2]
    assert node.open(store)["layer"].values.tolist() == [0, 1, 2]


def test_a_killed_sweep_goes_on_where_it_was(llama, tmp_path, monkeypatch):
    model, _ = llama
    store = open_store(tmp_path)
    node = EdgeKnockout(IDS, ((-1, 0), (-1, 1))).on(model)

    def dying(model, runs, **options):
        for number, done in enumerate(stream(model, runs, **options)):
            if number == 3:
                raise KeyboardInterrupt
            yield done

    with monkeypatch.context() as patch:
        patch.setattr("mizarr.stages.forward.runs.experiment.stream", dying)
        with pytest.raises(KeyboardInterrupt):
            run(node, store)
    left = len(node.missing(store))
    assert left < len(node.cells())
    run(node, store)
    whole = EdgeKnockout(IDS, ((-1, 0), (-1, 1))).on(model)
    fresh = open_store(tmp_path / "fresh")
    run(whole, fresh)
    np.testing.assert_allclose(node.open(store)["kl"], whole.open(fresh)["kl"], rtol=1e-4, atol=1e-9)


BASE = {"tokens": IDS, "edges": ((-1, 0),)}


@pytest.mark.parametrize(
    "changed",
    [
        {"tokens": IDS[:-1]},
        {"edges": ((-1, 1),)},
        {"edges": ((-1, 0), (-1, 1))},
        {"layers": (0,)},
        {"heads": (0,)},
        {"target": (5,)},
        {"top_k": 3},
        {"keeps_self": True},
    ],
)
def test_the_key_moves_with_every_parameter(llama, tmp_path, changed):
    model, _ = llama
    store = open_store(tmp_path)
    plain, other = (EdgeKnockout(**given).on(model).key(store) for given in (BASE, BASE | changed))
    assert plain.digest != other.digest
    assert EdgeKnockout(**BASE).on(model).key(store).digest == plain.digest


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"edges": ()}, InterventionError, "at least one attention edge"),
        ({"edges": ((12, 0),)}, InterventionError, r"positions in 0\.\.11"),
        ({"edges": ((3, None),)}, InterventionError, "leaves query 3 no key"),
        ({"edges": ((None, 0),)}, InterventionError, "leaves query 0 no key"),
        ({"layers": (3,)}, InterventionError, "layers from 0 to 2, each once, found 3"),
        ({"layers": ()}, InterventionError, "found none"),
        ({"layers": (1, 1)}, InterventionError, r"each once, found \[1, 1\]"),
        ({"heads": (4,)}, InterventionError, r"heads in 0\.\.3, found 4"),
        ({"tokens": ()}, PromptError, "at least one token"),
        ({"target": (-1,)}, PromptError, "of at least 0, found -1"),
    ],
)
def test_wrong_input_is_refused_before_anything_runs(llama, tmp_path, given, error, message):
    model, _ = llama
    with pytest.raises(error, match=message) as found:
        EdgeKnockout(**BASE | given).on(model).status(open_store(tmp_path))
    assert "\n" not in str(found.value)


def test_a_target_the_model_has_no_token_for_is_refused(llama, tmp_path):
    model, _ = llama
    with pytest.raises(PromptError, match="ids of the target from 0 to 319, found 320"):
        run(EdgeKnockout(IDS, ((-1, 0),), target=(320,)).on(model), open_store(tmp_path))


def test_every_variable_says_its_unit(llama, tmp_path):
    found = computed(EdgeKnockout(IDS, ((-1, 0),), layers=(0,)), llama[0], tmp_path)
    assert all("units" in found[name].attrs for name in found.data_vars)
    assert found["kl"].attrs["units"] == "nats"


def test_a_target_of_several_tokens_is_not_read_where_its_own_tokens_are_seen(tmp_path):
    """They would stand behind the prompt, and change what is read at its end."""
    save_random_hybrid(tmp_path / "model", "gpt2", 0, tokenizer=False, is_causal=False)
    model, store = Model.from_pretrained(tmp_path / "model"), open_store(tmp_path / "store")
    run(EdgeKnockout(IDS, ((3, 5),), target=(4,)).on(model), store)
    with pytest.raises(ConfigError, match="predicts the next token, found gpt2, in which every position also"):
        run(EdgeKnockout(IDS, ((3, 5),), target=(4, 5)).on(model), store)
