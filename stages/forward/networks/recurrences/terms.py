"""The common form of all linear recurrences, and the reference loop over tokens.

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
    """Reads, writes and decay of the state at each token."""

    queries: Tensor
    """[B, H, T, K]: queries of the state before the token."""
    keys: Tensor
    """[B, H, T, K]: keys as written into the state."""
    values: Tensor
    """[B, H, T, V]."""
    log_decay: Tensor
    """log d, [B, H, T, K], or [B, H, T, 1] for one decay per head; -inf erases the state."""
    correction: tuple[Tensor, Tensor] | None
    """alpha and beta of the rank-one correction, each [B, H, T, K]; None for a purely diagonal transition."""


class Kernel(Protocol):
    """An algorithm for the recurrence."""

    def __call__(self, terms: Terms, state: Tensor) -> tuple[Tensor, Tensor]:
        """What tokens read, [B, H, T, V], and the state after the last token, [B, H, K, V], in the dtype of
        `state`, the one before the first."""
        ...


def step_through(terms: Terms, state: Tensor) -> tuple[Tensor, Tensor]:
    """The formula, token by token: the kernel for few tokens, and the reference for the others."""
    if not terms.values.shape[2]:
        return torch.zeros_like(terms.values), state
    decays = terms.log_decay.exp().unsqueeze(-1).unbind(2)
    keys, values = terms.keys.unsqueeze(-1).unbind(2), terms.values.unsqueeze(-2).unbind(2)
    alphas, betas = _sides(terms.correction, len(keys))
    read = []
    for t, query in enumerate(terms.queries.unsqueeze(-2).unbind(2)):
        read.append(query @ state)
        decayed = decays[t] * state
        alpha, beta = alphas[t], betas[t]
        if alpha is not None and beta is not None:
            decayed = torch.addcmul(decayed, beta, alpha @ state)
        state = torch.addcmul(decayed, keys[t], values[t])
    return torch.cat(read, dim=2), state


def _sides(
    correction: tuple[Tensor, Tensor] | None, length: int
) -> tuple[tuple[Tensor | None, ...], tuple[Tensor | None, ...]]:
    """alpha as row vectors and beta as column vectors, per token."""
    if correction is None:
        return (None,) * length, (None,) * length
    alpha, beta = correction
    return alpha.unsqueeze(-2).unbind(2), beta.unsqueeze(-1).unbind(2)
