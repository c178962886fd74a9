"""Logistic regressions of many label columns at once, over rows that are read block by block.

Objective of a model: mean loss over its rows, in nats, plus penalty / 2 * |weight|^2; the bias is free.

Newton's method with backtracking. Loss and gradient are exact sums over all rows, one pass per step for all
models. The Hessian comes from a random sample of rows (Byrd et al. 2011, "On the Use of Stochastic Hessian
Information in Optimization Methods for Machine Learning"), all of them where they are few. So the optimum is
that of all rows. States in memory do not grow with the number of rows; labels do.

Axes: row, hidden, model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ...store.arrays import Array, Bools, Floats, Ints

__all__ = ["Blocks", "Fit", "fit_logistic", "sigmoid"]

Blocks = Callable[[], Iterable[tuple[slice, Array]]]
"""Starts a pass over rows: (range of rows, their values [row, hidden]), in order."""

SAMPLE_BYTES = 1 << 25
"""Largest size of the float32 rows from which Hessians are computed."""
STEPS = 60
"""Largest number of passes over the rows."""
TOLERANCE = 1e-6
"""Squared Newton decrement, in nats, below which a model has converged: about twice the distance of its
objective from the minimum, estimated with the sampled Hessian."""
_ARMIJO = 1e-4
"""Share of the predicted decrease that an accepted step must reach (Nocedal & Wright 2006, eq. 3.4)."""
_SHORTEST = 2.0**-12
"""Step length at which a model is left as it is: float32 rounding hides any further decrease."""


@dataclass(frozen=True)
class Fit:
    """Label columns to fit, and which rows each of them is fitted to."""

    labels: Array
    """bool [row, model]: whether the row is positive."""
    penalty: Floats
    """Penalty of each model on its squared weights, [model]; standardised rows are assumed."""
    fold: Array
    """Fold of each row, int [row]."""
    left_out: Array
    """Fold whose rows a model is not fitted to, int [model]; -1 for none."""

    @cached_property
    def n_rows(self) -> Ints:
        """Number of rows that each model is fitted to, [model]."""
        folds, sizes = np.unique(self.fold, return_counts=True)
        n_rows: Ints = ((folds[:, None] != self.left_out) * sizes[:, None]).sum(axis=0)
        return n_rows

    def is_fitted(self, rows: slice | Array) -> Bools:
        """Whether each model is fitted to rows, [row, model]."""
        is_fitted: Bools = self.fold[rows, None] != self.left_out
        return is_fitted


def fit_logistic(blocks: Blocks, width: int, fit: Fit) -> Floats:
    """Weights of one logistic regression per label column.

    Arguments:
        blocks: starts a pass over all rows.
        width: number of columns of a row.
        fit: labels, penalties and folds.

    Returns:
        float64 [model, hidden + 1]; the last column is the bias. Models that have not converged after STEPS
        passes are returned as they are.
    """
    n_models = fit.labels.shape[1]
    sample_rows, sample = _sample(blocks, len(fit.labels), width)
    weight = np.zeros((n_models, width + 1))
    loss, gradient = _losses(blocks, weight, fit)
    step = np.zeros_like(weight)
    slope, length = np.zeros(n_models), np.zeros(n_models)
    is_active = np.ones(n_models, bool)
    is_new = is_active.copy()
    for _ in range(STEPS):
        for model in np.flatnonzero(is_active & is_new).tolist():
            step[model] = -_solve(sample, sample_rows, weight[model], gradient[model], fit, model)
            slope[model], length[model] = gradient[model] @ step[model], 1.0
        # -slope is the squared Newton decrement.
        is_active &= (-slope > TOLERANCE) & (length >= _SHORTEST)
        if not is_active.any():
            break
        trial = weight + (length * is_active)[:, None] * step
        trial_loss, trial_gradient = _losses(blocks, trial, fit)
        is_new = is_active & (trial_loss <= loss + _ARMIJO * length * slope)
        weight[is_new], gradient[is_new], loss[is_new] = (
            trial[is_new],
            trial_gradient[is_new],
            trial_loss[is_new],
        )
        length[~is_new] /= 2
    return weight


def _losses(blocks: Blocks, weight: Floats, fit: Fit) -> tuple[Floats, Floats]:
    """(objective [model], its gradient [model, hidden + 1]) of all models, in one pass."""
    loss = 0.5 * fit.penalty * np.square(weight[:, :-1]).sum(axis=1)
    gradient = weight * fit.penalty[:, None]
    gradient[:, -1] = 0
    for rows, values in blocks():
        label, share = fit.labels[rows], fit.is_fitted(rows) / fit.n_rows
        logit = np.asarray(values @ weight[:, :-1].T.astype(values.dtype), np.float64) + weight[:, -1]
        loss += (share * np.logaddexp(0.0, np.where(label, -logit, logit))).sum(axis=0)
        error = share * (sigmoid(logit) - label)
        gradient[:, :-1] += error.T.astype(values.dtype) @ values
        gradient[:, -1] += error.sum(axis=0)
    return loss, gradient


def _solve(sample: Array, rows: Array, weight: Floats, gradient: Floats, fit: Fit, model: int) -> Floats:
    """Newton step of one model, [hidden + 1]: the gradient times the inverse Hessian of the sampled rows."""
    chance = sigmoid(np.asarray(sample @ weight[:-1].astype(sample.dtype), np.float64) + weight[-1])
    is_fitted = fit.fold[rows] != fit.left_out[model]
    curvature = chance * (1 - chance) * is_fitted / max(int(is_fitted.sum()), 1)
    weighted = sample * curvature[:, None].astype(sample.dtype)
    hessian = np.empty((len(weight), len(weight)))
    hessian[:-1, :-1] = weighted.T @ sample
    hessian[-1, :-1] = hessian[:-1, -1] = weighted.sum(axis=0, dtype=np.float64)
    hessian[-1, -1] = curvature.sum()
    # The bias has no penalty, and no curvature where all chances are 0 or 1.
    diagonal = np.full(len(weight), fit.penalty[model] + 1e-9 * (1 + hessian.diagonal().max()))
    diagonal[-1] -= fit.penalty[model]
    hessian[np.diag_indices_from(hessian)] += diagonal
    return np.asarray(np.linalg.solve(hessian, gradient), np.float64)


def _sample(blocks: Blocks, n_rows: int, width: int) -> tuple[Array, Array]:
    """(numbers of the sampled rows, ascending; their values [row, hidden]): all rows, or a random sample."""
    most = max(width, SAMPLE_BYTES // (4 * width))
    chosen = np.arange(n_rows)
    if n_rows > most:
        chosen = np.sort(np.random.default_rng(0).choice(n_rows, most, replace=False))
    parts = []
    for rows, values in blocks():
        start, stop = np.searchsorted(chosen, [rows.start, rows.stop])
        parts.append(values[chosen[start:stop] - rows.start])
    return chosen, np.concatenate(parts)


def sigmoid(logit: Floats) -> Floats:
    """Probability of log-odds, of the same shape."""
    # By tanh: exp of a large logit would overflow.
    chance: Floats = 0.5 + 0.5 * np.tanh(0.5 * logit)
    return chance
