"""One form for all linear recurrences, and the loop over tokens that says what it means.

    o_t = q_t^T S_{t-1}        S_t = diag(d_t) S_{t-1} + beta_t (alpha_t^T S_{t-1}) + k_t v_t^T

Every token reads the state *before* it. A readout of the state after it is the same with other queries, as
q^T S_t = (d q + (q.beta) alpha)^T S_{t-1} + (q.k) v_t, of which the last term needs no state; so kernels
know one readout.

Axes: as in recurrence.py.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Terms(NamedTuple):
    """What happens to the state at each token."""

    queries: Tensor
    """[B, H, T, K]: what reads the state before the token."""
    keys: Tensor
    """[B, H, T, K]: as they enter the state."""
    values: Tensor
    """[B, H, T, V]."""
    log_decay: Tensor
    """[B, H, T, K], or [B, H, T, 1] for one decay a head: log d, -inf where the state is forgotten."""
    correction: tuple[Tensor, Tensor] | None
    """alpha and beta, each [B, H, T, K]: d is diagonal where there is none."""


class Kernel(Protocol):
    """A way to compute what terms do."""

    def __call__(self, terms: Terms, state: Tensor) -> tuple[Tensor, Tensor]:
        """What is read, [B, H, T, V], and the state behind the last token, both like state [B, H, K, V]."""
        ...


def step_through(terms: Terms, state: Tensor) -> tuple[Tensor, Tensor]:
    """Token after token, as the formula stands. The kernel for few tokens, and the measure of all others."""
    if not terms.values.shape[2]:
        return torch.zeros_like(terms.values), state
    decays = terms.log_decay.exp().unsqueeze(-1).unbind(2)
    keys, values = terms.keys.unsqueeze(-1).unbind(2), terms.values.unsqueeze(-2).unbind(2)
    alphas, betas = _sides(terms.correction, len(keys))
    read = []
    for t, query in enumerate(terms.queries.unsqueeze(-2).unbind(2)):
        read.append(query @ state)
        kept = decays[t] * state
        alpha, beta = alphas[t], betas[t]
        if alpha is not None and beta is not None:
            kept = torch.addcmul(kept, beta, alpha @ state)
        state = torch.addcmul(kept, keys[t], values[t])
    return torch.cat(read, dim=2), state


def _sides(
    correction: tuple[Tensor, Tensor] | None, length: int
) -> tuple[tuple[Tensor | None, ...], tuple[Tensor | None, ...]]:
    """alpha as rows and beta as columns, of each token."""
    if correction is None:
        return (None,) * length, (None,) * length
    alpha, beta = correction
    return alpha.unsqueeze(-2).unbind(2), beta.unsqueeze(-1).unbind(2)
