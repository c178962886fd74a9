"""Controls: null distributions, p-values and confidence intervals of causal effects.

Almost any intervention changes something. The claim that a *particular* cause matters needs a comparison with
causes of equal size drawn at random: other features, heads, directions or positions. Their effects are the
null distribution.

    null = Null(values, "features of the same layer that write as much")
    null.share_as_large(effect)          # empirical p, never 0 (Phipson & Smyth 2010)
    interval(effects_by_prompt)          # percentile bootstrap over prompts (Efron & Tibshirani 1993, ch. 13)

A cause selected as the best of n candidates on the same data has had n chances: `looked_at` multiplies the
p-value by n (Bonferroni). A cause scored on held-out prompts has had one.

Border: numbers in, numbers out; experiments decide what is drawn (draws.py).

Axes: draw, prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from statistics import NormalDist
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ...store.arrays import Floats
from ...store.errors import ConfigError
from ..geometry.separation import mean_ranks

__all__ = [
    "CHANCE",
    "Null",
    "Side",
    "by_sign",
    "chosen_at_random",
    "correlation",
    "interval",
    "interval_of_mean",
    "random_directions",
    "random_means",
    "random_signs",
    "rank_correlation",
]

ROUNDING = 1e-9
"""Relative difference below which effects count as equal: the rounding of sums of float32 logits."""
CHANCE = 0.05
"""Significance level: largest p-value of an effect reported as beyond chance."""
RESAMPLES = 2000
"""Number of bootstrap resamples; the error of a 95 % bound is then a tenth of the interval's width."""

Side = Literal["above", "below", "either"]


@dataclass(frozen=True, eq=False)
class Null:
    """Null distribution of an effect: effects of randomly drawn causes, with which it is compared.

    Without draws, median, bounds and p-value are NaN, and no effect is beyond chance.

    Raises:
        ConfigError: A draw is infinite or NaN, or `looked_at` is below 1.
    """

    values: Floats
    """Effect of each random cause, float64 [draw]."""
    of: str
    """What the random causes are, in words: "heads of the same layer"."""
    side: Side = "above"
    """Which draws count as at least as large: larger ones, smaller ones ("below"), or those farther from the
    median on "either" side."""
    looked_at: int = 1
    """Number of candidates, the tested cause included, from which it was selected on the same data."""

    def __post_init__(self) -> None:
        values = np.asarray(self.values, np.float64).ravel()
        # A NaN draw compares as not large, so it would lower the p-value.
        if not np.isfinite(values).all():
            count = int((~np.isfinite(values)).sum())
            raise ConfigError(
                f"expected finite effects of the random causes ({self.of}), found {count} that are infinite "
                "or NaN; choose other prompts"
            )
        if self.looked_at < 1:
            raise ConfigError(
                f"expected looked_at, the number of candidates, to be at least 1, found {self.looked_at}"
            )
        object.__setattr__(self, "values", values)

    @property
    def is_run(self) -> bool:
        """Whether there are draws to compare an effect with."""
        return len(self.values) > 0

    @property
    def median(self) -> float:
        """Median effect of the random causes, in the unit of the effect; NaN without draws."""
        return float(np.median(self.values)) if self.is_run else float("nan")

    def bound(self, share: float = 0.95) -> tuple[float, float]:
        """(low, high) between which `share` of the draws lies, with equal tails; NaN without draws."""
        if not self.is_run:
            return float("nan"), float("nan")
        tail = (1.0 - share) / 2.0
        low, high = np.quantile(self.values, [tail, 1.0 - tail])
        return float(low), float(high)

    def as_large(self, effect: float) -> int:
        """Number of draws with an effect at least as large as `effect` (by `side`), up to rounding."""
        # Without a tolerance, 1e-16 of summation error would count as larger than an effect of exactly 0.
        rounding = ROUNDING * max(1.0, abs(effect))
        if self.side == "above":
            is_as_large = self.values >= effect - rounding
        elif self.side == "below":
            is_as_large = self.values <= effect + rounding
        else:
            is_as_large = np.abs(self.values - self.median) >= abs(effect - self.median) - rounding
        return int(is_as_large.sum())

    def share_as_large(self, effect: float) -> float:
        """Empirical p-value of an effect, 0 < p <= 1; NaN without draws, or for an effect that is not finite.

        (1 + draws as large) / (1 + draws), as the cause itself is one draw under the null (Phipson & Smyth
        2010, "Permutation p-values should never be zero"), times `looked_at`, at most 1.
        """
        if not np.isfinite(effect) or not self.is_run:
            return float("nan")
        # The effect itself is one draw under the null, so p is at least 1 / (draws + 1).
        p_value = (1 + self.as_large(effect)) / (1 + len(self.values))
        return float(min(1.0, p_value * self.looked_at))

    def is_beyond_chance(self, effect: float, chance: float = CHANCE) -> bool:
        """Whether the effect is significant: its p-value is at most `chance`.

        With fewer than 1 / chance - 1 draws no effect is.

        Arguments:
            effect: Effect of the claimed cause.
            chance: Significance level.
        """
        return bool(self.share_as_large(effect) <= chance)

    def to_json(self, effect: float) -> dict[str, Any]:
        """Summary of the null distribution and the p-value of an effect, as JSON values."""
        low, high = self.bound()
        return {
            "of": self.of,
            "draws": len(self.values),
            "median": self.median,
            "low_95": low,
            "high_95": high,
            "as_large": self.as_large(effect),
            "looked_at": self.looked_at,
            "share_as_large": self.share_as_large(effect),
        }


