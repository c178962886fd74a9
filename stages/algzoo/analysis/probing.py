"""Roles of neurons of the RNN: correlation of their final states with interpretable functions of the input.

Roles, in the order that decides ties (inputs x of n numbers, last = x_{n-1}, m(...) = max(0, ...)):

    RunningMax      m(x)
    RunningMin      relu(min x)
    MaxIncrement    relu(m(x) - m(x but the last))
    LeaveOneOutMax  relu(m(x) - last): "maximum minus the last", not leave-one-out over every index
    RecentInput     relu(last)
    Comparator      relu(x_a - x_b), for every ordered pair

Correlation is not causation: it does not show that the network uses the neuron for that function.

Border: labelled weights and samples in.

Axes: neuron, reference (each comparator separately), role, time.
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
"""Role of a neuron that correlates with no reference function by at least THRESHOLD."""
THRESHOLD = 0.8
"""Smallest absolute correlation with a reference function that gives a neuron a role."""


def references(x: Array) -> tuple[list[str], Array]:
    """Interpretable functions of inputs, with which the states of neurons are compared.

    Arguments:
        x: inputs [sample, time].

    Returns:
        (names of the functions, in the order of `ROLES`; their values, float64 [sample, reference]).
    """
    x = x.astype(np.float64)
    steps, last = x.shape[1], x[:, -1]
    top = np.maximum(x.max(axis=1), 0.0)
    # initial=0 also covers a single time step, which has no earlier numbers.
    earlier_top = np.maximum(x[:, :-1].max(axis=1, initial=0.0), 0.0)
    named = {
        "RunningMax": top,
        "RunningMin": np.maximum(x.min(axis=1), 0.0),
        "MaxIncrement": np.maximum(top - earlier_top, 0.0),
        "LeaveOneOutMax": np.maximum(top - last, 0.0),
        "RecentInput": np.maximum(last, 0.0),
    }
    for a in range(steps):
        for b in range(steps):
            if a != b:
                named[f"Comparator({a},{b})"] = np.maximum(x[:, a] - x[:, b], 0.0)
    return list(named), np.stack(list(named.values()), axis=1)


def absolute_correlation(states: Array, values: Array) -> Array:
    """Absolute Pearson correlation between states and reference functions over samples, [neuron, reference].

    It is 0 if one of both has no variance.

    Arguments:
        states: states of neurons, [sample, neuron].
        values: values of the reference functions, [sample, reference].
    """
    states, values = states - states.mean(axis=0), values - values.mean(axis=0)
    scale = np.outer(np.linalg.norm(states, axis=0), np.linalg.norm(values, axis=0))
    covariances = np.abs(states.T @ values)
    correlations: Array = np.divide(covariances, scale, out=np.zeros_like(covariances), where=scale > 0)
    # Rounding may exceed 1 in the last digit.
    return np.minimum(correlations, 1.0)


@stage(
    version=1,
    inputs={"weights": None, "samples": None},
    outputs={
        "role": Output(("neuron",), "1", "role of the best reference, or Unknown below 0.8"),
        "best": Output(("neuron",), "1", "reference of largest absolute correlation, however weak"),
        "correlation": Output(("neuron",), "1", "absolute correlation with that reference"),
        "correlations": Output(("neuron", "reference"), "1", "absolute correlation with every reference"),
        "by_time": Output(
            ("time", "neuron", "role_"), "1", "largest correlation by role, of inputs up to a time step"
        ),
    },
)
def neuron_roles(weights: xr.Dataset, samples: xr.Dataset) -> xr.Dataset:
    """Role of each neuron: the reference function with which its final state correlates most.

    Of references with equal correlation the first one counts.

    Arguments:
        weights: labelled weights of an RNN.
        samples: inputs, as `algzoo_samples` returns them.
    """
    import xarray as xr

    rnn = require_rnn(weights, "roles")
    x = samples["x"].values
    states = np.maximum(rnn.states(x), 0.0)
    by_time = np.zeros((x.shape[1], rnn.hidden, len(ROLES)))
    # References of inputs up to each step: the last iteration leaves those of whole inputs for below.
    for step in range(x.shape[1]):
        names, values = references(x[:, : step + 1])
        correlations = absolute_correlation(states[:, step], values)
        role_of_reference = np.array([ROLES.index(_role(name)) for name in names])
        for role in set(role_of_reference.tolist()):
            by_time[step, :, role] = correlations[:, role_of_reference == role].max(axis=1)
    best = correlations.argmax(axis=1)
    correlation = correlations[np.arange(rnn.hidden), best]
    roles = [
        _role(names[i]) if value >= THRESHOLD else UNKNOWN for i, value in zip(best, correlation, strict=True)
    ]
    return xr.Dataset(
        {
            "role": ("neuron", np.array(roles, object)),
            "best": ("neuron", np.array([names[i] for i in best], object)),
            "correlation": ("neuron", correlation),
            "correlations": (("neuron", "reference"), correlations),
            "by_time": (("time", "neuron", "role_"), by_time),
        },
        coords={"reference": np.array(names, object), "role_": np.array(ROLES, object)},
    )


def _role(name: str) -> str:
    """Role that a reference function stands for: "Comparator" for "Comparator(0,1)"."""
    return name.partition("(")[0]
