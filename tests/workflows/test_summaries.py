"""A workflow says its main numbers in one sentence, and the sentence holds what its document holds."""

from __future__ import annotations

import io
from functools import cache
from typing import Any

import pytest
from rich.console import Console

from mizarr.workflows import compute

pytestmark = pytest.mark.wide

PROMPT = "The mother tongue of John Calvin is"
ASKED: dict[str, dict[str, Any]] = {
    "logit_lens": {"prompts": [PROMPT], "answers": ["French"]},
    "logit_attribution": {"limit": 2, "neurons": 2},
    "generate": {"prompts": [PROMPT], "max_tokens": 2},
    "character_count_helix": {"widths": [40, 60], "characters": 3000, "layers": [1, 2], "min_tokens": 4},
    "attention_patterns": {},
    "head_detection": {"sequences": 2, "length": 8, "controls": 2},
    "probe": {"layers": [2], "examples": 200, "penalties": [0.01]},
    "inspect_weights": {},
    "token_positions": {},
}


@pytest.fixture(scope="module")
def answer(tmp_path_factory):
    """A workflow that has run, by name; each runs when a test first asks for it."""
    store = tmp_path_factory.mktemp("store")
    return cache(lambda name: compute(name, store=store, **ASKED[name]))


@pytest.mark.parametrize("name", ASKED)
def test_a_summary_is_one_sentence_in_the_document_and_in_the_terminal(answer, name):
    workflow = answer(name)
    summary = workflow.summary
    assert summary.endswith(".") and "nan" not in summary and "\n" not in summary
    assert workflow.to_json()["summary"] == summary
    said = io.StringIO()
    workflow.render(Console(file=said, width=10_000))
    assert summary in said.getvalue()


def test_the_sentence_of_the_lens_holds_the_first_layers_of_its_document(answer):
    first = answer("logit_lens").to_json()["results"][0]["answer_first_top10"]
    assert f"among the 10 most likely tokens first after layer {first} " in answer("logit_lens").summary


def test_the_sentence_of_the_attribution_holds_the_largest_mean_share_of_a_head(answer):
    workflow = answer("logit_attribution")
    mean = workflow.shares["head_share"].mean("prompt").transpose("layer", "head").values
    largest = mean.flat[abs(mean).argmax()]
    assert workflow.summary.endswith(f"{largest:+.2f}.")


def test_the_sentence_of_the_heads_holds_the_best_of_each_kind(answer):
    kinds = answer("head_detection").to_json()["kinds"]
    for kind in kinds.values():
        best = kind["best"][0]
        assert f"L{best['layer']}H{best['head']} ({best['score']:.2f})" in answer("head_detection").summary


def test_the_sentence_of_the_probe_holds_score_interval_and_control(answer):
    document = answer("probe").to_json()["results"][0]
    row = document["layers"][0]
    numbers = (row["true"]["score"], row["true"]["low"], row["shuffled"]["score"], document["baseline"])
    assert all(f"{number:.3f}" in answer("probe").summary for number in numbers)


def test_what_has_no_answer_has_no_sentence(tmp_path):
    assert compute("logit_lens", store=tmp_path, prompts=[PROMPT]).summary == ""
