"""Guides: what the specimen is told about its own inside in the first part of its training.

Border: a network's states and what a batch says of its tokens in, one loss out; knows no training loop.

Two things the specimen must learn give no gradient to follow until several parts of the network work
together: copying takes a head that looks one token back and, layers later, one that looks for what that head
wrote (Olsson et al. 2022); counting characters takes several layers of sums. Left alone, a network of this
size finds neither in the minutes a CPU has. So while a guide's weight lasts,
  a head two layers below the middle one (1 of 0 to 5) is rewarded for attention to the token before,
  a head of the middle layer (3) for attention to the token that followed this one's earlier occurrence,
  the state after the middle layer for the character count in it, read by a linear classifier that is then
  thrown away.
After that only the loss on the next token decides what the network keeps.

Axes: row, position, hidden.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .network import Llama, Shape, rotate

__all__ = ["COUNTS", "Guides"]

HEAD = 0
"""The head of a layer that is guided."""
COUNTS = 96
"""Classes of the classifier; longer lines count as the last."""
BLUR = 1.5
"""Standard deviation, in characters, of the count the classifier is asked for: neighbours are half right."""


class Guides(nn.Module):
    """The guides' loss of one network."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.middle = shape.layers // 2
        self.read = nn.Linear(shape.hidden, COUNTS)
        steps = torch.arange(COUNTS, dtype=torch.float32)
        self.register_buffer("soft", (-((steps[:, None] - steps) ** 2) / (2 * BLUR**2)).softmax(dim=1))

    def forward(self, network: Llama, states: list[Tensor], sources: Tensor, counts: Tensor) -> Tensor:
        """attention + count losses, float32 [2], in nats per token they apply to.

        states: of `Llama.states`; sources, counts: int64 [row, position] of the batch, -1 where none.
        """
        position = torch.arange(sources.shape[1]).expand_as(sources)
        below = max(0, self.middle - 2)
        looks = [
            _mean(-_log_attention(network, states, below, (position - 1).clamp(min=0)), position > 0),
            _mean(-_log_attention(network, states, self.middle, sources.clamp(min=0)), sources >= 0),
        ]
        state = states[self.middle + 1]
        said = self.read(F.rms_norm(state, state.shape[-1:])).float().log_softmax(-1)
        wanted = self.soft[counts.clamp(0, COUNTS - 1)]  # type: ignore[index]
        return torch.stack([looks[0] + looks[1], _mean(-(said * wanted).sum(-1), counts >= 0)])


def _log_attention(network: Llama, states: list[Tensor], layer: int, source: Tensor) -> Tensor:
    """Log of the attention `HEAD` pays from every position to the position `source`, [row, position]."""
    block: Any = network.model.layers[layer]
    attention, size = block.self_attn, source.shape[1]
    x = block.input_layernorm(states[layer])
    group = HEAD // (attention.heads // attention.key_heads)
    rows = slice(HEAD * attention.head, (HEAD + 1) * attention.head)
    key_rows = slice(group * attention.head, (group + 1) * attention.head)
    cos, sin = network.cos[:size], network.sin[:size]  # type: ignore[index]
    q = rotate(F.linear(x, attention.q_proj.weight[rows])[:, None], cos, sin)[:, 0]
    k = rotate(F.linear(x, attention.k_proj.weight[key_rows])[:, None], cos, sin)[:, 0]
    scores = (q @ k.mT).float() / attention.head**0.5
    later = torch.ones(size, size, dtype=torch.bool).triu(1)
    looks: Tensor = scores.masked_fill(later, -torch.inf).log_softmax(-1)
    return looks.gather(-1, source[..., None])[..., 0]


def _mean(values: Tensor, where: Tensor) -> Tensor:
    """Mean of the values at `where`; 0 if that is nowhere."""
    return (values * where).sum() / where.sum().clamp(min=1)
