"""Related and unrelated texts of a prompt: a choice made on the prompt is scored on the former, and
controlled by the latter.

Related to a fact are other shipped facts with its relation and answer; related to a couplet are other
couplets whose first line ends on a rhyme of its answer. Unrelated texts are other shipped facts.

Border: texts and characters; knows no tokens and no model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ...subject import shipped_facts
from .couplets import COUPLETS, FAMILIES

__all__ = ["COUPLET", "Kin", "kin_of", "strangers"]

COUPLET = "couplet"
"""Value of the preset's field `kind` for couplets without their last word."""


@dataclass(frozen=True)
class Kin:
    """Texts similar to a prompt, which score a selection made on the prompt."""

    texts: tuple[tuple[str, tuple[int, int] | None], ...]
    """(text, character span whose last token is the exchange position) of each text; None as the span for the
    position at the prompt's distance from the end."""
    where: str
    """Description of texts and position, as claims name them."""


def kin_of(prompt: str, kind: str, word: str) -> Kin:
    """Texts of a prompt's kind: other couplets, or other facts with equal relation and answer.

    Arguments:
        prompt: the prompt.
        kind: kind of the prompt, COUPLET or other.
        word: answer to the prompt.
    """
    if kind == COUPLET:
        where = f"other couplets, at the end of a first line that rhymes with {word!r}"
        return Kin(tuple(_couplets(prompt, word)), where)
    relation = _relation(prompt)
    texts = tuple(
        (fact["prompt"], None)
        for fact in shipped_facts()
        if fact["target"] == word and fact["prompt"] != prompt and _relation(fact["prompt"]) == relation
    )
    where = f"other facts with the answer {word!r}, at the same distance from the end"
    return Kin(texts, where)


def strangers(prompt: str) -> list[str]:
    """Shipped facts of other relations: their first two words and their last word differ from those of the
    prompt."""
    begins, ends = _relation(prompt)
    facts = [fact["prompt"] for fact in shipped_facts()]
    return [fact for fact in facts if (of := _relation(fact))[0] != begins and of[1] != ends]


def _couplets(prompt: str, word: str) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yields (couplet, span of the end of its first line): couplets whose first line ends on a rhyme of
    `word`, without any other rhyme of it; none for a word without a rhyme family."""
    family = next((family for family in FAMILIES if word.strip() in family), ())
    prompt_end = prompt.partition("\n")[0].split()[-1]
    ends = [end for end in family if end not in (word.strip(), prompt_end)]
    frames = [pair for pair in COUPLETS if ends and not pair.said & set(family)]
    for number, pair in enumerate(frames):
        end = ends[number % len(ends)]
        text = pair.text(end)
        # A couplet with the same second line would measure the prompt itself again.
        if text.partition("\n")[2] != prompt.partition("\n")[2]:
            start = len(pair.first) + 1
            yield text, (start, start + len(end))


def _relation(prompt: str) -> tuple[list[str], list[str]]:
    """(first two words, last word) of a fact, such as "The mother" and "is", which facts of one relation
    share."""
    words = prompt.split()
    return words[:2], words[-1:]
