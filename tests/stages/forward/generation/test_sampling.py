"""Sampling: ties, temperatures and seeds."""

from __future__ import annotations

import pytest
import torch

from mizarr.stages.forward.generation.sampling import sample_token, token_probability
from mizarr.store.errors import PromptError


def test_greedy_takes_the_smallest_id_of_a_tie():
    assert sample_token(torch.tensor([0.0, 3.0, 3.0, 1.0])) == 1


def test_one_seed_gives_one_sequence_and_another_seed_another():
    logits = torch.linspace(0, 2, 50)
    draws = [
        [sample_token(logits, temperature=1.0, generator=g) for _ in range(20)]
        for g in (torch.Generator().manual_seed(s) for s in (1, 1, 2))
    ]
    assert draws[0] == draws[1] != draws[2]


def test_draws_follow_the_softmax():
    logits = torch.tensor([0.0, 1.0, 2.0])
    generator = torch.Generator().manual_seed(0)
    counts = torch.bincount(
        torch.tensor([sample_token(logits, temperature=0.5, generator=generator) for _ in range(4000)]),
        minlength=3,
    )
    torch.testing.assert_close(counts / 4000, torch.softmax(logits / 0.5, 0), atol=0.02, rtol=0)


def test_a_token_of_no_probability_is_never_drawn():
    logits = torch.tensor([float("-inf"), 0.0, float("-inf")])
    generator = torch.Generator().manual_seed(0)
    assert {sample_token(logits, temperature=2.0, generator=generator) for _ in range(50)} == {1}


def test_probability_of_a_token():
    assert token_probability(torch.tensor([0.0, 0.0]), 1) == 0.5
    with pytest.raises(PromptError, match="found 2"):
        token_probability(torch.tensor([0.0, 0.0]), 2)


@pytest.mark.parametrize(
    ("logits", "options", "message"),
    [
        (torch.zeros(0), {}, "shape"),
        (torch.zeros(2, 3), {}, "shape"),
        (torch.tensor([0.0, float("nan")]), {}, "NaN"),
        (torch.zeros(3), {"temperature": -1.0}, "temperature"),
        (torch.zeros(3), {"temperature": 1.0}, "generator"),
    ],
)
def test_what_cannot_be_sampled_is_refused(logits, options, message):
    with pytest.raises(PromptError, match=message):
        sample_token(logits, **options)
