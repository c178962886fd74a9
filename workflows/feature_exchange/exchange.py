"""One exchange of features in one prompt, prepared for a model, with its control runs.

An exchange is a tuple of doses that are injected together: some features are suppressed, one is injected.
Claims are about the last dose. Controls are random features of the same layer with the same norm of their
write, the other doses unchanged. Further runs: the parts of the exchange alone, held-out texts of the same
kind (`held_out`), and facts of other kinds (`elsewhere`). Plans experiments and reads their results; never
imports torch.
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
from ..material.answers import encoded, word_id
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
"""Largest number of held-out prompts of an exchange."""


@dataclass(frozen=True)
class FeatureExchange:
    """An exchange of features in one prompt: some are suppressed, one is injected; prepared for the model and
    dictionary of a preset.

    Raises:
        ConfigError, DictionaryError, PromptError: model, dictionary, features and prompt do not fit together.
    """

    preset: FeaturePreset
    """Features, words, prompt and site."""
    subject: Subject
    """The model."""
    dictionary: Dictionary
    """Dictionary of the features."""
    settings: ControlSettings
    """Number of controls and their seed."""
    words: tuple[str, ...] = ()
    """Words whose probability at the end is measured, one token each; claims are about the first."""
    with_attention: bool = False
    """Whether the attention of the last token to the position of the exchange is stored."""

    cause = "injection"
    """Name in tables of the last dose, which claims are about."""
    company = "suppression"
    """Name in tables of the doses before the last one."""

    def __post_init__(self) -> None:
        self.dictionary.require_fit(self.subject.config, self.subject.name)
        _ = self.suppress, self.inject  # ConfigError for features that the dictionary does not have

    @cached_property
    def suppress(self) -> list[FeatureId]:
        """The suppressed features of the preset."""
        return [self.dictionary.feature(feature) for feature in self.preset.suppress]

    @cached_property
    def inject(self) -> FeatureId:
        """The injected feature of the preset."""
        return self.dictionary.feature(self.preset.inject)

    @cached_property
    def doses(self) -> tuple[Dose, ...]:
        """Doses that are injected together: of suppressed features, then of the injected one, which claims
        are about."""
        return self.preset_doses

    @property
    def preset_doses(self) -> tuple[Dose, ...]:
        """Doses of the preset: factor -1 for each suppressed feature, then factor 1 for the injected one; the
        strength of a run multiplies them."""
        suppressed = [Dose(feature.layer, feature.index, factor=-1.0) for feature in self.suppress]
        return (*suppressed, Dose(self.inject.layer, self.inject.index, factor=1.0))

    @property
    def strength(self) -> float:
        """Strength at which the exchange is compared with its controls."""
        return self.preset.strength

    @property
    def looked_at(self) -> int:
        """Number of features tried on this prompt before the one of the last dose was chosen; p-values are
        corrected for it."""
        return self.preset.looked_at

    # -- the prompt

    @cached_property
    def ids(self) -> tuple[int, ...]:
        """Token ids of the prompt with its ending."""
        return tuple(encoded(self.subject, self.preset.prompt + self.preset.ending).ids)

    @cached_property
    def tokens(self) -> list[str]:
        """Text of each token of the prompt."""
        return self.subject.token_texts(self.ids)

    @property
    def last(self) -> int:
        """Position whose next token is predicted: the last one."""
        return len(self.ids) - 1

    @cached_property
    def site(self) -> int | None:
        """Token position at which features are exchanged; None if the preset has no site."""
        return None if self.preset.site == "" else position_of(str(self.preset.site), self.tokens)

    @cached_property
    def required_site(self) -> int:
        """Token position at which features are exchanged. Raises ConfigError if the preset names none."""
        return position_of(str(self.preset.site), self.tokens) if self.site is None else self.site

    @property
    def every_position(self) -> list[Place]:
        """Places of an exchange at every token of the prompt in turn: (token ids, position) each."""
        return [(self.ids, position) for position in range(len(self.ids))]

    @property
    def site_label(self) -> str:
        """Token and position of the exchange as claims name them, "' night' (4)"; "the best position" without
        a site."""
        return "the best position" if self.site is None else self.token_label(self.site)

    def token_label(self, position: int) -> str:
        """A token and its position: "' night' (4)"."""
        return f"'{format_token(self.tokens[position])}' ({position})"

    @property
    def position_axis(self) -> dict[str, Any]:
        """Fields of a curve or bars with one value per token of the prompt: labels and name of the x axis."""
        return {
            "x": tuple(f"{format_token(token)} ({i})" for i, token in enumerate(self.tokens)),
            "x_name": "token at which features are suppressed and injected",
        }

    @property
    def heading(self) -> str:
        """The model, the kind of prompt and its last line, for titles."""
        lines = (self.preset.prompt + self.preset.ending).strip().splitlines()
        line = f"'{'… ' if lines[1:] else ''}{format_text(lines[-1])}'"
        return f"{self.subject.name}, {self.preset.kind} {line}"

    # -- controls

    @cached_property
    def random(self) -> list[Dose]:
        """Control doses: the last dose with other features of its layer, drawn at random and scaled to the
        same norm of what they write."""
        settings, total = self.settings, self.dictionary.n_features
        return random_like(
            self.doses[-1], settings.controls, total, seed=settings.seed, without=self.doses[:-1]
        )

    @property
    def controls_label(self) -> str:
        """The control doses in words that follow a number in claims."""
        company = f", with the same {self.company}" if self.doses[:-1] else ""
        return f"other features of layer {self.doses[-1].layer} with the same write norm{company}"

    @cached_property
    def tried(self) -> list[tuple[Dose, ...]]:
        """Exchanges along the axis "exchange" of results: the full exchange; the suppression alone, if
        features are suppressed; then one with each random feature in place of the injected one."""
        company = self.doses[:-1]
        return [self.doses, *([company] if company else []), *((*company, dose) for dose in self.random)]

    def of_random(self, values: Floats) -> Floats:
        """Entries of an array [..., exchange] that belong to random features, [..., draw]; see `tried`."""
        # Index 0 is the full exchange, index 1 the suppression alone, if there is one.
        start = 2 if self.doses[:-1] else 1
        return values[..., start : start + len(self.random)]

    @cached_property
    def kin(self) -> Kin:
        """Texts of the prompt's kind whose expected last word is the suppressed word."""
        return kin_of(self.preset.prompt, self.preset.kind, self.preset.suppress_word)

    @cached_property
    def held_out(self) -> list[Place]:
        """Held-out prompts of the prompt's kind, as (token ids, exchange position)."""
        return self._placed(self.kin.texts, HELD_OUT)

    @cached_property
    def elsewhere(self) -> list[Place]:
        """Random shipped facts of other relations: (token ids, position of the exchange) each, as far from
        the end as the site."""
        facts = strangers(self.preset.prompt)
        # All of them in random order, as `_placed` passes over those that are too short.
        order = chosen_at_random(facts, len(facts), seed=self.settings.seed)
        return self._placed([(prompt, None) for prompt in order], self.settings.controls)

    def _placed(self, prompts: Sequence[tuple[str, tuple[int, int] | None]], most: int) -> list[Place]:
        """Prompts as token ids, each with its position of the exchange; prompts too short for one are left
        out.

        Arguments:
            prompts: texts, each with the span in characters whose last token is the position; None for the
                position with the same distance from the end as the site.
            most: largest number of prompts that are returned.
        """
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
        """Nodes by name: "controls" at the site, or at every position without a site; with a site also
        "held_out" and "elsewhere", in other prompts; "trace" and "words" for the labels of the features."""
        places = self.every_position if self.site is None else [(self.ids, self.site)]
        # Placed after the random features, so that `tried` keeps its indices; tables read it as index -1.
        alone = [self.doses[-1:]] if self.doses[:-1] else []
        nodes = {"controls": self.node(places, [*self.tried, *alone])}
        if self.held_out:
            nodes["held_out"] = self.node(self.held_out, self.tried)
        if self.words and self.elsewhere:
            # One exchange without controls: these facts show whether the effect needs this kind of text.
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
        """The node that runs exchanges at places.

        Arguments:
            places: prompts as token ids, each with a position.
            exchanges: tuples of doses that are injected together.
            strengths: strengths of the runs; empty for the one that claims are about.
            words: token ids whose probabilities are measured; None for those of `self.words`.
        """
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
        experiment.cells(self.subject.config)  # raises for wrong settings before anything runs
        return self.subject.on_model(experiment)


