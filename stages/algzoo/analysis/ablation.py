"""What the RNN can do without a neuron, without two of them, and without a direction nobody chose.

A neuron that is ablated is zero after every ReLU, the last one included. Scores are accuracies, or for tasks
whose answer is a number minus the root mean squared error, so that damage is negative in both.

Border: labelled weights and samples in, scores out. An ablation is a change of the columns that read the
state (rnn.py), which is what `Zero(neurons=…)` at `rnn.hook_hidden.*` does.

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


def classes_or_numbers(said: Array) -> Array:
    """Answers [sample] of what a network says [sample, output]: the first largest, or the one number."""
    found: Array = said[:, 0] if said.shape[1] == 1 else said.argmax(axis=1)
    return found


def score(rnn: RnnWeights, x: Array, target: Array) -> float:
    """Accuracy over samples, or minus the root mean squared error."""
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
        "delta": Output(("neuron",), "1", "change of the score"),
        "order": Output(("rank",), "1", "neurons by delta, the most harmful first"),
        "pair_ablated": Output(("neuron", "neuron_"), "1", "score without both; NaN on the diagonal"),
        "pair_delta": Output(("neuron", "neuron_"), "1", "change of the score"),
        "interaction": Output(("neuron", "neuron_"), "1", "pair delta less the sum of both deltas"),
    },
)
def neuron_ablation(weights: xr.Dataset, samples: xr.Dataset) -> xr.Dataset:
    """Scores of the RNN without each neuron and without each two.

    samples: as `algzoo_samples` gives them. interaction: negative where two do together what neither does
    alone (redundancy: more damage than the sum), 0 where they are independent, positive where one is enough
    to fail.
    """
    import xarray as xr

    rnn = require_rnn(weights, "ablation")
    x, target = samples["x"].values, samples["target"].values
    baseline, hidden = score(rnn, x, target), rnn.hidden
    alone = np.array([score(rnn.without(j), x, target) for j in range(hidden)])
    pairs = np.full((hidden, hidden), np.nan)
    for i in range(hidden):
        for j in range(i + 1, hidden):
            pairs[i, j] = pairs[j, i] = score(rnn.without(i, j), x, target)
    delta, pair_delta = alone - baseline, pairs - baseline
    both = ("neuron", "neuron_")
    return xr.Dataset(
        {
            "baseline": baseline,
            "ablated": ("neuron", alone),
            "delta": ("neuron", delta),
            "order": ("rank", np.argsort(delta, kind="stable")),
            "pair_ablated": (both, pairs),
            "pair_delta": (both, pair_delta),
            "interaction": (both, pair_delta - (delta[:, None] + delta)),
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
    """Change of the score when one direction of a random orthonormal basis is taken out of the state after
    every ReLU: the null of neurons, which are such a basis.

    The state becomes (1 - v v') h. The most harmful of a basis is what the most harmful neuron is beside:
    both were chosen among as many.
    """
    import xarray as xr

    rnn = require_rnn(weights, "ablation")
    x, target = samples["x"].values, samples["target"].values
    baseline, whole = score(rnn, x, target), np.eye(rnn.hidden)
    drawn = np.random.default_rng(seed).standard_normal((draws, rnn.hidden, rnn.hidden))
    bases = np.linalg.qr(drawn)[0]
    found = [
        [score(rnn.projected(whole - np.outer(v, v)), x, target) - baseline for v in basis.T]
        for basis in bases
    ]
    return xr.DataArray(np.array(found), dims=("draw", "direction"), name="delta")
