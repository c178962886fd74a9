"""The common form of all linear recurrences, and a loop over tokens that computes it.

    o_t = q_t^T S_{t-1}        S_t = diag(d_t) S_{t-1} + beta_t (alpha_t^T S_{t-1}) + k_t v_t^T

Every token reads the state *before* its own write. Reading the state after it is equivalent to other queries,
q^T S_t = (d q + (q.beta) alpha)^T S_{t-1} + (q.k) v_t, where the last term needs no state. So kernels
implement one readout only.

Axes: as in recurrence.py.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Terms(NamedTuple):
    """Inputs of a linear recurrence at each token: queries, keys, values, and decay and correction of the
    state."""

    queries: Tensor
    """Queries that read the state before the token, [B, H, T, K]."""
    keys: Tensor
    """Keys as they are written into the state, [B, H, T, K]."""
    values: Tensor
    """Values as they are written into the state, [B, H, T, V]."""
    log_decay: Tensor
    """Natural logarithm of the state's decay at the token, [B, H, T, K], or [B, H, T, 1] for one decay per
    head; -inf erases the state."""
    correction: tuple[Tensor, Tensor] | None
    """Vectors alpha and beta of the rank-one correction beta (alpha^T S) of the state S, each [B, H, T, K];
    None for no correction."""


class Kernel(Protocol):
    """An algorithm that computes a linear recurrence over a number of tokens."""

    def __call__(self, terms: Terms, state: Tensor) -> tuple[Tensor, Tensor]:
        """What each token reads from the state, [B, H, T, V], and the state after the last token, [B, H, K,
        V].

        Arguments:
            terms: Inputs at each token.
            state: State before the first token, [B, H, K, V]; its dtype is that of the results.
        """
        ...


def step_through(terms: Terms, state: Tensor) -> tuple[Tensor, Tensor]:
    """What each token reads from the state, [B, H, T, V], and the state after the last token, [B, H, K, V],
    by a loop over tokens: fastest for few tokens, and tests compare the other kernel with it.

    Arguments:
        terms: Inputs at each token.
        state: State before the first token, [B, H, K, V].
    """
    if not terms.values.shape[2]:
        return torch.zeros_like(terms.values), state
    decays = terms.log_decay.exp().unsqueeze(-1).unbind(2)
    keys, values = terms.keys.unsqueeze(-1).unbind(2), terms.values.unsqueeze(-2).unbind(2)
    alphas, betas = _vectors_per_token(terms.correction, len(keys))
    read = []
    for t, query in enumerate(terms.queries.unsqueeze(-2).unbind(2)):
        read.append(query @ state)
        decayed = decays[t] * state
        alpha, beta = alphas[t], betas[t]
        if alpha is not None and beta is not None:
            decayed = torch.addcmul(decayed, beta, alpha @ state)
        state = torch.addcmul(decayed, keys[t], values[t])
    return torch.cat(read, dim=2), state


def _vectors_per_token(
    correction: tuple[Tensor, Tensor] | None, length: int
) -> tuple[tuple[Tensor | None, ...], tuple[Tensor | None, ...]]:
    """For each of `length` tokens, alpha as a row vector [B, H, 1, K], and beta as a column vector [B, H, K,
    1]; None for each token without correction."""
    if correction is None:
        return (None,) * length, (None,) * length
    alpha, beta = correction
    return alpha.unsqueeze(-2).unbind(2), beta.unsqueeze(-1).unbind(2)
