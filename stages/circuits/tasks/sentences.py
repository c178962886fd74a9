"""Tasks in sentences: indirect objects, pronouns, agreement of subject and verb, arguments of a docstring.

Border: texts; whether a tokenizer can have them is asked in drafts.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from ..pairs import Pair
from .drafts import Draft, drawn, single, usable
from .words import FEMALE, IDENTIFIERS, MALE, NOUNS, PLACES, THINGS

if TYPE_CHECKING:
    from ...forward.text.tokens import Tokenizer

__all__ = ["agreement", "docstrings", "indirect_objects", "pronouns"]


def indirect_objects(tokenizer: Tokenizer, count: int, seed: int) -> list[Pair]:
    """Who is given something (Wang et al., Interpretability in the Wild, 2023): the name that stands once and
    not the one that stands twice. Corrupted: a third name in place of the second of the two."""
    names = usable("ioi", "names", tokenizer, (*MALE, *FEMALE), 4)
    rng = np.random.default_rng(seed)

    def drafts() -> Iterator[Draft]:
        while True:
            one, other, third = rng.permutation(names)[:3].tolist()
            place, thing = rng.choice(PLACES), rng.choice(THINGS)
            first, second = (one, other) if rng.random() < 0.5 else (other, one)
            opening = f"When {first} and {second} went to the {place},"
            yield Draft(
                f"{opening} {other} gave a {thing} to",
                f"{opening} {third} gave a {thing} to",
                f" {one}",
                f" {other}",
            )

    return drawn("ioi", tokenizer, drafts(), count)


def pronouns(tokenizer: Tokenizer, count: int, seed: int) -> list[Pair]:
    """Which pronoun a name takes (Mathwin et al., Identifying a Preliminary Circuit for Predicting Gendered
    Pronouns, 2023). Corrupted: a name that takes the other."""
    male, female = (usable("pronouns", "names", tokenizer, names, 2) for names in (MALE, FEMALE))
    rng = np.random.default_rng(seed)
    sentences = (
        "So {} is a really great friend, isn't",
        "{} went home early because",
        "I saw {} yesterday and",
        "When {} came back,",
    )

    def drafts() -> Iterator[Draft]:
        while True:
            him, her, said = rng.choice(male), rng.choice(female), str(rng.choice(sentences))
            texts, words = (said.format(him), said.format(her)), (" he", " she")
            order = 1 if rng.random() < 0.5 else -1
            yield Draft(*texts[::order], *words[::order])

    return drawn("pronouns", tokenizer, drafts(), count)


def agreement(tokenizer: Tokenizer, count: int, seed: int) -> list[Pair]:
    """A verb in the number of its subject, past a noun in between (Linzen et al., Assessing the Ability of
    LSTMs to Learn Syntax-Sensitive Dependencies, 2016). Corrupted: the subject in the other number."""
    nouns = [pair for pair in NOUNS if all(single(tokenizer, f" {word}") for word in pair)]
    usable("agreement", "nouns in both numbers", tokenizer, [pair[0] for pair in nouns] or ["-"], 3)
    rng = np.random.default_rng(seed)
    verbs = ((" is", " are"), (" was", " were"), (" has", " have"))

    def drafts() -> Iterator[Draft]:
        while True:
            subject, between = (nouns[i] for i in rng.permutation(len(nouns))[:2])
            preposition = rng.choice(("near", "behind", "with", "beside"))
            rest = f"{preposition} the {rng.choice(between)}"
            order = 1 if rng.random() < 0.5 else -1
            verb = verbs[int(rng.integers(len(verbs)))]
            yield Draft(*(f"The {noun} {rest}" for noun in subject[::order]), *verb[::order])

    return drawn("agreement", tokenizer, drafts(), count)


def docstrings(tokenizer: Tokenizer, count: int, seed: int) -> list[Pair]:
    """The next argument a docstring describes (Heimersheim and Janiak, A Circuit for Python Docstrings,
    2023). Corrupted: other arguments in the definition."""
    words = usable("docstrings", "identifiers", tokenizer, IDENTIFIERS, 12)
    rng = np.random.default_rng(seed)

    def drafts() -> Iterator[Draft]:
        while True:
            name, *chosen = rng.permutation(words)[:12].tolist()
            given, others, said = chosen[:4], chosen[4:7], chosen[7:]
            wrong = others[2]
            told = (
                f'):\n    """{said[0]} {said[1]}\n\n    :param {given[0]}: {said[2]}\n'
                f"    :param {given[1]}: {said[3]}\n    :param"
            )
            opening = f"def {name}(self"
            yield Draft(
                opening + "".join(f", {word}" for word in given) + told,
                opening + "".join(f", {word}" for word in (*others, given[3])) + told,
                f" {given[2]}",
                f" {wrong}",
            )

    return drawn("docstrings", tokenizer, drafts(), count)
