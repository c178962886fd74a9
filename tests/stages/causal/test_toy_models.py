"""Claims about models whose answer is known: the right verdict where there is something and where not."""

from __future__ import annotations

import numpy as np
import pytest

import mizarr
from mizarr.pipeline import run
from mizarr.stages.causal.controls import Null
from mizarr.stages.causal.grids.patching import ActivationPatching
from mizarr.stages.causal.grids.patching_metrics import KL
from mizarr.stages.causal.knockout import EdgeKnockout
from mizarr.store import open_store
from mizarr.workflows import compute

from ... import toy_models as toys

SUBJECT_AT, LAST = 3, 10


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("toys")
    return {"routed": toys.routed(folder / "routed"), "local": toys.local(folder / "local")}


def done(experiment, model, folder):
    store = open_store(folder)
    node = experiment.on(model)
    run(node, store)
    return node.open(store).load()


@pytest.mark.parametrize("name", ["routed", "local"])
def test_both_say_paris_and_only_one_asks_who(folders, name):
    model = mizarr.Model.from_pretrained(folders[name])
    says = {
        subject: toys.WORDS[int(model.forward(toys.FACT.replace("france", subject)).logits[0, -1].argmax())]
        for subject in toys.SUBJECTS
    }
    cities = toys.CITIES if name == "routed" else ("paris",) * 4
    assert says == dict(zip(toys.SUBJECTS, cities, strict=True))


@pytest.mark.parametrize(("name", "is_claimed"), [("routed", True), ("local", False)])
def test_cutting_one_edge_matters_where_the_fact_is_routed(folders, name, is_claimed, tmp_path):
    model = mizarr.Model.from_pretrained(folders[name])
    ids = tuple(model.tokenizer.encode(toys.FACT).ids)

    asked = (LAST, SUBJECT_AT)
    edges = [(q, k) for q in range(7, LAST + 1) for k in range(q) if (q, k) != asked]
    found = done(EdgeKnockout(ids, (asked, *edges), layers=(1,), heads=(1,)), model, tmp_path)
    effect, *others = found["kl"].transpose("layer", "edge").values[0]
    assert len(others) > 30
    assert Null(np.array(others), "edges of this head").is_beyond_chance(effect) == is_claimed
    assert (effect > 1.0) == is_claimed


@pytest.mark.parametrize(("name", "is_claimed"), [("routed", True), ("local", False)])
def test_patching_finds_the_subject_where_the_fact_is_routed(folders, name, is_claimed, tmp_path):
    model = mizarr.Model.from_pretrained(folders[name])
    one, other = (
        tuple(model.tokenizer.encode(toys.FACT.replace("france", subject)).ids)
        for subject in ("france", "italy")
    )
    grid = done(
        ActivationPatching(kinds=("resid_pre",), metrics=(KL(),), clean=one, corrupted=other), model, tmp_path
    )
    moved = abs(grid["unpatched"].sel(run="corrupted") - grid["kl"]).squeeze("metric", drop=True)
    moved = moved.transpose("layer", "position").values
    effect, rest = moved[1, SUBJECT_AT], np.delete(moved.ravel(), [SUBJECT_AT, moved.shape[1] + SUBJECT_AT])
    assert Null(rest, "other places").is_beyond_chance(float(effect)) == is_claimed
    assert (effect > 1.0) == is_claimed


EVERY = tuple(range(1, toys.HIDDEN))


@pytest.mark.parametrize(("dimensions", "label", "is_claimed"), [
    ((1, 2, 3, 4), "attractor", True),
    (EVERY, "absorbed like any push", False),
    ((), "not absorbed", False),
    (EVERY[4:], "not absorbed", False),
])  # fmt: skip
def test_an_attractor_is_told_from_what_is_none(tmp_path, dimensions, label, is_claimed):
    folder = toys.contracting(tmp_path / "model", dimensions)
    found = compute(
        "steering_convergence", store=tmp_path / "store", model=str(folder), prompt="the city of france",
        contrastive="the city of italy", strength_steps=2, max_strength=2.0, controls=20,
    ).to_json()  # fmt: skip
    (claim,) = found["findings"]
    assert found["label"] == label
    assert (claim["verdict"] == "beyond chance") == is_claimed
    early = found["layer_summaries"][0]
    # What every layer leaves of a difference, squared: five layers after the first.
    left = 0.4**10 if label != "not absorbed" else 1.0
    assert early["share_left"] == pytest.approx(left, abs=0.02)
    assert (early["absorption_layer"] is not None) == (label != "not absorbed")


def test_a_push_that_cannot_be_seen_has_no_verdict(tmp_path):
    """No layer of this model looks back, so that a push before the last position is never seen."""
    folder = toys.contracting(tmp_path / "model", (1, 2, 3, 4))
    found = compute(
        "steering_convergence", store=tmp_path / "store", model=str(folder), prompt="france is",
        contrastive="italy is", inject_position="auto", strength_steps=1, controls=20,
    )  # fmt: skip
    document = found.to_json()
    assert (document["inject_position"], document["label"], document["findings"]) == (0, "no verdict", [])
    assert {one["fate"] for one in document["layer_summaries"]} == {"never away", "out of reach"}
    assert "No verdict on pushes from 'france is'" in found.shown[0].caption
