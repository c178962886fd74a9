"""Texts of one's own kind and of other kinds: what a choice made on one text is scored on, and held against.

Of a fact these are other shipped facts of its relation that end on the same word; of a couplet other couplets
whose first line ends on a rhyme of that word. Texts of other kinds are shipped facts.

Border: texts and characters; knows no tokens and no model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ...subject import shipped_facts
from .couplets import COUPLETS, FAMILIES

__all__ = ["COUPLET", "Kin", "kin_of", "strangers"]

COUPLET = "couplet"
"""The kind of prompt that is a couplet without its last word."""


@dataclass(frozen=True)
class Kin:
    """Texts of one kind. told: what they are, in words. place: where in them, in words.

    texts: each with the span, in characters, of the word in the place of the site; None where that is as far
    from the end as the site is.
    """

    texts: tuple[tuple[str, tuple[int, int] | None], ...]
    told: str
    place: str

    @property
    def where(self) -> str:
        """What they are and where in them, in words."""
        return f"{self.told}, {self.place}"


def kin_of(prompt: str, kind: str, word: str) -> Kin:
    """Other texts of the prompt's kind that would end as it does. word: what it would end on."""
    if kind == COUPLET:
        told = f"other couplets whose first line ends on a rhyme of {word!r}"
        return Kin(tuple(_couplets(prompt, word)), told, "at that end")
    own = _relation(prompt)
    texts = tuple(
        (fact["prompt"], None)
        for fact in shipped_facts()
        if fact["target"] == word and fact["prompt"] != prompt and _relation(fact["prompt"]) == own
    )
    return Kin(texts, f"other facts that end on {word!r}", "as far from their end")


def strangers(prompt: str) -> list[str]:
    """Shipped facts that neither begin nor end as the prompt does."""
    begins, ends = _relation(prompt)
    facts = [fact["prompt"] for fact in shipped_facts()]
    return [fact for fact in facts if (of := _relation(fact))[0] != begins and of[1] != ends]


def _couplets(prompt: str, word: str) -> Iterator[tuple[str, tuple[int, int]]]:
    """Every couplet that names nothing of the word's family, its first line ending on one of it in turn; none
    for a word without."""
    family = next((family for family in FAMILIES if word.strip() in family), ())
    own = prompt.partition("\n")[0].split()[-1]
    ends = [end for end in family if end not in (word.strip(), own)]
    frames = [pair for pair in COUPLETS if ends and not pair.said & set(family)]
    for number, pair in enumerate(frames):
        end = ends[number % len(ends)]
        text = pair.text(end)
        if text.partition("\n")[2] != prompt.partition("\n")[2]:
            start = len(pair.first) + 1
            yield text, (start, start + len(end))


def _relation(prompt: str) -> tuple[list[str], list[str]]:
    """What facts of one kind share: "The mother" and "is"."""
    words = prompt.split()
    return words[:2], words[-1:]
