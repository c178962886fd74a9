"""Grids over places of a recurrent state: every cell against the recurrence written by hand."""

from __future__ import annotations

import json

import numpy as np
import pytest

from mizarr.pipeline import run
from mizarr.stages.causal.grids.ablation import Ablation
from mizarr.stages.causal.grids.patching import ActivationPatching, DonorPatching
from mizarr.stages.causal.grids.patching_metrics import KL, LogitDifference, Recovery
from mizarr.stages.forward.architectures.points import HookPoint
from mizarr.stages.forward.hooks.interventions import Replace
from mizarr.stages.forward.hooks.spec import HookSpec
from mizarr.stages.forward.models.model import Model
from mizarr.store import open_store
from mizarr.store.errors import HookPointNotFound

from ...forward.literal_rwkv6 import forward
from ...forward.random_hybrids import save_random_hybrid
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


@pytest.mark.parametrize(
    ("family", "kind"),
    [("mamba", "ssm_state_seq"), ("mamba2", "ssm_out"), ("gla", "linear_state_seq"), ("xlstm", "mlstm_v")],
)
def test_every_recurrence_has_grids_of_its_state_and_of_its_heads(family, kind, tmp_path):
    """Against one plain forward pass for every cell."""
    save_random_hybrid(tmp_path / "model", family, 2)
    model = Model.from_pretrained(tmp_path / "model")
    given = {"clean": CLEAN, "corrupted": CORRUPTED, "kinds": (kind,), "metrics": METRICS[:1]}
    layers = tuple(model.config.layers_with(kind))
    given |= {"layers": layers, "over": "head_position"}
    found = computed(ActivationPatching(**given), model, tmp_path / "store")
    clean = model.forward(list(CLEAN), HookSpec().capture(*model.config.points_of(kind)))
    sizes = found["logit_difference"].sizes
    assert sizes["head"] == clean[HookPoint(kind, layers[0])].shape[1] and sizes["position"] == len(CLEAN)
    assert found["logit_difference"].std() > 1e-5
    for layer in layers:
        for head in range(0, sizes["head"], max(1, sizes["head"] // 3)):
            for place in range(len(CLEAN)):
                part = clean[HookPoint(kind, layer)][0, head : head + 1, place : place + 1]
                put = Replace(part, positions=(place,), heads=(head,))
                logits = model.forward(
                    list(CORRUPTED), HookSpec().intervene(HookPoint(kind, layer), put)
                ).logits[0, -1]
                here = found["logit_difference"].sel(layer=layer, head=head, position=place)
                assert float(here) == pytest.approx(float(logits[17] - logits[40]), abs=2e-5)


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
    for head in range(model.config.attention_heads):
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
