"""Ablation: every cell against full forwards of the reference with one part silenced."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import mizarr
from mizarr.pipeline import run
from mizarr.stages.causal.grids.ablation import Ablation
from mizarr.stages.causal.grids.patching_metrics import KL, LogitDifference, Recovery
from mizarr.store.errors import PromptError, StageError

from ...forward.random_models import save_random_model
from ...reference_runs import Reference, put

TOKENS = (0, 7, 42, 99, 5)
REFERENCES = ((0, 11, 12, 13, 14), (0, 200, 3, 77, 8), (0, 51, 52, 53, 54))
LAYERS, HEADS = 2, 4


@pytest.fixture(scope="module")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Reference]:
    """A random Llama of 2 layers and 4 heads, on disk and as the reference."""
    path = tmp_path_factory.mktemp("llama")
    axes = {"num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": 2}
    reference = save_random_model(path, "llama", 4, hidden_size=32, head_dim=8, **axes)
    return path, Reference(reference.eval())


def ablation(**given) -> Ablation:
    return Ablation(**({"tokens": TOKENS, "kinds": ("z",), "over": "head", "metrics": (KL(),)} | given))


def compute(experiment, folder: Path, where: Path):
    store = mizarr.open_store(where)
    node = experiment.on(str(folder))
    run(node, store)
    return node.open(store).load()


def divergence(baseline: torch.Tensor, other: torch.Tensor) -> float:
    p, q = baseline.double().log_softmax(-1), other.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum())


PLACES = {
    "head": [(h, None) for h in range(HEADS)],
    "layer": [(None, None)],
    "position": [(None, p) for p in range(len(TOKENS))],
    "head_position": [(h, p) for h in range(HEADS) for p in range(len(TOKENS))],
}


@pytest.mark.parametrize("how", ["zero", "mean", "mean per position", "resample"])
@pytest.mark.parametrize(
    ("kind", "over"),
    [
        ("z", "head"),
        ("z", "head_position"),
        ("mlp_out", "layer"),
        ("mlp_out", "position"),
        ("attn_out", "layer"),
    ],
)
def test_every_cell_is_the_forward_with_that_place_silenced(how, kind, over, random_model, tmp_path):
    folder, reference = random_model
    given = {} if how == "zero" else {"references": REFERENCES, "how": how.split()[0]}
    experiment = ablation(kinds=(kind,), over=over, per_position=how == "mean per position", **given)
    found = compute(experiment, folder, tmp_path)["kl"]
    baseline, own = reference.run(TOKENS)
    seen = [reference.run(each)[1] for each in REFERENCES]
    for layer in range(LAYERS):
        if how == "zero":
            source = torch.zeros_like(own[kind, layer])
        elif how == "resample":
            source = seen[experiment.drawn()[0]][kind, layer]
        else:
            source = torch.stack([each[kind, layer] for each in seen]).mean(0)
            if how == "mean":
                source = source.mean(-2, keepdim=True).expand_as(own[kind, layer])
        expected = [
            divergence(baseline, reference.run(TOKENS, {(kind, layer): put(source, *place)})[0])
            for place in PLACES[over]
        ]
        np.testing.assert_allclose(np.ravel(found.sel(layer=layer).values), expected, atol=1e-5)
        assert max(expected) > 1e-4


def test_the_mean_over_all_positions_weighs_every_token_once(random_model, tmp_path):
    folder, reference = random_model
    ragged = ((0, 11, 12), (0, 200, 3, 77, 8, 9, 10))
    experiment = ablation(kinds=("mlp_out",), over="layer", how="mean", references=ragged)
    found = compute(experiment, folder, tmp_path)["kl"]
    baseline, _ = reference.run(TOKENS)
    rows = torch.cat([reference.run(each)[1]["mlp_out", 1] for each in ragged])
    source = rows.mean(0).expand(len(TOKENS), -1)
    expected = divergence(baseline, reference.run(TOKENS, {("mlp_out", 1): put(source, None, None)})[0])
    assert float(found.sel(layer=1)) == pytest.approx(expected, abs=1e-5)


def test_resampling_several_times_gives_mean_and_spread(random_model, tmp_path):
    folder, reference = random_model
    experiment = ablation(how="resample", references=REFERENCES, samples=4, seed=2)
    assert len(set(experiment.drawn())) > 1
    found = compute(experiment, folder, tmp_path)
    baseline, _ = reference.run(TOKENS)
    seen = [reference.run(each)[1]["z", 1] for each in REFERENCES]
    values = [
        divergence(baseline, reference.run(TOKENS, {("z", 1): put(seen[i], 3, None)})[0])
        for i in experiment.drawn()
    ]
    cell = found.sel(layer=1, head=3)
    assert float(cell["kl"]) == pytest.approx(np.mean(values), abs=1e-5)
    assert float(cell["kl_std"]) == pytest.approx(np.std(values), abs=1e-5)


def test_samples_are_planned_as_runs_of_their_own(random_model, tmp_path):
    folder, _ = random_model
    store = mizarr.open_store(tmp_path)
    one, three = (
        ablation(how="resample", references=REFERENCES, samples=n).on(str(folder)).plan(store) for n in (1, 3)
    )
    assert three.branches == 3 * one.branches


def test_resampling_a_prompt_from_itself_changes_nothing(random_model, tmp_path):
    folder, _ = random_model
    difference = LogitDifference(3, 4)
    experiment = ablation(how="resample", references=(TOKENS,), metrics=(KL(), difference))
    found = compute(experiment, folder, tmp_path)
    np.testing.assert_allclose(found["kl"], 0, atol=1e-9)
    clean = float(found["unpatched"].sel(run="clean", metric="logit_difference"))
    np.testing.assert_allclose(found["logit_difference"], clean, atol=1e-5)
    assert found["run"].values.tolist() == ["clean"]


def test_keys_move_with_every_parameter(random_model, tmp_path):
    folder, _ = random_model
    store = mizarr.open_store(tmp_path)
    base = {"how": "resample", "references": REFERENCES}
    variants = [
        {},
        base,
        base | {"how": "mean"},
        base | {"how": "mean", "per_position": True},
        base | {"references": REFERENCES[:2]},
        base | {"samples": 2},
        base | {"seed": 1},
        {"tokens": (0, 7, 42, 99, 6)},
        {"kinds": ("q",)},
        {"over": "head_position"},
        {"metrics": (LogitDifference(1, 2),)},
    ]
    keys = {ablation(**each).on(str(folder)).key(store).digest for each in variants}
    assert len(keys) == len(variants)


@pytest.mark.parametrize(
    ("given", "error", "match"),
    [
        ({"how": "median"}, StageError, "'mean'"),
        ({"how": "mean"}, StageError, "no references"),
        ({"references": REFERENCES}, StageError, "3 references"),
        ({"samples": 2}, StageError, "found samples=2 with how='zero'"),
        ({"per_position": True}, StageError, "found it with how='zero'"),
        ({"kinds": ("pattern",)}, StageError, "with EdgeKnockout"),
        ({"metrics": (Recovery(KL()),)}, StageError, "no corrupted run"),
        ({"how": "resample", "references": ((0, 1),)}, PromptError, "of 5 tokens.*one of 2"),
        ({"how": "mean", "per_position": True, "references": ((0, 1),)}, PromptError, "one of 2"),
    ],
)
def test_what_cannot_be_ablated_is_refused(given, error, match, random_model):
    folder, _ = random_model
    with pytest.raises(error, match=match) as caught:
        ablation(**given).on(str(folder)).cells()
    assert "\n" not in str(caught.value)
