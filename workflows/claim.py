"""Claims: the protocol by which every causal workflow compares the effect of a cause with chance.

A workflow provides measured effects: of candidate causes on the prompts that select among them, of the same
on held-out prompts, and of control runs. `Claim` and `CandidateEffects` do the rest: selection, number and
draw of controls, null distribution, confidence interval, p-value and sentence.

    heads = CandidateEffects(chosen_on, scored_on)                     # effects [prompt, layer, head]
    claim = heads.claim(text, heads.best, "another head of each prompt", settings, unit="nats")
    claim.is_beyond_chance, claim.p_value, claim.sentence

constructor               the cause is compared with             null distribution
`Claim.over`              control causes in each of the prompts  means over prompts of a cause drawn in each
`CandidateEffects.claim`  likewise, selected on other prompts    likewise
`Claim.among`             other candidates of one prompt         some of them, drawn without replacement
`Claim.paired`            the same prompts without the cause     means of differences with random signs
`Claim.ranking`           exact effects, ranked by estimates     rank correlations of shuffled estimates
`Claim.against`           effects of separate control runs       these effects

An effect with a p-value above `chance` is reported as no more than chance.

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
"""Verdict on an effect with a p-value above `chance`."""
NO_CONTROL = "nothing is claimed, as no control was run"
"""Verdict on an effect without controls."""


class ControlOptions(Protocol):
    """Number of controls and random seed, the fields of `ControlSettings` that claims read."""

    @property
    def controls(self) -> int:
        """Number of draws of the null distribution; 0 runs no control and claims nothing."""

    @property
    def seed(self) -> int:
        """Seed of the random draws."""


@dataclass(frozen=True)
class Controls:
    """Number of controls and random seed, for claims without workflow settings."""

    controls: int
    """Number of draws of the null distribution."""
    seed: int = 0
    """Seed of the draws."""


@dataclass(frozen=True)
class Claim:
    """Measured effect with its null distribution and a sentence that states both."""

    text: str
    """Intervention, place and measure in words: "injecting L0:128 at ' in' raises P(' English')"."""
    effect: float
    """The measure under the cause, in `unit`."""
    null: Null
    """The same measure under random causes of equal size, the controls."""
    unit: str = ""
    """Unit of the measure, such as "nats"; empty for none."""
    spread: tuple[float, float] | None = None
    """95 % confidence interval of the effect over `prompts`, or over `noises` for a single prompt."""
    prompts: int = 1
    """Number of prompts that the effect is averaged over."""
    held_out: bool = False
    """Whether the prompts that selected the cause are disjoint from the prompts of the effect."""
    noises: int = 1
    """Number of noise samples that the effect is averaged over in each prompt."""
    levels: tuple[float, float] | None = None
    """Baseline value and value under the cause, such as probabilities, for an effect that equals their
    difference; None for other effects."""
    chance: float = CHANCE
    """Significance level: the largest p-value of an effect beyond chance."""

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
        """A claim compared with effects of separate control runs.

        Arguments:
            text: see `Claim`.
            effects: the measure under the cause: a number, or [prompt] for a mean with its interval.
            draws: the same measure under random causes, [draw]; empty without controls.
            of: name of the draws, in words that follow "50".
            side: which effects count as large; see `Null`.
            looked_at: number of candidates that the cause was selected from on the same data.
            seed: of the bootstrap interval.
            fields: further fields of the claim.
        """
        null = Null(np.asarray(draws, np.float64), of, side, looked_at)
        if np.ndim(effects) == 0:
            return cls(text, float(effects), null, **fields)
        spread = interval(effects, seed=seed)
        # A NaN stands for a prompt on which the effect is not defined; the others still count.
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
        """A claim on several prompts: the mean effect, compared with means of a random cause in each prompt.

        Arguments:
            text: see `Claim`.
            effects: the measure under the cause, [prompt].
            controls: the measure under control causes, [prompt, cause]; the cause itself is drawn too.
            of: what the controls are, in words that follow "50 draws of".
            settings: number of draws and their seed.
            side: which effects count as large; see `Null`.
            looked_at: number of candidates that the cause was selected from on the same prompts.
            fields: further fields of the claim.
        """
        # Without control causes, draws of the cause alone would be no null distribution.
        count = settings.controls if np.size(controls) else 0
        draws = random_means(np.column_stack([effects, controls]), count, seed=settings.seed)
        of, seed = f"draws of {of}", settings.seed
        return cls.against(text, effects, draws, of, side=side, looked_at=looked_at, seed=seed, **fields)

    @classmethod
    def paired(cls, text: str, differences: Any, of: str, settings: ControlOptions, **fields: Any) -> Claim:
        """A claim on several prompts: the mean difference from each prompt's control, compared with means of
        the differences with random signs.

        Arguments:
            text: see `Claim`.
            differences: effect minus that of the prompt's control, [prompt].
            of: name of the draws, in words that follow "50".
            settings: number of draws and their seed.
            fields: further fields of the claim.
        """
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
        """A claim on one prompt: a candidate's effect, compared with random other candidates.

        Arguments:
            text: see `Claim`.
            effects: effects of all candidates, of any shape, flattened here.
            own: flat index of the candidate.
            of: name of the draws, in words that follow "50".
            settings: number of draws and their seed.
            candidates: flat indices that may be drawn; None for all.
            side: which effects count as large; see `Null`.
            fields: further fields of the claim.
        """
        values = np.asarray(effects, np.float64).ravel()
        drawn = chosen_at_random(
            range(len(values)) if candidates is None else candidates,
            settings.controls,
            seed=settings.seed,
            # Otherwise the cause could be drawn as its own control.
            without=[own],
        )
        return cls.against(text, values[own], values[drawn], of, side=side, **fields)

    @classmethod
    def ranking(
        cls, text: str, pairs: Sequence[tuple[Any, Any]], ranked: str, settings: ControlOptions
    ) -> Claim:
        """A claim that estimates rank things as exact measurements do: the mean Spearman correlation over
        prompts, compared with that of shuffled estimates.

        Arguments:
            text: see `Claim`.
            pairs: (estimates, exact effects) of what is ranked in each prompt, one-dimensional and equally
                long.
            ranked: what is ranked, in words: "tokens of each prompt".
            settings: number of draws and their seed.
        """
        random = np.random.default_rng(settings.seed)
        ranks = np.array([rank_correlation(*pair) for pair in pairs])
        draws = [
            np.nanmean([rank_correlation(random.permutation(estimate), exact) for estimate, exact in pairs])
            for _ in range(settings.controls)
        ]
        of = f"shuffles of the estimates among the {ranked}"
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
        """Text, effect and verdict in one line: "ablating head 3 raises the loss: +0.2 nats, beyond
        chance"."""
        return f"{self.text}: {self._number(self.effect)}, {self.verdict}"

    @property
    def sentence(self) -> str:
        """The claim in words: cause, effect, confidence interval, null distribution and p-value."""
        opening = f"{_capital(self.text)}: {self._number(self.effect)}{self._interval}"
        if not self.null.is_run:
            return f"{opening}; {NO_CONTROL} (controls=0)."
        verdict = "" if self.is_beyond_chance else f", {NO_MORE}"
        return f"{opening}{verdict}. {self._null}"

    @property
    def _interval(self) -> str:
        """Part of the sentence in parentheses: values without and with the cause, confidence interval, and
        whether the cause was chosen on other prompts; empty if none of these is known."""
        parts = [] if self.levels is None else ["from {:.3g} to {:.3g}".format(*self.levels)]
        if self.prompts > 1 or self.spread is not None:
            low, high = self.spread or (self.effect, self.effect)
            prompts = "held-out prompts" if self.held_out else "prompts"
            over = f"{self.prompts} {prompts}" if self.prompts > 1 else f"{self.noises} noises"
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
            f"Control: {len(null.values)} {null.of}; median {self._number(null.median)}, 95 % of them "
            f"between {self._number(low)} and {self._number(high)}; {reach} (p = {self.p_value:.2g}{many})."
        )

    def to_json(self) -> dict[str, Any]:
        """JSON record of the claim, listed under `findings` in the document of a workflow."""
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
        """Coordinates from 0 to 100 for a drawing of the claim on a line: all draws, zero, the effect and its
        interval."""
        ends: list[float] = [*self.null.values.tolist(), self.effect, 0.0, *(self.spread or ())]
        low, high = min(ends), max(ends)
        # All values may be equal.
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
    """Effects of candidate causes, selected on some prompts and scored on held-out ones. Axes after `prompt`
    are those of the candidates, such as [prompt, layer, head]."""

    chosen_on: Floats
    """Effects on the selection prompts, [prompt, ...]."""
    scored_on: Floats
    """Effects on the held-out prompts, [prompt, ...]. The last axis may be longer: entries after the
    candidates are causes that serve as controls only."""
    controls: Floats | None = None
    """Effects of each candidate's control causes on the held-out prompts, [prompt, control, ...]; None if the
    other candidates are the controls."""
    among: npt.NDArray[np.bool_] | None = None
    """Mask of selectable candidates, bool, in the shape of `mean`; None for all candidates."""

    @property
    def mean(self) -> Floats:
        """Mean effect of each candidate over the selection prompts, of shape [layer, head] for effects
        [prompt, layer, head]."""
        mean: Floats = self.chosen_on.mean(axis=0)
        return mean

    @property
    def best(self) -> tuple[int, ...]:
        """Index of the candidate with the largest mean effect; the first of equal ones."""
        return self._smallest(-self.mean)

    @property
    def weakest(self) -> tuple[int, ...]:
        """Index of the candidate with the smallest mean effect; the first of equal ones."""
        return self._smallest(self.mean)

    @property
    def quietest(self) -> tuple[int, ...]:
        """Index of the candidate whose mean effect is nearest to 0; the first of equal ones."""
        return self._smallest(np.abs(self.mean))

    def _smallest(self, values: Floats) -> tuple[int, ...]:
        allowed = values if self.among is None else np.where(self.among, values, np.inf)
        return tuple(int(i) for i in np.unravel_index(int(allowed.argmin()), allowed.shape))

    def claim(
        self, text: str, index: tuple[int, ...], of: str, settings: ControlOptions, **fields: Any
    ) -> Claim:
        """Claim about the mean effect of a candidate over held-out prompts.

        Arguments:
            text: see `Claim`.
            index: index of the candidate in `mean`.
            of: name of the controls, in words that follow "50 draws of".
            settings: number of draws and their seed.
            fields: further fields of the claim.
        """
        cell: Any = (slice(None), *index)
        effects = self.scored_on[cell]
        if self.controls is None:
            flat = self.scored_on.reshape(len(self.scored_on), -1)
            # Every other candidate of the same prompt is a control; the chosen one is not its own.
            controls = np.delete(flat, int(np.ravel_multi_index(index, self.scored_on.shape[1:])), axis=1)
        else:
            controls = self.controls[(slice(None), *cell)]
        return Claim.over(text, effects, controls, of, settings, held_out=True, **fields)


def _capital(text: str) -> str:
    """The text with a capital first letter, unless it starts with a name such as "a3.h0"."""
    return text[:1].upper() + text[1:] if text.split(" ", 1)[0].isalpha() else text
