"""Tasks in sentences: indirect objects, pronouns, agreement, sentiment, arguments of a docstring.

Border: texts; drafts.py checks them with a tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from ..pairs import Pair
from .drafts import Draft, drawn, single, usable
from .words import FEMALE, IDENTIFIERS, MALE, NOUNS, PLACES, PRAISE, REVIEWED, THINGS

if TYPE_CHECKING:
    from ...forward.text.tokens import Tokenizer

__all__ = ["agreement", "docstrings", "indirect_objects", "pronouns", "sentiment"]


def indirect_objects(tokenizer: Tokenizer, count: int, seed: int) -> list[Pair]:
    """Pairs of the task indirect object identification: the answer is the name that occurs once.

    In the corrupted prompt a third name replaces the second mention of the repeated name (Wang et al. 2023,
    "Interpretability in the Wild").

    Arguments:
        tokenizer: The model's tokenizer.
        count: Number of pairs.
        seed: Seed of the draw.
    """
    names = usable("ioi", "names", tokenizer, (*MALE, *FEMALE), 4)
    rng = np.random.default_rng(seed)

    def drafts() -> Iterator[Draft]:
        while True:
            recipient, giver, stranger = rng.permutation(names)[:3].tolist()
            place, thing = rng.choice(PLACES), rng.choice(THINGS)
            # The order of the two names is random, so that position does not give the answer away.
            first_name, second_name = (recipient, giver) if rng.random() < 0.5 else (giver, recipient)
            opening = f"When {first_name} and {second_name} went to the {place},"
            yield Draft(
                f"{opening} {giver} gave a {thing} to",
                f"{opening} {stranger} gave a {thing} to",
                f" {recipient}",
                f" {giver}",
            )

    return drawn("ioi", tokenizer, drafts(), count)


def pronouns(tokenizer: Tokenizer, count: int, seed: int) -> list[Pair]:
    """Pairs of the task pronouns: the answer is the pronoun of a name, "he" or "she".

    In the corrupted prompt the name is of the other gender (Mathwin et al. 2023, "Identifying a Preliminary
    Circuit for Predicting Gendered Pronouns").

    Arguments:
        tokenizer: The model's tokenizer.
        count: Number of pairs.
        seed: Seed of the draw.
    """
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
            him, her, sentence = rng.choice(male), rng.choice(female), str(rng.choice(sentences))
            texts, words = (sentence.format(him), sentence.format(her)), (" he", " she")
            # Either side may be the clean one, so that the answer is not always the same pronoun.
            order = 1 if rng.random() < 0.5 else -1
            yield Draft(*texts[::order], *words[::order])

    return drawn("pronouns", tokenizer, drafts(), count)


def agreement(tokenizer: Tokenizer, count: int, seed: int) -> list[Pair]:
    """Pairs of the task agreement: the answer is a verb in the number of a subject, behind another noun.

    In the corrupted prompt the subject has the other number (Linzen et al. 2016, "Assessing the Ability of
    LSTMs to Learn Syntax-Sensitive Dependencies").

    Arguments:
        tokenizer: The model's tokenizer.
        count: Number of pairs.
        seed: Seed of the draw.
    """
    # Both numbers must be one token, so that sentences of either number align.
    nouns = [pair for pair in NOUNS if all(single(tokenizer, f" {word}") for word in pair)]
    usable("agreement", "nouns in both numbers", tokenizer, [pair[0] for pair in nouns] or ["-"], 3)
    rng = np.random.default_rng(seed)
    verbs = ((" is", " are"), (" was", " were"), (" has", " have"))

    def drafts() -> Iterator[Draft]:
        while True:
            subject, between = (nouns[i] for i in rng.permutation(len(nouns))[:2])
            preposition = rng.choice(("near", "behind", "with", "beside"))
            # The noun in between may have either number: agreement with the nearest noun then fails half the
            # time.
            phrase = f"{preposition} the {rng.choice(between)}"
            order = 1 if rng.random() < 0.5 else -1
            verb = verbs[int(rng.integers(len(verbs)))]
            yield Draft(*(f"The {noun} {phrase}" for noun in subject[::order]), *verb[::order])

    return drawn("agreement", tokenizer, drafts(), count)


def sentiment(tokenizer: Tokenizer, count: int, seed: int) -> list[Pair]:
    """Pairs of the task sentiment: the answer is the adjective, "great" or "terrible", that sums up a review.

    In the corrupted prompt the review is of the other sentiment (Tigges et al. 2023, "Linear Representations
    of Sentiment in Large Language Models").

    Arguments:
        tokenizer: The model's tokenizer.
        count: Number of pairs.
        seed: Seed of the draw.
    """
    # Both sides must be one token, so that reviews of either sentiment align.
    adjectives = [pair for pair in PRAISE if all(single(tokenizer, f" {word}") for word in pair)]
    usable("sentiment", "adjectives of praise", tokenizer, [pair[0] for pair in adjectives] or ["-"], 3)
    rng = np.random.default_rng(seed)
    verbs, answers = ("loved", "hated"), (" great", " terrible")

    def drafts() -> Iterator[Draft]:
        while True:
            adjective, subject = adjectives[int(rng.integers(len(adjectives)))], rng.choice(REVIEWED)
            order = 1 if rng.random() < 0.5 else -1
            reviews = (
                f"I thought this {subject} was {word}, I {verb} it. In conclusion, this {subject} is"
                for word, verb in zip(adjective, verbs, strict=True)
            )
            yield Draft(*tuple(reviews)[::order], *answers[::order])

    return drawn("sentiment", tokenizer, drafts(), count)


def docstrings(tokenizer: Tokenizer, count: int, seed: int) -> list[Pair]:
    """Pairs of the task docstrings: the answer is the argument that a docstring documents next.

    In the corrupted prompt the definition has other arguments (Heimersheim and Janiak 2023, "A Circuit for
    Python Docstrings").

    Arguments:
        tokenizer: The model's tokenizer.
        count: Number of pairs.
        seed: Seed of the draw.
    """
    words = usable("docstrings", "identifiers", tokenizer, IDENTIFIERS, 12)
    rng = np.random.default_rng(seed)

    def drafts() -> Iterator[Draft]:
        while True:
            name, *identifiers = rng.permutation(words)[:12].tolist()
            arguments, other_arguments, fillers = identifiers[:4], identifiers[4:7], identifiers[7:]
            # The argument at the same place of the corrupted definition.
            wrong = other_arguments[2]
            docstring = (
                f'):\n    """{fillers[0]} {fillers[1]}\n\n    :param {arguments[0]}: {fillers[2]}\n'
                f"    :param {arguments[1]}: {fillers[3]}\n    :param"
            )
            opening = f"def {name}(self"
            yield Draft(
                opening + "".join(f", {word}" for word in arguments) + docstring,
                opening + "".join(f", {word}" for word in (*other_arguments, arguments[3])) + docstring,
                f" {arguments[2]}",
                f" {wrong}",
            )

    return drawn("docstrings", tokenizer, drafts(), count)
