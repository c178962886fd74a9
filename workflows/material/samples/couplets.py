"""Pairs of couplets that differ only in the last word of the first line, and so in the rhyme.

Their frames follow the rules of the specimen's training couplets (tests/specimen_training/couplets.py), but
do not occur in its training data; a test checks this. No other word of the two lines belongs to either rhyme
family, so the last word alone determines the rhyme, and no word between the two line ends depends on it.

Border: texts and words; knows no tokens and no model.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["COUPLETS", "FAMILIES", "CoupletPair", "family_of"]

FAMILIES = (
    ("night", "light", "right", "sight", "might", "quite", "white", "bright"),
    ("head", "dead", "red", "bed", "said", "dread"),
    ("wall", "small", "fall", "call", "all"),
    ("find", "mind", "kind", "behind"),
    ("day", "way", "say", "away", "play", "lay", "may", "they"),
    ("me", "he", "she", "we", "see", "three", "be"),
    ("go", "so", "know", "show", "slow", "low", "grow", "no"),
    ("you", "two", "new", "do", "true", "knew", "who", "through", "few", "drew", "too"),
    ("care", "hair", "chair", "air", "there", "where"),
    ("door", "floor", "four", "more", "before", "nor"),
    ("my", "eye", "high", "cry", "by", "why"),
    ("still", "will", "till", "ill", "until"),
    ("ground", "found", "sound", "round"),
    ("old", "cold", "hold", "told"),
    ("side", "cried", "died", "replied"),
    ("good", "would", "should", "stood", "could"),
    ("great", "wait", "state", "gate"),
    ("name", "came", "became", "same"),
    ("out", "about", "without", "doubt"),
    ("then", "men", "again", "when"),
    ("man", "can", "began", "than"),
    ("that", "hat", "sat", "at"),
    ("done", "one", "sun", "won", "run"),
    ("dear", "fear", "near", "mere"),
)
"""Rhyme families, from the CMU Pronouncing Dictionary; no word is in two of them."""

_FAMILY = {word: number for number, family in enumerate(FAMILIES) for word in family}
"""Rhyming word -> index of its family in FAMILIES."""


@dataclass(frozen=True)
class CoupletPair:
    """Two couplets without their final word that differ only in the last word of the first line, which rhymes
    differently."""

    first: str
    """First line without its last word."""
    second: str
    """Second line without its last word."""
    end: str
    """Last word of the first line."""
    other: str
    """Alternative last word, of another rhyme family."""

    def text(self, end: str) -> str:
        """Text of the couplet with a word at the end of its first line, up to the last word of the second
        line, which is left out."""
        return f"{self.first} {end}\n{self.second}"

    @property
    def said(self) -> frozenset[str]:
        """Words of both lines except each line's last word."""
        return frozenset(re.findall(r"\w+", f"{self.first} {self.second}"))

    @property
    def same(self) -> Sequence[str]:
        """Words that rhyme with `end`, without `end` itself."""
        return [word for word in FAMILIES[family_of(self.end)] if word != self.end]

    @property
    def third(self) -> Sequence[str]:
        """Words outside the rhyme families of `end`, `other` and the line words."""
        excluded = {_FAMILY[word] for word in (*self.said, self.end, self.other) if word in _FAMILY}
        return [word for word, family in _FAMILY.items() if family not in excluded]


def family_of(word: str) -> int:
    """Index of a word's rhyme family in FAMILIES; KeyError for a word without one."""
    return _FAMILY[word]


