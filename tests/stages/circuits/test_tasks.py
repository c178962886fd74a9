"""Tasks for a tokenizer: pairs of equal length, answers of one token, and a line where there are too few."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from mizarr.stages.circuits.tasks.table import TASKS, task_pairs
from mizarr.stages.circuits.tasks.words import (
    FEMALE,
    IDENTIFIERS,
    MALE,
    NOUNS,
    PLACES,
    PRAISE,
    REVIEWED,
    SPANS,
    THINGS,
)
from mizarr.stages.circuits.tasks.years import ProbabilityDifference
from mizarr.stages.forward.models.files import resolve
from mizarr.stages.forward.text.library import LibraryTokenizer
from mizarr.store.errors import ConfigError

GLUE = (
    "When and went to the gave a So is really great friend isn't home early because I saw yesterday came "
    "back he she near behind with beside are was were has have The lasted from year def self param "
    "thought this loved hated it In conclusion"
)


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """A tokenizer whose tokens are the words of all tasks, with a space before them and without, and every
    character; years are a century and two digits more."""
    nouns = {noun for pair in NOUNS for noun in pair}
    adjectives = {adjective for pair in PRAISE for adjective in pair}
    every = {*MALE, *FEMALE, *PLACES, *THINGS, *SPANS, *IDENTIFIERS, *REVIEWED, *nouns, *adjectives}
    every |= set(GLUE.split(" "))
    pieces = {*every, *(chr(code) for code in range(32, 127)), "\n"}
    pieces |= {f" {piece}" for piece in pieces} | {f" {century}" for century in range(11, 20)}
    pieces |= {f"{year:02d}" for year in range(100)}
    vocabulary = {piece: number for number, piece in enumerate(["<unk>", *sorted(pieces)])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    cut = Regex(r" ?[A-Za-z']+| ?\d\d|\n| ?[^A-Za-z\d\n]")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(cut, "isolated")
    tokenizer.decoder = decoders.Fuse()
    folder = tmp_path_factory.mktemp("words")
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"unk_token": "<unk>"}))
    return LibraryTokenizer(folder / "tokenizer.json")


@pytest.fixture(scope="module")
def specimen():
    return resolve("specimen").tokenizer()


@pytest.mark.parametrize("task", TASKS)
def test_pairs_have_equal_lengths_answers_of_one_token_and_come_back_for_a_seed(words, task):
    pairs = task_pairs(words, task, 12, seed=3)
    assert len({(pair.clean, pair.corrupted) for pair in pairs}) == 12
    assert pairs == task_pairs(words, task, 12, seed=3) != task_pairs(words, task, 12, seed=4)
    for pair in pairs:
        assert len(pair.clean) == len(pair.corrupted) and pair.clean != pair.corrupted
        assert 0 not in (*pair.clean, *pair.corrupted), "every word is known"
        if task != "greater_than":
            assert pair.metric.correct != pair.metric.wrong


def read(tokenizer, pair):
    told = (pair.clean, pair.corrupted, (pair.metric.correct,), (pair.metric.wrong,))
    return [tokenizer.decode(list(ids)) for ids in told]


def parts(text):
    return [word.strip(",:)") for word in text.split()]


def test_the_indirect_object_is_the_name_that_stands_once(words):
    for pair in task_pairs(words, "ioi", 20, seed=0):
        clean, corrupted, right, wrong = (parts(text) for text in read(words, pair))
        assert clean.count(right[0]) == 1 and clean.count(wrong[0]) == 2
        assert corrupted.count(right[0]) == corrupted.count(wrong[0]) == 1
        assert sum(a != b for a, b in zip(clean, corrupted, strict=True)) == 1


def test_verbs_and_pronouns_are_those_of_the_clean_prompt(words):
    for pair in task_pairs(words, "agreement", 20, seed=0):
        clean, _, right, wrong = (parts(text) for text in read(words, pair))
        plural = {"are", "were", "have"}
        is_plural = clean[1] in {many for _, many in NOUNS}
        assert (right[0] in plural) == is_plural != (wrong[0] in plural)
    for pair in task_pairs(words, "pronouns", 20, seed=0):
        clean, corrupted, right, _ = (parts(text) for text in read(words, pair))
        assert (right == ["he"]) == any(name in MALE for name in clean)
        assert any(name in MALE for name in clean) != any(name in MALE for name in corrupted)


def test_the_summary_of_a_review_has_the_sentiment_of_its_adjective(words):
    pairs = task_pairs(words, "sentiment", 20, seed=0)
    assert len({pair.clean for pair in pairs}) == 20
    for pair in pairs:
        clean, corrupted, right, wrong = (parts(text) for text in read(words, pair))
        is_praise = bool({word for word, _ in PRAISE} & set(clean))
        assert is_praise == ("loved" in clean) == (right == ["great"]) == (wrong == ["terrible"])
        # Both the adjective and the verb differ.
        assert sum(a != b for a, b in zip(clean, corrupted, strict=True)) == 2


def test_the_next_argument_is_the_third(words):
    for pair in task_pairs(words, "docstrings", 20, seed=0):
        clean, corrupted, right, wrong = read(words, pair)
        assert clean.split("(self, ")[1].split(")")[0].split(", ")[2] == right.strip()
        assert corrupted.split("(self, ")[1].split(")")[0].split(", ")[2] == wrong.strip()
        assert clean.split(")")[1] == corrupted.split(")")[1] and right not in clean.split(")")[1]


def test_later_years_are_right_and_the_others_wrong(words):
    for pair in task_pairs(words, "greater_than", 20, seed=0):
        year = int(words.decode(list(pair.clean)).split(" to ")[0][-2:])
        told = (pair.metric.right, pair.metric.wrong)
        right, wrong = ({int(words.decode([i])) for i in ids} for ids in told)
        assert right == set(range(year + 1, 100)) and wrong == set(range(year + 1))
        assert words.decode(list(pair.corrupted)).split(" to ")[0].endswith("01")


def test_a_tokenizer_of_single_digits_is_asked_for_the_decade(specimen):
    for pair in task_pairs(specimen, "greater_than", 20, seed=0):
        decade = int(specimen.decode(list(pair.clean)).split(" to ")[0][-2])
        right, wrong = (
            {int(specimen.decode([i])) for i in ids} for ids in (pair.metric.right, pair.metric.wrong)
        )
        assert right == set(range(decade + 1, 10)) and wrong == set(range(decade)) and right and wrong
        assert specimen.decode(list(pair.corrupted)).split(" to ")[0].endswith("01")


def test_a_tokenizer_of_whole_years_is_refused(tmp_path):
    pieces = {*SPANS, *GLUE.split(" "), *(str(year) for year in range(1100, 2000)), *map(str, range(11, 20))}
    tokenizer = Tokenizer(models.WordLevel({piece: n for n, piece in enumerate(["<unk>", *sorted(pieces)])}))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ConfigError, match="at most 0 of 100 years are a century and one token more"):
        task_pairs(LibraryTokenizer(tmp_path / "tokenizer.json"), "greater_than", 4)


@pytest.mark.parametrize("task", ["induction", "copying"])
def test_only_the_first_time_tells_what_comes_next(specimen, task):
    for pair in task_pairs(specimen, task, 20, seed=0):
        assert pair.clean[0] == pair.corrupted[0] == specimen.bos_id
        last = pair.clean[-1]
        first = pair.clean.index(last)
        assert first < len(pair.clean) - 1
        assert pair.clean[first + 1] == pair.metric.correct and pair.metric.correct not in pair.corrupted
        assert pair.metric.wrong in pair.corrupted and pair.metric.wrong not in pair.clean


def test_the_gradient_of_a_difference_of_probabilities_is_that_of_small_steps():
    rng = np.random.default_rng(0)
    logits, metric = rng.normal(size=9), ProbabilityDifference((1, 2), (5,))
    assert metric.value(logits, logits) == pytest.approx(
        (np.exp(logits[[1, 2]]).sum() - np.exp(logits[5])) / np.exp(logits).sum()
    )
    steps = np.eye(9) * 1e-6
    wanted = [(metric.value(logits + e, logits) - metric.value(logits - e, logits)) / 2e-6 for e in steps]
    np.testing.assert_allclose(metric.gradient(logits, logits), wanted, atol=1e-9)
    assert metric.canonical()["version"] == 1 and metric.canonical()["right"] == [1, 2]


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ("ioi", "ioi: expected at least 4 names of one token, found 2 of 66 with this tokenizer: Joe, "),
        ("pronouns", "pronouns: expected at least 2 names of one token, found 1 of 33"),
        ("sentiment", "sentiment: expected at least 3 adjectives of praise of one token, found "),
        ("docstrings", "docstrings: expected at least 12 identifiers of one token, found 9 of 44"),
        ("greater", "a task among ioi, greater_than, .*, found 'greater'; did you mean 'greater_than'?"),
    ],
)
def test_a_tokenizer_that_cannot_says_so_in_one_line(specimen, task, said):
    with pytest.raises(ConfigError, match=said.replace("?", r"\?")) as caught:
        task_pairs(specimen, task, 4)
    assert "\n" not in str(caught.value)


def test_more_pairs_than_there_are_is_said(specimen, words):
    said = r"agreement: expected 600 prompt pairs of equal length .* found \d+ among \d+ that were tried"
    with pytest.raises(ConfigError, match=said):
        task_pairs(specimen, "agreement", 600)
    with pytest.raises(ConfigError, match="at least one prompt pair of the task, found count=0"):
        task_pairs(words, "ioi", 0)
