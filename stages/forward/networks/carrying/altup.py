"""AltUp: several streams, of which a layer computes one and predicts and corrects all by small matrices.

    predicted_j = x_j + sum_i P_ji x_i          P = W_p tanh(W_r norm(x_a) / D)
    corrected_j = predicted_j + (1 + c_j) (y - predicted_a)          c = W_c tanh(W_r norm(y) / D)

(Baykal et al., Alternating Updates, 2023, algorithm 1, with coefficients that depend on the token, as the
reference has them.) x are the streams that enter the layer, a is the one it computes, y what it makes of
predicted_a. Streams begin as maps of the embedding and end as the mean of maps of them, each brought to the
size of the first.

Axes: streams are [B, stream, token, D].
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..kernels.products import product
from ..norms import apply_norm
from ..weights import NormWeights

__all__ = ["AltUp", "merged", "spread"]

LEAST = 1e-5
"""A mean of squares that what is brought to a size is taken to have at least."""


class AltUp:
    """The predictions and corrections of one layer."""

    def __init__(self, tensors: Mapping[str, Tensor], active: int, eps: float) -> None:
        """active: the stream the layer computes. eps: of the router's norm."""
        self._weights, self._active, self._eps = tensors, active, eps

    def predicted(self, streams: Tensor) -> Tensor:
        """The streams as the layer finds them."""
        count = streams.shape[1]
        told = product(self._routed(streams[:, self._active]), self._weights["predicts"])
        shares = told.unflatten(-1, (count, count)).unsqueeze(-1)
        # Entry by entry: what products of so few rows sum up first would depend on their company.
        rows = (sum(shares[:, :, j, i] * streams[:, i] for i in range(count)) for j in range(count))
        return streams + torch.stack(list(rows), dim=1)

    def corrected(self, predicted: Tensor, made: Tensor) -> Tensor:
        """The streams behind what the layer has made [B, token, D] of the one it computes."""
        shares = product(self._routed(made), self._weights["corrects"]) + 1
        innovation = made - predicted[:, self._active]
        return predicted + shares.transpose(1, 2).unsqueeze(-1) * innovation.unsqueeze(1)

    def _routed(self, stream: Tensor) -> Tensor:
        """What coefficients are made of [B, token, stream]."""
        w = self._weights
        normed = apply_norm(stream, NormWeights(w["norm"]), "rms", self._eps) * stream.shape[-1] ** -1.0
        return torch.tanh(product(normed, w["router"]).float()).to(stream.dtype)


def spread(embedded: Tensor, maps: Mapping[str, Tensor], count: int) -> Tensor:
    """The streams that enter the first layer, of embeddings [B, token, D]; maps: "in.{i}" of all but the
    first."""
    size = _size(embedded)
    rest = (_brought(product(embedded, maps[f"in.{stream}"]), size) for stream in range(1, count))
    return torch.stack([embedded, *rest], dim=1)


def merged(streams: Tensor, maps: Mapping[str, Tensor]) -> Tensor:
    """What the final norm reads [B, token, D] of the streams behind the last layer; maps: "out.{i}"."""
    size, count = _size(streams[:, 0]), streams.shape[1]
    rest = (_brought(product(streams[:, i], maps[f"out.{i}"]), size) for i in range(1, count))
    return torch.stack([streams[:, 0], *rest]).mean(0)


def _size(x: Tensor) -> Tensor:
    """The root of the mean of squares, [B, token, 1]."""
    return x.square().mean(-1, keepdim=True) ** 0.5


def _brought(x: Tensor, size: Tensor) -> Tensor:
    """x [B, token, D] with this root of its mean of squares."""
    return x * size / x.square().mean(-1, keepdim=True).clamp(min=LEAST).sqrt()
