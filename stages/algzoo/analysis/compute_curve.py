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
"""Smallest number of groups from which an error is measured."""


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
    """Error and cost of sampling and of every explanation.

    Arguments:
        counted: from `sampled_accuracy`.
        surprise: from `surprise_accounting`.
        budgets: numbers of samples, multiples of `CHUNK`.

    Raises:
        ShapeError: for other budgets.
    """
    import xarray as xr

    if not budgets or any(budget < CHUNK or budget % CHUNK for budget in budgets):
        raise ShapeError(f"expected budgets that are multiples of {CHUNK} samples, found {list(budgets)}")
    # The last chunk of a block may be shorter; groups are of full ones only.
    is_full = counted["samples"].values == CHUNK
    right = counted["right"].values[is_full]
    share = float(counted["right"].sum() / counted["samples"].sum())
    sizes = np.array(budgets)
    measured, groups = np.full(len(sizes), np.nan), np.zeros(len(sizes), np.int64)
    for index, budget in enumerate(budgets):
        chunks = budget // CHUNK
        # Incomplete groups are dropped: their share of right answers has another variance.
        groups[index] = len(right) // chunks
        if groups[index] >= FEWEST_GROUPS:
            means = right[: groups[index] * chunks].reshape(groups[index], chunks).sum(axis=1) / budget
            measured[index] = means.var(ddof=1)
    accuracy = surprise["estimate_accuracy"].values
    bias = accuracy - float(surprise["model_accuracy"])
    return xr.Dataset(
        {
            "baseline_mse": ("samples", measured),
            "baseline_expected": ("samples", share * (1 - share) / sizes),
            "groups": ("samples", groups),
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
