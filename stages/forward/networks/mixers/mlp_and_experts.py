"""An MLP and experts in parallel (Gemma 4).

    norm(MLP(h)) + norm(experts(norm(x)))

h is the normalised stream, x the stream before that norm. Router and experts read another RMS norm of x, with
a separate gain each. Each expert has a learned factor of its routing weight.

Axes: as in experts.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from ...architectures.mixers import MlpAndExpertsSpec
from ...hooks.taps import Taps
from ..norms import apply_norm
from ..weights import NormWeights
from .experts import ExpertOutput, Experts
from .mixer import LayerTensors, strip_prefix
from .mlp import Mlp

__all__ = ["MlpAndExperts"]


class MlpAndExperts:
    """MLP and experts of one layer, in parallel."""

    def __init__(self, shape: MlpAndExpertsSpec, tensors: LayerTensors) -> None:
        extra = strip_prefix(tensors, "beside.")
        self._mlp, self._eps = Mlp(shape.mlp, tensors), shape.norm_eps
        self._experts = _Experts(shape, tensors)
        self._mlp_post, self._experts_post = (
            NormWeights(extra[f"{name}_post"]) for name in ("mlp", "experts")
        )
        self._unit = NormWeights(extra["experts"].new_ones(extra["experts"].shape))

    def __call__(self, h: Tensor, layer: int, taps: Taps, x: Tensor) -> Tensor:
        """Sum of both outputs [B, kept, D], from the MLP's input h and the stream x, each [B, kept, D]."""
        dense = apply_norm(self._mlp(h, layer, taps), self._mlp_post, "rms", self._eps)
        routed = self._experts(apply_norm(x, self._unit, "rms", self._eps), layer, taps)
        dense = taps("shared_expert_out", layer, dense)
        return dense + apply_norm(routed, self._experts_post, "rms", self._eps)


class _Experts(Experts):
    """Experts whose input and router have separate gains of the norm, and that have factors of their
    weights."""

    def __init__(self, shape: MlpAndExpertsSpec, tensors: LayerTensors) -> None:
        super().__init__(shape.experts, tensors)
        extra = strip_prefix(tensors, "beside.")
        self._gain, self._expert_gains = extra["experts"], extra["expert_gains"]
        # The gain of the router's norm is folded into its weights.
        router_gain = extra["router_gain"] * len(extra["router_gain"]) ** -0.5
        self.weights["router"] = self.weights["router"] * router_gain

    def _expert_outputs(self, inner: Tensor, experts: Tensor, share: Tensor) -> Iterator[ExpertOutput]:
        return super()._expert_outputs(inner * self._gain, experts, share)

    def _top_k(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        experts, share = super()._top_k(scores)
        return experts, share * self._expert_gains[experts]
