"""What neurons of the RNN stand for: their last states beside functions of the input that a person can name.

Roles, in the order in which a tie is decided (n numbers x, the last one x_{n-1}; m(...) = max(0, ...)):

    RunningMax      m(x)
    RunningMin      relu(min x)
    MaxIncrement    relu(m(x) - m(x but the last))
    LeaveOneOutMax  relu(m(x) - last): "maximum less the last", and no leave-one-out over every index
    RecentInput     relu(last)
    Comparator      relu(x_a - x_b), for every ordered pair

A correlation says that a neuron goes with a function over these inputs, not that the network needs it for
that.

Border: labelled weights and samples in.

Axes: neuron, reference (each comparator apart), role, time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ....pipeline import Output, stage
from ....store.arrays import Array
from ..rnn import require_rnn

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["ROLES", "THRESHOLD", "UNKNOWN", "absolute_correlation", "neuron_roles", "references"]

ROLES = ("RunningMax", "RunningMin", "MaxIncrement", "LeaveOneOutMax", "RecentInput", "Comparator")
UNKNOWN = "Unknown"
THRESHOLD = 0.8
"""Absolute correlation below which a neuron has no role."""


def references(x: Array) -> tuple[list[str], Array]:
    """Names and values [sample, reference] of all functions of inputs [sample, time], in the order of the
    roles."""
    x = x.astype(np.float64)
    steps, last = x.shape[1], x[:, -1]
    top = np.maximum(x.max(axis=1), 0.0)
    before = np.maximum(x[:, :-1].max(axis=1, initial=0.0), 0.0)
    named = {
        "RunningMax": top,
        "RunningMin": np.maximum(x.min(axis=1), 0.0),
        "MaxIncrement": np.maximum(top - before, 0.0),
        "LeaveOneOutMax": np.maximum(top - last, 0.0),
        "RecentInput": np.maximum(last, 0.0),
    }
    for a in range(steps):
        for b in range(steps):
            if a != b:
                named[f"Comparator({a},{b})"] = np.maximum(x[:, a] - x[:, b], 0.0)
    return list(named), np.stack(list(named.values()), axis=1)


def absolute_correlation(states: Array, values: Array) -> Array:
    """|Pearson| [neuron, reference] of states [sample, neuron] and values [sample, reference]; 0 without
    variance."""
    states, values = states - states.mean(axis=0), values - values.mean(axis=0)
    scale = np.outer(np.linalg.norm(states, axis=0), np.linalg.norm(values, axis=0))
    found = np.abs(states.T @ values)
    shares: Array = np.divide(found, scale, out=np.zeros_like(found), where=scale > 0)
    return np.minimum(shares, 1.0)


@stage(
    version=1,
    inputs={"weights": None, "samples": None},
    outputs={
        "role": Output(("neuron",), "1", "the best role, or Unknown below 0.8"),
        "best": Output(("neuron",), "1", "the best reference, however weak"),
        "correlation": Output(("neuron",), "1", "its absolute correlation"),
        "correlations": Output(("neuron", "reference"), "1", "absolute correlation with every reference"),
        "by_time": Output(
            ("time", "neuron", "role_"), "1", "the best of each role, of inputs up to a time step"
        ),
    },
)
def neuron_roles(weights: xr.Dataset, samples: xr.Dataset) -> xr.Dataset:
    """Absolute correlation of each neuron's last state with each reference, and the role that goes with it
    best.

    samples: as `algzoo_samples` gives them. Among equals the first reference counts.
    """
    import xarray as xr

    rnn = require_rnn(weights, "roles")
    x = samples["x"].values
    states = np.maximum(rnn.states(x), 0.0)
    by_time = np.zeros((x.shape[1], rnn.hidden, len(ROLES)))
    for step in range(x.shape[1]):
        names, values = references(x[:, : step + 1])
        found = absolute_correlation(states[:, step], values)
        kinds = np.array([ROLES.index(_kind(name)) for name in names])
        for role in set(kinds.tolist()):
            by_time[step, :, role] = found[:, kinds == role].max(axis=1)
    best = found.argmax(axis=1)
    correlation = found[np.arange(rnn.hidden), best]
    chosen = [
        _kind(names[i]) if high >= THRESHOLD else UNKNOWN for i, high in zip(best, correlation, strict=True)
    ]
    return xr.Dataset(
        {
            "role": ("neuron", np.array(chosen, object)),
            "best": ("neuron", np.array([names[i] for i in best], object)),
            "correlation": ("neuron", correlation),
            "correlations": (("neuron", "reference"), found),
            "by_time": (("time", "neuron", "role_"), by_time),
        },
        coords={"reference": np.array(names, object), "role_": np.array(ROLES, object)},
    )


def _kind(name: str) -> str:
    return name.partition("(")[0]
