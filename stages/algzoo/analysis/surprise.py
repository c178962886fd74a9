"""Surprise accounting: how much of a network is explained, in bits.

An explanation (estimators.py) costs the bits it takes to write it down, and leaves a residual surprise: the
bits that say where the network does otherwise. It is worth having if both together are fewer than what was
selected when the network was trained:

    explanation_bits + residual_surprise <= selection_bits

Weights are read through noise N(0, (sigma std)^2), std that of each matrix: what lies below it nobody needs
to explain. A number then holds b = log2(1 + 1 / sigma^2) / 2 bits (capacity of the Gaussian channel),
selection_bits are b times the number of parameters, and numbers of an explanation are told to b bits too.
With disagreement q between the explanation and the noisy networks, O classes and n samples, residual_surprise
= n (h(q) + q log2(O - 1)), h the binary entropy: the answers of the network, coded given the explanation. It
grows with n: a bound that holds says so for the n told, and `covered` is the largest n it would hold for.

Source: Hilton, "Formal verification, heuristic explanations and surprise accounting" (Alignment Research
Center, 2024); the readings of its quantities above are ours.

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
"""Noise of the research protocol, in standard deviations of a matrix."""


def bits_per_number(sigma: float) -> float:
    """Bits of a number read through noise of `sigma` times its spread: log2(1 + 1 / sigma^2) / 2."""
    return 0.5 * math.log2(1.0 + sigma**-2)


def residual_bits(disagreement: float, classes: int, samples: int) -> float:
    """Bits that tell the answers to `samples` samples, given answers that are wrong with this share."""
    q = min(max(disagreement, 0.0), 1.0)
    entropy = -sum(share * math.log2(share) for share in (q, 1.0 - q) if share > 0)
    return samples * (entropy + q * math.log2(max(classes - 1, 1)))


def covered(spare: Array, per_answer: Array) -> Array:
    """How many answers may be coded with the bits to spare; infinitely many where they take none."""
    free = np.where(spare >= 0, np.inf, 0.0)
    return np.floor(np.divide(np.maximum(spare, 0.0), per_answer, out=free, where=per_answer > 0))


def noisy(rnn: RnnWeights, sigma: float, rng: np.random.Generator) -> RnnWeights:
    """The network with normal noise of `sigma` times its standard deviation on every matrix."""
    return RnnWeights(
        *(held + rng.standard_normal(held.shape) * sigma * held.std() for held in (rnn.ih, rnn.hh, rnn.oh))
    )


@stage(
    version=1,
    inputs={"weights": None, "samples": None, "fitted": None},
    outputs={
        "model_accuracy": Output((), "1", "accuracy of the network"),
        "chance_accuracy": Output((), "1", "accuracy of a guess"),
        "estimate_accuracy": Output(("estimator",), "1", "accuracy of the explanation"),
        "agreement_rate": Output(("estimator",), "1", "share of samples where both say the same"),
        "disagreement_rate": Output(("estimator",), "1", "the rest"),
        "operations": Output(("estimator",), "operations", "work per sample"),
        "description": Output(("estimator",), "1", "what is written down"),
        "model_operations": Output((), "operations", "work of the network per sample"),
        "noisy_accuracy": Output(("sigma",), "1", "mean accuracy of noisy networks"),
        "noisy_agreement": Output(("estimator", "sigma"), "1", "mean agreement with noisy networks"),
        "selection_bits": Output(("sigma",), "bits", "what the weights hold"),
        "explanation_bits": Output(("estimator", "sigma"), "bits", "length of the explanation"),
        "residual_surprise": Output(("estimator", "sigma"), "bits", "what it leaves unsaid"),
        "bound_satisfied": Output(("estimator", "sigma"), "1", "whether both are at most the selection"),
        "tightness": Output(("estimator", "sigma"), "1", "their sum over the selection"),
        "covered": Output(("estimator", "sigma"), "samples", "answers up to which the bound would hold"),
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
    """Every estimator beside the network, and the account of its bits.

    samples: scored on; fitted: what estimators are fitted on, other samples (`algzoo_samples`). sigmas: noise
    in standard deviations. realisations: noisy networks per sigma; explanations stay as they are. Raises
    ConfigError for tasks whose answer is a number, which no account of classes fits, and for noise that is
    none.
    """
    import xarray as xr

    rnn, chosen = require_rnn(weights, "surprise accounting"), task_named(task)
    if chosen.is_scalar:
        raise ConfigError(f"expected a task with classes for surprise accounting, found {task}")
    if not sigmas or min(sigmas) <= 0 or realisations < 1:
        raise ConfigError(
            f"expected noise above 0 and at least one network, found {list(sigmas)} and {realisations}"
        )
    x, target = samples["x"].values, samples["target"].values
    steps, many = x.shape[1], len(x)
    held = estimators_of(rnn, chosen, fitted["x"].values, fitted["target"].values, regions=regions)
    said = classes_or_numbers(rnn.outputs(x))
    guesses = np.array([each.says(x) for each in held])
    rng = np.random.default_rng(seed)
    accuracy = np.zeros(len(sigmas))
    agreement = np.zeros((len(held), len(sigmas)))
    for place, sigma in enumerate(sigmas):
        for _ in range(realisations):
            answers = classes_or_numbers(noisy(rnn, sigma, rng).outputs(x))
            accuracy[place] += np.mean(answers == target) / realisations
            agreement[:, place] += (guesses == answers).mean(axis=1) / realisations
    selection = np.array([rnn.parameters * bits_per_number(sigma) for sigma in sigmas])
    explanation = np.array([[each.bits(bits_per_number(sigma)) for sigma in sigmas] for each in held])
    residual = np.vectorize(residual_bits)(1.0 - agreement, len(rnn.oh), many)
    agrees, both = (guesses == said).mean(axis=1), ("estimator", "sigma")
    return xr.Dataset(
        {
            "model_accuracy": float(np.mean(said == target)),
            "chance_accuracy": chosen.chance(steps),
            "estimate_accuracy": ("estimator", (guesses == target).mean(axis=1)),
            "agreement_rate": ("estimator", agrees),
            "disagreement_rate": ("estimator", 1.0 - agrees),
            "operations": ("estimator", np.array([each.operations for each in held])),
            "description": ("estimator", np.array([each.description for each in held], object)),
            "model_operations": operations_of(rnn, steps),
            "noisy_accuracy": ("sigma", accuracy),
            "noisy_agreement": (both, agreement),
            "selection_bits": ("sigma", selection),
            "explanation_bits": (both, explanation),
            "residual_surprise": (both, residual),
            "bound_satisfied": (both, explanation + residual <= selection),
            "tightness": (both, (explanation + residual) / selection),
            "covered": (both, covered(selection - explanation, residual / many)),
        },
        coords={"estimator": np.array(ESTIMATORS, object), "sigma": np.array(sigmas)},
        attrs={"samples": many, "param_count": rnn.parameters},
    )
