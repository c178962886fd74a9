"""circuit_discovery and circuit_evaluation: what the specimens copy and know with, and chance.

Heads are known of the guided one, whose training asked for them.
"""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from scipy.stats import binomtest

import mizarr
from mizarr.stages.causal.controls import by_sign
from mizarr.stages.circuits.circuit import Circuit
from mizarr.stages.circuits.runs import CircuitRuns
from mizarr.store.errors import ConfigError, PromptError
from mizarr.workflows import build, compute
from mizarr.workflows.subject import SPECIMEN_FOLDER as SPECIMEN
from mizarr.workflows.views import Lines
from tests.stages.forward.random_models import save_random_model

FEW = {"pairs": 5, "steps": 2}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def discovery(store):
    return compute("circuit_discovery", store=store, model="specimen-guided", **FEW)


@pytest.fixture(scope="module")
def evaluation(store):
    given = {"shares": [0.005, 0.02, 0.1, 1.0], "tasks": ["copying"], "model": "specimen-guided"}
    return compute("circuit_evaluation", store=store, **FEW, **given)


def test_copying_and_facts_are_kept_by_their_circuits_and_by_no_random_one(discovery):
    claims = discovery.findings.findings
    assert [each.verdict for each in claims] == ["beyond chance"] * 2
    assert [each.held_out for each in claims] == [True] * 2
    copying, facts = claims
    assert copying.effect > 85 and facts.effect > 50
    for claim in claims:
        assert len(claim.null.values) == 20 and np.abs(claim.null.values).max() < 10
        low, high = claim.spread
        assert low <= claim.effect <= high


def test_the_copying_circuit_has_the_heads_that_were_trained_to_copy(discovery):
    """Its card tells of a previous-token head and an induction head: the keys of one read the other."""
    assert "L1H0" in discovery.trained_with_help and "L3H0" in discovery.trained_with_help
    circuit = discovery.circuit("copying").pruned()
    assert "a1.h0->a3.h0<k>" in circuit and "a3.h0->logits" in circuit
    by_effect = sorted(discovery.document("copying")["edges"], key=lambda each: each["exact_effect"])
    assert {"m0->a3.h0<v>", "m0->a1.h0<v>", "a1.h0->a3.h0<k>"} <= {each["edge"] for each in by_effect[:6]}


def test_edges_are_told_with_their_scores_and_exact_effects(discovery):
    told = discovery.to_json()["circuits"]["facts"]
    circuit = Circuit.from_json(told["circuit"])
    assert len(circuit) == len(told["edges"]) == discovery.size("facts") == 218
    assert circuit == discovery.circuit("facts")
    effects = discovery.result("facts_effects")["effect"].mean("pair")
    for each in told["edges"][:5]:
        source, destination = each["edge"].split("->")
        exact = float(effects.sel(source=source, destination=destination))
        assert each["exact_effect"] == pytest.approx(exact)
    assert 0.9 < told["scores_and_exact_effects"]["correlation"] <= 1


@pytest.mark.parametrize("name", ["discovery", "evaluation"])
def test_it_is_told_in_every_form(name, request, tmp_path):
    done = request.getfixturevalue(name)
    assert json.dumps(done.to_json(), allow_nan=False)
    assert done.tables()
    assert all(path.stat().st_size > 10_000 for path in done.draw(tmp_path))
    assert done.report(tmp_path / "page.html").stat().st_size > 10_000


def test_by_position_the_circuit_is_read_where_copying_reads(tmp_path):
    """What it claims is what its edges give by themselves, beside random ones as large."""
    given = {"tasks": "copying", "by_position": True, "size": 400, "controls": 3, "pairs": 5, "steps": 2}
    asked = compute("circuit_discovery", store=tmp_path / "store", **given)
    told = asked.to_json()["circuits"]["copying"]
    circuit = Circuit.from_json(told["circuit"])
    pairs = asked.pairs["copying"][1]
    assert circuit.positions == len(pairs[0].clean) and len(circuit) == len(told["edges"]) == 400
    assert told["edges_there_are"] == len(Circuit.whole(asked.layout, circuit.positions))
    named = {f"{each['edge']}@{each['position']}" for each in told["edges"]}
    assert named == set(circuit.edges) and "scores_and_exact_effects" not in told
    runs = CircuitRuns(mizarr.Model.from_pretrained("specimen"), asked.layout, pairs, "corrupted")
    value, empty = runs.values(np.stack([circuit.chosen, np.zeros_like(circuit.chosen)])).mean(1)
    expected = 100 * (value - empty) / (runs.clean.mean() - empty)
    assert told["faithfulness_percent"] == pytest.approx(expected, abs=1e-3)
    assert told["faithfulness_percent"] > max(told["random_faithfulness_percent"])
    assert len(told["random_faithfulness_percent"]) == 3
    assert any("where the circuit reads" in getattr(view, "title", "") for view in asked.views())
    with pytest.raises(PromptError, match="one length, as edges are told apart by position"):
        compute("circuit_discovery", store=tmp_path / "store", tasks="facts", by_position=True)


