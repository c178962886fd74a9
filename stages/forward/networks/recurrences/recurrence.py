"""What a recurrence over tokens is: it reads a state at each token and leaves one behind the last.

A mixer projects its tokens, hands them over by name, and gets what each of them reads. Linear recurrences
(linear.py) are a family of one formula; RWKV-4's average (rwkv4.py) has a state of another shape.

Border: tensors. What models call these tokens, where a state comes from and who changes it are told
elsewhere.

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
"""What enters at each token, by name, each [B, H, T, width]."""


class Recurrence(Protocol):
    """A recurrence over tokens: what each reads, and the state behind the last."""

    def __call__(self, tokens: Tokens, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """What is read, float32 [B, H, T, V], and the state behind the last token, float32 [B, H, K, V].

        state: the one before the first token, float32 [B, H, K, V]; None for an empty one.
        """
        ...

    def read(self, tokens: Tokens, before: Tensor, after: Tensor) -> Tensor:
        """What one token (T = 1) reads, [B, H, 1, V], of the states before and after it, which somebody may
        have changed."""
        ...

    def weights(self, tokens: Tokens, *, start: int = 0, stop: int | None = None) -> Tensor:
        """alpha [B, H, T, stop - start]: how much each query reads of the value of each source in start:stop.

        From an empty state, so that alpha @ v over all sources is what is read; signed, 0 for later sources.
        """
        ...


def widened(tokens: Tokens) -> dict[str, Tensor]:
    """The same tokens in float32, whatever half precision a model runs in; all in float64 if any is."""
    dtype = reduce(torch.promote_types, (x.dtype for x in tokens.values()), torch.float32)
    return {name: x.to(dtype) for name, x in tokens.items()}
