"""Choice of the next token from logits: greedy, or drawn with a seeded generator.

Works on one row of logits. The same seed and logits give the same token on every machine.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ....store.errors import PromptError


def sample_token(
    logits: Tensor, *, temperature: float = 0.0, generator: torch.Generator | None = None
) -> int:
    """Choose the next token: the most likely one, or a random draw.

    Arguments:
        logits: [vocab], of one prompt and position.
        temperature: 0 takes the most likely token, the smallest id on a tie; above 0, a draw from
            softmax(logits / temperature).
        generator: source of randomness; required for a draw, so that no result depends on a global seed.

    Raises:
        PromptError: for empty or NaN logits, a negative temperature, or a draw without a generator.
    """
    if logits.ndim != 1 or not len(logits):
        raise PromptError(
            f"sample_token: expected logits of shape [vocab], found {list(logits.shape)}; select one prompt "
            "and one position"
        )
    if not math.isfinite(temperature) or temperature < 0:
        raise PromptError(f"sample_token: expected a finite temperature >= 0, found {temperature}")
    logits64 = logits.detach().double().cpu()
    if bool(logits64.isnan().any()):
        raise PromptError(
            "sample_token: expected logits without NaN, found NaN; positions past the end of a prompt hold "
            "NaN, so select one of its own positions"
        )
    if temperature == 0:
        return int((logits64 == logits64.max()).nonzero()[0])
    if generator is None:
        raise PromptError(
            "sample_token: expected a generator to draw a token, found none; pass "
            "generator=torch.Generator().manual_seed(0)"
        )
    # Inverse transform sampling: one uniform number per token, whatever the vocabulary size.
    # `torch.multinomial` draws other tokens on other devices.
    cumulative = torch.softmax(logits64 / temperature, dim=-1).cumsum(0)
    threshold = torch.rand((), generator=generator, dtype=torch.float64) * cumulative[-1]
    # Rounding may leave the threshold at the very end of the cumulative sum.
    return min(int(torch.searchsorted(cumulative, threshold, right=True)), len(logits64) - 1)


def token_probability(logits: Tensor, token: int) -> float:
    """Probability of a token, softmax(logits)[token].

    Arguments:
        logits: [vocab], of one prompt and position.
        token: token id.

    Raises:
        PromptError: for a token id out of range.
    """
    if not 0 <= token < len(logits):
        raise PromptError(f"token_probability: expected a token id in 0..{len(logits) - 1}, found {token}")
    return float(torch.softmax(logits.detach().double(), dim=-1)[token])
