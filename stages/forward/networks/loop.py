"""The one loop over layers, whoever asks for it.

    carried = network.embed(ids, positions)
    for each layer:     history: which tokens enter it      taps: embed, or resid_post of the layer before
                        network: what the layer makes of them, hook points shown to the taps on the way
    after the last one: history, and taps: its resid_post

A plain pass, a text read on token by token, a sweep over branches of many runs and a pass in which features
are set are this loop over different histories with different taps. What comes before it (which tokens) and
after it (final norm, LM head) is theirs.

It can be run under autograd: nothing that needs a gradient is written over, and who wants no gradients says
so at the door (`torch.no_grad` in `Model`), not here.

Border: knows neither families nor hook points by name, but for the two at which the stream enters a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from .history import STREAM, Carried

if TYPE_CHECKING:
    from ..architectures.architecture import Architecture
    from ..hooks.taps import Taps
    from ..hooks.wants import Logits
    from .history import History, Shares

__all__ = ["Network", "onwards", "part_way", "through_layers"]


class Network(Protocol):
    """The torch side of an architecture: embedding, layers, final norm and LM head, over its weights."""

    @property
    def config(self) -> Architecture:
        """What it was built from."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """What is computed in, whatever dtype the checkpoint has."""
        ...

    @property
    def device(self) -> torch.device:
        """Where it is computed."""
        ...

    @property
    def embedding(self) -> Tensor:
        """The embedding matrix [vocab, hidden], on the device and in the dtype of the computation."""
        ...

    def embed(
        self,
        ids: Tensor,
        positions: Tensor | None,
        shares: Shares | None = None,
        starts: Tensor | None = None,
    ) -> Carried:
        """Token ids [B, S] at these positions [S] -> what enters the first layer; None for tokens alone.
        shares: how much of its prompt is a token (`History.shares`); None where each row is one prompt.
        starts: where the target of its prompt begins, of each token or row (`History.starts`)."""
        ...

    def layer(self, layer: int, carried: Carried, history: History, taps: Taps) -> Carried:
        """What enters a layer -> what comes out of it, the same names, of the tokens that are kept."""
        ...

    def gathered(self, carried: Carried, taps: Taps) -> Tensor:
        """What is carried behind the last layer -> what the final norm reads, [B, token, D]."""
        ...

    def finish(self, x: Tensor, taps: Taps, want: Logits | None) -> Tensor:
        """The last residual stream [B, S, D] -> normalised [B, wanted positions, D], past its hook points."""
        ...

    def final_norm(self, x: Tensor) -> Tensor:
        """Residual states [..., D] normalised for the LM head."""
        ...

    def unembed(self, x: Tensor, want: Logits, *, softcap: bool = True) -> Tensor:
        """Normalised states [..., D] -> logits [..., tokens]; softcap: as the model's own output has it."""
        ...

    @property
    def unembedding(self) -> Tensor:
        """What the LM head multiplies by, [vocab, hidden]."""
        ...

    def norm_gain(self, name: str, layer: int | None, dtype: torch.dtype) -> Tensor:
        """What a norm multiplies by [hidden], by its hook points' name: "ln1" of a layer, "ln_final"."""
        ...

    def value_matrix(self, layer: int) -> Tensor:
        """What a layer with attention makes values with, [kv_head * d_head, hidden]."""
        ...

    def output_matrix(self, layer: int) -> Tensor:
        """What a layer with attention writes heads with, [hidden, head * d_head]."""
        ...


def through_layers(
    network: Network, ids: Tensor, history: History, taps: Taps, order: Sequence[int] | None = None
) -> Tensor:
    """Token ids [B, S] -> what the final norm reads [B, token, D]: mostly the stream behind the last layer.

    order: layers as they are gone through, where some are more than once (hooks/recurrent.py); only a history
    that keeps nothing of a layer can say what that means.
    Raises EarlyStop, by way of the taps, where the last thing wanted is reached earlier.
    """
    carried = network.embed(ids, history.positions, history.shares, history.starts)
    return onwards(
        network, carried, range(network.config.num_layers) if order is None else order, history, taps
    )


def onwards(
    network: Network,
    carried: Carried,
    layers: Sequence[int],
    history: History,
    taps: Taps,
    left: int | None = None,
) -> Tensor:
    """What comes out of one layer, or is embedded -> what the final norm would read [B, token, D] behind
    these layers: mostly the stream.

    left: the layer it comes out of; None for the embedding.
    """
    carried = part_way(network, carried, layers, history, taps, left)
    left = layers[-1] if layers else left
    return network.gathered(_entering(network.config.num_layers, left, carried, history, taps), taps)


def part_way(
    network: Network,
    carried: Carried,
    layers: Sequence[int],
    history: History,
    taps: Taps,
    left: int | None = None,
) -> Carried:
    """As `onwards`, all that is carried, where it comes out of the last of these layers: whoever goes on from
    there shows it to the taps."""
    for layer in layers:
        carried = _entering(layer, left, carried, history, taps)
        carried, left = network.layer(layer, carried, history, taps), layer
    return carried


def _entering(layer: int, left: int | None, carried: Carried, history: History, taps: Taps) -> Carried:
    """What enters a layer, the stream read and changed at the hook point it comes from: of the layer that was
    left, or the embedding."""
    carried = history.enter(layer, carried)
    kind = "embed" if left is None else "resid_post"
    return {**carried, STREAM: taps(kind, left, carried[STREAM])}
