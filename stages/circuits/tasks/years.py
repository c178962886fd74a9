"""Greater-than: a year that must be later than another (Hanna et al. 2023, "How does GPT-2 compute
greater-than?").

Needs a tokenizer that splits a year into century and two digits, as GPT-2's does, or into single digits, as
Llama's does. Corrupted: the year 01, after which any other is later.

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
    """Metric: total probability of some next tokens minus the total probability of others."""

    right: tuple[int, ...]
    """Token ids that count positively."""
    wrong: tuple[int, ...]
    """Token ids that count negatively."""
    name: str = "probability_difference"
    """Name of the variable with this metric."""

    version: ClassVar[int] = 1
    # init=False: dataclasses leave such a default on the class, so that it is not in `vars` and in no key.
    units: str = field(default="1", init=False, repr=False)
    """Unit of the metric: none."""
    long_name: str = field(
        default="probability of the right tokens less that of the wrong ones", init=False, repr=False
    )
    """Description of the metric."""

    def value(self, logits: Floats, clean: Floats) -> float:
        """Difference of the two total probabilities, -1 to 1."""
        return float(np.exp(log_softmax(logits)) @ self._signs(len(logits)))

    def gradient(self, logits: Floats, clean: Floats) -> Floats:
        """Gradient p (s - p . s), with s = 1 for right tokens and -1 for wrong ones, float64 [vocab]."""
        shares, signs = np.exp(log_softmax(logits)), self._signs(len(logits))
        gradient: Floats = shares * (signs - shares @ signs)
        return gradient

    def canonical(self) -> dict[str, Any]:
        """Plain values that identify the metric in keys of results."""
        return {**super().canonical(), "right": list(self.right), "wrong": list(self.wrong)}

    def _signs(self, size: int) -> Floats:
        """Weight of each token's probability, float64 [vocab]: 1 if right, -1 if wrong, else 0."""
        signs: Floats = np.zeros(size)
        signs[list(self.right)], signs[list(self.wrong)] = 1.0, -1.0
        return signs


def later_years(tokenizer: Tokenizer, count: int, seed: int) -> list[Pair]:
    """Pairs of the task greater-than: the metric is the probability of later years minus that of others.

    A vocabulary may contain whole years (GPT-2's has 1830, and every round century). No prompt starts with
    such a year, and as an answer it counts by the token of its two digits, as in other centuries. Digits that
    no century splits off (of GPT-2 "00") are never counted.

    Tokenizers of newer models (Llama, Gemma, SmolLM) split a year into single digits. There the next token is
    the digit of the decade: larger digits are later, smaller ones earlier, and the digit of the clean prompt
    itself, which may begin either, is not counted.

    Arguments:
        tokenizer: The model's tokenizer.
        count: Number of pairs.
        seed: Seed of the draw.

    Raises:
        ConfigError: The tokenizer splits years otherwise, or leaves too few pairs.
    """
    rng = np.random.default_rng(seed)
    tokens = {century: _endings(tokenizer, century, 2) for century in range(11, 20)}
    # Digits that a century does not split off count by their token in another century.
    years = {year: token for by_year in tokens.values() for year, token in by_year.items()}
    n_digits, n_years = 2, len(years)
    if not set(range(1, 100)) <= years.keys():
        tokens = {century: _endings(tokenizer, century, 1) for century in range(11, 20)}
        years = {digit: token for by_digit in tokens.values() for digit, token in by_digit.items()}
        n_digits = 1
        if len(years) < 10:
            raise ConfigError(
                "greater_than: expected a tokenizer that splits a year into its century and two digits, or "
                f"into single digits, found one in which at most {n_years} of 100 years are a century and "
                "one token more; choose another task"
            )
    centuries = [century for century, endings in tokens.items() if 1 in endings]
    pairs: dict[tuple[int, ...], Pair] = {}
    # Bounded, as a tokenizer may leave fewer distinct pairs than requested.
    for _ in range(50 * count):
        century, span = int(rng.choice(centuries)), str(rng.choice(SPANS))
        # Later years and years that are not later both exist, and 01 is the corrupted one.
        year = int(rng.integers(2, 99) if n_digits == 2 else rng.integers(10, 90))
        clean, corrupted = (
            tuple(tokenizer.encode(_text(span, century, other_year)).ids) for other_year in (year, 1)
        )
        ending = year if n_digits == 2 else year // 10
        # The answer must be one token in this century, and both prompts align position by position.
        if ending in tokens[century] and len(clean) == len(corrupted):
            by_ending = {**years, **tokens[century]}
            later = tuple(by_ending[other] for other in sorted(by_ending) if other > ending)
            # The year itself is not later; its decade alone does not say.
            last_earlier = ending if n_digits == 2 else ending - 1
            earlier = tuple(by_ending[other] for other in sorted(by_ending) if other <= last_earlier)
            pairs.setdefault(clean, Pair(clean, corrupted, ProbabilityDifference(later, earlier)))
        if len(pairs) == count:
            return list(pairs.values())
    raise ConfigError(
        f"greater_than: expected {count} prompt pairs of equal length, found {len(pairs)} with this "
        "tokenizer; request fewer pairs"
    )


def _text(span: str, century: int, year: int) -> str:
    """Prompt that ends with the century of a later year, which the next token completes."""
    return f"The {span} lasted from the year {century}{year:02d} to the year {century}"


def _endings(tokenizer: Tokenizer, century: int, n_digits: int) -> Mapping[int, int]:
    """Token ids of the first digits of a year after its century, by the digits, where they are one token."""
    prompt = _text(SPANS[0], century, 1)
    tokens = {
        ending: next_token(tokenizer, prompt, f"{ending:0{n_digits}d}") for ending in range(10**n_digits)
    }
    return {ending: token for ending, token in tokens.items() if token is not None}
