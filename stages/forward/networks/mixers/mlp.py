"""The MLP as a channel mixer: networks/mlp.py with the weights of one layer."""

from __future__ import annotations

from dataclasses import fields

from torch import Tensor

from ...architectures.mixers import MlpSpec
from ...hooks.taps import Taps
from ..mlp import mlp
from ..weights import MlpWeights, parts_of
from .mixer import LayerTensors, strip_prefix

__all__ = ["Mlp", "mlp_weights"]


class Mlp:
    """MLP of one layer with its weights."""

    def __init__(self, spec: MlpSpec, tensors: LayerTensors) -> None:
        self.spec, self.weights = spec, mlp_weights(tensors)

    def __call__(self, x: Tensor, layer: int, taps: Taps) -> Tensor:
        """Normalised stream x [B, kept, D] -> output that is added to the residual stream, [B, kept, D]."""
        spec = self.spec
        return mlp(x, self.weights, spec.activation, layer, taps, spec.inner_norm_eps, spec.sparsity)


def mlp_weights(tensors: LayerTensors) -> MlpWeights:
    """Weights of a layer's MLP, selected from all weights of the layer by name."""
    parts, names = parts_of(tensors), {field.name for field in fields(MlpWeights)}
    weights = {name: part for name, part in parts.items() if name in names}
    return MlpWeights(**weights, activation=strip_prefix(tensors, "act."))
