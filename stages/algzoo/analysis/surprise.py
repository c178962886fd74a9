"""Surprise accounting: how much of a network an explanation explains, in bits.

An explanation (estimators.py) costs the bits of its description and leaves a residual surprise: the bits that
encode where the network answers differently. It is worthwhile if both together are fewer than the bits
selected by training:

    explanation_bits + residual_surprise <= selection_bits

Weights are read through noise N(0, (sigma std)^2), with std that of each matrix; smaller details need no
explanation. A number then holds b = log2(1 + 1 / sigma^2) / 2 bits (capacity of the Gaussian channel),
selection_bits are b times the number of parameters, and numbers of an explanation take b bits as well. With
disagreement q between explanation and noisy networks, O classes and n samples, residual_surprise = n (h(q) +
q log2(O - 1)) with the binary entropy h: the network's answers, encoded given the explanation. It grows with
n, so a bound holds for the reported n only; `covered` is the largest n for which it would.

Source: Hilton, "Formal verification, heuristic explanations and surprise accounting" (Alignment Research
Center, 2024). Selection, noise and residual are not defined there; the definitions above are of this project.

Border: labelled weights and samples in.

Axes: estimator, sigma.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from ....pipeline import Output, stage
from ....store.arrays import Array
from ....store.errors import ConfigError
from ..rnn import RnnWeights, require_rnn
from ..tasks import task_named
from .ablation import classes_or_numbers
from .estimators import ESTIMATORS, estimators_of, operations_of

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["SIGMAS", "bits_per_number", "noisy", "residual_bits", "surprise_accounting"]

SIGMAS = (0.01, 0.05, 0.1)
"""Default noise levels, in units of the standard deviation of each weight matrix."""


def bits_per_number(sigma: float) -> float:
    """Bits of information in a weight read through Gaussian noise: log2(1 + 1 / sigma^2) / 2.

    Arguments:
        sigma: standard deviation of the noise, in units of that of the weights.
    """
    return 0.5 * math.log2(1.0 + sigma**-2)


def residual_bits(disagreement: float, classes: int, samples: int) -> float:
    """Bits that encode a network's answers, given predictions that are sometimes wrong.

    Arguments:
        disagreement: share of wrong predictions.
        classes: number of classes.
        samples: number of answers.
    """
    # A mean of shares may leave [0, 1] by rounding, where the logarithm fails.
    q = min(max(disagreement, 0.0), 1.0)
    entropy = -sum(rate * math.log2(rate) for rate in (q, 1.0 - q) if rate > 0)
    return samples * (entropy + q * math.log2(max(classes - 1, 1)))


def covered(spare: Array, per_answer: Array) -> Array:
    """Number of answers that a number of bits can encode, float; infinite where an answer takes no bits.

    Arguments:
        spare: available bits; a negative number encodes 0 answers.
        per_answer: bits per answer, of the same shape.
    """
    unlimited = np.where(spare >= 0, np.inf, 0.0)
    # `where` avoids 0 / 0, which numpy would warn about; those entries keep `unlimited`.
    return np.floor(np.divide(np.maximum(spare, 0.0), per_answer, out=unlimited, where=per_answer > 0))


def noisy(rnn: RnnWeights, sigma: float, rng: np.random.Generator) -> RnnWeights:
    """A copy of the network with Gaussian noise added to every weight.

    Arguments:
        rnn: the network.
        sigma: standard deviation of the noise, in units of that of each matrix.
        rng: generator of the noise.
    """
    return RnnWeights(
        *(
            matrix + rng.standard_normal(matrix.shape) * sigma * matrix.std()
            for matrix in (rnn.ih, rnn.hh, rnn.oh)
        )
    )


@stage(
    version=1,
    inputs={"weights": None, "samples": None, "fitted": None},
    outputs={
        "model_accuracy": Output((), "1", "accuracy of the network"),
        "chance_accuracy": Output((), "1", "accuracy of a guess"),
        "estimate_accuracy": Output(("estimator",), "1", "accuracy of the explanation"),
        "agreement_rate": Output(("estimator",), "1", "share of samples where network and explanation agree"),
        "disagreement_rate": Output(("estimator",), "1", "share of samples where they differ"),
        "operations": Output(("estimator",), "operations", "operations of the explanation per sample"),
        "description": Output(("estimator",), "1", "the explanation in words"),
        "model_operations": Output((), "operations", "operations of the network per sample"),
        "noisy_accuracy": Output(("sigma",), "1", "mean accuracy of noisy networks"),
        "noisy_agreement": Output(("estimator", "sigma"), "1", "mean agreement with noisy networks"),
        "selection_bits": Output(("sigma",), "bits", "bits selected by training: those of all weights"),
        "explanation_bits": Output(("estimator", "sigma"), "bits", "length of the explanation"),
        "residual_surprise": Output(
            ("estimator", "sigma"), "bits", "bits of the answers given the explanation"
        ),
        "bound_satisfied": Output(
            ("estimator", "sigma"), "1", "whether explanation and residual are at most the selection"
        ),
        "tightness": Output(("estimator", "sigma"), "1", "explanation plus residual over selection"),
        "covered": Output(("estimator", "sigma"), "samples", "most answers for which the bound would hold"),
    },
)
def surprise_accounting(
    weights: xr.Dataset,
    samples: xr.Dataset,
    fitted: xr.Dataset,
    *,
    task: str,
    sigmas: tuple[float, ...] = SIGMAS,
    realisations: int = 10,
    regions: int = 16,
    seed: int = 0,
) -> xr.Dataset:
    """Length of every explanation in bits and its residual surprise, compared with the bits of the network.

    Arguments:
        weights: labelled weights of an RNN.
        samples: samples on which explanations are scored, as `algzoo_samples` returns them.
        fitted: other samples, to which explanations are fitted.
        task: name of the task.
        sigmas: noise levels, in units of the standard deviation of each weight matrix.
        realisations: number of noisy networks per noise level.
        regions: number of regions that the explanation "top_regions" describes.
        seed: seed of the noise.

    Raises:
        ConfigError: the task has a scalar answer, or a noise level or `realisations` is not positive.
    """
    import xarray as xr

    rnn, zoo_task = require_rnn(weights, "surprise accounting"), task_named(task)
    if zoo_task.is_scalar:
        raise ConfigError(
            f"surprise accounting needs a task whose answer is a class, found {task}, whose answer is a "
            "number; pass another task"
        )
    if not sigmas or min(sigmas) <= 0 or realisations < 1:
        raise ConfigError(
            "expected sigmas above 0 and realisations of at least 1, found "
            f"sigmas={list(sigmas)} and realisations={realisations}"
        )
    x, target = samples["x"].values, samples["target"].values
    steps, n_samples = x.shape[1], len(x)
    estimators = estimators_of(rnn, zoo_task, fitted["x"].values, fitted["target"].values, regions=regions)
    answers_clean = classes_or_numbers(rnn.outputs(x))
    guesses = np.array([estimator.predict(x) for estimator in estimators])
    rng = np.random.default_rng(seed)
    accuracy = np.zeros(len(sigmas))
    agreement = np.zeros((len(estimators), len(sigmas)))
    for index, sigma in enumerate(sigmas):
        for _ in range(realisations):
            answers = classes_or_numbers(noisy(rnn, sigma, rng).outputs(x))
            # One noisy network scores every estimator: their differences are not due to different noise.
            accuracy[index] += np.mean(answers == target) / realisations
            agreement[:, index] += (guesses == answers).mean(axis=1) / realisations
    selection = np.array([rnn.parameters * bits_per_number(sigma) for sigma in sigmas])
    explanation = np.array(
        [[estimator.bits(bits_per_number(sigma)) for sigma in sigmas] for estimator in estimators]
    )
    residual = np.vectorize(residual_bits)(1.0 - agreement, len(rnn.oh), n_samples)
    agrees, dims = (guesses == answers_clean).mean(axis=1), ("estimator", "sigma")
    return xr.Dataset(
        {
            "model_accuracy": float(np.mean(answers_clean == target)),
            "chance_accuracy": zoo_task.chance(steps),
            "estimate_accuracy": ("estimator", (guesses == target).mean(axis=1)),
            "agreement_rate": ("estimator", agrees),
            "disagreement_rate": ("estimator", 1.0 - agrees),
            "operations": ("estimator", np.array([estimator.operations for estimator in estimators])),
            "description": (
                "estimator",
                np.array([estimator.description for estimator in estimators], object),
            ),
            "model_operations": operations_of(rnn, steps),
            "noisy_accuracy": ("sigma", accuracy),
            "noisy_agreement": (dims, agreement),
            "selection_bits": ("sigma", selection),
            "explanation_bits": (dims, explanation),
            "residual_surprise": (dims, residual),
            "bound_satisfied": (dims, explanation + residual <= selection),
            "tightness": (dims, (explanation + residual) / selection),
            "covered": (dims, covered(selection - explanation, residual / n_samples)),
        },
        coords={"estimator": np.array(ESTIMATORS, object), "sigma": np.array(sigmas)},
        attrs={"samples": n_samples, "param_count": rnn.parameters},
    )
