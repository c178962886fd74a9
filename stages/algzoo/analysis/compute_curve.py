"""Mean squared error of an estimate of accuracy against what it costs.

The baseline draws samples: with n of them its squared error is p (1 - p) / n on average. That is told, and
measured: the counts of many thousands of samples are put together in groups of each size, whose variance
about their mean (over groups less one, so that it is unbiased for the error about the truth, which nobody
knows) is the error. An explanation takes samples as well, but of itself: p_e (1 - p_e) / n and the square of
how far it is off the network.

Cost is in operations, samples times those of one; budgets of one and the same number of samples differ by it.

Border: counts and an account of surprise in, curves out.

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
"""Groups below which a variance is not told."""


@stage(
    version=1,
    inputs={"counted": None, "surprise": None},
    outputs={
        "baseline_mse": Output(
            ("samples",), "1", "measured error of so many samples; NaN for too few groups"
        ),
        "baseline_expected": Output(("samples",), "1", "p (1 - p) / n"),
        "groups": Output(("samples",), "1", "groups the error was measured on"),
        "baseline_operations": Output(("samples",), "operations", "what so many samples cost"),
        "estimator_mse": Output(("estimator", "samples"), "1", "error of so many samples of the explanation"),
        "estimator_operations": Output(("estimator", "samples"), "operations", "what they cost"),
        "bias": Output(("estimator",), "1", "accuracy of the explanation less that of the network"),
    },
)
def compute_curve(counted: xr.Dataset, surprise: xr.Dataset, *, budgets: tuple[int, ...]) -> xr.Dataset:
    """The curves of sampling and of every explanation.

    counted: of `sampled_accuracy`. surprise: of `surprise_accounting`. budgets: numbers of samples, multiples
    of a thousand. Raises ShapeError for others.
    """
    import xarray as xr

    if not budgets or any(budget < CHUNK or budget % CHUNK for budget in budgets):
        raise ShapeError(f"expected budgets that are multiples of {CHUNK} samples, found {list(budgets)}")
    whole = counted["samples"].values == CHUNK
    right = counted["right"].values[whole]
    share = float(counted["right"].sum() / counted["samples"].sum())
    many = np.array(budgets)
    measured, groups = np.full(len(many), np.nan), np.zeros(len(many), np.int64)
    for place, budget in enumerate(budgets):
        chunks = budget // CHUNK
        groups[place] = len(right) // chunks
        if groups[place] >= FEWEST_GROUPS:
            means = right[: groups[place] * chunks].reshape(groups[place], chunks).sum(axis=1) / budget
            measured[place] = means.var(ddof=1)
    own = surprise["estimate_accuracy"].values
    bias = own - float(surprise["model_accuracy"])
    return xr.Dataset(
        {
            "baseline_mse": ("samples", measured),
            "baseline_expected": ("samples", share * (1 - share) / many),
            "groups": ("samples", groups),
            "baseline_operations": ("samples", many * float(surprise["model_operations"])),
            "estimator_mse": (
                ("estimator", "samples"),
                bias[:, None] ** 2 + (own * (1 - own))[:, None] / many,
            ),
            "estimator_operations": (
                ("estimator", "samples"),
                surprise["operations"].values[:, None] * many.astype(np.float64),
            ),
            "bias": ("estimator", bias),
        },
        coords={"samples": many, "estimator": surprise["estimator"].values.astype(object)},
    )
