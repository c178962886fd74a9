"""A year that must be later than another (Hanna et al., How does GPT-2 compute greater-than?, 2023).

Needs a tokenizer that cuts a year behind its century, as GPT-2's does. Corrupted: the year 01, after which
any other is later.

Border: texts; the metric compares probabilities of many tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ....store.arrays import Floats
from ....store.errors import ConfigError
from ...causal.grids.patching_metrics import Metric
from ...causal.metrics import log_softmax
from ..pairs import Pair
from .drafts import next_token
from .words import SPANS

if TYPE_CHECKING:
    from ...forward.text.tokens import Tokenizer

__all__ = ["ProbabilityDifference", "later_years"]


@dataclass(frozen=True)
class ProbabilityDifference(Metric):
    """Probability of some tokens less that of others."""

    right: tuple[int, ...]
    wrong: tuple[int, ...]
    name: str = "probability_difference"

    version: ClassVar[int] = 1
    units: str = field(default="1", init=False, repr=False)
    long_name: str = field(
        default="probability of the right tokens less that of the wrong ones", init=False, repr=False
    )

    def value(self, logits: Floats, clean: Floats) -> float:
        """Between -1 and 1."""
        return float(np.exp(log_softmax(logits)) @ self._signs(len(logits)))

    def gradient(self, logits: Floats, clean: Floats) -> Floats:
        """p (s - p s), s = 1 of right tokens and -1 of wrong ones."""
        shares, signs = np.exp(log_softmax(logits)), self._signs(len(logits))
        found: Floats = shares * (signs - shares @ signs)
        return found

    def canonical(self) -> dict[str, Any]:
        """See `Metric`; tokens as lists."""
        return {**super().canonical(), "right": list(self.right), "wrong": list(self.wrong)}

    def _signs(self, size: int) -> Floats:
        found: Floats = np.zeros(size)
        found[list(self.right)], found[list(self.wrong)] = 1.0, -1.0
        return found


def later_years(tokenizer: Tokenizer, count: int, seed: int) -> list[Pair]:
    """Pairs measured by the probability of later years less that of years that are not.

    A vocabulary may have some years whole (GPT-2's has 1830, and every round century): no prompt begins with
    such a year, and as an answer it is the token of its two digits, as in the other centuries. What no
    century cuts, of GPT-2 "00", counts nowhere.
    """
    rng = np.random.default_rng(seed)
    tokens = {century: _years(tokenizer, century) for century in range(11, 20)}
    years = {year: token for known in tokens.values() for year, token in known.items()}
    centuries = [century for century, known in tokens.items() if 1 in known]
    if not set(range(1, 100)) <= years.keys():
        raise ConfigError(
            "greater_than: expected a tokenizer that cuts years behind their century, found one in which at "
            f"most {len(years)} of 100 years are a century and one token more; ask another task"
        )
    found: dict[tuple[int, ...], Pair] = {}
    for _ in range(50 * count):
        century, span = int(rng.choice(centuries)), str(rng.choice(SPANS))
        year = int(rng.integers(2, 99))
        clean, corrupted = (tuple(tokenizer.encode(_text(span, century, each)).ids) for each in (year, 1))
        if year in tokens[century] and len(clean) == len(corrupted):
            said = {**years, **tokens[century]}
            later = tuple(said[each] for each in range(year + 1, 100))
            others = tuple(said[each] for each in range(year + 1) if each in said)
            found.setdefault(clean, Pair(clean, corrupted, ProbabilityDifference(later, others)))
        if len(found) == count:
            return list(found.values())
    raise ConfigError(
        f"greater_than: expected {count} pairs of equal length, found {len(found)} with this tokenizer; ask "
        "for fewer"
    )


def _text(span: str, century: int, year: int) -> str:
    return f"The {span} lasted from the year {century}{year:02d} to the year {century}"


def _years(tokenizer: Tokenizer, century: int) -> Mapping[int, int]:
    """The token of each year of a century behind it, of those that are one."""
    prompt = _text(SPANS[0], century, 1)
    made = {year: next_token(tokenizer, prompt, f"{year:02d}") for year in range(100)}
    return {year: token for year, token in made.items() if token is not None}
