"""One exchange of features in one prompt, made ready for a model, with the control runs it is compared with.

An exchange is a tuple of doses injected together: some features suppressed, one injected. The last dose is
the cause in question. Its controls are random features of the same layer that write the same norm, with the
other doses unchanged; the parts of the exchange; other texts of the same kind, on which nothing was chosen
(`held_out`); and facts of other kinds (`elsewhere`). Plans experiments and reads their results; never imports
torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from ...stages.causal.controls import chosen_at_random
from ...stages.features.dictionary import Dictionary
from ...stages.features.effects.doses import Dose, random_like
from ...stages.features.effects.exchanges import FeatureExchanges, Place
from ...stages.features.layers.layout import FeatureId
from ...stages.logits.lens import format_text, format_token
from ...store.arrays import Floats
from ...store.errors import ConfigError
from ..material.answers import encoded, named, word_id
from ..material.feature_labels import named_nodes
from ..material.samples.kin import Kin, kin_of, strangers
from ..settings import ControlSettings
from ..subject import Subject
from ..workflow import Nodes
from .presets import FeaturePreset

if TYPE_CHECKING:
    import xarray as xr

    from ...pipeline.nodes import ResultNode

__all__ = ["FeatureExchange", "changes", "probabilities"]

HELD_OUT = 8
"""Largest number of other texts of the same kind on which a choice is scored."""


@dataclass(frozen=True)
class FeatureExchange:
    """A preset on its model and dictionary.

    Raises ConfigError, DictionaryError or PromptError for parts that do not fit together.
    """

    preset: FeaturePreset
    subject: Subject
    dictionary: Dictionary
    settings: ControlSettings
    words: tuple[str, ...] = ()
    """Words whose probability at the end is followed, one token each; the first is the measure of the
    claim."""
    with_attention: bool = False
    """Whether the attention from the last token to the position is stored."""

    cause = "injection"
    """Word for the last dose."""
    company = "suppression"
    """Word for the other doses."""

    def __post_init__(self) -> None:
        self.dictionary.require_fit(self.subject.config, self.subject.name)
        _ = self.suppress, self.inject  # ConfigError for features that the dictionary does not have

    @cached_property
    def suppress(self) -> list[FeatureId]:
        """The suppressed features."""
        return [self.dictionary.feature(feature) for feature in self.preset.suppress]

    @cached_property
    def inject(self) -> FeatureId:
        """The injected feature."""
        return self.dictionary.feature(self.preset.inject)

    @cached_property
    def doses(self) -> tuple[Dose, ...]:
        """Doses of the exchange, the cause in question last."""
        return self.preset_doses

    @property
    def preset_doses(self) -> tuple[Dose, ...]:
        """The suppressed features and the injected one, all scaled by the strength of the run."""
        off = [Dose(feature.layer, feature.index, factor=-1.0) for feature in self.suppress]
        return (*off, Dose(self.inject.layer, self.inject.index, factor=1.0))

    @property
    def strength(self) -> float:
        """Strength at which the exchange is compared with its controls."""
        return self.preset.strength

    @property
    def looked_at(self) -> int:
        """Number of features tried on this prompt before the cause was chosen."""
        return self.preset.looked_at

    # -- the prompt

    @cached_property
    def ids(self) -> tuple[int, ...]:
        """Token ids of the prompt with its ending."""
        return tuple(encoded(self.subject, self.preset.prompt + self.preset.ending).ids)

    @cached_property
    def tokens(self) -> list[str]:
        """Text of each token of the prompt."""
        return named(self.subject, self.ids)

    @property
    def last(self) -> int:
        """Position whose next token is predicted: the last one."""
        return len(self.ids) - 1

    @cached_property
    def site(self) -> int | None:
        """Position of the exchange; None where the user's prompt names none."""
        return None if self.preset.site == "" else position_of(str(self.preset.site), self.tokens)

    @cached_property
    def required_site(self) -> int:
        """Position of the exchange; ConfigError where the preset has none."""
        return position_of(str(self.preset.site), self.tokens) if self.site is None else self.site

    @property
    def every_position(self) -> list[Place]:
        """The prompt at each of its positions."""
        return [(self.ids, position) for position in range(len(self.ids))]

    @property
    def site_label(self) -> str:
        """The token and position of the exchange, in words."""
        return "the best position" if self.site is None else self.token_label(self.site)

    def token_label(self, position: int) -> str:
        """A token and its position: "' night' (4)"."""
        return f"'{format_token(self.tokens[position])}' ({position})"

    @property
    def heading(self) -> str:
        """The model, the kind of prompt and its last line, for titles."""
        lines = (self.preset.prompt + self.preset.ending).strip().splitlines()
        line = f"'{'… ' if lines[1:] else ''}{format_text(lines[-1])}'"
        return f"{self.subject.name}, {self.preset.kind} {line}"

    # -- controls

    @cached_property
    def random(self) -> list[Dose]:
        """The last dose with other features of its layer that write the same norm, drawn at random."""
        settings, total = self.settings, self.dictionary.n_features
        return random_like(
            self.doses[-1], settings.controls, total, seed=settings.seed, without=self.doses[:-1]
        )

    @property
    def controls_label(self) -> str:
        """What the control runs inject, in words."""
        more = f", with the same {self.company}" if self.doses[:-1] else ""
        return f"other features of layer {self.doses[-1].layer} that write as much{more}"

    @cached_property
    def tried(self) -> list[tuple[Dose, ...]]:
        """Exchanges in the order of axis `exchange`: all doses; all but the last, if there are others; each
        random feature in the place of the last."""
        others = self.doses[:-1]
        return [self.doses, *([others] if others else []), *((*others, dose) for dose in self.random)]

    def of_random(self, values: Floats) -> Floats:
        """The values of the random features among values [..., exchange]."""
        first = 2 if self.doses[:-1] else 1
        return values[..., first : first + len(self.random)]

    @cached_property
    def kin(self) -> Kin:
        """Other texts of the prompt's kind that end on the suppressed word."""
        return kin_of(self.preset.prompt, self.preset.kind, self.preset.suppress_word)

    @cached_property
    def held_out(self) -> list[Place]:
        """Held-out texts of the same kind, with the position of the exchange."""
        return self._placed(self.kin.texts, HELD_OUT)

    @cached_property
    def elsewhere(self) -> list[Place]:
        """Facts of other kinds drawn at random, with the position of the exchange."""
        others = strangers(self.preset.prompt)
        order = chosen_at_random(others, len(others), seed=self.settings.seed)
        return self._placed([(prompt, None) for prompt in order], self.settings.controls)

    def _placed(self, prompts: Sequence[tuple[str, tuple[int, int] | None]], most: int) -> list[Place]:
        """The first `most` prompts with the last token of their span; without a span, with the position as
        far from the end as the site is."""
        places: list[Place] = []
        for prompt, span in dict.fromkeys(prompts if self.site is not None else ()):
            encoding = encoded(self.subject, prompt + self.preset.ending)
            if span is None:
                position = len(encoding.ids) - 1 - (self.last - (self.site or 0))
            else:
                position = encoding.label_spans([("site", span)]).index("site_final")
            if position > self.subject.special_tokens:
                places.append((tuple(encoding.ids), position))
            if len(places) == most:
                break
        return places

    # -- nodes

    @cached_property
    def nodes(self) -> Nodes:
        """Control runs: `controls` at the site, or at every position; `held_out` and `elsewhere` in other
        prompts, where the site is named; `trace` and `words` for the labels of the features."""
        here = self.every_position if self.site is None else [(self.ids, self.site)]
        alone = [self.doses[-1:]] if self.doses[:-1] else []
        nodes = {"controls": self.node(here, [*self.tried, *alone])}
        if self.held_out:
            nodes["held_out"] = self.node(self.held_out, self.tried)
        if self.words and self.elsewhere:
            nodes["elsewhere"] = self.node(self.elsewhere, [self.doses])
        features = [FeatureId(dose.layer, dose.index) for dose in self.doses]
        return nodes | named_nodes(self.subject, self.dictionary, self.ids, features)

    def node(
        self,
        places: Sequence[Place],
        exchanges: Sequence[tuple[Dose, ...]],
        strengths: Sequence[float] = (),
        words: Sequence[int] | None = None,
    ) -> ResultNode:
        """The runs of some exchanges at some places. strengths: by default the one of the claim; words: token
        ids, by default those of `words`."""
        if words is None:
            words = [word_id(self.subject, word) for word in self.words]
        experiment = FeatureExchanges(
            places=tuple(places),
            dictionary=self.dictionary.name,
            features=self.dictionary.identity,
            exchanges=tuple(exchanges),
            strengths=tuple(strengths or (self.strength,)),
            words=tuple(words),
            edge=self.with_attention,
        )
        experiment.cells(self.subject.config)  # refuse wrong settings now, before anything runs
        return self.subject.on_model(experiment)


