"""`mizarr generate` prints what `mizarr.generate` gives, and refuses what it refuses in a line."""

from __future__ import annotations

import json

import pytest

import mizarr
from mizarr.workflows.cli import run

PROMPTS = ["Once upon a time", "He said"]


@pytest.fixture(scope="module")
def expected():
    return mizarr.generate(mizarr.Model.from_pretrained("specimen"), PROMPTS, max_tokens=6)


def test_one_prompt_is_printed_with_its_continuation(expected, capsys):
    assert run(["generate", "specimen", PROMPTS[0], "--max-tokens", "6"]) == 0
    assert capsys.readouterr().out == f"{expected[0].full_text}\n"


def test_several_prompts_stand_in_turn(expected, capsys):
    assert run(["generate", "specimen", *PROMPTS, "--max-tokens", "6"]) == 0
    assert capsys.readouterr().out == "".join(f"{result.full_text}\n\n" for result in expected)


def test_json_holds_ids_and_log_probabilities(expected, capsys):
    assert run(["generate", "specimen", *PROMPTS, "--max-tokens", "6", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [tuple(each["generated_ids"]) for each in printed] == [each.generated_ids for each in expected]
    for each, result in zip(printed, expected, strict=True):
        assert each["logprobs"] == pytest.approx(result.logprobs, abs=1e-6)


def test_draws_are_those_of_their_seed(capsys):
    texts = []
    for seed in ("1", "1", "2"):
        assert run(["generate", "specimen", PROMPTS[0], "--temperature", "1.5", "--seed", seed]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["specimen", "Once", "--top-k", "3"], "set temperature=1"),
        (["specimen", "Once", "--chat"], "expected a chat template"),
        (["specimen"], "Missing argument 'PROMPT...'"),
        (["no-such-model", "Once"], "no-such-model"),
    ],
)
def test_what_cannot_be_generated_is_told_in_a_line(arguments, told, capsys):
    assert run(["generate", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and told in err and len(err.splitlines()) == 1
