"""Compute curve: mean squared error of estimates of a network's accuracy, against their cost in operations.

The baseline is sampling: the accuracy p over n samples has an expected squared error of p (1 - p) / n. It is
reported, and also measured: stored counts are combined into groups of n samples, and the error is the
variance of their accuracies (divided by groups - 1, hence unbiased for the error about the unknown truth). An
explanation is sampled as well: its error is p_e (1 - p_e) / n plus the square of its bias, which is its
accuracy minus that of the network.

Cost is samples times operations per sample, which differ between network and explanation.

Border: counts and surprise accounting in, curves out.

Axes: samples (the budget), estimator.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ....pipeline import Output, stage
from ....store.errors import ShapeError
from ..accuracy import CHUNK

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["FEWEST_GROUPS", "compute_curve"]

FEWEST_GROUPS = 8
"""Smallest number of groups of samples from whose accuracies an error is measured."""


@stage(
    version=1,
    inputs={"counted": None, "surprise": None},
    outputs={
        "baseline_mse": Output(
            ("samples",), "1", "measured squared error of this many samples; NaN for too few groups"
        ),
        "baseline_expected": Output(("samples",), "1", "expected squared error, p (1 - p) / n"),
        "groups": Output(("samples",), "1", "number of groups from which the error is measured"),
        "baseline_operations": Output(("samples",), "operations", "cost of this many samples of the network"),
        "estimator_mse": Output(
            ("estimator", "samples"), "1", "expected squared error of this many samples of the explanation"
        ),
        "estimator_operations": Output(
            ("estimator", "samples"), "operations", "cost of this many samples of the explanation"
        ),
        "bias": Output(("estimator",), "1", "accuracy of the explanation minus that of the network"),
    },
)
def compute_curve(counted: xr.Dataset, surprise: xr.Dataset, *, budgets: tuple[int, ...]) -> xr.Dataset:
    """Squared error and cost of two estimates of a network's accuracy: by sampling it, and by an explanation.

    Arguments:
        counted: correct answers of the network by chunks of samples, from `sampled_accuracy`.
        surprise: accuracies and costs of the explanations, from `surprise_accounting`.
        budgets: numbers of samples for which error and cost are computed, multiples of `CHUNK`.

    Raises:
        ShapeError: a budget is not a multiple of `CHUNK`, or there are none.
    """
    import xarray as xr

    if not budgets or any(budget < CHUNK or budget % CHUNK for budget in budgets):
        raise ShapeError(
            f"expected budgets (numbers of samples) that are multiples of {CHUNK}, found {list(budgets)}"
        )
    # The last chunk of a block may be shorter: groups consist of full chunks only.
    is_full = counted["samples"].values == CHUNK
    right = counted["right"].values[is_full]
    accuracy_of_network = float(counted["right"].sum() / counted["samples"].sum())
    sizes = np.array(budgets)
    measured, n_groups = np.full(len(sizes), np.nan), np.zeros(len(sizes), np.int64)
    for index, budget in enumerate(budgets):
        n_chunks = budget // CHUNK
        # Chunks that do not fill a group are dropped: a smaller group's accuracy has another variance.
        n_groups[index] = len(right) // n_chunks
        if n_groups[index] >= FEWEST_GROUPS:
            by_group = right[: n_groups[index] * n_chunks].reshape(n_groups[index], n_chunks)
            measured[index] = (by_group.sum(axis=1) / budget).var(ddof=1)
    accuracy = surprise["estimate_accuracy"].values
    bias = accuracy - float(surprise["model_accuracy"])
    return xr.Dataset(
        {
            "baseline_mse": ("samples", measured),
            "baseline_expected": ("samples", accuracy_of_network * (1 - accuracy_of_network) / sizes),
            "groups": ("samples", n_groups),
            "baseline_operations": ("samples", sizes * float(surprise["model_operations"])),
            "estimator_mse": (
                ("estimator", "samples"),
                bias[:, None] ** 2 + (accuracy * (1 - accuracy))[:, None] / sizes,
            ),
            "estimator_operations": (
                ("estimator", "samples"),
                surprise["operations"].values[:, None] * sizes.astype(np.float64),
            ),
            "bias": ("estimator", bias),
        },
        coords={"samples": sizes, "estimator": surprise["estimator"].values.astype(object)},
    )