def position_of(wanted: str, tokens: Sequence[str]) -> int:
    """The position that a site names: an index, negative from the end, or the first token with that text.

    Raises ConfigError for a site that is not in the prompt.
    """
    if wanted.lstrip("-").isdecimal():
        position = int(wanted)
        if not -len(tokens) <= position < len(tokens):
            raise ConfigError(f"expected a site in 0..{len(tokens) - 1}, found {wanted}")
        return position % len(tokens)
    matches = [i for i, token in enumerate(tokens) if token.strip().lower() == wanted.strip().lower()]
    if not matches:
        raise ConfigError(
            f"expected a token {wanted!r} in the prompt as the site, found {' '.join(map(repr, tokens))}"
        )
    return matches[0]


def probabilities(result: xr.Dataset, word: int = 0) -> Floats:
    """P(word) at the end of the prompt, at the first strength: [place, exchange]."""
    logprob: Any = result["logprob"].isel(strength=0, word=word).transpose("place", "exchange")
    return np.exp(logprob.values)  # type: ignore[no-any-return]


def changes(result: xr.Dataset, word: int = 0) -> Floats:
    """The change of P(word) from the untouched run: [place, exchange]."""
    before: Floats = np.exp(result["baseline_logprob"].isel(word=word).values)
    return probabilities(result, word) - before[:, None]