def test_a_circuit_of_every_edge_is_the_model_and_leaves_nothing(evaluation):
    told = evaluation.to_json()["evaluated"]["copying"]
    assert told["sizes"] == [10, 43, 218, 2188]
    assert told["faithfulness_percent"][-1] == pytest.approx(100, abs=1e-3)
    assert told["complement_percent"][-1] == pytest.approx(0, abs=1e-3)
    assert np.array(told["random_percent"]).shape == (4, 20)
    assert np.array(told["random_percent"])[-1] == pytest.approx(100, abs=1e-3)
    x, f = np.array(told["sizes"]) / 2188, np.array(told["faithfulness_percent"]) / 100
    assert told["cpr"] == pytest.approx(np.trapezoid(f, x))
    assert told["cmd"] == pytest.approx(np.trapezoid(np.abs(1 - f), x))
    (claim,) = evaluation.findings.findings
    assert claim.verdict == "beyond chance" and claim.effect == pytest.approx(100 * told["cpr"])
    (curve,) = [view for view in evaluation.shown if isinstance(view, Lines)]
    assert curve.log_x and curve.x == pytest.approx(100 * x)


def test_the_circuit_told_loses_what_one_of_its_edges_carries(evaluation):
    told = evaluation.to_json()["evaluated"]["copying"]
    lost = {each["edge"]: each["lost_percent"] for each in told["lost_without_edge"]}
    assert len(lost) == 43 == len(told["circuit"]["edges"])
    assert next(iter(lost)) == "m0->a3.h0<v>" and lost["m0->a3.h0<v>"] > 50
    assert abs(told["without_circuit_percent"]) < 10 and told["circuit_percent"] > 80


def test_a_sign_test_is_scipy_s():
    for values in ([1, 1, 1, -1], [1.0] * 8, [-1, -2], [0.0, 1.0, 1.0]):
        count = int((np.array(values) > 0).sum())
        wanted = binomtest(count, len(values), alternative="greater").pvalue
        assert by_sign(np.array(values)) == pytest.approx(wanted)


@pytest.mark.parametrize("seeds", [1, pytest.param(10, marks=pytest.mark.slow)])
def test_random_weights_claim_nothing_of_what_they_do_not_do(seeds, tmp_path):
    for seed in range(seeds):
        folder = tmp_path / str(seed)
        save_random_model(folder, "llama", seed, tokenizer=False, vocab_size=2048)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(SPECIMEN / file, folder)
        done = compute("circuit_discovery", store=tmp_path / "store", model=str(folder), **FEW)
        told = done.findings
        assert not told.findings and told.caption.startswith("The model does not do greater_than: ")


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        ("circuit_discovery", {"tasks": ["copy"]}, "no task 'copy'; there are facts, ioi"),
        ("circuit_discovery", {"tasks": ["facts", "facts"]}, "different tasks, found facts, facts"),
        (
            "circuit_discovery",
            {"tasks": ["ioi"]},
            "at least 4 names of one token, found 2 of 66",
        ),
        ("circuit_discovery", {"size": 99999}, "a circuit of 0 to 2188 edges, .* found size 99999"),
        (
            "circuit_discovery",
            {"pairs": 5000, "tasks": ["facts"]},
            "expected 10000 pairs .* ask for fewer",
        ),
        ("circuit_evaluation", {"shares": [0.5]}, "two or more ascending numbers above 0"),
        ("circuit_evaluation", {"shares": [0.00001, 0.00002]}, "two or more sizes in a graph of 2188 edges"),
        ("circuit_evaluation", {"alternative": "none"}, "expected alternative to be corrupted, zero"),
        ("circuit_discovery", {"method": "eap"}, "expected method to be EAP, EAP-IG-inputs"),
    ],
)
def test_what_cannot_be_asked_is_refused_before_anything_runs(name, given, said):
    with pytest.raises(Exception, match=said) as caught:
        build(name, **given)
    assert "\n" not in str(caught.value)


def test_a_model_whose_parts_are_no_sum_is_refused(tmp_path):
    save_random_model(tmp_path, "gemma2", 0)
    with pytest.raises(ConfigError, match="norms 'around' the output of heads or MLP in layer 0 of gemma2"):
        build("circuit_discovery", model=str(tmp_path))
