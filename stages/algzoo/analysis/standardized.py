"""Standardised RNN: the same function with input weights of 1 or -1, so states are in units of the input.

A ReLU commutes with positive factors: neuron j may be divided by s_j = |ih_j| where it is written and
multiplied by s_j where it is read.

Border: labelled weights in, labelled weights out.

Axes: neuron, neuron_, output.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ....pipeline import Output, stage
from ....store.errors import WeightsError
from ..rnn import require_rnn

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["SMALLEST", "is_standardizable", "standardized_rnn"]

SMALLEST = 1.19e-7
"""Input weight below which a neuron counts as not reading the input: float32 epsilon."""


def is_standardizable(weights: xr.Dataset) -> bool:
    """Whether every neuron of an RNN has an input weight of at least SMALLEST, so that it can be scaled to
    1."""
    return bool((np.abs(require_rnn(weights, "standardisation").ih) >= SMALLEST).all())


@stage(
    version=1,
    inputs={"weights": None},
    outputs={
        "scale": Output(("neuron",), "1", "factor by which the state of a neuron is divided"),
        "weight_ih": Output(("neuron", "input"), "1", "input weights, 1 or -1"),
        "weight_hh": Output(("neuron", "neuron_"), "1", "recurrent weights in units of the input"),
        "weight_oh": Output(("output", "neuron"), "1", "readout of states in units of the input"),
    },
)
def standardized_rnn(weights: xr.Dataset) -> xr.Dataset:
    """Weights that compute the same function with input weights of 1 or -1.

    With s_j = |ih_j| they are ih_j / s_j, hh_jk s_k / s_j and oh_oj s_j. The result is labelled weights,
    which other stages accept.

    Raises:
        WeightsError: the input weight of a neuron is below 1.19e-7.
    """
    import xarray as xr

    rnn = require_rnn(weights, "standardisation")
    scale = np.abs(rnn.ih)
    if (scale < SMALLEST).any():
        raise WeightsError(
            f"an RNN can be standardised if every input weight is at least {SMALLEST} in magnitude, found "
            f"{scale.min():.3g} at neuron {int(scale.argmin())}, which does not read the input; analyse the "
            "weights without standardising them"
        )
    return xr.Dataset(
        {
            "scale": ("neuron", scale),
            "weight_ih": (("neuron", "input"), (rnn.ih / scale)[:, None]),
            # Row j is written, hence divided by s_j; column k is read, hence multiplied by s_k.
            "weight_hh": (("neuron", "neuron_"), rnn.hh * scale / scale[:, None]),
            "weight_oh": (("output", "neuron"), rnn.oh * scale),
        },
        attrs={"network": "rnn", "heads": 1},
    )
