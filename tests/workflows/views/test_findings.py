"""Findings: sentences that follow from the numbers, the same everywhere."""

from __future__ import annotations

import numpy as np
import pytest

from mizarr.stages.causal.controls import Null
from mizarr.workflows.views import Finding, Findings, paper

NULL = Null(np.linspace(-0.1, 0.1, 50), "features of the same layer")


def test_an_effect_that_no_draw_reaches_is_told_with_its_null():
    found = Finding("injecting L0:1 raises P('x')", 0.5, NULL, spread=(0.4, 0.6), prompts=12, held_out=True)
    assert found.is_beyond_chance
    assert found.sentence == (
        "injecting L0:1 raises P('x'): +0.5 (95 % over 12 held-out prompts: +0.4 to +0.6). 50 features of "
        "the same layer: median +0, 95 % between -0.095 and +0.095; none do as much (p = 0.02)."
    )


def test_an_effect_that_draws_reach_is_no_more_than_chance():
    found = Finding("cutting the edge", 0.05, NULL, unit="nats")
    assert not found.is_beyond_chance
    assert found.sentence.startswith("cutting the edge: +0.05 nats, no more than chance. 50 features")
    assert "13 do as much (p = 0.27)" in found.sentence


def test_an_effect_without_a_control_claims_nothing_and_has_no_p_value():
    null = Null(np.empty(0), "edges")
    found = Finding("cutting the edge", 0.5, null, unit="nats", spread=(0.4, 0.6), prompts=3)
    assert found.sentence == (
        "cutting the edge: +0.5 nats (95 % over 3 prompts: +0.4 nats to +0.6 nats); nothing is claimed, as "
        "no control was run (controls=0)."
    )
    told = Findings.of(found).json["findings"][0]
    assert told["verdict"] == "nothing is claimed, as no control was run"
    assert told["null"]["draws"] == 0 and np.isnan(told["null"]["share_as_large"])
    assert found.strip["draws"] == []


def test_a_cause_chosen_among_many_says_so_and_pays():
    found = Finding("cutting the edge", 1.0, Null(NULL.values, "edges", looked_at=20))
    assert not found.is_beyond_chance
    assert "(p = 0.39, chosen among 20)" in found.sentence


def test_terminal_notebook_and_json_say_the_same_sentence():
    one, other = Finding("one", 0.5, NULL), Finding("<other>", 0.01, NULL)
    view = Findings.of(one, other)
    told = view.json["findings"]
    assert [each["sentence"] for each in told] == [one.sentence, other.sentence]
    assert [each["verdict"] for each in told] == ["beyond chance", "no more than chance"]
    assert told[0]["null"]["share_as_large"] == pytest.approx(1 / 51)
    assert one.sentence in view.body()
    assert "&lt;other&gt;" in view.body()
    assert view.rich().row_count == 2


def test_the_strip_has_everything_on_one_axis_in_order():
    strip = Finding("one", 0.5, NULL, spread=(0.4, 0.6)).strip
    assert min(strip["draws"]) == 2.0
    assert max(strip["spread"]) == 98.0
    assert max(strip["draws"]) < strip["spread"][0] < strip["effect"] < strip["spread"][1]
    assert min(strip["draws"]) < strip["zero"] < max(strip["draws"])


def test_equal_draws_make_a_strip():
    strip = Finding("one", 0.0, Null(np.zeros(50), "draws")).strip
    assert set(strip["draws"]) == {strip["effect"]} == {strip["zero"]}


def test_a_figure_says_how_large_an_effect_is_where_zero_is_and_what_the_strokes_are():
    view = Findings.of(
        Finding("one", 0.5, NULL, unit="nats"), Finding("other", 0.01, NULL), caption="As named."
    )
    axes = paper.compose([view.panel()]).axes[0]
    said = [text.get_text() for text in axes.texts]
    assert "one: +0.5 nats, beyond chance" in said and "other: +0.01, no more than chance" in said
    assert any(text.startswith("As named. Dot: the effect") for text in said)
    assert view.caption == "As named.", "a page has words of its own"
    upright = [
        line.get_xdata()[0] for line in axes.lines if len(set(line.get_xdata())) == 1 < len(line.get_xdata())
    ]
    assert upright == [each.strip["zero"] for each in view.findings]
