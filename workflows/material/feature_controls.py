"""What an exchange of features is held against: other features in its place, its parts, other prompts.

Of the doses of an exchange the last one is the cause in question; the others go with it, and stay as they are
where another feature takes its place.

    controls = FeatureControls(planned, planned.doses, 5.5, ("English",), settings)
    nodes |= controls.nodes
    null = controls.null(results["controls"])

Border: declares exchanges and reads them; what they are is stages/features/effects/exchanges.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from ...stages.causal.controls import chosen_at_random
from ...stages.features.effects.exchanges import FeatureExchanges, Place
from ...stages.features.effects.sweeps import Dose, random_like
from ...stages.features.labels import labels_of
from ...stages.features.layers.layout import FeatureId
from ...store.arrays import Floats
from ..settings import ControlSettings
from .answers import encoded
from .feature_injection import word_id
from .feature_labels import FeatureLabels, named_nodes
from .samples.kin import Kin, kin_of, strangers

if TYPE_CHECKING:
    import xarray as xr

    from ...pipeline.nodes import ResultNode
    from ...store import Store
    from .feature_injection import Planned

__all__ = ["FeatureControls", "changes", "probabilities"]

HELD_OUT = 8
"""Other texts of the same kind on which a choice is scored, at most."""


@dataclass(frozen=True)
class FeatureControls:
    """An exchange at the site, or where there is none at every position, and what it is held against.

    doses: the cause in question last. words: whose probability is followed, the first one is the measure's.
    looked_at: features tried on this prompt before the cause was chosen. edge: whether the attention from the
    end to the site is kept. cause, company: what the last dose is, and what the others are, in a word.
    """

    planned: Planned
    doses: tuple[Dose, ...]
    strength: float
    words: tuple[str, ...]
    settings: ControlSettings
    looked_at: int = 1
    edge: bool = False
    cause: str = "injection"
    company: str = "suppression"

    @cached_property
    def random(self) -> list[Dose]:
        """Other features of the layer that write as much as the last one, none of those exchanged."""
        given = self.settings
        total = self.planned.dictionary.n_features
        return random_like(self.doses[-1], given.controls, total, seed=given.seed, without=self.doses[:-1])

    @property
    def of(self) -> str:
        """What was drawn, in words."""
        more = f", with the same {self.company}" if self.has_company else ""
        return f"other features of layer {self.doses[-1].layer} that write as much{more}"

    @property
    def has_company(self) -> bool:
        """Whether other doses go with the cause in question."""
        return len(self.doses) > 1

    @cached_property
    def kin(self) -> Kin:
        """Other texts of the prompt's kind that end as it does, on the suppressed word."""
        preset = self.planned.preset
        return kin_of(preset.prompt, preset.kind, preset.suppress_word)

    @cached_property
    def held_out(self) -> list[Place]:
        """Tokens and position of some of the kin."""
        return self._placed(self.kin.texts, HELD_OUT)

    @cached_property
    def elsewhere(self) -> list[Place]:
        """Tokens and position of as many facts of other kinds, drawn at random."""
        others = strangers(self.planned.preset.prompt)
        order = chosen_at_random(others, len(others), seed=self.settings.seed)
        return self._placed([(prompt, None) for prompt in order], self.settings.controls)

    @cached_property
    def nodes(self) -> dict[str, ResultNode]:
        """`controls` at the site, or at every position; `held_out` and `elsewhere` in other prompts, of a
        named site. Exchanges: all doses; all but the last, if there are; every random feature in its
        place; and of `controls` the last alone."""
        planned = self.planned
        ids, place = tuple(planned.encoding.ids), planned.named_site
        here = [(ids, at) for at in (range(len(ids)) if place is None else (place,))]
        tried = [*([self.doses, self.doses[:-1]] if self.has_company else [self.doses])]
        tried += [(*self.doses[:-1], dose) for dose in self.random]
        alone = [self.doses[-1:]] if self.has_company else []
        found = {"controls": self._exchanges(here, [*tried, *alone])}
        if self.held_out:
            found["held_out"] = self._exchanges(self.held_out, tried)
        if self.words and self.elsewhere:
            found["elsewhere"] = self._exchanges(self.elsewhere, [self.doses])
        features = [FeatureId(dose.layer, dose.index) for dose in self.doses]
        return found | named_nodes(planned.subject, planned.dictionary, ids, features)

    def labels(self, result: Callable[[str], xr.Dataset], store: Store | None) -> FeatureLabels:
        """What the features exchanged are called; result: a result by the name of its node. store: that has
        what people call them."""
        planned = self.planned
        words = result("words") if "words" in self.nodes else None
        found = FeatureLabels.of_trace(planned.subject, planned.encoding.ids, words, result("trace"))
        return found.called(labels_of(store, planned.dictionary))

    def drawn(self, found: Floats) -> Floats:
        """Of values [..., exchange] those of the random features."""
        first = 1 + self.has_company
        return found[..., first : first + len(self.random)]

    def _exchanges(self, places: Sequence[Place], exchanges: Sequence[tuple[Dose, ...]]) -> ResultNode:
        planned = self.planned
        words = tuple(word_id(planned.subject, word) for word in self.words)
        found = FeatureExchanges(
            places=tuple(places),
            dictionary=planned.dictionary.name,
            features=planned.dictionary.identity,
            exchanges=tuple(exchanges),
            strength=self.strength,
            words=words,
            edge=self.edge,
        )
        found.cells(planned.subject.config)
        return planned.on_model(found)

    def _placed(self, prompts: Sequence[tuple[str, tuple[int, int] | None]], most: int) -> list[Place]:
        """The first prompts, each with the last token of its span, or without one the position as far from
        its end as the site is from the prompt's."""
        planned = self.planned
        place = planned.named_site
        found: list[Place] = []
        for prompt, span in dict.fromkeys(prompts if place is not None else ()):
            encoding = encoded(planned.subject, prompt + planned.ending)
            ids = tuple(encoding.ids)
            if span is None:
                at = len(ids) - 1 - (planned.last - (place or 0))
            else:
                at = encoding.label_spans([("site", span)]).index("site_final")
            if at > planned.subject.special_tokens:
                found.append((ids, at))
            if len(found) == most:
                break
        return found


def probabilities(found: xr.Dataset, word: int = 0) -> Floats:
    """P(word) at the end, [place, exchange]."""
    after: Floats = np.exp(found["logprob"].isel(word=word).values)
    return after


def changes(found: xr.Dataset, word: int = 0) -> Floats:
    """The change of P(word) at the end from the untouched run, [place, exchange]."""
    before: Floats = np.exp(found["baseline_logprob"].isel(word=word).values)
    return probabilities(found, word) - before[:, None]
