"""The parts of a network outside of its layers, shared by all families: embedding, final norm, head.

Encoders have a transform before the head, after the final norm or instead of it (`HeadTransform`). The input
of the head includes this transform in all methods here. A head of labels is computed like a language head; if
it reads one position, `Logits.read` selects it.

A subclass adds `embed`, `layer` and the norms of layers (`Network` in loop.py).

Border: only weights outside of layers.

Axes: [B, position, hidden].
"""

from __future__ import annotations

from typing import Generic, TypeVar

import torch
from torch import Tensor

from ....store.errors import ConfigError
from ..architectures.architecture import Architecture
from ..architectures.points import LOGITS
from ..hooks.taps import Taps
from ..hooks.wants import Logits
from .history import STREAM, Carried
from .kernels.products import product
from .norms import apply_norm, normalise
from .transform import BEFORE_HEAD, transformed
from .weights import NormWeights, Weights

__all__ = ["Ends"]

Config = TypeVar("Config", bound=Architecture)
Layer = TypeVar("Layer")


class Ends(Generic[Config, Layer]):
    """Base class of networks: the parts outside of the layers, which do not depend on the kind of layers."""

    def __init__(self, config: Config, weights: Weights[Layer]) -> None:
        self.config = config
        self.weights = weights

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the computation, which may differ from that of the checkpoint."""
        return self.weights.dtype

    @property
    def device(self) -> torch.device:
        """Device of weights and computation."""
        return self.weights.device

    @property
    def embedding(self) -> Tensor:
        """The embedding matrix [vocab, hidden]."""
        return self.weights.embed

    @property
    def unembedding(self) -> Tensor:
        """Matrix of the head [logit, hidden], which may be the embedding. Raises ConfigError without head."""
        self.config.require_head()
        head = self.weights.lm_head
        return self.weights.embed if head is None else head

    def gathered(self, carried: Carried, taps: Taps) -> Tensor:
        """Input of the final norm, [B, token, D], from the tensors that leave the last layer: the residual
        stream."""
        return carried[STREAM]

    def finish(self, x: Tensor, taps: Taps, want: Logits | None) -> Tensor:
        """Input of the LM head at the wanted positions, [B, position, D], with the hook points before it.

        Arguments:
            x: Final residual stream [B, S, D].
            taps: Captures and interventions of the pass, called at its hook points.
            want: Which positions' logits are wanted; None for all positions.
        """
        config, norm, x = self.config, self.weights.final_norm, self._narrow(x)
        is_mean = config.head.reads == "mean"
        if want is not None and not is_mean and not taps.touches(None, *BEFORE_HEAD):
            # Without hook points, only the wanted positions are computed.
            return self.final_norm(want.at_positions(x))
        if norm is not None:
            normed = normalise(x, norm, config.norm_type, config.final_norm_eps, taps, "ln_final", None)
            x = taps("final_norm", None, normed)
        x = x.mean(1, keepdim=True).expand_as(x) if is_mean else x
        if config.transform is not None:
            x = transformed(x, self.weights, config.transform, config.norm_type, taps)
        if taps.captures(None, LOGITS):
            # The tap gets the head's input and computes logits in parts (capture/vocabulary.py): whole, they
            # would be the largest tensor of the pass.
            taps(LOGITS, None, x)
        return x if want is None else want.at_positions(x)

    def final_norm(self, x: Tensor) -> Tensor:
        """Residual states [..., D] -> input of the LM head, without hook points: final norm and, in encoders,
        the dense transform."""
        config, norm, x = self.config, self.weights.final_norm, self._narrow(x)
        if norm is not None:
            x = apply_norm(x, norm, config.norm_type, config.final_norm_eps)
        if config.transform is None:
            return x
        return transformed(x, self.weights, config.transform, config.norm_type)

    def unembed(self, x: Tensor, want: Logits, *, softcap: bool = True) -> Tensor:
        """Inputs of the LM head [..., D] -> logits [..., tokens].

        Arguments:
            x: states after `final_norm`.
            want: tokens of the vocabulary whose logits are computed.
            softcap: whether to apply the model's soft cap of logits.
        """
        bias = self.weights.head_bias
        bias = None if bias is None else want.of_tokens(bias)
        logits = product(x, want.of_tokens(self.unembedding), bias)
        cap = self.config.final_logit_softcapping
        return cap * torch.tanh(logits / cap) if softcap and cap is not None else logits

    def norm_gain(self, name: str, layer: int | None, dtype: torch.dtype) -> Tensor:
        """Gain of a norm [hidden], with the 1 that Gemma adds.

        Arguments:
            name: name of the norm, such as "ln1"; ignored for the final norm.
            layer: number of the layer; None for the final norm.
            dtype: dtype of the result.

        Raises:
            ConfigError: the model has no such norm.
        """
        norm = self.weights.final_norm if layer is None else self.norm_of(name, layer)
        if norm is None:
            raise ConfigError(
                f"expected a model with a norm before its language head, found {self.config.model_type}, "
                "which has none; choose another model"
            )
        weight = norm.weight.to(dtype)
        return 1 + weight if self.config.norm_type == "gemma_rms" else weight

    def norm_of(self, name: str, layer: int) -> NormWeights:
        """Weights of a layer's norm; name: of its hook points, such as "ln1". ConfigError if the layer has no
        such norm."""
        raise NotImplementedError

    def _narrow(self, x: Tensor) -> Tensor:
        """The residual stream in the dtype of the weights; some models keep it in float32."""
        return x.to(self.weights.dtype)
