"""Pairs of prompts that attribution is asked about: whose answers differ, of as many tokens.

One's own pair, the pairs of `data`, or shipped facts; of the last two count those the model knows, whose
clean answer is its likeliest next token (material/facts/known.py): gradients of an untrained network find
causes, too, of nothing anybody said.

Border: texts and token ids; loads no model and never imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ...store.errors import ConfigError
from ..material.answers import encoded, require_next
from ..material.facts.fact_data import FIELDS
from ..material.facts.fact_pairs import pair_records
from ..material.facts.known import SCORED, KnownWorkflow
from ..settings import Count, DataSettings, ModelSettings, require_together, setting
from ..subject import Subject
from ..workflow import Nodes

__all__ = ["AttributedPair", "AttributedPairs", "AttributionSettings"]


@dataclass(frozen=True)
class AttributionSettings(DataSettings, ModelSettings):
    """A question about a pair of prompts and their answers, or about pairs of facts."""

    prompt: str = setting("", "clean prompt; none: the pairs of data, or shipped facts")
    corrupted: str = setting("", "the same of another answer, of as many tokens")
    answer: str = setting("", "what comes next in the clean prompt; its first token is followed")
    pairs: Count = setting(8, "how many pairs of facts, where no prompt is named")

    def __post_init__(self) -> None:
        require_together(self, "prompt", "corrupted", "answer")


@dataclass(frozen=True)
class AttributedPair:
    """Texts of a clean and a corrupted prompt and their answers, and all of it as token ids.

    wrong: the corrupted prompt's answer, that of the clean one where nobody named it.
    """

    texts: tuple[str, str]
    answers: tuple[str, str]
    clean: tuple[int, ...]
    corrupted: tuple[int, ...]
    answer: int
    wrong: int


class AttributedPairs(KnownWorkflow):
    """A question about such pairs."""

    settings: AttributionSettings
    asked_about = "pairs"

    def read_pairs(self, wrong: str = "") -> tuple[AttributedPair, ...]:
        """Those asked for, or the first of `data`, else of the shipped ones, that fit the model.

        wrong: the answer of one's own corrupted prompt. Raises ConfigError for prompts of different lengths
        or of the same tokens, answers that begin alike, or no pair at all.
        """
        given, subject = self.settings, self.subject
        require_next(subject)
        if given.prompt:
            return (_paired(subject, (given.prompt, given.corrupted), (given.answer, wrong)),)
        found: list[AttributedPair] = []
        for record in pair_records(subject, given.data):
            one, other, answer, wrong = (record[name] for name in FIELDS)
            try:
                found.append(_paired(subject, (one, other), (answer, wrong)))
            except ConfigError:
                continue  # answers that begin with the same token tell nothing apart
            if len(found) == given.pairs:
                break
        if not found:
            raise ConfigError(
                "expected pairs of facts that fit the model, of as many tokens and with answers that begin "
                "differently, found none; give others in data=…, or name a prompt"
            )
        return tuple(found)

    def known_pairs_node(self, pairs: tuple[AttributedPair, ...]) -> Nodes:
        """The node that says which pairs the model knows; none for a pair of one's own: it always counts."""
        if self.settings.prompt:
            return {}
        return self.known_node({SCORED: [(pair.clean, pair.answer, -1) for pair in pairs]})

    @property
    def counts(self) -> npt.NDArray[np.bool_]:
        """Which pairs count, bool [pair]: those that the model knows, and a pair of one's own."""
        return np.ones(1, bool) if self.settings.prompt else self.is_known(SCORED)


def _paired(subject: Subject, texts: tuple[str, str], answers: tuple[str, str]) -> AttributedPair:
    clean, corrupted = (tuple(encoded(subject, text).ids) for text in texts)
    answer = subject.answer_id(texts[0], answers[0])
    wrong = subject.answer_id(texts[1], answers[1]) if answers[1] else answer
    if len(clean) != len(corrupted):
        raise ConfigError(
            f"expected prompts of as many tokens, found {len(clean)} in {texts[0]!r} and {len(corrupted)} in "
            f"{texts[1]!r}; choose another corrupted prompt"
        )
    if clean == corrupted:
        raise ConfigError(
            f"expected a corrupted prompt that differs from the clean one, found {texts[0]!r} twice; change "
            "the words the answer depends on"
        )
    if answers[1] and answer == wrong:
        raise ConfigError(
            f"expected answers that begin with different tokens, found {answers[0]!r} and {answers[1]!r}; "
            "choose others"
        )
    return AttributedPair(texts, answers, clean, corrupted, answer, wrong)


def pair_json(pair: AttributedPair) -> dict[str, Any]:
    """Fields of a pair in documents."""
    return {
        "clean_prompt": pair.texts[0],
        "corrupted_prompt": pair.texts[1],
        "answer": pair.answers[0],
        "wrong": pair.answers[1],
    }
