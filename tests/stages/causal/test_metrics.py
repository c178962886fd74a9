"""Metrics on next-token logits."""

import numpy as np
import pytest

from mizarr import MizarrError
from mizarr.stages.causal.metrics import kl_divergence, logit_difference, probability, top_changed

A = np.log(np.array([0.5, 0.25, 0.25]))
B = np.log(np.array([0.25, 0.5, 0.25]))


def test_kl_is_that_of_the_definition_in_nats():
    assert kl_divergence(A, B + 7) == pytest.approx(0.25 * np.log(2), abs=1e-15)


def test_kl_keeps_terms_of_tiny_probability():
    p, q = np.array([0.0, -30.0]), np.array([0.0, -60.0])
    assert kl_divergence(p, q) == pytest.approx(np.exp(-30) * 30 - np.exp(-30) + np.exp(-60), rel=1e-3)


def test_kl_broadcasts_over_leading_axes_and_is_zero_on_equal_logits():
    assert kl_divergence(A, np.stack([A, B])).shape == (2,)
    assert kl_divergence(A, A + 3.0) == pytest.approx(0, abs=1e-15)


def test_logit_difference_and_probability_read_the_last_axis():
    logits = np.stack([A, B])
    np.testing.assert_allclose(logit_difference(logits, 0, 1), [np.log(2), -np.log(2)])
    np.testing.assert_allclose(probability(logits, 1), [0.25, 0.5])


def test_a_token_outside_the_vocabulary_is_refused():
    with pytest.raises(MizarrError, match="expected a token id from 0 to 2, found 3"):
        probability(A, 3)


def test_tokens_that_changed_most_come_first_and_ties_by_id():
    changed = top_changed(A, B, k=2)
    assert [(c.token_id, round(c.difference, 12)) for c in changed] == [(0, -0.25), (1, 0.25)]
