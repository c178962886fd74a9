"""How well scores separate two classes, their ranks, and the shrinkage of a covariance of few states.

Border: plain arrays. Axes: example.
"""

from __future__ import annotations

import numpy as np

from ...store.arrays import Array, Bools, Floats

__all__ = ["auroc", "mean_ranks", "oracle_shrinkage", "shrunk"]


def auroc(score: Array, label: Bools) -> float:
    """Area under the ROC curve: share of pairs of a positive and a negative example in which the positive one
    has the larger score; equal scores count half. NaN without positive or without negative examples.

    Arguments:
        score: score of each example, [example].
        label: whether each is positive, [example].
    """
    positive, negative = score[label], np.sort(score[~label])
    if not len(positive) or not len(negative):
        return float("nan")
    below, below_or_equal = (np.searchsorted(negative, positive, side).sum() for side in ("left", "right"))
    return float((below + below_or_equal) / (2 * len(positive) * len(negative)))


def mean_ranks(values: Array) -> Floats:
    """Ranks of values from 1 to their number, float64 [example]; equal values get their mean rank.

    Arguments:
        values: Values [example].
    """
    _, group, counts = np.unique(values, return_inverse=True, return_counts=True)
    # Mean of the ranks that a group of ties covers: cumsum is its last rank.
    ranks: Floats = (np.cumsum(counts) - (counts - 1) / 2)[group]
    return ranks


def oracle_shrinkage(covariance: Floats, n: int, width: int) -> float:
    """Share s of the identity with which a covariance C becomes (1 - s) C + s trace(C) / width I: "OAS" of
    Chen et al. 2010, "Shrinkage Algorithms for MMSE Covariance Estimation".

    Arguments:
        covariance: sample covariance, possibly in the span of few rows.
        n: number of rows.
        width: number of coordinates of the whole space.
    """
    squares, trace = float(np.square(covariance).sum()), float(covariance.trace())
    excess = (n + 1 - 2 / width) * (squares - trace**2 / width)
    return 1.0 if excess <= 0 else min(1.0, ((1 - 2 / width) * squares + trace**2) / excess)


def shrunk(covariance: Floats, n: int, width: int) -> Floats:
    """The covariance C with the share s of `oracle_shrinkage`: (1 - s) C + s trace(C) / width I.

    Arguments:
        covariance: sample covariance, possibly in the span of few rows.
        n: number of rows.
        width: number of coordinates of the whole space.
    """
    share = oracle_shrinkage(covariance, n, width)
    result: Floats = (1 - share) * covariance
    result[np.diag_indices_from(result)] += share * covariance.trace() / width
    return result