# fmt: off
COUPLETS = tuple(CoupletPair(*row) for row in (
    ("The large horse said", "and Estella with the coach said", "night", "sun"),
    ("Pip wrote to the fire:", "then Lorry and the horse heard", "red", "sight"),
    ("A heart and a poor hand sang", "for Wemmick had a whole friend and", "behind", "replied"),
    ("We heard the certain face of Defarge say", "and every wine by the hand was", "be", "small"),
    ("When Oliver saw the prison, it was", "but the present heart called", "show", "became"),
    ("In the last hand they read", "and Defarge with the wine said", "through", "about"),
    ("The strange voice said", "and Joe with the glass said", "chair", "high"),
    ("Defarge wrote to the face:", "then Oliver and the friend heard", "nor", "she"),
    ("A brother and a open house sang", "for Lorry had a open hand and", "still", "ground"),
    ("We heard the other window of Carton say", "and every prisoner by the wine was", "sound", "cold"),
    ("When Joe saw the street, it was", "but the strong paper called", "cold", "fall"),
    ("In the whole coach they read", "and Lorry with the wine said", "cried", "ground"),
    ("The strong house said", "and Wemmick with the window said", "would", "at"),
    ("Defarge wrote to the window:", "then Pip and the hand heard", "great", "new"),
    ("A prisoner and a quiet road sang", "for Oliver had a first gentleman and", "about", "go"),
    ("We heard the usual woman of Carton say", "and every country by the gentleman was", "when", "done"),
    ("When Oliver saw the friend, it was", "but the strong child called", "began", "men"),
    ("In the large hand they read", "and Estella with the boy said", "at", "stood"),
    ("The poor friend said", "and Oliver with the boy said", "sun", "cried"),
    ("Joe wrote to the brother:", "then Joe and the child heard", "dear", "go"),
    ("A hand and a first morning sang", "for Lucie had a whole wine and", "light", "side"),
    ("We heard the last street of Lucie say", "and every table by the gentleman was", "red", "side"),
    ("When Estella saw the brother, it was", "but the first face called", "wall", "mind"),
    ("In the strange lady they read", "and Darnay with the table said", "find", "will"),
    ("The young prisoner said", "and Defarge with the house said", "away", "stood"),
    ("Joe wrote to the face:", "then Lorry and the prison heard", "you", "find"),
    ("A coach and a strange street sang", "for Lucie had a large coach and", "where", "my"),
    ("We heard the certain heart of Estella say", "and every child by the table was", "four", "fear"),
    ("When Pip saw the hand, it was", "but the present child called", "eye", "chair"),
    ("In the little child they read", "and Defarge with the heart said", "will", "done"),
    ("The certain street said", "and Lorry with the boy said", "round", "behind"),
    ("Lucie wrote to the horse:", "then Wemmick and the brother heard", "hold", "call"),
    ("A father and a last prison sang", "for Darnay had a large boy and", "side", "dear"),
    ("We heard the long prison of Wemmick say", "and every lady by the morning was", "would", "than"),
    ("When Joe saw the letter, it was", "but the present face called", "state", "that"),
    ("In the little street they read", "and Pip with the hand said", "became", "hair"),
    ("The honest street said", "and Darnay with the morning said", "again", "man"),
    ("Lucie wrote to the morning:", "then Lorry and the brother heard", "can", "won"),
    ("A table and a open wine sang", "for Lorry had a long letter and", "sat", "mere"),
    ("We heard the strange prison of Darnay say", "and every father by the wine was", "won", "true"),
    ("When Defarge saw the prisoner, it was", "but the little house called", "dear", "round"),
    ("In the dark lady they read", "and Pip with the prison said", "light", "grow"),
    ("The long voice said", "and Pip with the boy said", "wall", "drew"),
    ("Defarge wrote to the brother:", "then Estella and the street heard", "kind", "till"),
    ("A morning and a certain boy sang", "for Oliver had a large country and", "way", "mind"),
    ("We heard the large letter of Defarge say", "and every morning by the friend was", "he", "replied"),
    ("When Carton saw the hand, it was", "but the dark woman called", "no", "right"),
    ("In the last house they read", "and Estella with the fire said", "knew", "care"),
))
# fmt: on
"""All pairs of couplets; the last words of their first lines take all rhyme families in turn."""
