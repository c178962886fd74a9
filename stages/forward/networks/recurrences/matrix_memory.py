"""The matrix memory of an mLSTM: a linear recurrence with exponential gates and a normaliser.

    C_t = f_t C_{t-1} + e^{i_t} k_t v_t^T       n_t = f_t n_{t-1} + e^{i_t} k_t
    h_t = C_t^T q_t / (max(|n_t^T q_t|, 1) + eps e^{m_t})       m_t = max(log f_t + m_{t-1}, i_t), m_0 = 0

(Beck et al., xLSTM, 2024, equations 19 to 27.) C and n are stored as one state, as n is C for a value of 1.
Both are stored divided by e^m so that nothing overflows: keys become e^{i - m} k, and the decay f e^{m_{t-1}
- m_t}, which is at most 1. eps is added to the scaled divisor, which is why m appears in its term.

Axes: as in recurrence.py; the state is [B, H, K, V + 2]: C, then n, then m, which is the same in every row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .linear import LinearRecurrence
from .recurrence import Tokens, widened

__all__ = ["MatrixMemory"]

_LINEAR = LinearRecurrence("after")


@dataclass(frozen=True, eq=False)
class MatrixMemory:
    """An mLSTM's recurrence (recurrence.Recurrence).

    Its inputs, each [B, H, T, width]: "q" and "k" (K), "v" (V), "log_decay" (1), which is log f, "input" (1),
    which is i; optionally "write" (1), a factor of what the token writes into C and n.
    """

    eps: float
    """Epsilon added to the scaled divisor of each output, max(|n^T q|, e^{-m})."""

    def __call__(self, tokens: Tokens, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """What tokens read, [B, H, T, V], and the state after the last one, [B, H, K, V + 2]."""
        tokens = widened(tokens)
        scaled, tops = _scaled(tokens, state)
        memory = None if state is None else state[..., :-1].to(tops.dtype)
        read, memory = _LINEAR(scaled, memory)
        last = tops[:, :, -1:].expand(-1, -1, memory.shape[2], -1)
        return self._over(read, tops[:, :, 1:]), torch.cat([memory, last], dim=-1)

    def read(self, tokens: Tokens, before: Tensor, after: Tensor) -> Tensor:
        """What one token reads, [B, H, 1, V], from the state after it, [B, H, K, V + 2]; `before` is unused.
        See `Recurrence.read`."""
        queries = widened(tokens)["q"]
        after = after.to(queries.dtype)
        return self._over(queries @ after[..., :-1], after[:, :, :1, -1:])

    def weights(self, tokens: Tokens, *, start: int = 0, stop: int | None = None) -> Tensor:
        """Effective attention alpha [B, H, T, stop - start], signed. See `Recurrence.weights`."""
        scaled, tops = _scaled(widened(tokens), None)
        read, _ = _LINEAR(scaled, None)
        return _LINEAR.weights(scaled, start=start, stop=stop) / self._divisor(read, tops[:, :, 1:])

    def _over(self, read: Tensor, tops: Tensor) -> Tensor:
        """Reads of C and n, [B, H, T, V + 1] -> their quotient, [B, H, T, V]."""
        return read[..., :-1] / self._divisor(read, tops)

    def _divisor(self, read: Tensor, tops: Tensor) -> Tensor:
        return torch.maximum(read[..., -1:].abs(), torch.exp(-tops)) + self.eps


def _scaled(tokens: Tokens, state: Tensor | None) -> tuple[dict[str, Tensor], Tensor]:
    """Inputs of the linear recurrence of C and n divided by e^m; and m before the first token and after each
    token, [B, H, 1 + T, 1]."""
    log_input, log_decay = tokens["input"], tokens["log_decay"]
    start = torch.zeros_like(log_input[:, :, :1]) if state is None else state[:, :, :1, -1:]
    tops = _tops(log_decay, torch.cat([start.to(log_input.dtype), log_input], dim=2))
    before, after = tops[:, :, :-1], tops[:, :, 1:]
    scaled = {
        "q": tokens["q"],
        "k": tokens["k"] * torch.exp(log_input - after),
        "v": F.pad(tokens["v"], (0, 1), value=1.0),
        "log_decay": log_decay + before - after,
    }
    return scaled | ({"write": tokens["write"]} if "write" in tokens else {}), tops


def _tops(log_decay: Tensor, highest: Tensor) -> Tensor:
    """Running maximum m, [B, H, 1 + T, 1], from the initial m followed by each token's i.

    A parallel scan over ranges that double in each step (Hillis and Steele, Data Parallel Algorithms, 1986).
    Sums of log decays are never subtracted, as they may be infinite.
    """
    fallen, width = F.pad(log_decay, (0, 0, 1, 0)), 1
    while width < highest.shape[2]:
        earlier = F.pad(highest[:, :, :-width], (0, 0, width, 0), value=-torch.inf)
        highest = torch.maximum(highest, earlier + fallen)
        fallen = fallen + F.pad(fallen[:, :, :-width], (0, 0, width, 0))
        width *= 2
    return highest
