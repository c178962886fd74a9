"""An MLP with experts beside it (Gemma 4).

    norm(MLP(h)) + norm(experts(norm(x)))

h is what the MLP reads, x the stream that h is the norm of. The router reads the same norm of x as experts
do, with weights of its own, and each expert has a number that its weight is multiplied by.

Axes: as in mixers/experts.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from ...architectures.mixers import MlpAndExpertsSpec
from ...hooks.taps import Taps
from ..mixers.experts import ExpertOutput, Experts
from ..mixers.mixer import LayerTensors, strip_prefix
from ..mixers.mlp import Mlp
from ..norms import apply_norm
from ..weights import NormWeights

__all__ = ["MlpAndExperts"]


class MlpAndExperts:
    """The MLP and the experts of one layer."""

    def __init__(self, shape: MlpAndExpertsSpec, tensors: LayerTensors) -> None:
        found = strip_prefix(tensors, "beside.")
        self._mlp, self._eps = Mlp(shape.mlp, tensors), shape.norm_eps
        self._experts = _Experts(shape, tensors)
        self._mlp_post, self._experts_post = (
            NormWeights(found[f"{name}_post"]) for name in ("mlp", "experts")
        )
        self._unit = NormWeights(found["experts"].new_ones(found["experts"].shape))

    def __call__(self, h: Tensor, x: Tensor, layer: int, taps: Taps) -> Tensor:
        """What the MLP reads, and the stream, each [B, kept, D] -> what both give [B, kept, D]."""
        dense = apply_norm(self._mlp(h, layer, taps), self._mlp_post, "rms", self._eps)
        routed = self._experts(apply_norm(x, self._unit, "rms", self._eps), layer, taps)
        dense = taps("shared_expert_out", layer, dense)
        return dense + apply_norm(routed, self._experts_post, "rms", self._eps)


class _Experts(Experts):
    """Experts that read a norm of which they and the router have weights of their own."""

    def __init__(self, shape: MlpAndExpertsSpec, tensors: LayerTensors) -> None:
        super().__init__(shape.experts, tensors)
        found = strip_prefix(tensors, "beside.")
        self._gain, self._gains = found["experts"], found["expert_gains"]
        reads = found["router_gain"] * len(found["router_gain"]) ** -0.5
        self.weights["router"] = self.weights["router"] * reads

    def _expert_outputs(self, inner: Tensor, chosen: Tensor, share: Tensor) -> Iterator[ExpertOutput]:
        return super()._expert_outputs(inner * self._gain, chosen, share)

    def _top_k(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        chosen, share = super()._top_k(scores)
        return chosen, share * self._gains[chosen]
