"""Explanations of the RNN as programs that predict its class.

    oracle       the task itself
    piecewise    every linear map of the network; it restates the network, and always agrees
    top_regions  the most frequent regions, each by its mean direction and its map; an input goes to the
                 nearest direction
    ablation     the network without the neurons it hardly needs
    roles        states predicted from the references that neurons correlate with (probing.py), means for
                 neurons without a role; the readout unchanged

Numbers are written to b bits (surprise.py); `bits` is the length of the description. Explanations are fitted
on samples of their own.

Border: matrices and samples in, predictions out.

Axes: sample, time, neuron.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ....store.arrays import Array, Floats, Ints
from ..rnn import RnnWeights
from ..tasks import TASKS, Task
from .ablation import classes_or_numbers, score
from .probing import THRESHOLD, absolute_correlation, references
from .regions import gates_of, linear_maps, pattern_bits

__all__ = ["ESTIMATORS", "Estimator", "estimators_of"]

ESTIMATORS = ("oracle", "piecewise", "top_regions", "ablation", "roles")
"""Names of the explanations, in order."""
NEEDED = 0.01
"""The explanation "ablation" keeps a neuron if its ablation lowers the accuracy by at least this much."""


@dataclass(frozen=True, eq=False)
class Estimator:
    """One explanation: a program that predicts the class, and the length of its description."""

    name: str
    """One of `ESTIMATORS`."""
    description: str
    """The program in words."""
    predict: Callable[[Array], Ints]
    """Function from inputs [sample, time] to predicted classes [sample]."""
    structure: float
    """Number of bits that encode the discrete choices of the program, such as which neurons are kept."""
    numbers: int
    """Number of real numbers in the program."""
    operations: int
    """Number of multiplications and additions per sample."""

    def bits(self, per_number: float) -> float:
        """Length of the program in bits, if each real number is written with `per_number` bits."""
        return self.structure + self.numbers * per_number


def estimators_of(rnn: RnnWeights, task: Task, x: Array, target: Array, *, regions: int) -> list[Estimator]:
    """All explanations of a network that answers with classes, in the order of `ESTIMATORS`.

    Arguments:
        rnn: the network.
        task: its task.
        x: inputs [sample, time] to which the explanations are fitted.
        target: correct answers [sample] to these inputs.
        regions: number of regions that the explanation "top_regions" describes.
    """
    return [
        _oracle(rnn, task, x.shape[1]),
        _piecewise(rnn, x.shape[1]),
        _top_regions(rnn, x, regions),
        _ablation(rnn, x, target),
        _roles(rnn, x),
    ]


def operations_of(rnn: RnnWeights, steps: int) -> int:
    """Number of multiplications and additions of a forward pass over one sample.

    Arguments:
        rnn: the network.
        steps: number of time steps of the input.
    """
    return 2 * (steps * rnn.hidden * (1 + rnn.hidden) + rnn.oh.size)


def _oracle(rnn: RnnWeights, task: Task, steps: int) -> Estimator:
    """The explanation that the network always answers correctly."""
    # Its only choice is which of the tasks it is: log2 of their number in bits.
    description = f"the task: {task.meaning}"
    return Estimator("oracle", description, task.targets, math.log2(len(TASKS)), 0, steps)


def _piecewise(rnn: RnnWeights, steps: int) -> Estimator:
    """The explanation by all linear regions of the network, each with its linear map."""

    def predict(x: Array) -> Ints:
        gates = gates_of(rnn, x)
        patterns, first, inverse = np.unique(
            pattern_bits(gates), axis=0, return_index=True, return_inverse=True
        )
        maps, region_of = linear_maps(rnn, gates[first]), inverse.reshape(-1)
        outputs = np.empty((len(x), len(rnn.oh)))
        for region in range(len(patterns)):
            in_region = region_of == region
            outputs[in_region] = x[in_region] @ maps[region].T
        return classes_or_numbers(outputs)

    # A full pass to find the region, and the region's linear map.
    work = operations_of(rnn, steps) + 2 * steps * len(rnn.oh)
    return Estimator("piecewise", "every region with its linear map", predict, 0.0, rnn.parameters, work)


def _top_regions(rnn: RnnWeights, x: Array, regions: int) -> Estimator:
    """The explanation by the linear regions that contain most of the inputs `x`."""
    gates = gates_of(rnn, x)
    patterns, first, inverse, counts = np.unique(
        pattern_bits(gates), axis=0, return_index=True, return_inverse=True, return_counts=True
    )
    most_frequent = np.argsort(-counts, kind="stable")[:regions]
    maps = linear_maps(rnn, gates[first[most_frequent]])
    # Regions are cones, so only the direction of an input matters.
    unit = x / np.linalg.norm(x, axis=1, keepdims=True)
    directions = np.array([unit[inverse.reshape(-1) == region].mean(axis=0) for region in most_frequent])
    # tiny: the mean of opposite directions may be 0, and 0 / tiny stays 0.
    directions /= np.maximum(np.linalg.norm(directions, axis=1, keepdims=True), np.finfo(float).tiny)

    def predict(x: Array) -> Ints:
        nearest = (x @ directions.T).argmax(axis=1)
        return classes_or_numbers(np.einsum("sot,st->so", maps[nearest], x))

    count, steps = len(most_frequent), x.shape[1]
    description = (
        f"the {count} commonest of {len(patterns)} regions, each by its mean direction and its linear map"
    )
    numbers = count * steps * (1 + len(rnn.oh))
    return Estimator("top_regions", description, predict, 0.0, numbers, 2 * steps * (count + len(rnn.oh)))


def _ablation(rnn: RnnWeights, x: Array, target: Array) -> Estimator:
    """The explanation by a smaller network: only the neurons whose ablation costs accuracy on `x`."""
    baseline = score(rnn, x, target)
    lost_accuracy = np.array([baseline - score(rnn.without(j), x, target) for j in range(rnn.hidden)])
    needed = np.flatnonzero(lost_accuracy >= NEEDED)
    small = RnnWeights(rnn.ih[needed], rnn.hh[np.ix_(needed, needed)], rnn.oh[:, needed])

    def predict(x: Array) -> Ints:
        return classes_or_numbers(small.outputs(x))

    description = f"the network of the {len(needed)} of {rnn.hidden} neurons worth a point of accuracy each"
    # Bits that name which neurons are kept, among all subsets of this size.
    choice = math.log2(math.comb(rnn.hidden, len(needed)))
    return Estimator(
        "ablation", description, predict, choice, small.parameters, operations_of(small, x.shape[1])
    )


def _roles(rnn: RnnWeights, x: Array) -> Estimator:
    """Estimator that predicts the final state of each neuron from its role, the function of the input that
    correlates most with it, by a line fitted on the inputs x."""
    states = np.maximum(rnn.states(x)[:, -1], 0.0)
    names, values = references(x)
    correlations = absolute_correlation(states, values)
    best = correlations.argmax(axis=1)
    slope, level = np.zeros(rnn.hidden), states.mean(axis=0)
    has_role = correlations[np.arange(rnn.hidden), best] >= THRESHOLD
    for j in np.flatnonzero(has_role):
        slope[j], level[j] = np.polyfit(values[:, best[j]], states[:, j], 1)

    def predict(x: Array) -> Ints:
        composed: Floats = references(x)[1][:, best] * slope + level
        return classes_or_numbers(composed @ rnn.oh.T)

    count = int(has_role.sum())
    description = (
        f"{count} of {rnn.hidden} neurons by their roles, the others by their mean; the readout as it is"
    )
    # Bits that name each neuron's reference, or that it has none.
    choice = rnn.hidden * math.log2(len(names) + 1)
    numbers = rnn.hidden + count + rnn.oh.size
    return Estimator("roles", description, predict, choice, numbers, x.shape[1] + 2 * (count + rnn.oh.size))
