"""Texts of one kind: what a choice made on one text is scored on."""

from __future__ import annotations

import pytest

from mizarr.workflows.feature_exchange.presets import PRESETS
from mizarr.workflows.material.samples.couplets import COUPLETS, FAMILIES, family_of
from mizarr.workflows.material.samples.kin import COUPLET, kin_of, strangers
from mizarr.workflows.subject import shipped_facts

FACT = "The mother tongue of John Calvin is"


def test_kin_of_a_fact_are_the_other_facts_of_its_relation_and_answer():
    kin = kin_of(FACT, "fact", "French")
    targets = {fact["prompt"]: fact["target"] for fact in shipped_facts()}
    assert kin.texts and {targets[text] for text, _ in kin.texts} == {"French"}
    assert all(text.startswith("The mother ") and text.endswith(" is") for text, _ in kin.texts)
    assert FACT not in dict(kin.texts) and {span for _, span in kin.texts} == {None}
    more = [fact for fact in shipped_facts() if fact["prompt"].startswith("The mother tongue")]
    assert len(kin.texts) == sum(fact["target"] == "French" for fact in more if fact["prompt"] != FACT)
    assert kin.where == "other facts with the answer 'French', at the same distance from the end"


@pytest.mark.parametrize("word", ["light", "run", "before"])
def test_kin_of_a_couplet_rhyme_with_its_end_and_share_no_line_with_it(word: str):
    prompt = COUPLETS[0].text("night" if word == "light" else "sun")
    kin = kin_of(prompt, COUPLET, word)
    family = set(FAMILIES[family_of(word)])
    own = prompt.splitlines()
    ends = []
    for text, span in kin.texts:
        assert span is not None
        first, second = text.splitlines()
        end = text[slice(*span)]
        assert first.endswith(f" {end}") and span[1] == len(first)
        ends.append(end)
        said = {*first.replace(":", " ").replace(",", " ").split()[:-1], *second.split()}
        assert not said & family, "nothing else of the two lines rhymes with the end"
        assert second != own[1]
    assert len(kin.texts) >= 8
    assert set(ends) == family - {word, own[0].split()[-1]}, "all other words of the family have their turn"


def test_a_word_that_rhymes_with_nothing_has_no_kin():
    assert kin_of(COUPLETS[0].text("night"), COUPLET, " the").texts == ()
    spaced, plain = (kin_of(COUPLETS[0].text("night"), COUPLET, word).texts for word in (" light", "light"))
    assert spaced == plain != ()


def test_strangers_begin_and_end_otherwise():
    found = strangers(FACT)
    assert len(found) > 1000
    assert not any(text.split()[:2] == ["The", "mother"] or text.split()[-1] == "is" for text in found)


def test_the_specimens_preset_is_the_first_couplet_and_its_words_rhyme():
    preset = PRESETS["specimen"]
    assert preset.kind == COUPLET and preset.prompt == COUPLETS[0].text(preset.site)
    assert preset.suppress_word in COUPLETS[0].same
    assert family_of(preset.correct_word) == family_of(preset.site)
    assert family_of(preset.inject_word) == family_of(COUPLETS[0].other)
