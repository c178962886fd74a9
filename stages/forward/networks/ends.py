"""What every network does before its layers and behind them: embedding, final norm, LM head.

Encoders have a transform before the head, behind the final norm or in its place: what the head reads is what
that gives (`head_transform`), here as everywhere.

A network is made of these and of its own `embed`, `layer` and norms of layers (`Network` in loop.py).

Border: knows no layer, and weights outside of layers alone.

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
    """The part of a network that does not depend on what its layers are."""

    def __init__(self, config: Config, weights: Weights[Layer]) -> None:
        self.config = config
        self.weights = weights

    @property
    def dtype(self) -> torch.dtype:
        """See `Network`."""
        return self.weights.dtype

    @property
    def device(self) -> torch.device:
        """See `Network`."""
        return self.weights.device

    @property
    def embedding(self) -> Tensor:
        """The embedding matrix [vocab, hidden]."""
        return self.weights.embed

    @property
    def unembedding(self) -> Tensor:
        """What the LM head multiplies by, [vocab, hidden]."""
        head = self.weights.lm_head
        return self.weights.embed if head is None else head

    def gathered(self, carried: Carried, taps: Taps) -> Tensor:
        """What the final norm reads of all that is carried behind the last layer: the stream."""
        return carried[STREAM]

    def finish(self, x: Tensor, taps: Taps, want: Logits | None) -> Tensor:
        """The last residual stream [B, S, D] -> what the LM head reads, [B, wanted positions, D]."""
        c, final, x = self.config, self.weights.final_norm, self._narrow(x)
        if want is not None and not taps.touches(None, *BEFORE_HEAD):
            return self.final_norm(want.at_positions(x))
        if final is not None:
            normed = normalise(x, final, c.norm_type, c.final_norm_eps, taps, "ln_final", None)
            x = taps("final_norm", None, normed)
        if c.transform is not None:
            x = transformed(x, self.weights, c.transform, c.norm_type, taps)
        if taps.captures(None, LOGITS):  # handed over as what the head reads: whole, they would be the
            taps(LOGITS, None, x)  # largest tensor of the pass (capture/vocabulary.py)
        return x if want is None else want.at_positions(x)

    def final_norm(self, x: Tensor) -> Tensor:
        """What the LM head reads of residual states [..., D]: their final norm, transformed where it is."""
        c, final, x = self.config, self.weights.final_norm, self._narrow(x)
        if final is not None:
            x = apply_norm(x, final, c.norm_type, c.final_norm_eps)
        return x if c.transform is None else transformed(x, self.weights, c.transform, c.norm_type)

    def unembed(self, x: Tensor, want: Logits, *, softcap: bool = True) -> Tensor:
        """Normalised states [..., D] -> logits [..., tokens], soft-capped as the model's output is."""
        bias = self.weights.head_bias
        bias = None if bias is None else want.of_tokens(bias)
        logits = product(x, want.of_tokens(self.unembedding), bias)
        cap = self.config.final_logit_softcapping
        return cap * torch.tanh(logits / cap) if softcap and cap is not None else logits

    def norm_gain(self, name: str, layer: int | None, dtype: torch.dtype) -> Tensor:
        """What a norm multiplies by [hidden]: a norm of a layer by its name ("ln1"); "ln_final"."""
        norm = self.weights.final_norm if layer is None else self.norm_of(name, layer)
        if norm is None:
            raise ConfigError(f"expected a final norm in {self.config.model_type}, found none")
        weight = norm.weight.to(dtype)
        return 1 + weight if self.config.norm_type == "gemma_rms" else weight

    def norm_of(self, name: str, layer: int) -> NormWeights:
        """A norm of a layer, by its name."""
        raise NotImplementedError

    def _narrow(self, x: Tensor) -> Tensor:
        """The stream in the dtype of the weights: some models keep it wider."""
        return x.to(self.dtype)
