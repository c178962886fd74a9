"""The Recurrence protocol: a state that is updated at each token and read by it.

A mixer projects its tokens to named inputs, such as "q", "k" and "v", and gets back what each token reads.
Linear recurrences (linear.py) share one formula; RWKV-4's average (rwkv4.py) has a state of another shape.

Border: tensors only. Names of hook points, caches of states and interventions are handled by the callers.

Axes: B prompts, H heads, T tokens, K width of keys, V width of values; query = token that reads, source =
token that was written.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from typing import Protocol

import torch
from torch import Tensor

Tokens = Mapping[str, Tensor]
"""Inputs of a recurrence by name, each [B, H, T, width]."""


class Recurrence(Protocol):
    """A recurrence over tokens: a state that each token decays, writes to and reads."""

    def __call__(self, tokens: Tokens, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """Run the recurrence over all tokens.

        Arguments:
            tokens: inputs by name, each [B, H, T, width].
            state: state before the first token, float32 [B, H, K, V]; None for an empty one.

        Returns:
            What each token reads, float32 [B, H, T, V], and the state after the last token, float32 [B, H, K,
            V].
        """
        ...

    def read(self, tokens: Tokens, before: Tensor, after: Tensor) -> Tensor:
        """What one token (T = 1) reads from given states, which an intervention may have changed.

        Arguments:
            tokens: Inputs by name, of one token.
            before: State before the token, [B, H, K, V].
            after: State after the token, [B, H, K, V].

        Returns:
            What each head reads, [B, H, 1, V].
        """
        ...

    def weights(self, tokens: Tokens, *, start: int = 0, stop: int | None = None) -> Tensor:
        """Effective attention alpha: weight of each source's value in what each query reads.

        Computed from an empty state, so that alpha @ v over all sources is the output; signed, 0 for later
        sources.

        Arguments:
            tokens: Inputs by name.
            start: First source.
            stop: End of the sources, exclusive; None for all.

        Returns:
            Weights [B, H, T, stop - start].
        """
        ...


def widened(tokens: Tokens) -> dict[str, Tensor]:
    """Inputs of a recurrence by name, in float32, or all in float64 if any of them is float64."""
    dtype = reduce(torch.promote_types, (x.dtype for x in tokens.values()), torch.float32)
    return {name: x.to(dtype) for name, x in tokens.items()}
