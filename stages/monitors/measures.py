"""How well scores tell positive from negative examples: ROC area, recall, calibration, and their intervals.

AUROC is the probability that a positive example scores above a negative one, ties counting half (Hanley &
McNeil 1982). Recall is the largest share of positives above a threshold that at most a given share of the
negatives exceed; the threshold is taken from the same examples, so recall is optimistic. The Brier score is
the mean squared error of the probability; the expected calibration error compares mean probability with the
share of positives in bins of equally many examples (Naeini et al. 2015).

Intervals are percentile bootstraps over groups of examples, such as prompts. Two detectors are compared by
exchanging their ranks in random groups (Venkatraman & Begg 1996).

Axes: example, threshold, draw.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ...store.arrays import Array, Bools, Floats
from ..geometry.separation import auroc, mean_ranks
from .logistic import sigmoid

__all__ = ["MEASURES", "RESAMPLES", "measure", "swapped_differences"]

MEASURES = ("auroc", "recall", "brier", "calibration_error")
"""Names of the measures, in the order in which `measure` returns them."""
BINS = 10
"""Number of bins of the expected calibration error."""
RESAMPLES = 500
"""Number of bootstrap resamples of an interval."""
AT_ONCE = 1 << 20
"""Largest number of weights, resamples times examples, in memory at once."""


def measure(
    score: Array, label: Bools, group: Array, *, false_positives: float, resamples: int, seed: int
) -> Floats:
    """The four measures of scores, with 95 % intervals.

    Arguments:
        score: log-odds of each example, [example].
        label: whether each is positive, [example].
        group: group of each example, whose members are resampled together, [example].
        false_positives: largest share of negatives above the threshold, for recall.
        resamples: number of bootstrap resamples.
        seed: seed of the resamples.

    Returns:
        float64 [measure, 3]: value, 2.5 % and 97.5 %; NaN where a class is missing.
    """
    scores = _Scores(score, label)
    (value,) = scores.measures(np.ones((1, len(score))), false_positives)
    resampled = np.concatenate(
        [scores.measures(weight, false_positives) for weight in _resamples(group, resamples, seed)]
    )
    # A resample without one of the classes has no AUROC.
    usable = resampled[~np.isnan(resampled).any(axis=1)]
    bounds = (
        np.percentile(usable, (2.5, 97.5), axis=0) if len(usable) else np.full((2, len(MEASURES)), np.nan)
    )
    return np.stack([value, *bounds], axis=1)


def swapped_differences(
    first: Array, second: Array, label: Bools, group: Array, *, draws: int, seed: int
) -> tuple[float, tuple[float, float], Floats]:
    """Difference in AUROC of two detectors of the same examples, with its interval and null distribution.

    Under the null, it does not matter in any group which detector gave which rank. Ranks, ties at their mean
    rank, run from 1 to the number of examples in both detectors; their scores have no common unit.

    Arguments:
        first: scores of one detector, [example].
        second: scores of the other, [example].
        label: whether each example is positive, [example].
        group: group of each example, [example].
        draws: number of random exchanges.
        seed: seed of the exchanges.

    Returns:
        AUROC of the first minus that of the second; its 95 % bootstrap interval over groups; and the same
        difference after each exchange, [draw].
    """
    ranks = [mean_ranks(score) for score in (first, second)]
    _, member = np.unique(group, return_inverse=True)
    rng = np.random.default_rng(seed)
    differences = []
    for _ in range(draws):
        is_swapped = rng.integers(2, size=member.max() + 1).astype(bool)[member]
        a, b = (auroc(np.where(is_swapped, ranks[1 - i], ranks[i]), label) for i in (0, 1))
        differences.append(a - b)
    both = [_Scores(score, label) for score in (first, second)]
    resampled = np.concatenate(
        [
            both[0].curves(weight)[2] - both[1].curves(weight)[2]
            for weight in _resamples(group, RESAMPLES, seed)
        ]
    )
    low, high = np.nanpercentile(resampled, (2.5, 97.5))
    return auroc(first, label) - auroc(second, label), (float(low), float(high)), np.array(differences)


class _Scores:
    """Scores and labels, sorted once, whose measures are computed for any weights of the examples."""

    def __init__(self, score: Array, label: Bools) -> None:
        """Sort the examples by descending score.

        Arguments:
            score: log-odds, [example].
            label: whether each is positive, [example].
        """
        self._order = np.argsort(-np.asarray(score, np.float64), kind="stable")
        ordered = np.asarray(score, np.float64)[self._order]
        self._label = np.asarray(label, bool)[self._order]
        self._error = sigmoid(ordered) - self._label
        # A threshold lies below the last of equal scores.
        self._ends = np.flatnonzero(np.append(np.diff(ordered) != 0, True))

    def curves(self, weight: Floats) -> tuple[Floats, Floats, Floats]:
        """ROC curves of resamples; NaN where a class is missing.

        Arguments:
            weight: how often each example counts, [resample, example].

        Returns:
            False-positive rates and true-positive rates at every threshold, descending, from (0, 0), both
            [resample, threshold]; areas under the curves [resample].
        """
        rates = []
        for member in (~self._label, self._label):
            above = np.cumsum(weight[:, self._order] * member, axis=1)[:, self._ends]
            with np.errstate(divide="ignore", invalid="ignore"):
                rates.append(np.pad(above, ((0, 0), (1, 0))) / above[:, -1:])
        return rates[0], rates[1], np.trapezoid(rates[1], rates[0], axis=1)

    def measures(self, weight: Floats, false_positives: float) -> Floats:
        """Values of MEASURES, [resample, measure].

        Arguments:
            weight: how often each example counts, [resample, example].
            false_positives: largest share of negatives above the threshold, for recall.
        """
        false_rate, true_rate, area = self.curves(weight)
        # A rounding error must not exclude a threshold with exactly this rate.
        recall = np.where(false_rate <= false_positives + 1e-12, true_rate, 0.0).max(axis=1)
        ordered = weight[:, self._order]
        total = ordered.sum(axis=1)
        brier = (ordered * np.square(self._error)).sum(axis=1) / total
        # Bins of equally many examples: of bins of equal width, most would be empty.
        middle = np.cumsum(ordered, axis=1) - ordered / 2
        bins = np.minimum((BINS * middle / total[:, None]).astype(int), BINS - 1)
        bins += BINS * np.arange(len(weight))[:, None]
        gap = np.bincount(bins.ravel(), (ordered * self._error).ravel(), BINS * len(weight))
        gap = np.abs(gap.reshape(len(weight), BINS)).sum(axis=1)
        return np.stack([area, np.where(np.isnan(area), np.nan, recall), brier, gap / total], axis=1)


def _resamples(group: Array, count: int, seed: int) -> Iterator[Floats]:
    """Weight of each example in resamples of as many groups, [resample, example], some at a time."""
    _, member = np.unique(group, return_inverse=True)
    n_groups, rng = int(member.max()) + 1, np.random.default_rng(seed)
    step = max(1, AT_ONCE // len(member))
    for start in range(0, count, step):
        drawn = [
            np.bincount(rng.integers(n_groups, size=n_groups), minlength=n_groups)
            for _ in range(min(step, count - start))
        ]
        yield np.stack(drawn)[:, member].astype(np.float64)
