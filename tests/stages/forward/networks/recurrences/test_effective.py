"""Effective attention: what is positive, scaled to a sum of one."""

from __future__ import annotations

import torch

from mizarr.stages.forward.networks.recurrences.effective import effective_attention


def test_negative_weights_are_dropped_and_the_others_sum_to_one() -> None:
    alpha = torch.tensor([[3.0, 0.0, 0.0], [-1.0, 2.0, 0.0], [6.0, -4.0, 2.0]])
    expected = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.75, 0.0, 0.25]])
    assert torch.allclose(effective_attention(alpha), expected, rtol=0, atol=1e-7)


def test_a_query_without_a_positive_weight_attends_to_nothing() -> None:
    assert torch.equal(effective_attention(torch.tensor([[-1.0, 0.0], [-2.0, -3.0]])), torch.zeros(2, 2))
