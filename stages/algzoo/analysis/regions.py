"""Where the RNN is linear: which ReLUs are open, and the matrix it then is.

A gate is open where a pre-activation is not negative. All gates of all steps are a pattern of T H bits, bit t
H + j for neuron j at time t; inputs of one pattern are a region, a cone, in which y = A x. Column t of A is
W_oh (G_{T-1} W_hh) ... (G_{t+1} W_hh) G_t W_ih, and there is no offset, as there are no biases.

Border: labelled weights and samples in; exact measures of regions are cones.py's.

Axes: region (the commonest first), byte of a pattern (least bit first), output, time, sample.
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
    """Which ReLUs are open [sample, time, neuron]; one that reads 0 is."""
    found: Bools = rnn.states(x) >= 0
    return found


def pattern_bits(gates: Bools) -> Array:
    """Gates [sample, time, neuron] as packed patterns, uint8 [sample, byte]."""
    return np.packbits(gates.reshape(len(gates), -1), axis=1, bitorder="little")


def linear_maps(rnn: RnnWeights, gates: Bools) -> Array:
    """The matrices [region, output, time] of regions with these gates [region, time, neuron].

    Raises WeightsError where products leave the range of float64.
    """
    many, steps, _ = gates.shape
    maps = np.empty((many, len(rnn.oh), steps))
    read = np.broadcast_to(rnn.oh, (many, *rnn.oh.shape))
    with np.errstate(over="ignore", invalid="ignore"):
        for step in range(steps - 1, -1, -1):
            open_ones = read * gates[:, step, None, :]
            maps[:, :, step] = open_ones @ rnn.ih
            read = open_ones @ rnn.hh
    if not np.isfinite(maps).all():
        raise WeightsError(f"linear maps: expected finite entries, found an overflow over {steps} steps")
    return maps


@stage(
    version=1,
    inputs={"weights": None, "samples": None},
    outputs={
        "count": Output(("region",), "samples", "samples in the region"),
        "representative": Output(("region",), "1", "its first sample"),
        "pattern": Output(("region", "byte"), "1", "open gates, packed"),
        "active": Output(("region",), "1", "open gates"),
        "map": Output(("region", "output", "time"), "1", "the matrix the network is there"),
        "region_id": Output(("sample",), "1", "region of each sample"),
        "active_fraction": Output((), "1", "share of gates that are open, over all samples"),
        "active_by_time": Output(("time",), "1", "the same of each time step"),
    },
)
def linear_regions(weights: xr.Dataset, samples: xr.Dataset) -> xr.Dataset:
    """The regions some samples lie in, with their counts and matrices, the commonest first.

    samples: as `algzoo_samples` gives them. Regions of as many samples come in the order of their first.
    """
    import xarray as xr

    rnn = require_rnn(weights, "linear regions")
    gates = gates_of(rnn, samples["x"].values)
    patterns, first, inverse, counts = np.unique(
        pattern_bits(gates), axis=0, return_index=True, return_inverse=True, return_counts=True
    )
    order = np.lexsort((first, -counts))
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    held = gates[first[order]]
    return xr.Dataset(
        {
            "count": ("region", counts[order]),
            "representative": ("region", first[order]),
            "pattern": (("region", "byte"), patterns[order]),
            "active": ("region", held.sum(axis=(1, 2))),
            "map": (("region", "output", "time"), linear_maps(rnn, held)),
            "region_id": ("sample", place[inverse.reshape(-1)]),
            "active_fraction": float(gates.mean()),
            "active_by_time": ("time", gates.mean(axis=(0, 2))),
        },
        attrs={"most_regions_log2": rnn.hidden * gates.shape[1]},
    )
