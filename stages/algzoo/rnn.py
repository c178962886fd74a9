"""The RNN as three matrices in float64: what analyses of its weights compute with, without torch.

    p_t = ih x_t + hh h_{t-1},  h_t = relu(p_t),  y = oh h_{T-1}

Border: numpy; the passes over millions of samples, and those with hook points, are forward.py's.

Axes: neuron (rows: what is written), neuron_ (columns: what is read), output, sample, time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ...store.arrays import Array
from ...store.errors import WeightsError
from .networks import RnnShape, tensors_of

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["RnnWeights", "require_rnn"]


@dataclass(frozen=True, eq=False)
class RnnWeights:
    """ih [neuron], hh [neuron, neuron_], oh [output, neuron]; float64."""

    ih: Array
    hh: Array
    oh: Array

    @property
    def hidden(self) -> int:
        """How many neurons the state has."""
        return len(self.ih)

    @property
    def parameters(self) -> int:
        """H (1 + H + O)."""
        return self.ih.size + self.hh.size + self.oh.size

    def projected(self, keep: Array) -> RnnWeights:
        """The network whose states go through `keep` [neuron, neuron_] after every ReLU, the last included.

        A state is read through hh and oh alone, so that changing those is changing it.
        """
        return RnnWeights(self.ih, self.hh @ keep, self.oh @ keep)

    def without(self, *neurons: int) -> RnnWeights:
        """The network whose neurons are zero after every ReLU."""
        keep = np.ones(self.hidden)
        keep[list(neurons)] = 0.0
        return RnnWeights(self.ih, self.hh * keep, self.oh * keep)

    def states(self, x: Array) -> Array:
        """Pre-activations [sample, time, neuron] for inputs [sample, time]; float64."""
        traced = np.empty((len(x), x.shape[1], self.hidden))
        hidden = np.zeros((len(x), self.hidden))
        for step in range(x.shape[1]):
            traced[:, step] = x[:, step, None] * self.ih + hidden @ self.hh.T
            hidden = np.maximum(traced[:, step], 0.0)
        return traced

    def outputs(self, x: Array) -> Array:
        """What it says [sample, output] for inputs [sample, time]; float64."""
        hidden = np.zeros((len(x), self.hidden))
        for step in range(x.shape[1]):
            hidden = np.maximum(x[:, step, None] * self.ih + hidden @ self.hh.T, 0.0)
        return hidden @ self.oh.T


def require_rnn(weights: xr.Dataset, what: str) -> RnnWeights:
    """The three matrices of an RNN, float64. Raises WeightsError for another network."""
    tensors, shape = tensors_of(weights)
    if not isinstance(shape, RnnShape):
        raise WeightsError(
            f"{what}: expected an RNN, found a {shape.kind}; only RNNs are pieces of linear maps"
        )
    ih, hh, oh = (np.asarray(tensors[name], np.float64) for name in shape.tensors)
    return RnnWeights(ih[:, 0], hh, oh)
