"""Controls: what an effect is worth beside causes of equal size that were not chosen.

An intervention changes something almost always; that *this* one does, and not any of its size, is a claim. So
an effect stands beside its null: the same measure under causes drawn at random - other features, heads,
directions or positions, scaled to the same size - and the claim is what share of them does as much.

    null = Null(values, "features of the same layer that write as much")
    null.share_as_large(effect)          # empirical p, never 0 (Phipson & Smyth 2010)
    interval(effects_by_prompt)          # percentile bootstrap over prompts (Efron & Tibshirani 1993, ch. 13)

A cause that was found by looking at several on the same data has had as many chances: `looked_at` multiplies
the share (Bonferroni). One that is scored on prompts nobody looked at when it was chosen has had one.

Border: numbers in, numbers out; what is drawn is an experiment's business (draws.py).

Axes: draw, prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ...store.arrays import Floats
from ...store.errors import ConfigError

__all__ = [
    "CHANCE",
    "Null",
    "Side",
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
"""Effects that differ by less are the same: what float64 sums of float32 logits cannot tell apart."""
CHANCE = 0.05
"""Share of random causes that may do as much before an effect is told as no more than chance."""
RESAMPLES = 2000
"""Of the bootstrap: its own error of a 95 % bound is then about a tenth of the interval's width."""

Side = Literal["above", "below", "either"]


@dataclass(frozen=True, eq=False)
class Null:
    """The measure under causes that were drawn, not chosen.

    values: float [draw]. of: what was drawn, in words: "heads of the same layer". side: which effects count
    as large: those above the null, below it, or far from its median. looked_at: how many candidates the cause
    was chosen among on the same data, itself included. No draws at all mean that no control was run: the
    null then has no median, no bounds and no share (NaN), and nothing is beyond chance. Raises ConfigError
    for draws that are no numbers.
    """

    values: Floats
    of: str
    side: Side = "above"
    looked_at: int = 1

    def __post_init__(self) -> None:
        values = np.asarray(self.values, np.float64).ravel()
        if not np.isfinite(values).all():
            told = f"{int((~np.isfinite(values)).sum())} that are not"
            raise ConfigError(f"expected finite draws of {self.of}, found {told}; choose other prompts")
        if self.looked_at < 1:
            raise ConfigError(f"expected looked_at of at least 1, found {self.looked_at}")
        object.__setattr__(self, "values", values)

    @property
    def is_run(self) -> bool:
        """Whether there are any draws to hold an effect against."""
        return len(self.values) > 0

    @property
    def median(self) -> float:
        """Of the draws, in the unit of the measure."""
        return float(np.median(self.values)) if self.is_run else float("nan")

    def bound(self, share: float = 0.95) -> tuple[float, float]:
        """Between which this share of the draws lies, the same share left out on both sides."""
        if not self.is_run:
            return float("nan"), float("nan")
        rest = (1.0 - share) / 2.0
        low, high = np.quantile(self.values, [rest, 1.0 - rest])
        return float(low), float(high)

    def as_large(self, effect: float) -> int:
        """How many draws do as much as `effect` or more, but for rounding: 1e-16 is not more than 0."""
        rounding = ROUNDING * max(1.0, abs(effect))
        if self.side == "above":
            found = self.values >= effect - rounding
        elif self.side == "below":
            found = self.values <= effect + rounding
        else:
            found = np.abs(self.values - self.median) >= abs(effect - self.median) - rounding
        return int(found.sum())

    def share_as_large(self, effect: float) -> float:
        """Probability of an effect this large if the cause were one of those drawn, 0 < share <= 1.

        (1 + draws as large) / (1 + draws), as the cause itself is a draw under the null (Phipson & Smyth
        2010, "Permutation p-values should never be zero"), times `looked_at`. NaN for an effect that is no
        number, and without draws.
        """
        if not np.isfinite(effect) or not self.is_run:
            return float("nan")
        own = (1 + self.as_large(effect)) / (1 + len(self.values))
        return float(min(1.0, own * self.looked_at))

    def is_beyond_chance(self, effect: float, chance: float = CHANCE) -> bool:
        """Whether fewer random causes do as much than `chance` allows. Too few draws can never say so."""
        return bool(self.share_as_large(effect) <= chance)

    def to_json(self, effect: float) -> dict[str, Any]:
        """Everything that is said of it, as plain values."""
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
    """Between which the mean of such values lies: percentile bootstrap over them, float [prompt].

    Bounds are equal for a single value, about whose spread nothing is known. NaNs are left out.
    """
    known = np.asarray(values, np.float64).ravel()
    known = known[np.isfinite(known)]
    if not len(known):
        return float("nan"), float("nan")
    rest = (1.0 - share) / 2.0
    drawn = np.random.default_rng(seed).integers(len(known), size=(RESAMPLES, len(known)))
    low, high = np.quantile(known[drawn].mean(axis=1), [rest, 1.0 - rest])
    return float(low), float(high)


