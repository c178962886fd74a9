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
        """What each token reads, [B, H, T, V], and the state after the last token, [B, H, K, V + 2]. state:
        before the first token, of the same shape; None for an empty memory."""
        tokens = widened(tokens)
        scaled, log_scales = _scaled_inputs(tokens, state)
        memory = None if state is None else state[..., :-1].to(log_scales.dtype)
        read, memory = _LINEAR(scaled, memory)
        last_log_scale = log_scales[:, :, -1:].expand(-1, -1, memory.shape[2], -1)
        return self._quotient(read, log_scales[:, :, 1:]), torch.cat([memory, last_log_scale], dim=-1)

    def read(self, tokens: Tokens, before: Tensor, after: Tensor) -> Tensor:
        """Output of one token (T = 1) from a given state, [B, H, 1, V].

        Arguments:
            tokens: inputs by name, each [B, H, 1, width].
            before: unused, as the output depends on the state after the token.
            after: state after the token, [B, H, K, V + 2].
        """
        queries = widened(tokens)["q"]
        after = after.to(queries.dtype)
        return self._quotient(queries @ after[..., :-1], after[:, :, :1, -1:])

    def weights(self, tokens: Tokens, *, start: int = 0, stop: int | None = None) -> Tensor:
        """Effective attention alpha [B, H, T, stop - start], signed: the weight of each source's value in
        what each query reads, from an empty memory.

        Arguments:
            tokens: inputs by name, each [B, H, T, width].
            start: first source.
            stop: end of the sources, exclusive; None for all sources from `start` on.
        """
        scaled, log_scales = _scaled_inputs(widened(tokens), None)
        read, _ = _LINEAR(scaled, None)
        return _LINEAR.weights(scaled, start=start, stop=stop) / self._divisor(read, log_scales[:, :, 1:])

    def _quotient(self, read: Tensor, log_scales: Tensor) -> Tensor:
        """What tokens read, [B, H, T, V]: the product with C over the product with n.

        Arguments:
            read: queries times scaled C and n, [B, H, T, V + 1], n last.
            log_scales: m, the logarithm of the scale of C and n, [B, H, T, 1].
        """
        return read[..., :-1] / self._divisor(read, log_scales)

    def _divisor(self, read: Tensor, log_scales: Tensor) -> Tensor:
        """Divisor max(|n^T q|, e^-m) + eps of the outputs, [B, H, T, 1]; arguments as in `_quotient`."""
        return torch.maximum(read[..., -1:].abs(), torch.exp(-log_scales)) + self.eps


def _scaled_inputs(tokens: Tokens, state: Tensor | None) -> tuple[dict[str, Tensor], Tensor]:
    """Inputs of the linear recurrence of C and n, both divided by e^m, by name; and m before the first token
    and after each token, [B, H, 1 + T, 1].

    Arguments:
        tokens: inputs of the mLSTM by name.
        state: state before the first token, [B, H, K, V + 2]; None for an empty memory.
    """
    log_input, log_decay = tokens["input"], tokens["log_decay"]
    start = torch.zeros_like(log_input[:, :, :1]) if state is None else state[:, :, :1, -1:]
    log_scales = _running_maximum(log_decay, torch.cat([start.to(log_input.dtype), log_input], dim=2))
    before, after = log_scales[:, :, :-1], log_scales[:, :, 1:]
    scaled = {
        "q": tokens["q"],
        "k": tokens["k"] * torch.exp(log_input - after),
        "v": F.pad(tokens["v"], (0, 1), value=1.0),
        "log_decay": log_decay + before - after,
    }
    return scaled | ({"write": tokens["write"]} if "write" in tokens else {}), log_scales


def _running_maximum(log_decay: Tensor, maximum: Tensor) -> Tensor:
    """Running maximum m_t = max(log f_t + m_{t-1}, i_t), [B, H, 1 + T, 1].

    A parallel scan over ranges that double in each step (Hillis and Steele, Data Parallel Algorithms, 1986).
    Sums of log decays are never subtracted, as they may be infinite.

    Arguments:
        log_decay: log f of each token, [B, H, T, 1].
        maximum: the initial m, followed by the i of each token, [B, H, 1 + T, 1].
    """
    # At each entry, the sum of the last `width` log decays, and the maximum over as many tokens.
    total_decay, width = F.pad(log_decay, (0, 0, 1, 0)), 1
    while width < maximum.shape[2]:
        earlier = F.pad(maximum[:, :, :-width], (0, 0, width, 0), value=-torch.inf)
        maximum = torch.maximum(maximum, earlier + total_decay)
        total_decay = total_decay + F.pad(total_decay[:, :, :-width], (0, 0, width, 0))
        width *= 2
    return maximum
