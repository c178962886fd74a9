"""Explanations of the RNN as programs: each says what class the network will say, without being it.

An estimator is what somebody would have to write down, and what that predicts:

    oracle       the task itself
    piecewise    every linear map the network is made of; it restates the network, and always agrees
    top_regions  the commonest regions, each by its mean direction and its map; an input goes to the nearest
                 direction
    ablation     the network without the neurons it hardly misses
    roles        states by the references neurons go with (probing.py), means where there is none; the readout
                 as it is

Numbers are told to b bits (surprise.py says how many); `bits` is the length of the description. What an
estimator needs to know of the network is fitted on samples of its own.

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
NEEDED = 0.01
"""Accuracy a neuron must be worth to be kept by the ablation estimator."""


@dataclass(frozen=True, eq=False)
class Estimator:
    """One explanation.

    says: classes [sample] for inputs [sample, time]. structure: bits of choices among finitely many. numbers:
    how many numbers are told. operations: multiplications and additions for one sample.
    """

    name: str
    description: str
    says: Callable[[Array], Ints]
    structure: float
    numbers: int
    operations: int

    def bits(self, per_number: float) -> float:
        """Length of the description where a number takes so many bits."""
        return self.structure + self.numbers * per_number


def estimators_of(rnn: RnnWeights, task: Task, x: Array, target: Array, *, regions: int) -> list[Estimator]:
    """Every estimator of a network whose answers are classes, in the order of `ESTIMATORS`.

    x, target: samples [sample, time] they are fitted on. regions: how many top_regions tells.
    """
    return [
        _oracle(rnn, task, x.shape[1]),
        _piecewise(rnn, x.shape[1]),
        _top_regions(rnn, x, regions),
        _ablation(rnn, x, target),
        _roles(rnn, x),
    ]


def operations_of(rnn: RnnWeights, steps: int) -> int:
    """Multiplications and additions of a pass over one sample."""
    return 2 * (steps * rnn.hidden * (1 + rnn.hidden) + rnn.oh.size)


def _oracle(rnn: RnnWeights, task: Task, steps: int) -> Estimator:
    told = f"the task: {task.meaning}"
    return Estimator("oracle", told, task.targets, math.log2(len(TASKS)), 0, steps)


def _piecewise(rnn: RnnWeights, steps: int) -> Estimator:
    def says(x: Array) -> Ints:
        gates = gates_of(rnn, x)
        patterns, first, inverse = np.unique(
            pattern_bits(gates), axis=0, return_index=True, return_inverse=True
        )
        maps, place = linear_maps(rnn, gates[first]), inverse.reshape(-1)
        found = np.empty((len(x), len(rnn.oh)))
        for region in range(len(patterns)):
            here = place == region
            found[here] = x[here] @ maps[region].T
        return classes_or_numbers(found)

    work = operations_of(rnn, steps) + 2 * steps * len(rnn.oh)
    return Estimator("piecewise", "every region with its linear map", says, 0.0, rnn.parameters, work)


def _top_regions(rnn: RnnWeights, x: Array, regions: int) -> Estimator:
    gates = gates_of(rnn, x)
    patterns, first, inverse, counts = np.unique(
        pattern_bits(gates), axis=0, return_index=True, return_inverse=True, return_counts=True
    )
    kept = np.argsort(-counts, kind="stable")[:regions]
    maps = linear_maps(rnn, gates[first[kept]])
    unit = x / np.linalg.norm(x, axis=1, keepdims=True)
    middles = np.array([unit[inverse.reshape(-1) == region].mean(axis=0) for region in kept])
    middles /= np.maximum(np.linalg.norm(middles, axis=1, keepdims=True), np.finfo(float).tiny)

    def says(x: Array) -> Ints:
        nearest = (x @ middles.T).argmax(axis=1)
        return classes_or_numbers(np.einsum("sot,st->so", maps[nearest], x))

    many, steps = len(kept), x.shape[1]
    told = f"the {many} commonest of {len(patterns)} regions, each by its mean direction and its linear map"
    numbers = many * steps * (1 + len(rnn.oh))
    return Estimator("top_regions", told, says, 0.0, numbers, 2 * steps * (many + len(rnn.oh)))


def _ablation(rnn: RnnWeights, x: Array, target: Array) -> Estimator:
    baseline = score(rnn, x, target)
    worth = np.array([baseline - score(rnn.without(j), x, target) for j in range(rnn.hidden)])
    kept = np.flatnonzero(worth >= NEEDED)
    small = RnnWeights(rnn.ih[kept], rnn.hh[np.ix_(kept, kept)], rnn.oh[:, kept])

    def says(x: Array) -> Ints:
        return classes_or_numbers(small.outputs(x))

    told = f"the network of the {len(kept)} of {rnn.hidden} neurons worth a point of accuracy each"
    choice = math.log2(math.comb(rnn.hidden, len(kept)))
    return Estimator("ablation", told, says, choice, small.parameters, operations_of(small, x.shape[1]))


def _roles(rnn: RnnWeights, x: Array) -> Estimator:
    states = np.maximum(rnn.states(x)[:, -1], 0.0)
    names, values = references(x)
    found = absolute_correlation(states, values)
    best = found.argmax(axis=1)
    slope, level = np.zeros(rnn.hidden), states.mean(axis=0)
    known = found[np.arange(rnn.hidden), best] >= THRESHOLD
    for j in np.flatnonzero(known):
        slope[j], level[j] = np.polyfit(values[:, best[j]], states[:, j], 1)

    def says(x: Array) -> Ints:
        composed: Floats = references(x)[1][:, best] * slope + level
        return classes_or_numbers(composed @ rnn.oh.T)

    many = int(known.sum())
    told = f"{many} of {rnn.hidden} neurons by their roles, the others by their mean; the readout as it is"
    choice = rnn.hidden * math.log2(len(names) + 1)
    numbers = rnn.hidden + many + rnn.oh.size
    return Estimator("roles", told, says, choice, numbers, x.shape[1] + 2 * (many + rnn.oh.size))
