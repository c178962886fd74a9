"""The History protocol: which tokens a pass computes, and where the earlier tokens that they see are.

A layer computes tokens independently, except for its mixer, which reads other tokens. These may be in the
same batch (whole prompts), in a cache (generation), or in the parent branch (planned runs). Only the history
knows where, so the same network computes a batch of prompts, the newest token of a text, or thousands of
variants of a prompt side by side.

Each way of mixing positions is one method: `attend` (attention), `before` (token shift, short convolutions)
and `scan` (recurrences). This file has the protocol; the implementations are in passes/.

Axes: as in passes/; kept = the tokens whose output of the current layer is needed later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

if TYPE_CHECKING:
    import torch

    from ..architectures.layer_summaries import AttentionMixer
    from ..architectures.transformer import RopeConfig
    from .recurrences.recurrence import Recurrence


Carried = dict[str, Tensor]
"""Tensors [B, token, width] passed from layer to layer, by name: the residual stream (`STREAM`) and, in some
families, further tensors."""
STREAM = "stream"
"""Name of the residual stream in `Carried`."""
Shares = Callable[[int, Tensor], Tensor]
"""Signature of `History.shares`: (token id, ids [B, token]) -> share of each prompt's positions that hold the
token."""


def share_of(token: int, ids: Tensor) -> Tensor:
    """Share of positions that hold one token id in each prompt of ids [B, position]: float32 [B, 1], 0 to
    1."""
    return (ids == token).float().mean(1, keepdim=True)


class History(Protocol):
    """Selects the tokens that a pass computes, and mixes them along positions."""

    @property
    def positions(self) -> Tensor:
        """Positions in their sequences of the tokens that enter the current layer, int [token]."""
        ...

    @property
    def starts(self) -> Tensor | None:
        """For each token, the position at which the target begins in its sequence: int [B, token], or [B, 1]
        if each row is one prompt; None unless the model is an encoder-decoder."""
        ...

    def shares(self, token: int, ids: Tensor) -> Tensor:
        """For each token that is embedded, the share of its prompt's positions that hold one token id:
        float32, 0 to 1, [B, token], or [B, 1] if each row is one prompt.

        Arguments:
            token: The token id, such as that of the mask token.
            ids: Ids of the tokens that are embedded, [B, token].
        """
        ...

    def enter(self, layer: int, carried: Carried) -> Carried:
        """Tensors of the tokens that a layer computes, selected from the output of the previous layer.

        Arguments:
            layer: Number of the layer; the number of all layers for the output of the last one.
            carried: Tensors that left the previous layer, by name, each [B, token, width].
        """
        ...

    def needed(self, x: Tensor) -> Tensor:
        """Rows of x for the tokens whose output of this layer is needed later: [..., token, width] -> [...,
        kept, width]."""
        ...

    def rotation(self, rope: RopeConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin for RoPE at the tokens' positions, each float32 [token, rope.dim / 2].

        Arguments:
            rope: rotary embedding of the layer.
            dtype: dtype of queries and keys; for float64, angles are rounded as in transformers (rope.py).
        """
        ...

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, mixer: AttentionMixer) -> Tensor:
        """Attention of one layer: weighted values z [B, H, kept, dh].

        Arguments:
            layer: number of the layer.
            q: queries after RoPE of the tokens whose output is needed, [B, H, kept, dh].
            k: keys after RoPE of the tokens that enter the layer, [B, Hk, token, dh].
            v: values of the tokens that enter the layer, [B, Hk, token, dh].
            mixer: parameters of the layer's attention, such as window, scale and soft cap.
        """
        ...

    def before(self, layer: int, name: str, x: Tensor, count: int) -> Tensor:
        """Rows of x at the positions just before each token in its sequence (token shift, convolutions).

        Arguments:
            layer: number of the layer.
            name: name of the shift or convolution, as a layer may have several, which caches keep apart.
            x: rows of the tokens that enter the layer, [B, token, width].
            count: number of previous positions.

        Returns:
            [B, token, count, width], the most distant position first; zeros before the start.
        """
        ...

    def scan(self, layer: int, recurrence: Recurrence, tokens: Mapping[str, Tensor], room: str) -> Tensor:
        """Run a recurrence over the tokens of each sequence.

        Arguments:
            layer: number of the layer.
            recurrence: how the state is decayed, written and read.
            tokens: inputs of the recurrence by name, such as "q", "k", "v", each [B, H, token, width].
            room: prefix of the names of the hook points for states and effective attention, such as "rwkv".

        Returns:
            What each token reads from the state, [B, H, token, V], float32.
        """
        ...
