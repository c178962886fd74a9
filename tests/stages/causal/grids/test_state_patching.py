"""Grids over places of a recurrent state: every cell against the recurrence written by hand."""

from __future__ import annotations

import json

import numpy as np
import pytest

from mizarr.pipeline import run
from mizarr.stages.causal.grids.ablation import Ablation
from mizarr.stages.causal.grids.patching import ActivationPatching, DonorPatching
from mizarr.stages.causal.grids.patching_metrics import KL, LogitDifference, Recovery
from mizarr.stages.forward.models.model import Model
from mizarr.store import open_store
from mizarr.store.errors import HookPointNotFound

from ...forward.literal_rwkv6 import forward
from ...forward.random_rwkv import save_random_rwkv

CLEAN, CORRUPTED, DONOR = (7, 42, 3, 99, 120, 61), (7, 42, 5, 12, 120, 61), (9, 8, 11, 70, 65, 2)
METRICS = (LogitDifference(17, 40), KL(), Recovery(KL()))
STATE = "rwkv_state_seq"


@pytest.fixture(scope="module")
def rwkv6(tmp_path_factory):
    """A model, its tensors and its config.json."""
    folder = tmp_path_factory.mktemp("rwkv6")
    tensors = save_random_rwkv(folder, "rwkv6", seed=1)
    return Model.from_pretrained(str(folder)), tensors, json.loads((folder / "config.json").read_text())


def computed(experiment, model, folder):
    store = open_store(folder)
    node = experiment.on(model)
    run(node, store)
    return node.open(store).load()


def kl(before, after):
    one, other = (x - x.max() - np.log(np.exp(x - x.max()).sum()) for x in (before, after))
    return float((np.exp(one) * (one - other)).sum())


@pytest.mark.parametrize("donor", [None, DONOR])
def test_every_state_put_in_is_the_recurrence_gone_on_from_it(rwkv6, donor, tmp_path):
    model, tensors, config = rwkv6
    given = {"clean": CLEAN, "corrupted": CORRUPTED, "kinds": (STATE,), "metrics": METRICS}
    patching = ActivationPatching(**given) if donor is None else DonorPatching(donor=donor, **given)
    found = computed(patching, model, tmp_path)
    assert found["kl"].dims == ("layer", "position")
    clean, corrupted = (forward(tensors, config, ids).logits[-1] for ids in (CLEAN, CORRUPTED))
    source = forward(tensors, config, donor or CLEAN)
    far = kl(clean, corrupted)
    assert found["kl"].std() > 1e-3 * far, "or places are all alike"
    for layer in range(config["num_hidden_layers"]):
        for place in range(len(CLEAN)):
            put = {(layer, place): source.states[layer, place]}
            logits = forward(tensors, config, CORRUPTED, states=put).logits[-1]
            here = found.sel(layer=layer, position=place)
            assert float(here["logit_difference"]) == pytest.approx(logits[17] - logits[40], abs=5e-5)
            assert float(here["kl"]) == pytest.approx(kl(clean, logits), rel=1e-3, abs=1e-7)
            assert float(here["recovery"]) == pytest.approx(1 - kl(clean, logits) / far, abs=2e-3)


def test_a_state_behind_what_prompts_share_changes_nothing_and_one_behind_the_end_is_read_by_nobody(
    rwkv6, tmp_path
):
    found = computed(
        ActivationPatching(clean=CLEAN, corrupted=CORRUPTED, kinds=(STATE,), metrics=METRICS),
        rwkv6[0],
        tmp_path,
    )
    assert abs(found["recovery"].sel(position=[0, 1, 5])).max() < 1e-4


def test_states_are_put_in_head_by_head(rwkv6, tmp_path):
    model, tensors, config = rwkv6
    given = {"clean": CLEAN, "corrupted": CORRUPTED, "kinds": (STATE,), "metrics": METRICS}
    found = computed(ActivationPatching(over="head_position", layers=(1,), **given), model, tmp_path)
    assert found["kl"].dims == ("layer", "head", "position")
    own, source = (forward(tensors, config, ids).states[1, 3] for ids in (CORRUPTED, CLEAN))
    for head in range(model.config.num_heads):
        state = own.copy()
        state[head] = source[head]
        logits = forward(tensors, config, CORRUPTED, states={(1, 3): state}).logits[-1]
        here = found.sel(layer=1, head=head, position=3)["logit_difference"]
        assert float(here) == pytest.approx(logits[17] - logits[40], abs=5e-5)


def test_the_mean_of_states_is_over_prompts_and_positions(rwkv6, tmp_path):
    """Against the recurrence gone on from the mean."""
    model, tensors, config = rwkv6
    references = (CORRUPTED, DONOR[:4])
    given = {"tokens": CLEAN, "how": "mean", "references": references, "metrics": METRICS[:2]}
    found = computed(Ablation(kinds=(STATE,), layers=(1,), **given), model, tmp_path)
    states = [forward(tensors, config, ids).states[1, t] for ids in references for t in range(len(ids))]
    logits = forward(tensors, config, CLEAN, states={(1, 2): np.mean(states, axis=0)}).logits[-1]
    here = found.sel(layer=1, position=2)["logit_difference"]
    assert float(here) == pytest.approx(logits[17] - logits[40], abs=5e-5)


@pytest.mark.parametrize(("kind", "name"), [(STATE, "specimen"), ("pattern", "rwkv6")])
def test_a_kind_the_model_does_not_have_is_refused_before_it_runs(kind, name, rwkv6):
    model = rwkv6[0] if name == "rwkv6" else Model.from_pretrained("specimen")
    grid = ActivationPatching(clean=CLEAN, corrupted=CORRUPTED, kinds=(kind,), over="head", metrics=METRICS)
    with pytest.raises(HookPointNotFound, match=f"{model.config.model_type} has no hook point"):
        grid.cells(model.config)
