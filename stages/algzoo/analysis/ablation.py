"""Ablation of neurons of the RNN, one and two at a time, with random directions as the null distribution.

An ablated neuron is zero after every ReLU, the last included. Scores are accuracies, or minus the root mean
squared error for a scalar answer, so that a negative change is damage in both.

Border: labelled weights and samples in, scores out. Ablation changes the columns that read the state
(rnn.py), equivalent to `Zero(neurons=…)` at `rnn.hook_hidden.*`.

Axes: neuron, neuron_ (the second of a pair), draw.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ....pipeline import Output, stage
from ....store.arrays import Array
from ..rnn import RnnWeights, require_rnn

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["classes_or_numbers", "neuron_ablation", "random_ablation", "score"]


def classes_or_numbers(outputs: Array) -> Array:
    """Answers of a network [sample] from its outputs [sample, output].

    For one output, the output itself; for several, the index of the largest (the first of equal ones).
    """
    answers: Array = outputs[:, 0] if outputs.shape[1] == 1 else outputs.argmax(axis=1)
    return answers


def score(rnn: RnnWeights, x: Array, target: Array) -> float:
    """Score of a network, larger is better: accuracy, or minus the root mean squared error of scalar answers.

    Arguments:
        rnn: the network.
        x: inputs [sample, time].
        target: correct answers [sample].
    """
    # Minus, so that a larger score is better and a negative change is damage in both measures.
    answers = classes_or_numbers(rnn.outputs(x))
    if len(rnn.oh) == 1:
        return -float(np.sqrt(np.mean((answers - target) ** 2)))
    return float(np.mean(answers == target))


@stage(
    version=1,
    inputs={"weights": None, "samples": None},
    outputs={
        "baseline": Output((), "1", "score of the whole network"),
        "ablated": Output(("neuron",), "1", "score without the neuron"),
        "delta": Output(("neuron",), "1", "change of the score without the neuron"),
        "order": Output(("rank",), "1", "neurons by change of the score, most harmful ablation first"),
        "pair_ablated": Output(("neuron", "neuron_"), "1", "score without both; NaN on the diagonal"),
        "pair_delta": Output(("neuron", "neuron_"), "1", "change of the score without both"),
        "interaction": Output(("neuron", "neuron_"), "1", "pair delta less the sum of both deltas"),
    },
)
def neuron_ablation(weights: xr.Dataset, samples: xr.Dataset) -> xr.Dataset:
    """Ablation scores of the RNN: each neuron alone, and each pair.

    `interaction` of a pair is negative if the neurons are redundant (ablating both does more damage than the
    sum of both alone), 0 if they are independent, and positive if ablating either one already does the
    damage.

    Arguments:
        weights: labelled weights of an RNN.
        samples: inputs and correct answers, as `algzoo_samples` returns them.
    """
    import xarray as xr

    rnn = require_rnn(weights, "ablation")
    x, target = samples["x"].values, samples["target"].values
    baseline, hidden = score(rnn, x, target), rnn.hidden
    single = np.array([score(rnn.without(j), x, target) for j in range(hidden)])
    # NaN on the diagonal: a pair of a neuron with itself is no pair.
    pairs = np.full((hidden, hidden), np.nan)
    for i in range(hidden):
        for j in range(i + 1, hidden):
            pairs[i, j] = pairs[j, i] = score(rnn.without(i, j), x, target)
    delta, pair_delta = single - baseline, pairs - baseline
    pair_dims = ("neuron", "neuron_")
    return xr.Dataset(
        {
            "baseline": baseline,
            "ablated": ("neuron", single),
            "delta": ("neuron", delta),
            "order": ("rank", np.argsort(delta, kind="stable")),
            "pair_ablated": (pair_dims, pairs),
            "pair_delta": (pair_dims, pair_delta),
            "interaction": (pair_dims, pair_delta - (delta[:, None] + delta)),
        },
        attrs={"measure": "minus RMSE" if len(rnn.oh) == 1 else "accuracy"},
    )


@stage(
    version=1,
    inputs={"weights": None, "samples": None},
    outputs={
        "delta": Output(
            ("draw", "direction"), "1", "change of the score without a direction of a random basis"
        )
    },
)
def random_ablation(
    weights: xr.Dataset, samples: xr.Dataset, *, draws: int = 50, seed: int = 0
) -> xr.DataArray:
    """Null distribution of neuron ablation: changes of the score if random directions are ablated instead.

    For each direction v of a random orthonormal basis, the state becomes (1 - v v^T) h after every ReLU.
    Neurons form such a basis, so the most harmful neuron is compared with the most harmful direction of each
    random basis: both are the extreme of equally many candidates.

    Arguments:
        weights: labelled weights of an RNN.
        samples: inputs and correct answers, as `algzoo_samples` returns them.
        draws: number of random bases.
        seed: seed of the bases.

    Returns:
        Change of the score without each direction, float64 [draw, direction].
    """
    import xarray as xr

    rnn = require_rnn(weights, "ablation")
    x, target = samples["x"].values, samples["target"].values
    baseline, identity = score(rnn, x, target), np.eye(rnn.hidden)
    gaussian = np.random.default_rng(seed).standard_normal((draws, rnn.hidden, rnn.hidden))
    # Q of a Gaussian matrix is a uniformly distributed orthonormal basis.
    bases = np.linalg.qr(gaussian)[0]
    deltas = [
        [score(rnn.projected(identity - np.outer(v, v)), x, target) - baseline for v in basis.T]
        for basis in bases
    ]
    return xr.DataArray(np.array(deltas), dims=("draw", "direction"), name="delta")