def interval(values: Any, share: float = 0.95, seed: int = 0) -> tuple[float, float]:
    """Confidence interval of a mean over prompts, by percentile bootstrap.

    Arguments:
        values: One value per prompt; infinite values and NaN are left out.
        share: Confidence level.
        seed: Seed of the resamples.

    Returns:
        (low, high); both equal the value if there is only one, and are NaN if there is none.
    """
    finite = np.asarray(values, np.float64).ravel()
    finite = finite[np.isfinite(finite)]
    if not len(finite):
        return float("nan"), float("nan")
    tail = (1.0 - share) / 2.0
    drawn = np.random.default_rng(seed).integers(len(finite), size=(RESAMPLES, len(finite)))
    low, high = np.quantile(finite[drawn].mean(axis=1), [tail, 1.0 - tail])
    return float(low), float(high)


def interval_of_mean(
    mean: float, deviation: float, count: int, share: float = 0.95
) -> tuple[float, float] | None:
    """Confidence interval of a mean, from the mean and the standard deviation of the values.

    Student's t by its expansion in 1 / degrees of freedom (Abramowitz & Stegun 1964, eq. 26.7.5), within 4 %
    from 3 values on.

    Arguments:
        mean: Mean of the values.
        deviation: Standard deviation with divisor `count` (numpy's default `ddof=0`).
        count: Number of values.
        share: Confidence level.

    Returns:
        (low, high); None for fewer than 3 values.
    """
    if count < 3:
        return None
    freedom = count - 1
    z = NormalDist().inv_cdf(0.5 + share / 2.0)
    t = z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    t += (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
    half_width = t * deviation / np.sqrt(freedom)
    return float(mean - half_width), float(mean + half_width)


def random_means(causes: Any, count: int, *, seed: int) -> Floats:
    """Null distribution of a mean effect over prompts, float64 [draw]: each prompt gets a random cause.

    A randomisation test in blocks (Edgington & Onghena 2007, ch. 6): under the null it does not matter,
    within any prompt, which cause was taken.

    Arguments:
        causes: Effect of every cause in every prompt [prompt, cause], the claimed cause included.
        count: Number of draws.
        seed: Seed of the draws.
    """
    effects = np.asarray(causes, np.float64)
    # The claimed cause stays among those drawn: with few causes p would be too small without it.
    drawn = np.random.default_rng(seed).integers(effects.shape[1], size=(count, effects.shape[0]))
    means: Floats = effects[np.arange(effects.shape[0]), drawn].mean(axis=1)
    return means


def random_signs(differences: Any, count: int, *, seed: int) -> Floats:
    """Null distribution of a mean paired difference over prompts, float64 [draw, ...]: signs are random.

    A randomisation test of matched pairs (Fisher 1935; Edgington & Onghena 2007, ch. 5): where neither side
    is better, either sign is equally likely in every prompt.

    Arguments:
        differences: Cause minus control [..., prompt]; leading axes share the sign of a prompt.
        count: Number of draws.
        seed: Seed of the signs.
    """
    values = np.asarray(differences, np.float64)
    # Leading axes share signs, so that the null keeps the dependence between layers of one prompt.
    signs = np.random.default_rng(seed).choice([-1.0, 1.0], size=(count, values.shape[-1]))
    means: Floats = np.moveaxis(values @ signs.T, -1, 0) / values.shape[-1]
    return means


def by_sign(values: Any) -> float:
    """p-value of a one-sided sign test: probability that a fair coin gives as many positive values.

    Arguments:
        values: One difference per prompt.
    """
    # Exact binomial tail: no normal approximation, as there are few prompts.
    count, positive = len(values), int((np.asarray(values) > 0).sum())
    return float(sum(comb(count, k) for k in range(positive, count + 1)) / 2**count)


def chosen_at_random(
    population: Sequence[Any], count: int, *, seed: int, without: Sequence[Any] = ()
) -> list[Any]:
    """Items drawn at random without replacement, in the order of the draw.

    Arguments:
        population: Items to draw from.
        count: Number of items; all are returned if fewer remain.
        seed: Seed of the draw.
        without: Items that are never drawn.

    Raises:
        ConfigError: No item remains to draw from.
    """
    left_out = set(without)
    candidates = [item for item in population if item not in left_out]
    if not candidates:
        raise ConfigError(
            f"expected other candidates to draw random controls from, found that all {len(population)} are "
            "excluded"
        )
    order = np.random.default_rng(seed).permutation(len(candidates))
    return [candidates[i] for i in order[:count]]


def random_directions(like: Any, count: int, *, seed: int) -> npt.NDArray[np.float32]:
    """Vectors in random directions, uniform on the sphere, with the norms of given vectors (Muller 1959).

    Arguments:
        like: Vectors [..., hidden] whose norms the random ones get.
        count: Number of draws.
        seed: Seed of the draws.

    Returns:
        float32 [draw, ..., hidden]; directions are independent of each other.
    """
    template = np.asarray(like, np.float64)
    drawn = np.random.default_rng(seed).standard_normal((count, *template.shape))
    norms = np.linalg.norm(drawn, axis=-1, keepdims=True)
    directions: npt.NDArray[np.float32] = np.asarray(
        drawn / norms * np.linalg.norm(template, axis=-1, keepdims=True), np.float32
    )
    return directions


def rank_correlation(x: Floats, y: Floats) -> float:
    """Spearman's rank correlation of two lists of values; equal values share their mean rank.

    Arguments:
        x: Values [item].
        y: Values [item].
    """
    return correlation(mean_ranks(x), mean_ranks(y))


def correlation(x: Floats, y: Floats) -> float:
    """Pearson's correlation of two lists of values; NaN for fewer than three, or if one list is constant.

    Arguments:
        x: Values [item].
        y: Values [item].
    """
    # numpy.corrcoef would warn about constant values, and return 1 or -1 for two.
    x, y = (np.asarray(values, np.float64) - np.mean(values) if len(values) else values for values in (x, y))
    scale = float(np.linalg.norm(x) * np.linalg.norm(y))
    # Two points always correlate by 1 or -1.
    return float(x @ y) / scale if len(x) > 2 and scale > 0 else float("nan")
