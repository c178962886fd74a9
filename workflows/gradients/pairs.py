"""Pairs of prompts for attribution: equal numbers of tokens, different answers.

Pairs are one pair given by the settings, the pairs of `data`, or shipped facts. Of the latter two, claims
only count pairs that the model knows, whose clean answer is its likeliest next token
(material/facts/known.py): gradients of an untrained network have largest entries too.

Border: texts and token ids; loads no model and never imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ...store.errors import ConfigError
from ..material.answers import encoded, require_next
from ..material.facts.fact_pairs import pair_records
from ..material.facts.known import SCORED, KnownWorkflow
from ..settings import Count, DataSettings, ModelSettings, require_together, setting
from ..subject import Subject
from ..workflow import Nodes

__all__ = ["AttributedPair", "AttributedPairs", "AttributionSettings", "VerifiedSettings", "pair_json"]


@dataclass(frozen=True)
class AttributionSettings(DataSettings, ModelSettings):
    """Settings of attribution workflows: one pair of prompts and its answer, or pairs of facts.

    Raises:
        ConfigError: some but not all of prompt, corrupted and answer are set.
    """

    prompt: str = setting("", "clean prompt; none: the pairs of data, or of facts that the model knows")
    corrupted: str = setting("", "corrupted prompt, with another answer and as many tokens")
    answer: str = setting("", "next word of the clean prompt; its first token is measured")
    pairs: Count = setting(8, "number of pairs of facts, if prompt is not set")

    def __post_init__(self) -> None:
        require_together(self, "prompt", "corrupted", "answer")


@dataclass(frozen=True)
class VerifiedSettings(AttributionSettings):
    """Settings of attribution workflows that check some of their estimates by exact patches.

    Raises:
        ConfigError: some but not all of prompt, corrupted, answer and wrong are set.
    """

    wrong: str = setting("", "next word of the corrupted prompt, if prompt is set")
    verify: Count = setting(
        12, "number of cells with the largest estimates that are patched exactly, and of random ones"
    )

    def __post_init__(self) -> None:
        require_together(self, "prompt", "corrupted", "answer", "wrong")


AGREEMENT = ("correlation", "rank_correlation", "worst_miss")
"""Names of the measures of agreement between estimates and exact effects."""


@dataclass(frozen=True)
class AttributedPair:
    """Clean and corrupted prompt of equal token count, with answers, as text and token ids."""

    texts: tuple[str, str]
    """Clean and corrupted prompt."""
    answers: tuple[str, str]
    """Answers of the clean and of the corrupted prompt; the latter "" if unknown."""
    clean: tuple[int, ...]
    """Token ids of the clean prompt."""
    corrupted: tuple[int, ...]
    """Token ids of the corrupted prompt."""
    answer: int
    """First token id of the clean prompt's answer."""
    wrong: int
    """First token id of the corrupted prompt's answer; `answer` if that is unknown."""


class AttributedPairs(KnownWorkflow):
    """Base class of workflows that attribute the answers of pairs of prompts."""

    settings: AttributionSettings
    asked_about = "pairs"
    read: tuple[AttributedPair, ...]
    """The pairs; the first one is displayed. `plan` sets it."""

    def read_pairs(self, wrong: str = "") -> tuple[AttributedPair, ...]:
        """The pair that the settings name or, without one, the first settings.pairs pairs of `data` or of
        shipped facts that fit the model.

        Arguments:
            wrong: answer of the corrupted prompt of the settings; "" if unknown.

        Raises:
            ConfigError: prompts of different lengths or with equal tokens, answers with the same first token,
                or no pair of facts that fits the model.
        """
        settings, subject = self.settings, self.subject
        # Models that fill in masks have no next token to predict.
        require_next(subject)
        if settings.prompt:
            texts, answers = (settings.prompt, settings.corrupted), (settings.answer, wrong)
            return (_paired(subject, texts, answers),)
        pairs: list[AttributedPair] = []
        for record in pair_records(subject, settings.data):
            try:
                pairs.append(_paired(subject, record[:2], record[2:]))
            except ConfigError:
                continue  # lengths differ, or answers with the same first token, whose logits cannot differ
            if len(pairs) == settings.pairs:
                break
        if not pairs:
            raise ConfigError(
                "expected pairs of facts with equally many tokens in both prompts and answers that begin "
                "with different tokens, found none for this model; give others: data=FILE, or set prompt, "
                "corrupted and answer"
            )
        return tuple(pairs)

    def known_pairs_node(self) -> Nodes:
        """Node that measures which pairs the model knows; empty for a pair that the settings name, as claims
        are about it in any case."""
        if self.settings.prompt:
            return {}
        # -1: the answer is predicted at the last position.
        return self.known_node({SCORED: [(pair.clean, pair.answer, -1) for pair in self.read]})

    def token_columns(self, number: int) -> tuple[str, ...]:
        """Tokens of the corrupted prompt of pair `number`, as labels of the columns of a heatmap."""
        return tuple(self.subject.token_labels(self.read[number].corrupted))

    @property
    def counts(self) -> npt.NDArray[np.bool_]:
        """Which pairs claims are about, bool [pair]: those that the model knows, and a pair that the settings
        name."""
        return np.ones(1, bool) if self.settings.prompt else self.is_known(SCORED)


def _paired(subject: Subject, texts: tuple[str, str], answers: tuple[str, str]) -> AttributedPair:
    """Pair of texts with their answers, tokenized. Raises ConfigError for the conditions that `read_pairs`
    lists."""
    clean, corrupted = (tuple(encoded(subject, text).ids) for text in texts)
    answer = subject.answer_id(texts[0], answers[0])
    wrong = subject.answer_id(texts[1], answers[1]) if answers[1] else answer
    if len(clean) != len(corrupted):
        raise ConfigError(
            f"expected prompts with the same number of tokens, found {len(clean)} in {texts[0]!r} and "
            f"{len(corrupted)} in {texts[1]!r}; choose another corrupted prompt"
        )
    if clean == corrupted:
        raise ConfigError(
            f"expected a corrupted prompt that differs from the clean one, found {texts[0]!r} twice; change "
            "the words that the answer depends on"
        )
    if answers[1] and answer == wrong:
        raise ConfigError(
            f"expected answers that begin with different tokens, found {answers[0]!r} and {answers[1]!r}; "
            "choose other answers"
        )
    return AttributedPair(texts, answers, clean, corrupted, answer, wrong)


def pair_json(pair: AttributedPair) -> dict[str, Any]:
    """JSON fields of a pair: both prompts and their answers."""
    return {
        "clean_prompt": pair.texts[0],
        "corrupted_prompt": pair.texts[1],
        "answer": pair.answers[0],
        "wrong": pair.answers[1],
    }
