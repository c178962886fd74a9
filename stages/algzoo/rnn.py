"""The RNN as three float64 matrices in numpy, for analyses of its weights without torch.

    p_t = ih x_t + hh h_{t-1},  h_t = relu(p_t),  y = oh h_{T-1}

Border: numpy; forward.py has the passes over millions of samples, and those with hook points.

Axes: neuron (rows: written), neuron_ (columns: read), output, sample, time.
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
    """Weights of an RNN as float64 matrices."""

    ih: Array
    """Input weights [neuron]."""
    hh: Array
    """Recurrent weights [neuron, neuron_]: from neuron_ in one time step to neuron in the next."""
    oh: Array
    """Readout weights [output, neuron]."""

    @property
    def hidden(self) -> int:
        """Number of neurons."""
        return len(self.ih)

    @property
    def parameters(self) -> int:
        """Number of parameters, H (1 + H + O)."""
        return self.ih.size + self.hh.size + self.oh.size

    def projected(self, keep: Array) -> RnnWeights:
        """The network whose state is multiplied by a matrix after every ReLU.

        Arguments:
            keep: the matrix, [neuron, neuron_].
        """
        # States are read by hh and oh only, so changing these matrices changes the states they read.
        return RnnWeights(self.ih, self.hh @ keep, self.oh @ keep)

    def without(self, *neurons: int) -> RnnWeights:
        """The network in which some neurons (indices) are ablated: set to zero after every ReLU."""
        keep = np.ones(self.hidden)
        keep[list(neurons)] = 0.0
        # A neuron is read by its columns in hh and oh; the row that computes it may stay.
        return RnnWeights(self.ih, self.hh * keep, self.oh * keep)

    def states(self, x: Array) -> Array:
        """Pre-activations, float64 [sample, time, neuron], for inputs [sample, time]."""
        pre_activations = np.empty((len(x), x.shape[1], self.hidden))
        hidden = np.zeros((len(x), self.hidden))
        for step in range(x.shape[1]):
            pre_activations[:, step] = x[:, step, None] * self.ih + hidden @ self.hh.T
            hidden = np.maximum(pre_activations[:, step], 0.0)
        return pre_activations

    def outputs(self, x: Array) -> Array:
        """Outputs, float64 [sample, output], for inputs [sample, time]."""
        # Not by `states`: that array has a number for every time step, and ablation calls this per pair of
        # neurons.
        hidden = np.zeros((len(x), self.hidden))
        for step in range(x.shape[1]):
            hidden = np.maximum(x[:, step, None] * self.ih + hidden @ self.hh.T, 0.0)
        return hidden @ self.oh.T


def require_rnn(weights: xr.Dataset, analysis: str) -> RnnWeights:
    """The float64 matrices of an RNN from its labelled weights.

    Arguments:
        weights: labelled weights of a network, as `AlgZooModel.weights`.
        analysis: name of the analysis that needs an RNN, for the error message.

    Raises:
        WeightsError: the network is not an RNN.
    """
    tensors, shape = tensors_of(weights)
    if not isinstance(shape, RnnShape):
        raise WeightsError(
            f"{analysis} needs an RNN, which is piecewise linear, found a {shape.kind}; pass the weights of "
            "an RNN"
        )
    ih, hh, oh = (np.asarray(tensors[name], np.float64) for name in shape.tensors)
    return RnnWeights(ih[:, 0], hh, oh)
