"""Features injected by hand, one run at a time and as sweeps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import mizarr
from mizarr.pipeline import run
from mizarr.stages.features.dictionary import Dictionary
from mizarr.stages.features.injection import Injection, added, injected
from mizarr.stages.features.sweeps import Dose, InjectionSweep

from ...random_dictionaries import save_random_clt

PROMPT = (5, 9, 2, 31, 7, 4)
LAYERS = 6  # of the specimen, hidden 192


@pytest.fixture(scope="module")
def model() -> mizarr.Model:
    return mizarr.Model.from_pretrained("specimen")


@pytest.fixture(scope="module")
def clt(tmp_path_factory: pytest.TempPathFactory) -> Dictionary:
    return Dictionary.from_pretrained(
        save_random_clt(tmp_path_factory.mktemp("clt"), layers=LAYERS, hidden=192)
    )


def logits_of(model: mizarr.Model, hooks: mizarr.HookSpec) -> torch.Tensor:
    return model.forward([list(PROMPT)], hooks).logits[0]


def test_a_feature_is_added_at_every_layer_it_writes_to(model: mizarr.Model, clt: Dictionary):
    by_hand = mizarr.HookSpec()
    for layer in (2, 3, 4, 5):
        vector = 4.0 * clt.layer(2).W_dec[layer][7]
        by_hand.intervene(f"blocks.{layer}.hook_resid_post", mizarr.AddAtPositions([(3, vector)]))
    ours = logits_of(model, injected(clt, [Injection("L2:7", 4.0)], [3]))
    torch.testing.assert_close(ours, logits_of(model, by_hand), atol=1e-4, rtol=1e-4)
    plain = logits_of(model, mizarr.HookSpec())
    torch.testing.assert_close(ours[:3], plain[:3], atol=1e-4, rtol=1e-4)
    assert (ours[3] - plain[3]).abs().max() > 0.1


def test_what_injections_add_is_the_sum_of_their_vectors(clt: Dictionary):
    found = added(clt, [Injection("1:3", 2.0), Injection("4:0", -1.5), Injection("L1:5", 1.0, from_layer=5)])
    assert list(found) == [1, 2, 3, 4, 5]
    first, second = clt.layer(1), clt.layer(4)
    torch.testing.assert_close(found[1], 2 * first.W_dec[1][3])
    torch.testing.assert_close(found[4], 2 * first.W_dec[4][3] - 1.5 * second.W_dec[4][0])
    expected = 2 * first.W_dec[5][3] - 1.5 * second.W_dec[5][0] + first.W_dec[5][5]
    torch.testing.assert_close(found[5], expected)


def test_opposite_strengths_cancel(model: mizarr.Model, clt: Dictionary):
    spec = injected(clt, [Injection("L0:1", 3.0), Injection("L0:1", -3.0)], [2, -1])
    torch.testing.assert_close(logits_of(model, spec), logits_of(model, mizarr.HookSpec()))


@pytest.mark.parametrize(("feature", "from_layer", "said"), [
    ("L2:12", None, "feature of layer 2 from 0 to 11, found 12"),
    ("L6:0", None, "features of layers 0 to 5, found layer 6"),
    ("2.3", None, "as layer:index"),
    ("L4:0", 3, "L4:0 writes to layers 4 to 5, not from layer 3"),
])  # fmt: skip
def test_features_there_are_not_are_refused(clt: Dictionary, feature: str, from_layer: int | None, said: str):
    with pytest.raises(mizarr.MizarrError, match=said):
        added(clt, [Injection(feature, 1.0, from_layer)])


def test_a_sweep_is_its_runs_one_by_one(model: mizarr.Model, clt: Dictionary, tmp_path: Path):
    sweep = InjectionSweep(
        tokens=PROMPT,
        dictionary=clt.name,
        features=clt.identity,
        doses=(Dose(3, 2, factor=1.0), Dose(0, 4, fixed=-2.0)),
        strengths=(1.0, 6.0),
        words=(8, 300),
        edge=(5, 2),
    )
    store = mizarr.open_store(tmp_path / "store")
    node = sweep.on(model)
    run(node, store, quiet=True)
    found = node.open(store)
    plain = model.forward([list(PROMPT)]).logits[0, -1].double().log_softmax(-1)
    np.testing.assert_allclose(found["baseline_logprob"], plain[[8, 300]], atol=1e-5)
    capture = mizarr.HookSpec().capture("blocks.*.attn.hook_pattern")
    for strength in (1.0, 6.0):
        for position in range(len(PROMPT)):
            hooks = injected(clt, [Injection("3:2", strength), Injection("0:4", -2.0)], [position])
            cache = model.forward([list(PROMPT)], hooks.extend(capture))
            here = found.sel(strength=strength, position=position)
            logprob = cache.logits[0, -1].double().log_softmax(-1)
            np.testing.assert_allclose(here["logprob"], logprob[[8, 300]], atol=1e-4)
            np.testing.assert_allclose(here["kl"], (plain.exp() * (plain - logprob)).sum(), atol=1e-5)
            for layer in range(LAYERS):
                edge = cache[f"blocks.{layer}.attn.hook_pattern"][0, :, 5, 2]
                np.testing.assert_allclose(here["attention"][layer], edge, atol=1e-5)


def test_a_sweep_with_one_more_strength_computes_one(model: mizarr.Model, clt: Dictionary, tmp_path: Path):
    store = mizarr.open_store(tmp_path / "store")

    def node(*strengths: float):
        return InjectionSweep(
            PROMPT, clt.name, clt.identity, (Dose(3, 2, factor=1.0),), strengths, (8,), positions=(1,)
        ).on(model)

    run(node(1.0, 2.0), store, quiet=True)
    more = node(1.0, 2.0, 3.0)
    assert [cell["strength"] for cell in more.missing(store)] == [3.0]
    run(more, store, quiet=True)
    assert more.open(store)["strength"].values.tolist() == [1.0, 2.0, 3.0]


def test_a_sweep_tells_what_it_will_cost_before_a_model_is_loaded(clt: Dictionary, tmp_path: Path):
    sweep = InjectionSweep(PROMPT, clt.name, clt.identity, (Dose(3, 2, factor=1.0),), (1.0,), (8,))
    work = sweep.on("specimen").estimate(mizarr.open_store(tmp_path / "store")).work
    # The shared run, and of each branch layer 3 where features are added and layers 4 and 5 from there on.
    length = len(PROMPT)
    changed = sum(1 + 2 * (length - place) for place in range(length))
    told = f"{LAYERS * length + changed} layer-positions instead of {length * LAYERS * length}"
    assert told in work, work
