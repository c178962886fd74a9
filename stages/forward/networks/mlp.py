"""The MLP of one layer, gated or plain, and the hook points inside."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ..hooks.taps import Taps
from .attention import linear
from .gradients import is_recorded
from .kernels.functions import evenly
from .norms import apply_norm
from .weights import MlpWeights

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: torch.relu(x).square(),
    "tanh": torch.tanh,
}
"""Name of an activation function (`MlpSpec.activation`) -> the function."""
IN_PLACE: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": lambda x: F.silu(x, inplace=True),
    "relu": lambda x: F.relu(x, inplace=True),
}
"""Name of an activation function -> the function in place, with the same bits: allocating the hidden
activations, the widest tensor of a layer, costs more time than the function."""
EXACT = ("relu", "relu2")
"""Names of activation functions without intermediate rounding: an element's result has the same bits wherever
it is in a tensor, so `evenly` is not needed."""


def mlp(
    x: Tensor,
    weights: MlpWeights,
    activation: str,
    layer: int,
    taps: Taps,
    inner_eps: float | None = None,
    sparsity: float = 0.0,
) -> Tensor:
    """Output of one layer's MLP, gated or plain.

    Arguments:
        x: normalised stream [B, token, D].
        weights: weights of the MLP.
        activation: name of the activation function in `ACTIVATIONS` or `LEARNED`.
        layer: number of the layer.
        taps: hook points of the pass; those used are mlp_pre_act, mlp_pre_linear and mlp_post_act.
        inner_eps: epsilon of the norm before the down projection; None for no norm.
        sparsity: intended share of gates that are set to 0 (Gemma 3n); 0 for none.

    Returns:
        Output of the down projection [B, token, D], before any post-norm.
    """
    gate: Tensor | None
    if weights.gate_up is not None:
        gate, up = linear(x, weights.gate_up).chunk(2, dim=-1)
    else:
        gate = None if weights.gate is None else linear(x, weights.gate)
        up = linear(x, weights.up)
    # The activation function applies to the gate or, in a plain MLP, to the up projection.
    pre_act = taps("mlp_pre_act", layer, up if gate is None else gate)
    up = up if gate is None else taps("mlp_pre_linear", layer, up)
    pre_act = _gaussian_top_k(pre_act, sparsity) if sparsity else pre_act
    needs_gradient = is_recorded(pre_act, up)
    parameters = weights.activation
    act = partial(LEARNED[activation], **parameters) if parameters else ACTIVATIONS[activation]
    if activation in IN_PLACE and not needs_gradient and not taps.touches(layer, "mlp_pre_act"):
        act = IN_PLACE[activation]
    hidden = act(pre_act) if activation in EXACT else evenly(act, pre_act)
    if gate is not None:
        hidden = hidden * up if needs_gradient else hidden.mul_(up)  # in place: no tap has a reference to it
    if weights.inner_norm is not None and inner_eps is not None:
        hidden = apply_norm(hidden, weights.inner_norm, "rms", inner_eps)
    return linear(taps("mlp_post_act", layer, hidden), weights.down)


def _gaussian_top_k(gate: Tensor, share: float) -> Tensor:
    """relu(gate - t) for gates [B, token, inner], where t is the quantile `share` of a normal distribution
    with the mean and standard deviation of the token's gates (Gemma 3n, Gaussian top-k)."""
    quantile_in_deviations = torch.special.ndtri(torch.tensor(share)).to(gate.dtype)
    # Population deviation, as in transformers (`unbiased=False`).
    deviation = gate.std(-1, keepdim=True, correction=0)
    threshold = gate.mean(-1, keepdim=True) + deviation * quantile_in_deviations.to(gate.device)
    return F.relu(gate - threshold)


def xielu(x: Tensor, alpha_p: Tensor, alpha_n: Tensor, beta: Tensor, eps: Tensor) -> Tensor:
    """xIELU: quadratic above zero, integral of an ELU below (Huang and Schlag, xIELU, 2024, equation 6).

    Arguments:
        x: values of any shape.
        alpha_p: learned curvature above zero, before its softplus.
        alpha_n: learned factor below zero, before its softplus.
        beta: slope at zero.
        eps: upper limit of the argument of expm1, for precision near zero.
    """
    above = F.softplus(alpha_p) * x * x + beta * x
    below = (torch.expm1(torch.minimum(x, eps)) - x) * (beta + F.softplus(alpha_n)) + beta * x
    return torch.where(x > 0, above, below)


LEARNED: dict[str, Callable[..., Tensor]] = {"xielu": xielu}
"""Name of an activation function with learned parameters -> the function, which takes them as keyword
arguments after x."""
