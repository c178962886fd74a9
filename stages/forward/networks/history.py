"""History: which earlier tokens the tokens of a pass can see, and where these are.

A layer computes each token by itself, except for its mixer, which reads other tokens. They may be in the same
batch (whole prompts), in a cache (generation), or in the parent branch (planned runs). Only the history knows
which, so one network computes a batch of prompts, the newest token of a text, and thousands of variants of a
prompt side by side.

Each way of mixing positions is one method: `attend` (attention), `before` (token shift, short convolutions)
and `scan` (recurrences). This file has the protocol; the implementations are in passes/.

Axes: as in passes/; kept = the tokens whose output of a layer is needed later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

if TYPE_CHECKING:
    import torch

    from ..architectures.architecture import AttentionMixer
    from ..architectures.transformer import RopeConfig
    from .recurrences.recurrence import Recurrence


Carried = dict[str, Tensor]
"""Tensors [B, token, width] that go from layer to layer, by name: the residual stream, and whatever a family
passes along beside it."""
STREAM = "stream"
Shares = Callable[[int, Tensor], Tensor]
"""What `History.shares` gives."""


def share_of(token: int, ids: Tensor) -> Tensor:
    """How much of each prompt [B, position] is a token, float32 [B, 1]."""
    return (ids == token).float().mean(1, keepdim=True)


class History(Protocol):
    """Which tokens a pass computes, and how they see each other."""

    @property
    def positions(self) -> Tensor:
        """Of the tokens that enter the layer under way in their sequences, int [token]."""
        ...

    @property
    def starts(self) -> Tensor | None:
        """Where the target begins in the sequence of each token, int [B, token], or [B, 1] where a row is one
        prompt; None where prompts are no pairs."""
        ...

    def shares(self, token: int, ids: Tensor) -> Tensor:
        """How much of its prompt is this token, of each of the ids [B, token] that are embedded: float32,
        [B, token], or [B, 1] where a row is one prompt."""
        ...

    def enter(self, layer: int, carried: Carried) -> Carried:
        """What is carried into a layer, of the tokens it computes; `layer` is the number of layers for what
        comes out of the last one."""
        ...

    def kept(self, x: Tensor) -> Tensor:
        """x [..., token, width] at those tokens whose output of this layer anyone needs."""
        ...

    def rotation(self, rope: RopeConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos, sin of the tokens' positions, each float32 [token, rope.dim / 2], for heads of this dtype."""
        ...

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, how: AttentionMixer) -> Tensor:
        """Pattern-weighted values z [B, H, kept, dh] from rotated q [B, H, kept, dh], and rotated k and v of
        all tokens [B, Hk, token, dh]."""
        ...

    def before(self, layer: int, name: str, x: Tensor, count: int) -> Tensor:
        """What stands before each of x [B, token, width] in its sequence: [B, token, count, width], the
        farthest first, zeros before the beginning. name: which of the layer's shifts it is."""
        ...

    def scan(self, layer: int, recurrence: Recurrence, tokens: Mapping[str, Tensor], room: str) -> Tensor:
        """What each token reads of the state before it and of its own write: [B, H, token, V] float32 from
        tokens [B, H, token, width] by name. room: of the hook points on the way, "rwkv": the states, and the
        attention they amount to."""
        ...