def position_of(site: str, tokens: Sequence[str]) -> int:
    """Position named by a site: an index (negative from the end), or the text of a token, whose first
    occurrence counts.

    Arguments:
        site: the index or the text of a token.
        tokens: texts of the tokens of the prompt.

    Raises:
        ConfigError: a site that is not in the prompt.
    """
    if site.lstrip("-").isdecimal():
        position = int(site)
        if not -len(tokens) <= position < len(tokens):
            raise ConfigError(
                f"expected the site as a position in 0..{len(tokens) - 1}, found {site}; choose another "
                "position"
            )
        return position % len(tokens)
    matches = [i for i, token in enumerate(tokens) if token.strip().lower() == site.strip().lower()]
    if not matches:
        raise ConfigError(
            f"expected the site to be a token of the prompt, found {site!r}; choose one of "
            f"{' '.join(map(repr, tokens))}"
        )
    return matches[0]


def probabilities(result: xr.Dataset, word: int = 0) -> Floats:
    """Probability of a word at the end of the prompt, at the first strength of a result, [place, exchange].

    Arguments:
        result: result of the exchange.
        word: index of the word.
    """
    logprob: Any = result["logprob"].isel(strength=0, word=word).transpose("place", "exchange")
    return np.exp(logprob.values)  # type: ignore[no-any-return]


def changes(result: xr.Dataset, word: int = 0) -> Floats:
    """Probability of a word at the end of the prompt minus that without injection, [place, exchange].

    Arguments:
        result: result of the exchange.
        word: index of the word.
    """
    before: Floats = np.exp(result["baseline_logprob"].isel(word=word).values)
    return probabilities(result, word) - before[:, None]
