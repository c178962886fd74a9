"""Unrelated prompts: facts as long with other answers, then windows of prose."""

from __future__ import annotations

import pytest

from mizarr.store.errors import ConfigError
from mizarr.workflows import build
from mizarr.workflows.material.unrelated import Unrelated
from mizarr.workflows.subject import Subject, shipped_facts, shipped_prose


def test_they_are_facts_as_long_with_other_answers_drawn_by_seed():
    subject = Subject("specimen")
    unrelated, prompt = Unrelated(subject), subject.tokenizer.encode("In Tonga, they understand").ids
    found = unrelated.to(prompt, 20, seed=0, targets=("English",))
    facts = {tuple(subject.tokenizer.encode(f["prompt"]).ids): f["target"] for f in shipped_facts()}
    assert len(set(found)) == 20
    assert tuple(prompt) not in found
    assert {len(ids) for ids in found} == {len(prompt)}
    assert "English" not in {facts[ids] for ids in found}
    assert found[:5] == unrelated.to(prompt, 5, seed=0, targets=("English",))
    assert found != unrelated.to(prompt, 20, seed=1, targets=("English",))


def test_where_facts_end_they_are_prose_after_the_same_special_tokens():
    subject = Subject("specimen")
    prompt = subject.tokenizer.encode("one two three " * 12).ids
    found = Unrelated(subject).to(prompt, 3, seed=0)
    prose = subject.tokenizer.encode(shipped_prose(), add_special=False).ids
    assert {len(ids) for ids in found} == {len(prompt)}
    for ids in found:
        assert ids[0] == prompt[0]
        rest = list(ids[1:])
        assert any(prose[i : i + len(rest)] == rest for i in range(len(prose)))


@pytest.mark.parametrize(
    ("workflow", "given"),
    [
        ("activation_patching", {"corrupted": ["w1 w8 w3 w4 w5"]}),
        ("causal_tracing", {"target": "w6", "subject": "w2 w3"}),
    ],
)
def test_a_tokenizer_that_reads_all_that_ships_alike_is_told_in_a_line(workflow, given, checkpoint):
    with pytest.raises(
        ConfigError, match=r"expected \d+ (unrelated prompts of 5 tokens|general facts) .* ask for fewer"
    ):
        build(workflow, model=checkpoint(), prompt="w1 w2 w3 w4 w5", **given)
