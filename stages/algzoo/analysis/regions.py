"""Linear regions of the RNN: which ReLUs are open, and the linear map of the network there.

A gate is open where its pre-activation is not negative. The gates of all steps form a pattern of T H bits,
bit t H + j for neuron j at time t. Inputs with one pattern form a region, a cone, in which y = A x. Column t
of A is W_oh (G_{T-1} W_hh) ... (G_{t+1} W_hh) G_t W_ih; without biases there is no offset.

Border: labelled weights and samples in; cones.py measures regions exactly.

Axes: region (most frequent first), byte of a pattern (least significant bit first), output, time, sample.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ....pipeline import Output, stage
from ....store.arrays import Array, Bools
from ....store.errors import WeightsError
from ..rnn import RnnWeights, require_rnn

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["gates_of", "linear_maps", "linear_regions", "pattern_bits"]


def gates_of(rnn: RnnWeights, x: Array) -> Bools:
    """Whether each ReLU is open (its pre-activation is not negative), bool [sample, time, neuron].

    Arguments:
        rnn: the network.
        x: inputs [sample, time].
    """
    gates: Bools = rnn.states(x) >= 0
    return gates


def pattern_bits(gates: Bools) -> Array:
    """Pack gates, bool [sample, time, neuron], into bits, uint8 [sample, byte], the first gate lowest."""
    return np.packbits(gates.reshape(len(gates), -1), axis=1, bitorder="little")


def linear_maps(rnn: RnnWeights, gates: Bools) -> Array:
    """Matrix of the network's outputs as a linear function of the input in each region, [region, output,
    time].

    Arguments:
        rnn: the network.
        gates: whether each ReLU is open in each region, bool [region, time, neuron].

    Raises:
        WeightsError: a product of weights overflows float64.
    """
    n_regions, steps, _ = gates.shape
    maps = np.empty((n_regions, len(rnn.oh), steps))
    readout = np.broadcast_to(rnn.oh, (n_regions, *rnn.oh.shape))
    with np.errstate(over="ignore", invalid="ignore"):
        # Backwards from the readout: each step needs one product with W_hh instead of a product per column.
        for step in range(steps - 1, -1, -1):
            open_readout = readout * gates[:, step, None, :]
            maps[:, :, step] = open_readout @ rnn.ih
            readout = open_readout @ rnn.hh
    if not np.isfinite(maps).all():
        raise WeightsError(
            f"the linear maps of the network overflow float64 over {steps} time steps; analyse shorter "
            "inputs, or a network with smaller recurrent weights"
        )
    return maps


@stage(
    version=1,
    inputs={"weights": None, "samples": None},
    outputs={
        "count": Output(("region",), "samples", "samples in the region"),
        "representative": Output(("region",), "1", "index of the first sample in the region"),
        "pattern": Output(("region", "byte"), "1", "open gates, packed as bits"),
        "active": Output(("region",), "1", "number of open gates"),
        "map": Output(("region", "output", "time"), "1", "linear map of the network in the region"),
        "region_id": Output(("sample",), "1", "region of each sample"),
        "active_fraction": Output((), "1", "share of gates that are open, over all samples"),
        "active_by_time": Output(("time",), "1", "share of gates that are open at each time step"),
    },
)
def linear_regions(weights: xr.Dataset, samples: xr.Dataset) -> xr.Dataset:
    """Linear regions that contain some of the samples, with their numbers of samples and linear maps.

    The most frequent region comes first; of equally frequent ones, that of the earlier sample.

    Arguments:
        weights: labelled weights of an RNN.
        samples: inputs, as `algzoo_samples` returns them.
    """
    import xarray as xr

    rnn = require_rnn(weights, "linear regions")
    gates = gates_of(rnn, samples["x"].values)
    patterns, first_sample, inverse, counts = np.unique(
        pattern_bits(gates), axis=0, return_index=True, return_inverse=True, return_counts=True
    )
    # lexsort's last key is the primary one: counts, then the first sample.
    order = np.lexsort((first_sample, -counts))
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    region_gates = gates[first_sample[order]]
    return xr.Dataset(
        {
            "count": ("region", counts[order]),
            "representative": ("region", first_sample[order]),
            "pattern": (("region", "byte"), patterns[order]),
            "active": ("region", region_gates.sum(axis=(1, 2))),
            "map": (("region", "output", "time"), linear_maps(rnn, region_gates)),
            "region_id": ("sample", rank[inverse.reshape(-1)]),
            "active_fraction": float(gates.mean()),
            "active_by_time": ("time", gates.mean(axis=(0, 2))),
        },
        attrs={"most_regions_log2": rnn.hidden * gates.shape[1]},
    )
