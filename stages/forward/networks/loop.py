"""The loop over layers, shared by all kinds of forward pass.

    carried = network.embed(ids, positions)
    for layer in layers:  history selects the tokens that enter; taps see embed, or resid_post of the
                          previous layer; network.layer computes the layer and calls the taps at its hook
                          points
    after the last layer: history, then taps on its resid_post

A plain pass, token-by-token generation, a sweep over branches of many runs and a pass with features set to
given values differ only in the `History` and the taps they use. Choosing the tokens (before the loop) and
final norm and LM head (after it) belong to the callers.

The loop runs under autograd: tensors that need a gradient are never overwritten. Callers that need no
gradients use `torch.no_grad` themselves, as `Model` does.

Border: knows no families, and only the two hook points at which the stream enters a layer.
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

__all__ = ["Network", "final_state", "run_layers", "run_to_end", "through_layers"]


class Network(Protocol):
    """The torch side of an architecture: embedding, layers, final norm and LM head, over its weights."""

    @property
    def config(self) -> Architecture:
        """Architecture of the network."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the computation, which may differ from that of the checkpoint."""
        ...

    @property
    def device(self) -> torch.device:
        """Device of the computation."""
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
        """Compute the tensors that enter the first layer.

        Arguments:
            ids: token ids, int [B, S].
            positions: their positions, int [S]; None to leave out learned position embeddings.
            shares: function that returns which share of its prompt a token makes up (`History.shares`); None
                if each row is one prompt.
            starts: position at which the target begins, per token or row (`History.starts`); None unless the
                model is an encoder-decoder.
        """
        ...

    def layer(self, layer: int, carried: Carried, history: History, taps: Taps) -> Carried:
        """Compute one layer.

        Arguments:
            layer: Number of the layer.
            carried: Tensors that enter the layer, by name, each [B, token, width].
            history: Which tokens the pass computes and how they see each other.
            taps: Captures and interventions of the pass, called at its hook points.

        Returns:
            Tensors that leave the layer, under the same names, for the needed tokens.
        """
        ...

    def gathered(self, carried: Carried, taps: Taps) -> Tensor:
        """Input of the final norm, [B, token, D], from the tensors that leave the last layer."""
        ...

    def finish(self, x: Tensor, taps: Taps, want: Logits | None) -> Tensor:
        """Input of the LM head at the wanted positions, [B, position, D], with the hook points before it.

        Arguments:
            x: Final residual stream [B, S, D].
            taps: Captures and interventions of the pass, called at its hook points.
            want: Which positions' logits are wanted; None for all positions.
        """
        ...

    def final_norm(self, x: Tensor) -> Tensor:
        """Residual states [..., D] -> input of the LM head, without hook points."""
        ...

    def unembed(self, x: Tensor, want: Logits, *, softcap: bool = True) -> Tensor:
        """Inputs of the LM head [..., D] -> logits [..., tokens].

        Arguments:
            x: States after `final_norm`.
            want: Tokens of the vocabulary whose logits are computed.
            softcap: Whether to apply the model's soft cap of logits.
        """
        ...

    @property
    def unembedding(self) -> Tensor:
        """Weight matrix of the LM head, [vocab, hidden]."""
        ...

    def norm_gain(self, name: str, layer: int | None, dtype: torch.dtype) -> Tensor:
        """Gain of a norm, [hidden].

        Arguments:
            name: Name of the norm in its hook points: "ln1" of a layer, or "ln_final".
            layer: Number of the layer; None for the final norm.
            dtype: Dtype of the result.

        Raises:
            ConfigError: The model has no such norm.
        """
        ...

    def value_matrix(self, layer: int) -> Tensor:
        """Value projection of a layer with attention, [kv_head * d_head, hidden]."""
        ...

    def output_matrix(self, layer: int) -> Tensor:
        """Output projection of a layer with attention, [hidden, head * d_head]."""
        ...


def through_layers(
    network: Network, ids: Tensor, history: History, taps: Taps, order: Sequence[int] | None = None
) -> Tensor:
    """Embed token ids and run all layers.

    Arguments:
        network: the network.
        ids: token ids, int [B, S].
        history: which tokens the pass computes and how they see each other.
        taps: captures and interventions of the pass, called at its hook points.
        order: layers in execution order, which may repeat (hooks/recurrent.py); None for each layer once. A
            history that caches tensors per layer supports no repeated layers.

    Returns:
        Input of the final norm, [B, token, D]: in most families the residual stream.

    Raises:
        EarlyStop: from the taps, once the last wanted hook point is reached.
    """
    carried = network.embed(ids, history.positions, history.shares, history.starts)
    order = range(network.config.num_layers) if order is None else order
    return run_to_end(network, carried, order, history, taps)


def run_to_end(
    network: Network,
    carried: Carried,
    layers: Sequence[int],
    history: History,
    taps: Taps,
    previous: int | None = None,
) -> Tensor:
    """Run some layers, up to the last one, and return the input of the final norm.

    Arguments:
        network: the network.
        carried: tensors that leave the embedding or a layer, by name.
        layers: numbers of the layers to run, in order; may be empty.
        history: which tokens the pass computes and how they see each other.
        taps: captures and interventions of the pass, called at its hook points.
        previous: layer that `carried` comes from; None for the embedding.

    Returns:
        Input of the final norm after these layers, [B, token, D]: in most families the residual stream.
    """
    carried = run_layers(network, carried, layers, history, taps, previous)
    return final_state(network, carried, layers[-1] if layers else previous, history, taps)


def final_state(
    network: Network, carried: Carried, previous: int | None, history: History, taps: Taps
) -> Tensor:
    """Input of the final norm, after the taps on the last layer's output.

    Arguments:
        network: The network.
        carried: Tensors that left layer `previous`, before the taps of its resid_post.
        previous: Last layer that ran; None if `carried` is the output of the embedding.
        history: Which tokens the pass computes and how they see each other.
        taps: Captures and interventions of the pass, called at its hook points.

    Returns:
        Input of the final norm, [B, token, D].

    Raises:
        EarlyStop: From the taps, once the last wanted hook point is reached.
    """
    return network.gathered(_entering(network.config.num_layers, previous, carried, history, taps), taps)


def run_layers(
    network: Network,
    carried: Carried,
    layers: Sequence[int],
    history: History,
    taps: Taps,
    previous: int | None = None,
) -> Carried:
    """Run some layers and return all tensors that leave the last of them.

    The taps of the last layer's resid_post are not called; the caller that continues from there calls them.

    Arguments:
        network: The network.
        carried: Tensors that leave the embedding or a layer, by name.
        layers: Numbers of the layers to run, in order; may be empty.
        history: Which tokens the pass computes and how they see each other.
        taps: Captures and interventions of the pass, called at its hook points.
        previous: Layer that `carried` comes from; None for the embedding.

    Returns:
        All tensors that leave the last layer, by name; `carried` itself if there are no layers to run.

    Raises:
        EarlyStop: From the taps, once the last wanted hook point is reached.
    """
    for layer in layers:
        carried = _entering(layer, previous, carried, history, taps)
        carried, previous = network.layer(layer, carried, history, taps), layer
    return carried


def _entering(layer: int, previous: int | None, carried: Carried, history: History, taps: Taps) -> Carried:
    """Tensors that enter a layer, by name, for the tokens that the history selects, after the taps on the
    stream: at resid_post of the previous layer, or at the embedding if `previous` is None."""
    carried = history.enter(layer, carried)
    kind = "embed" if previous is None else "resid_post"
    return {**carried, STREAM: taps(kind, previous, carried[STREAM])}