def interval_of_mean(
    mean: float, deviation: float, count: int, share: float = 0.95
) -> tuple[float, float] | None:
    """Between which the mean of many more such values lies, where only mean and deviation of some are kept.

    deviation: of `count` values, divided by count, as numpy has it. None for fewer than 3 values. Student's
    t by its expansion in 1 / freedom (Abramowitz & Stegun 1964, eq. 26.7.5), within 4 % from 3 values on.
    """
    if count < 3:
        return None
    freedom = count - 1
    z = NormalDist().inv_cdf(0.5 + share / 2.0)
    t = z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    t += (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
    wide = t * deviation / np.sqrt(freedom)
    return float(mean - wide), float(mean + wide)


def random_means(causes: Any, count: int, *, seed: int) -> Floats:
    """Means over prompts of a cause drawn anew in each of them: float64 [draw].

    causes: the measure under every cause of every prompt, the one that is told among them, float [prompt,
    cause]. This is the null of an effect that is a mean over prompts: which cause it was says nothing, within
    any prompt (a randomisation test in blocks, Edgington & Onghena 2007, ch. 6). Without the told cause, few
    others would make p too small.
    """
    held = np.asarray(causes, np.float64)
    drawn = np.random.default_rng(seed).integers(held.shape[1], size=(count, held.shape[0]))
    found: Floats = held[np.arange(held.shape[0]), drawn].mean(axis=1)
    return found


def random_signs(differences: Any, count: int, *, seed: int) -> Floats:
    """Means over prompts of differences whose signs are drawn: float64 [draw, ...].

    differences: float [..., prompt], of something and its control. Where neither is better, either sign is as
    likely in every prompt (a randomisation test of matched pairs, Fisher 1935; Edgington & Onghena 2007, ch.
    5); leading axes share the signs of a prompt.
    """
    held = np.asarray(differences, np.float64)
    signs = np.random.default_rng(seed).choice([-1.0, 1.0], size=(count, held.shape[-1]))
    found: Floats = np.moveaxis(held @ signs.T, -1, 0) / held.shape[-1]
    return found


def chosen_at_random(
    population: Sequence[Any], count: int, *, seed: int, without: Sequence[Any] = ()
) -> list[Any]:
    """`count` of a population but for `without`, in the order drawn; all where there is less.

    Raises ConfigError where nothing is left.
    """
    left_out = set(without)
    rest = [each for each in population if each not in left_out]
    if not rest:
        raise ConfigError(f"expected something to draw controls from, found all {len(population)} excluded")
    order = np.random.default_rng(seed).permutation(len(rest))
    return [rest[i] for i in order[:count]]


def random_directions(like: Any, count: int, *, seed: int) -> npt.NDArray[np.float32]:
    """Directions drawn evenly from the sphere, as long as `like` [..., hidden]: float32 [draw, ..., hidden].

    Normal deviates, normalised (Muller 1959). Leading axes are drawn each for itself.
    """
    wanted = np.asarray(like, np.float64)
    drawn = np.random.default_rng(seed).standard_normal((count, *wanted.shape))
    length = np.linalg.norm(drawn, axis=-1, keepdims=True)
    found: npt.NDArray[np.float32] = np.asarray(
        drawn / length * np.linalg.norm(wanted, axis=-1, keepdims=True), np.float32
    )
    return found


def rank_correlation(one: Floats, other: Floats) -> float:
    """Spearman's rank correlation; equal values share their mean rank."""
    return correlation(_ranks(one), _ranks(other))


def correlation(one: Floats, other: Floats) -> float:
    """Pearson's correlation; NaN for fewer than three values, or where all are equal."""
    one, other = (
        np.asarray(values, np.float64) - np.mean(values) if len(values) else values for values in (one, other)
    )
    size = float(np.linalg.norm(one) * np.linalg.norm(other))
    return float(one @ other) / size if len(one) > 2 and size > 0 else float("nan")


def _ranks(values: Floats) -> Floats:
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: Floats = (np.cumsum(counts) - (counts - 1) / 2)[place]
    return ranks
