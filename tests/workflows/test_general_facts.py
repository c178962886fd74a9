"""General facts: a model is asked for them once, and workflows then ask about those that it knows."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

import mizarr
from mizarr.workflows import build, compute
from mizarr.workflows.general_facts import GENERAL_NODE, general_facts
from mizarr.workflows.subject import FEWEST_KNOWN, SPECIMEN_FOLDER, Subject, shipped_facts


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A copy of the specimen, whose name is not that of a model that ships with mizarr."""
    folder = tmp_path_factory.mktemp("copied") / "model"
    shutil.copytree(SPECIMEN_FOLDER, folder)
    return str(folder)


def known_prompts(model: str) -> list[str]:
    """Prompts of the general facts whose answer is the most likely next token, in one pass each."""
    loaded, subject = mizarr.Model.from_pretrained(model), Subject(model)
    facts = [(fact["prompt"], fact["target"]) for fact in general_facts()]
    answers = subject.answer_ids(facts)
    prompts = subject.tokenizer.ids_of([prompt for prompt, _ in facts], add_special=True)
    top = [int(loaded.forward([ids]).logits[0, -1].argmax()) for ids in prompts]
    return [prompt for (prompt, _), best, answer in zip(facts, top, answers, strict=True) if best == answer]


def test_there_are_400_facts_of_ten_relations_each_with_one_answer():
    facts = general_facts()
    assert len(facts) >= 400
    assert len({fact["relation"] for fact in facts}) >= 10
    assert len({fact["prompt"] for fact in facts}) == len(facts)
    assert all(fact[name] == fact[name].strip() != "" for fact in facts for name in fact)
    # One of each relation in turn: a workflow that asks about few facts asks about many relations.
    assert len({fact["relation"] for fact in facts[:10]}) == 10


def test_a_shipped_model_is_asked_about_shipped_facts_alone():
    workflow = build("logit_lens")
    assert GENERAL_NODE not in workflow.nodes
    assert workflow.subject.facts == shipped_facts()


def test_a_workflow_asks_about_the_facts_that_a_pass_of_the_model_answers(copied, tmp_path):
    known = known_prompts(copied)
    assert len(known) >= FEWEST_KNOWN, "the copy knows too little for this test"
    store = mizarr.open_store(tmp_path / "store")
    lens = compute("logit_lens", model=copied, store=store)
    assert set(lens.texts) <= set(known)
    assert (
        lens.knowledge
        == f"model knows {len(known)} of {len(general_facts())} general facts; it is asked about these."
    )
    assert lens.to_json()["knowledge"] == lens.knowledge
    again = build("logit_lens", model=copied)
    assert len(again.texts) > len(lens.texts), "before the ranks are read, all facts are planned"
    again.choose_facts(store)
    assert (again.texts, again.fact_nodes()) == (lens.texts, {})


def test_a_model_that_knows_none_is_asked_about_all_and_told_so(tiny_model, tmp_path):
    traced = compute("causal_tracing", model=str(tiny_model), facts=2, store=tmp_path / "store")
    ranks = traced.result(GENERAL_NODE)["rank"].values
    assert np.sum(ranks == 0) < FEWEST_KNOWN
    assert "it is asked about all of them" in traced.knowledge
    assert traced.not_claimed


def test_a_workflow_runs_in_one_store_after_another(copied, tmp_path):
    traced = build("causal_tracing", model=copied, kinds=["mlp_out"], facts=2, samples=1, controls=5)
    sentences = []
    for name in ("one", "two"):
        traced.run(mizarr.open_store(tmp_path / name))
        sentences.append((traced.knowledge, traced.to_json()["findings"]))
    assert sentences[0] == sentences[1]
