"""A real-gated linear recurrent unit (RG-LRU) after a short convolution, with a multiplicative output gate.

    x = convolution of W_x u      r, i = sigmoid(W_a x + b_a), sigmoid(W_i x + b_i), block by block
    log a = -8 r softplus(c)      h_t = a h_{t-1} + sqrt(1 - a^2) i x       out = W_out (act(W_y u) h)

(De et al., Griffin, 2024, section 2.4.) The first token of a sequence is written without the factor sqrt(1 -
a^2). In terms of a linear recurrence, a channel is a head with a state of one number; its key is the factor
of x.

Axes: as in mixer.py; head = channel.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ...architectures.linear_mixers import LinearUnitSpec
from ...hooks.taps import Taps
from ..history import History
from ..kernels.products import product
from ..mlp import ACTIVATIONS
from ..recurrences.linear import LinearRecurrence
from ..scan import scan
from .convolution import convolve
from .mixer import LayerTensors, merge_heads, split_heads, strip_prefix, upcast

__all__ = ["LinearUnit"]

_SHARPNESS = 8.0
"""Constant c of the paper, by which the recurrence gate scales the log decay."""


class LinearUnit:
    """The real-gated linear recurrent unit (RG-LRU) of one layer, after a short convolution."""

    def __init__(self, spec: LinearUnitSpec, tensors: LayerTensors) -> None:
        self.spec, self.weights = spec, strip_prefix(tensors, "linear.")

    def __call__(self, x: Tensor, layer: int, history: History, taps: Taps) -> Tensor:
        """Normalised stream x [B, token, D] -> output that is added to the residual stream, [B, kept, D];
        kept: the tokens whose output later layers need."""
        w = self.weights
        gate = ACTIVATIONS[self.spec.activation](product(history.needed(x), w["gate"], w["gate.bias"]))
        gate = taps("linear_gate", layer, split_heads(gate, 1))
        inner = product(x, w["in"], w["in.bias"])
        inner = taps("linear_conv", layer, convolve(inner, w["conv"], w["conv.bias"], layer, history))
        recurrence_gate, input_gate = self._gate(inner, "forget"), self._gate(inner, "input")
        log_decay = -_SHARPNESS * recurrence_gate * F.softplus(upcast(w["decays"]))
        # As a linear recurrence: each channel is a head whose key is the factor of its input.
        keys = input_gate * self._input_scale(log_decay, layer, history)
        keys = taps("linear_k", layer, split_heads(keys, 1))
        values = taps("linear_v", layer, split_heads(inner, 1))
        tokens = {"q": torch.ones_like(keys), "k": keys, "v": values, "log_decay": split_heads(log_decay, 1)}
        read = scan(LinearRecurrence("after"), tokens, layer, history, taps, "linear")
        read = history.needed(taps("linear_out", layer, read))
        return product(merge_heads(read.to(x.dtype) * gate), w["out"], w["out.bias"])

    def _gate(self, x: Tensor, name: str) -> Tensor:
        """Gate [B, token, channel]: sigmoid of the block-diagonal linear map called `name` of x, of the same
        shape."""
        w = self.weights
        blocks = x.unflatten(-1, (self.spec.gates, -1))
        logits = torch.einsum("btgi,gij->btgj", blocks, w[name]) + w[f"{name}.bias"]
        return upcast(torch.sigmoid(logits).flatten(-2))

    @staticmethod
    def _input_scale(log_decay: Tensor, layer: int, history: History) -> Tensor:
        """Factor of the input of each channel, [B, token, channel]: sqrt(1 - a^2) for the decay a, and 1 at
        the first token of a sequence; log_decay: log a, of the same shape."""
        # Only the history knows which token is first: ones shifted by one position are 0 there.
        ones = log_decay.new_ones(*log_decay.shape[:2], 1)
        is_first = history.before(layer, "start", ones, 1).squeeze(2) == 0
        # expm1 keeps the digits of 1 - a^2 where a is close to 1.
        return torch.where(is_first, 1.0, torch.sqrt(-torch.expm1(2 * log_decay)))
