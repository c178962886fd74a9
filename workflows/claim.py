"""Claims: the one protocol by which every causal question says what a cause does, beside what chance does.

A workflow declares the effects it measured: of the candidates it chose among, on the prompts they are chosen
on and on the held-out prompts they are scored on, and of the control runs. `Claim` and `CandidateEffects` own
the rest: the choice, how many controls are drawn and which, the null distribution, the interval, the p-value
and the sentence.

    heads = CandidateEffects(chosen_on, scored_on)                     # effects [prompt, layer, head]
    claim = heads.claim(text, heads.best, "another head of each prompt", settings, unit="nats")
    claim.is_beyond_chance, claim.p_value, claim.sentence

constructor               the cause is compared with             null distribution
`Claim.over`              control causes in each of the prompts  means over prompts of a cause drawn in each
`CandidateEffects.claim`  the same, chosen on other prompts      the same
`Claim.among`             other candidates of one prompt         some of them, drawn without replacement
`Claim.paired`            the same prompts without the cause     means of the differences with random signs
`Claim.ranking`           exact effects, which estimates rank    rank correlations of shuffled estimates
`Claim.against`           draws that runs of their own gave      those draws

An effect that random causes of equal size reach as often as `chance` allows is no more than chance.

Axes: prompt, cause or candidate, draw. Units: of the measure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ..stages.causal.controls import (
    CHANCE,
    Null,
    Side,
    chosen_at_random,
    interval,
    random_means,
    random_signs,
    rank_correlation,
)
from ..store.arrays import Floats

__all__ = ["CandidateEffects", "Claim", "Controls", "ControlOptions"]

NO_MORE = "no more than chance"
NO_CONTROL = "nothing is claimed, as no control was run"


class ControlOptions(Protocol):
    """Number of controls and the seed they are drawn with, as `ControlSettings` has them."""

    @property
    def controls(self) -> int:
        """Number of draws of the null distribution; 0 runs no control and claims nothing."""

    @property
    def seed(self) -> int:
        """Seed of everything that is drawn."""


@dataclass(frozen=True)
class Controls:
    """Number of controls and their seed, where they are not those of the settings."""

    controls: int
    seed: int = 0


@dataclass(frozen=True)
class Claim:
    """An effect, the null distribution it is compared with, and the sentence made of both."""

    text: str
    """What was done to what, and read where: "injecting L0:128 at ' in' raises P(' English')"."""
    effect: float
    """The measure under the cause, in `unit`."""
    null: Null
    """The measure under random causes of equal size."""
    unit: str = ""
    spread: tuple[float, float] | None = None
    """95 % interval of the effect over `prompts`, where there is more than one, else over `noises`."""
    prompts: int = 1
    """Number of prompts that the effect is a mean of."""
    held_out: bool = False
    """Whether the cause was chosen on other prompts than these."""
    noises: int = 1
    """Number of noises that the effect is a mean of in each prompt."""
    levels: tuple[float, float] | None = None
    """What is measured without and with the cause, such as a probability, where the effect is their
    difference."""
    chance: float = CHANCE
    """Largest p-value of an effect beyond chance."""

    @classmethod
    def against(
        cls,
        text: str,
        effects: Any,
        draws: Any,
        of: str,
        *,
        side: Side = "above",
        looked_at: int = 1,
        seed: int = 0,
        **fields: Any,
    ) -> Claim:
        """A claim beside draws that runs of their own gave.

        Arguments:
            text: see `Claim`.
            effects: the measure under the cause: a number, or [prompt] for a mean with its interval.
            draws: the same measure under random causes, [draw]; empty without controls.
            of: what was drawn, in words that follow "50".
            side: which effects count as large; see `Null`.
            looked_at: number of candidates that the cause was chosen among on the same data.
            seed: of the bootstrap.
            fields: further fields of the claim.
        """
        null = Null(np.asarray(draws, np.float64), of, side, looked_at)
        if np.ndim(effects) == 0:
            return cls(text, float(effects), null, **fields)
        spread = interval(effects, seed=seed)
        return cls(text, float(np.nanmean(effects)), null, spread=spread, prompts=len(effects), **fields)

    @classmethod
    def over(
        cls,
        text: str,
        effects: Any,
        controls: Any,
        of: str,
        settings: ControlOptions,
        *,
        side: Side = "above",
        looked_at: int = 1,
        **fields: Any,
    ) -> Claim:
        """A claim about several prompts: the mean effect, beside means of a cause drawn anew in each prompt.

        Arguments:
            text: see `Claim`.
            effects: the measure under the cause, [prompt].
            controls: the measure under control causes, [prompt, cause]; the cause itself is drawn too.
            of: what the controls are, in words that follow "50 draws of".
            settings: number of draws and their seed.
            side: which effects count as large; see `Null`.
            looked_at: number of candidates that the cause was chosen among on the same prompts.
            fields: further fields of the claim.
        """
        count = settings.controls if np.size(controls) else 0
        draws = random_means(np.column_stack([effects, controls]), count, seed=settings.seed)
        of, seed = f"draws of {of}", settings.seed
        return cls.against(text, effects, draws, of, side=side, looked_at=looked_at, seed=seed, **fields)

    @classmethod
    def paired(cls, text: str, differences: Any, of: str, settings: ControlOptions, **fields: Any) -> Claim:
        """A claim about several prompts: the mean difference from each prompt's own control, beside the means
        with random signs. differences: [prompt]. of: what a sign decides, in words that follow "50"."""
        draws = random_signs(differences, settings.controls, seed=settings.seed)
        return cls.against(text, differences, draws, of, seed=settings.seed, **fields)

    @classmethod
    def among(
        cls,
        text: str,
        effects: Any,
        own: int,
        of: str,
        settings: ControlOptions,
        *,
        candidates: Sequence[int] | None = None,
        side: Side = "above",
        **fields: Any,
    ) -> Claim:
        """A claim about one prompt: one candidate's effect, beside other candidates drawn at random.

        effects: [candidate, ...], flattened. own: index of the candidate. candidates: indices that may be
        drawn; None for all. of, side, fields: see `over`.
        """
        values = np.asarray(effects, np.float64).ravel()
        drawn = chosen_at_random(
            range(len(values)) if candidates is None else candidates,
            settings.controls,
            seed=settings.seed,
            without=[own],
        )
        return cls.against(text, values[own], values[drawn], of, side=side, **fields)

    @classmethod
    def ranking(
        cls, text: str, pairs: Sequence[tuple[Any, Any]], cells: str, settings: ControlOptions
    ) -> Claim:
        """A claim that estimates rank cells as exact runs do: the mean Spearman correlation over prompts,
        beside that of shuffled estimates. pairs: (estimates [cell], exact effects [cell]) of each prompt.
        cells: what is shuffled, in words: "tokens of each prompt"."""
        random = np.random.default_rng(settings.seed)
        ranks = np.array([rank_correlation(*pair) for pair in pairs])
        draws = [
            np.nanmean([rank_correlation(random.permutation(estimate), exact) for estimate, exact in pairs])
            for _ in range(settings.controls)
        ]
        of = f"shuffles of the estimates among the {cells}"
        return cls.against(text, ranks, draws, of, seed=settings.seed)

    @property
    def p_value(self) -> float:
        """Probability of an effect this large if the cause were a random one; NaN without controls."""
        return self.null.share_as_large(self.effect)

    @property
    def is_beyond_chance(self) -> bool:
        """Whether the p-value is at most `chance`."""
        return self.null.is_beyond_chance(self.effect, self.chance)

    @property
    def verdict(self) -> str:
        """ "beyond chance", "no more than chance", or that nothing is claimed without controls."""
        if not self.null.is_run:
            return NO_CONTROL
        return "beyond chance" if self.is_beyond_chance else NO_MORE

    @property
    def short(self) -> str:
        """The text, the effect and the verdict."""
        return f"{self.text}: {self._number(self.effect)}, {self.verdict}"

    @property
    def sentence(self) -> str:
        """Cause, effect, interval, null distribution and p-value."""
        opening = f"{_capital(self.text)}: {self._number(self.effect)}{self._interval}"
        if not self.null.is_run:
            return f"{opening}; {NO_CONTROL} (controls=0)."
        verdict = "" if self.is_beyond_chance else f", {NO_MORE}"
        return f"{opening}{verdict}. {self._null}"

    @property
    def _interval(self) -> str:
        """In brackets the levels before and after, the interval, and where the cause was chosen."""
        parts = [] if self.levels is None else ["from {:.3g} to {:.3g}".format(*self.levels)]
        if self.prompts > 1 or self.spread is not None:
            low, high = self.spread or (self.effect, self.effect)
            which = "held-out prompts" if self.held_out else "prompts"
            over = f"{self.prompts} {which}" if self.prompts > 1 else f"{self.noises} noises"
            parts.append(f"95 % interval over {over}: {self._number(low)} to {self._number(high)}")
        if self.prompts == 1 and self.held_out:
            parts.append("chosen on other prompts")
        return f" ({'; '.join(parts)})" if parts else ""

    @property
    def _null(self) -> str:
        """The null distribution and the p-value, as a sentence."""
        null, (low, high), count = self.null, self.null.bound(), self.null.as_large(self.effect)
        reach = f"{count or 'none'} {'reach' if count > 1 else 'reaches'} this effect"
        many = f", corrected for the choice among {null.looked_at}" if null.looked_at > 1 else ""
        return (
            f"{len(null.values)} {null.of}: median {self._number(null.median)}, 95 % of them between "
            f"{self._number(low)} and {self._number(high)}; {reach} (p = {self.p_value:.2g}{many})."
        )

    def to_json(self) -> dict[str, Any]:
        """The record of a document under `findings`."""
        return {
            "claim": self.text,
            "effect": self.effect,
            "unit": self.unit,
            "verdict": self.verdict,
            "sentence": self.sentence,
            "interval_95": self.spread,
            "prompts": self.prompts,
            "held_out": self.held_out,
            "noises": self.noises,
            "levels": self.levels,
            "chance": self.chance,
            "null": self.null.to_json(self.effect),
        }

    def _number(self, value: float) -> str:
        return f"{value:+.3g} {self.unit}".strip()

    @property
    def strip(self) -> Mapping[str, Any]:
        """Places from 0 to 100 on a common axis, for drawing: every draw, zero, the effect and its
        interval."""
        ends: list[float] = [*self.null.values.tolist(), self.effect, 0.0, *(self.spread or ())]
        low, high = min(ends), max(ends)
        width = (high - low) or 1.0

        def place(value: float) -> float:
            return round(2.0 + 96.0 * (value - low) / width, 2)

        return {
            "draws": [place(value) for value in self.null.values.tolist()],
            "zero": place(0.0),
            "effect": place(self.effect),
            "spread": None if self.spread is None else [place(end) for end in self.spread],
        }


@dataclass(frozen=True, eq=False)
class CandidateEffects:
    """Effects of candidate causes: chosen on some prompts, scored on held-out ones. Axes behind `prompt` are
    those of the candidates, such as [prompt, layer, head]."""

    chosen_on: Floats
    """Effects on the prompts to choose on, [prompt, ...]."""
    scored_on: Floats
    """Effects on the held-out prompts, [prompt, ...]; causes that were never candidates, and only serve as
    controls of others, may stand behind the candidates of the last axis."""
    controls: Floats | None = None
    """Effects of each candidate's control causes on the held-out prompts, [prompt, control, ...]; None: the
    other candidates are the controls."""
    among: npt.NDArray[np.bool_] | None = None
    """Mask of the candidates that may be chosen, bool, of the shape of `mean`; None for all."""

    @property
    def mean(self) -> Floats:
        """Mean effects on the prompts to choose on, [...]."""
        mean: Floats = self.chosen_on.mean(axis=0)
        return mean

    @property
    def best(self) -> tuple[int, ...]:
        """Index of the candidate of the largest mean effect; of equal ones the first."""
        return self._smallest(-self.mean)

    @property
    def weakest(self) -> tuple[int, ...]:
        """Index of the candidate of the smallest mean effect; of equal ones the first."""
        return self._smallest(self.mean)

    @property
    def quietest(self) -> tuple[int, ...]:
        """Index of the candidate whose mean effect is nearest to 0; of equal ones the first."""
        return self._smallest(np.abs(self.mean))

    def _smallest(self, values: Floats) -> tuple[int, ...]:
        allowed = values if self.among is None else np.where(self.among, values, np.inf)
        return tuple(int(i) for i in np.unravel_index(int(allowed.argmin()), allowed.shape))

    def claim(
        self, text: str, index: tuple[int, ...], of: str, settings: ControlOptions, **fields: Any
    ) -> Claim:
        """What the candidate at an index does on the held-out prompts. of, settings, fields: see
        `Claim.over`."""
        place: Any = (slice(None), *index)
        effects = self.scored_on[place]
        if self.controls is None:
            flat = self.scored_on.reshape(len(self.scored_on), -1)
            controls = np.delete(flat, int(np.ravel_multi_index(index, self.scored_on.shape[1:])), axis=1)
        else:
            controls = self.controls[(slice(None), *place)]
        return Claim.over(text, effects, controls, of, settings, held_out=True, **fields)


def _capital(text: str) -> str:
    """The text with a capital letter, where it begins with a word and not with a name such as "a3.h0"."""
    return text[:1].upper() + text[1:] if text.split(" ", 1)[0].isalpha() else text
