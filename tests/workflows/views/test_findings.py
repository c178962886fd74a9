"""Findings: sentences that follow from the numbers, the same everywhere."""

from __future__ import annotations

import numpy as np
import pytest

from mizarr.stages.causal.controls import Null
from mizarr.workflows.claim import CandidateEffects, Claim, Controls
from mizarr.workflows.views import Findings, paper

NULL = Null(np.linspace(-0.1, 0.1, 50), "features of the same layer")


def test_an_effect_that_no_draw_reaches_is_told_with_its_null():
    found = Claim("injecting L0:1 raises P('x')", 0.5, NULL, spread=(0.4, 0.6), prompts=12, held_out=True)
    assert found.is_beyond_chance
    assert found.sentence == (
        "Injecting L0:1 raises P('x'): +0.5 (95 % interval over 12 held-out prompts: +0.4 to +0.6). 50 "
        "features of the same layer: median +0, 95 % of them between -0.095 and +0.095; none reaches this "
        "effect (p = 0.02)."
    )


def test_an_effect_that_draws_reach_is_no_more_than_chance():
    found = Claim("cutting the edge", 0.05, NULL, unit="nats")
    assert not found.is_beyond_chance
    assert found.sentence.startswith("Cutting the edge: +0.05 nats, no more than chance. 50 features")
    assert "13 reach this effect (p = 0.27)" in found.sentence


def test_an_effect_without_a_control_claims_nothing_and_has_no_p_value():
    null = Null(np.empty(0), "edges")
    found = Claim("cutting the edge", 0.5, null, unit="nats", spread=(0.4, 0.6), prompts=3)
    assert found.sentence == (
        "Cutting the edge: +0.5 nats (95 % interval over 3 prompts: +0.4 nats to +0.6 nats); nothing is "
        "claimed, as no control was run (controls=0)."
    )
    told = Findings.of(found).json["findings"][0]
    assert told["verdict"] == "nothing is claimed, as no control was run"
    assert told["null"]["draws"] == 0 and np.isnan(told["null"]["share_as_large"])
    assert found.strip["draws"] == []


def test_levels_before_and_after_are_in_the_sentence():
    claim = Claim("cutting the edge lowers P('x')", -0.49, NULL, levels=(0.61, 0.12), prompts=1)
    assert claim.sentence.startswith("Cutting the edge lowers P('x'): -0.49 (from 0.61 to 0.12)")
    assert claim.to_json()["levels"] == (0.61, 0.12)


def test_a_cause_chosen_among_many_says_so_and_pays():
    found = Claim("cutting the edge", 1.0, Null(NULL.values, "edges", looked_at=20))
    assert not found.is_beyond_chance
    assert "(p = 0.39, corrected for the choice among 20)" in found.sentence


def test_terminal_notebook_and_json_say_the_same_sentence():
    one, other = Claim("one", 0.5, NULL), Claim("<other>", 0.01, NULL)
    view = Findings.of(one, other)
    told = view.json["findings"]
    assert [each["sentence"] for each in told] == [one.sentence, other.sentence]
    assert [each["verdict"] for each in told] == ["beyond chance", "no more than chance"]
    assert told[0]["null"]["share_as_large"] == pytest.approx(1 / 51)
    assert one.sentence in view.body()
    assert "&lt;other&gt;" in view.body()
    assert view.rich().row_count == 2


def test_the_strip_has_everything_on_one_axis_in_order():
    strip = Claim("one", 0.5, NULL, spread=(0.4, 0.6)).strip
    assert min(strip["draws"]) == 2.0
    assert max(strip["spread"]) == 98.0
    assert max(strip["draws"]) < strip["spread"][0] < strip["effect"] < strip["spread"][1]
    assert min(strip["draws"]) < strip["zero"] < max(strip["draws"])


def test_equal_draws_make_a_strip():
    strip = Claim("one", 0.0, Null(np.zeros(50), "draws")).strip
    assert set(strip["draws"]) == {strip["effect"]} == {strip["zero"]}


def test_a_figure_says_how_large_an_effect_is_where_zero_is_and_what_the_strokes_are():
    view = Findings.of(Claim("one", 0.5, NULL, unit="nats"), Claim("other", 0.01, NULL), caption="As named.")
    axes = paper.compose([view.panel()]).axes[0]
    said = [text.get_text() for text in axes.texts]
    assert "one: +0.5 nats, beyond chance" in said and "other: +0.01, no more than chance" in said
    assert any(text.startswith("As named. Blue dot: measured effect") for text in said)
    assert view.caption == "As named.", "a page has words of its own"
    upright = [
        line.get_xdata()[0] for line in axes.lines if len(set(line.get_xdata())) == 1 < len(line.get_xdata())
    ]
    assert upright == [each.strip["zero"] for each in view.findings]


# -- the protocol


SETTINGS = Controls(200, seed=1)


def test_a_candidate_is_chosen_on_one_half_and_scored_on_the_other():
    chosen_on = np.zeros((3, 2, 4))
    chosen_on[:, 1, 2], chosen_on[:, 0, 3] = 1.0, -1.0
    scored_on = np.arange(16.0).reshape(2, 2, 4)
    candidates = CandidateEffects(chosen_on, scored_on)
    assert (candidates.best, candidates.weakest) == ((1, 2), (0, 3))
    in_the_first_layer = np.arange(8).reshape(2, 4) < 4
    assert CandidateEffects(chosen_on, scored_on, among=in_the_first_layer).best == (0, 0)
    assert CandidateEffects(np.array([[-3.0, 1.0, -0.5]]), np.ones((1, 3))).quietest == (2,)
    claim = candidates.claim("cutting a head", candidates.best, "another head", SETTINGS)
    assert (claim.effect, claim.prompts, claim.held_out) == (10.0, 2, True)
    # Means over both prompts of one of eight candidates each: 0 to 7 and 8 to 15.
    assert set(claim.null.values) <= {total / 2 for total in range(8, 23)}
    assert claim.null.values.mean() == pytest.approx(7.5, abs=0.5)


def test_candidates_with_controls_of_their_own_are_compared_with_these():
    controls = np.full((2, 5, 3), 0.5)
    candidates = CandidateEffects(np.eye(3)[:2], np.ones((2, 3)), controls)
    claim = candidates.claim("patching", (0,), "unrelated states", SETTINGS)
    assert set(claim.null.values) <= {0.5, 0.75, 1.0}, "controls, and the cause itself"
    assert claim.null.of == "draws of unrelated states"


def test_a_candidate_of_one_prompt_is_compared_with_others_and_never_with_itself():
    claim = Claim.among("cutting", np.arange(6.0), 5, "edges", Controls(100), candidates=[1, 2, 5])
    assert sorted(claim.null.values) == [1.0, 2.0] and claim.effect == 5.0
    assert claim.p_value == pytest.approx(1 / 3)


def test_differences_of_one_sign_are_beyond_chance_and_balanced_ones_are_not():
    assert Claim.paired("repeating", np.ones(8), "draws of signs", SETTINGS).is_beyond_chance
    assert not Claim.paired("repeating", [1.0, -1.0] * 4, "draws of signs", SETTINGS).is_beyond_chance


def test_estimates_that_rank_cells_are_beyond_chance():
    exact = np.arange(9.0)
    claim = Claim.ranking("estimates", [(exact**3, exact), (exact + 1, exact)], "cells", SETTINGS)
    assert claim.effect == pytest.approx(1.0) and claim.is_beyond_chance
    assert Claim.ranking("estimates", [(-exact, exact)], "cells", SETTINGS).effect == pytest.approx(-1.0)
