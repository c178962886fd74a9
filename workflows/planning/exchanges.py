"""The exchanges of one preset on its model: a node per pair, and what its numbers say.

Every pair is an experiment of its own: at every position of its prompt the exchange, its suppression alone,
and as much of random features in place of the injected one. So a killed run goes on with the next pair, and a
pair more computes that pair.

Border: plans and reads `FeatureExchanges`; presets are presets.py's, views the workflow's. Never imports
torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from ...stages.causal.controls import Null
from ...stages.features.dictionary import Dictionary
from ...stages.features.effects.exchanges import FeatureExchanges
from ...stages.features.effects.sweeps import Dose, random_like
from ...store.arrays import Floats
from ...store.errors import ConfigError
from ..material.answers import encoded, named
from ..material.feature_controls import changes, probabilities
from ..material.feature_injection import place_of
from ..subject import Subject
from .presets import ExchangePair, PairPreset

if TYPE_CHECKING:
    import xarray as xr

    from ...pipeline.nodes import ResultNode
    from ...stages.forward.models.model import Model
    from ..settings import ControlSettings, ModelSettings

__all__ = ["Exchanged", "Exchanges", "jaccard", "shuffled_jaccard"]

OWN, ALONE, RANDOM = 0, 1, 2
"""Exchanges of each pair, in order: all doses; the suppression alone; from here on random features."""


@dataclass(frozen=True)
class Exchanged:
    """What came out for a pair.

    probability, change: of the injected word at the end, [position, exchange]. before: without either;
    before_own: of the suppressed word. site: position. of: what was drawn, in words.
    """

    pair: ExchangePair
    tokens: Sequence[str]
    site: int
    before: float
    before_own: float
    probability: Floats
    change: Floats
    of: str

    @property
    def effect(self) -> float:
        """Change of the word's probability by the exchange at the site."""
        return float(self.change[self.site, OWN])

    @property
    def drawn(self) -> Floats:
        """The same by each random feature, [draw]."""
        return self.change[self.site, RANDOM:]

    @property
    def null(self) -> Null:
        """What random features do at the site."""
        return Null(self.drawn, self.of)

    @property
    def peaks(self) -> Floats:
        """1 where an exchange changes most at the site, else 0: [exchange], without the suppression alone."""
        most = np.delete(self.change.argmax(axis=0), ALONE)
        found: Floats = np.where(most == self.site, 1.0, 0.0)
        return found

    @property
    def works(self) -> bool:
        """Whether it changes the word most at the site, and there more than random features do."""
        return bool(self.peaks[OWN]) and self.null.is_beyond_chance(self.effect)


class Exchanges:
    """Some pairs of a preset, ready for its model.

    Raises ConfigError, DictionaryError or PromptError for what does not fit together, before anything runs.
    """

    def __init__(
        self,
        preset: PairPreset,
        pairs: Sequence[ExchangePair],
        controls: ControlSettings,
        on: ModelSettings,
        model: Model | None = None,
    ) -> None:
        """controls: how many random features, and their seed. on: dtype, revision and device."""
        self.preset, self.pairs, self.controls = preset, tuple(pairs), controls
        self.subject = Subject(on.reference(model, preset.model))
        self.dictionary = Dictionary.from_pretrained(preset.dictionary)
        self.dictionary.require_fit(self.subject.config, self.subject.name)

    @cached_property
    def ids(self) -> list[tuple[int, ...]]:
        """Tokens of every pair's prompt."""
        return [tuple(encoded(self.subject, pair.prompt + self.preset.ending).ids) for pair in self.pairs]

    def words(self, pair: ExchangePair) -> tuple[int, int]:
        """First tokens of the injected and of the suppressed word. Raises ConfigError where they are one."""
        found = tuple(
            self.subject.answer_id(pair.prompt, word) for word in (pair.inject_word, pair.suppress_word)
        )
        if found[0] == found[1]:
            raise ConfigError(
                f"expected words that begin with different tokens, found {pair.inject_word!r} and "
                f"{pair.suppress_word!r}; choose another pair"
            )
        return found[0], found[1]

    def site(self, number: int) -> int:
        """Position of a pair's site."""
        tokens = named(self.subject, self.ids[number])
        try:
            return place_of(str(self.pairs[number].site), tokens)
        except ConfigError as error:
            raise ConfigError(f"pair {number}: {error}") from error

    def doses(self, pair: ExchangePair) -> tuple[Dose, ...]:
        """What is suppressed, and what is injected last. Raises ConfigError where nothing is suppressed."""
        if not pair.suppress:
            raise ConfigError(f"expected features to suppress in {pair.prompt[-40:]!r}, found none")
        off, on = map(self.dictionary.feature, pair.suppress), self.dictionary.feature(pair.inject)
        return (
            *(Dose(each.layer, each.index, factor=-1.0) for each in off),
            Dose(on.layer, on.index, factor=1.0),
        )

    def of(self, pair: ExchangePair) -> str:
        """What is drawn, in words."""
        layer = self.dictionary.feature(pair.inject).layer
        return f"other features of layer {layer} that write as much, with the same suppression"

    def nodes(self, prefix: str = "pair") -> dict[str, ResultNode]:
        """A node per pair, "pair_0" and so on."""
        return {f"{prefix}_{i}": self._node(i) for i in range(len(self.pairs))}

    def _node(self, number: int) -> ResultNode:
        pair, ids = self.pairs[number], self.ids[number]
        doses = self.doses(pair)
        given, total = self.controls, self.dictionary.n_features
        drawn = random_like(doses[-1], given.controls, total, seed=given.seed, without=doses[:-1])
        self.site(number)
        experiment = FeatureExchanges(
            places=tuple((ids, place) for place in range(len(ids))),
            dictionary=self.dictionary.name,
            features=self.dictionary.identity,
            exchanges=(doses, doses[:-1], *((*doses[:-1], dose) for dose in drawn)),
            strength=self.preset.strength,
            words=self.words(pair),
        )
        experiment.cells(self.subject.config)
        return self.subject.on_model(experiment)

    def read(self, result: Callable[[str], xr.Dataset], prefix: str = "pair") -> list[Exchanged]:
        """What came out of each pair. result: a result by the name of its node."""
        return [self._read(number, result(f"{prefix}_{number}").load()) for number in range(len(self.pairs))]

    def _read(self, number: int, found: xr.Dataset) -> Exchanged:
        pair, before = self.pairs[number], np.exp(found["baseline_logprob"].isel(place=0).values)
        return Exchanged(
            pair,
            named(self.subject, self.ids[number]),
            self.site(number),
            float(before[0]),
            float(before[1]),
            probabilities(found),
            changes(found),
            self.of(pair),
        )


def jaccard(one: Sequence[bool], other: Sequence[bool]) -> float:
    """Share of what is in either of two sets that is in both, of members as booleans; NaN for empty ones."""
    both, either = np.logical_and(one, other).sum(), np.logical_or(one, other).sum()
    return float(both / either) if either else float("nan")


def shuffled_jaccard(one: Sequence[bool], other: Sequence[bool], count: int, *, seed: int) -> Floats:
    """The same of sets as large whose members were drawn: [draw]."""
    random = np.random.default_rng(seed)
    drawn = (random.permutation(np.asarray(other, bool)).tolist() for _ in range(count))
    return np.array([jaccard(one, each) for each in drawn])
