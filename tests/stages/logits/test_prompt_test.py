"""`test_prompt` and directions of tokens, beside logits of transformers and the checkpoint's own rows."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from mizarr import Model
from mizarr.stages.logits import prompt_test as module
from mizarr.store.errors import PromptError

from ..forward.random_models import save_random_model

PROMPT = "The capital of France is"


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """Our model and the reference of the same random weights, untied, and its directory."""
    folder = tmp_path_factory.mktemp("model")
    reference = save_random_model(folder, "llama", 3, tie_word_embeddings=False)
    return Model.from_pretrained(folder), reference, folder


def logits_of(reference, ids: list[int]) -> np.ndarray:
    with torch.no_grad():
        return reference(torch.tensor([ids])).logits[0].double().numpy()


def assert_is(found: module.AnswerToken, logits: np.ndarray, token: int) -> None:
    chances = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
    assert found.token_id == token
    assert found.rank == int((logits > logits[token]).sum())
    assert found.logit == pytest.approx(logits[token], abs=1e-4)
    assert found.probability == pytest.approx(chances[token], rel=1e-3)
    assert [one.token_id for one in found.top] == np.argsort(-logits, kind="stable")[
        : len(found.top)
    ].tolist()
    assert [one.logit for one in found.top] == pytest.approx(
        np.sort(logits)[::-1][: len(found.top)], abs=1e-4
    )


def test_every_token_of_an_answer_stands_behind_those_before(both):
    model, reference, _ = both
    given = model.tokenizer.encode(PROMPT).ids
    for answer, spaced in (("Paris, the best of times", True), (" myself", True), ("Paris", False)):
        found = module.test_prompt(model, PROMPT, answer, prepend_space=spaced, top_k=7)
        text = f" {answer}" if spaced and answer[0] != " " else answer
        ids = model.tokenizer.encode(text, add_special=False).ids
        assert len(ids) == len(found.tokens)
        logits = logits_of(reference, [*given, *ids])
        for step, (each, token) in enumerate(zip(found.tokens, ids, strict=True)):
            assert len(each.top) == 7
            assert_is(each, logits[len(given) - 1 + step], token)
            assert each.token == model.tokenizer.decode_token(token)
    assert len(found.prompt_tokens) == len(given)


def test_of_several_answers_the_first_token_counts(both):
    model, reference, _ = both
    given = model.tokenizer.encode(PROMPT).ids
    answers = ["Paris", "worst of times", "France"]
    found = module.test_prompt(model, PROMPT, answers)
    logits = logits_of(reference, given)[-1]
    for each, answer in zip(found.tokens, answers, strict=True):
        assert_is(each, logits, model.tokenizer.encode(f" {answer}", add_special=False).ids[0])
    assert found.ranks == [(each.token, each.rank) for each in found.tokens]
    assert json.dumps(found.to_json(), allow_nan=False)
    assert "answer" in str(found) and str(found).count("rank") == 3


@pytest.mark.parametrize("answer", ["", [], ["Paris", ""]])
def test_an_answer_of_no_token_is_refused(both, answer):
    with pytest.raises(PromptError, match="an answer") as caught:
        module.test_prompt(both[0], PROMPT, answer)
    assert "\n" not in str(caught.value)


def test_directions_are_rows_of_the_unembedding(both):
    model, _, folder = both
    rows = load_file(folder / "model.safetensors")["lm_head.weight"]
    found = module.tokens_to_residual_directions
    (token,) = model.tokenizer.encode(" of", add_special=False).ids
    assert torch.equal(found(model, " of"), rows[token])
    assert torch.equal(found(model, 7), rows[7])
    assert torch.equal(found(model, [7, " of"]), rows[[7, token]])
    shaped = torch.tensor([[1, 2, 3], [4, 5, 6]])
    assert torch.equal(found(model, shaped), rows[shaped])


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (" of times", "a text of one token"),
        ("", "which has 0"),
        (-1, "found -1"),
        ([3, 10**6], "found 1000000"),
    ],
)
def test_what_is_not_one_token_is_refused(both, tokens, message):
    with pytest.raises(PromptError, match=message) as caught:
        module.tokens_to_residual_directions(both[0], tokens)
    assert "\n" not in str(caught.value)
