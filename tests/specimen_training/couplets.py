"""Couplets: machine-made pairs of lines whose second end must rhyme with the first.

Border: words and a random generator in, two lines out; knows no tokens and no model.

Idea. Each end belongs to one family of rhymes (`FAMILIES`), and every other word of the family fits: the
first line decides the family, nothing in the text decides the word. So whoever completes the second line must
have read the first one's end, and may or may not have chosen its own before it is there; that can be asked of
the states in between (planning in poems: Lindsey et al. 2025, "On the Biology of a Large Language Model").
Everything else in the two lines is drawn at random from `NOUNS`, `ADJECTIVES` and `NAMES`, in one of a few
frames, so that no line can be remembered.

Held out, by rule and not by chance: pairs of ends (`is_held_out_pair`, either order) and pairs of frames
(`is_held_out_frames`). The second kind is the test set, lines of a make never read; the first tells whether a
rhyme never read is taken from its family.

Every end is, with the space before it, one token of the specimen's tokenizer, so that "which end" is one
logit. Families after the CMU Pronouncing Dictionary, words of two pronunciations left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256

import numpy as np

from mizarr.workflows.material.samples.couplets import FAMILIES

__all__ = [
    "FAMILIES", "FIRST", "SECOND", "Couplet", "couplet", "family_of", "held_out_couplets",
    "is_held_out_frames", "is_held_out_pair",
]  # fmt: skip

NOUNS = (
    "house", "road", "table", "woman", "child", "friend", "horse", "street", "window", "letter", "fire",
    "morning", "prisoner", "gentleman", "lady", "boy", "coach", "country", "prison", "father", "brother",
    "paper", "glass", "wine", "heart", "face", "voice", "hand",
)  # fmt: skip
ADJECTIVES = (
    "little", "young", "poor", "dark", "long", "strange", "whole", "last", "other", "large", "first", "quiet",
    "honest", "present", "usual", "strong", "certain", "open",
)  # fmt: skip
NAMES = ("Pip", "Joe", "Oliver", "Lucie", "Carton", "Darnay", "Defarge", "Lorry", "Wemmick", "Estella")
FIRST = (
    "The {a} {n} said {e}",
    "{p} wrote to the {n}: {e}",
    "A {n} and a {a} {m} sang {e}",
    "We heard the {a} {n} of {p} say {e}",
    "When {p} saw the {n}, it was {e}",
    "In the {a} {n} they read {e}",
)
"""Frames of the first line: {a} an adjective, {n} and {m} nouns, {p} a name, {e} the end."""
SECOND = (
    "and {p} with the {n} said {e}",
    "but the {a} {n} called {e}",
    "and every {n} by the {m} was {e}",
    "for {p} had a {a} {n} and {e}",
    "then {p} and the {n} heard {e}",
)
"""Frames of the second line."""

_FAMILY = {word: number for number, family in enumerate(FAMILIES) for word in family}


@dataclass(frozen=True)
class Couplet:
    """Two lines: the first whole, the second without its end; the ends, and the words that fit the second."""

    first: str
    second: str
    rhyme: str
    end: str

    @property
    def text(self) -> str:
        """Both lines, the second with its end, and no line break behind it."""
        return f"{self.first}\n{self.second} {self.end}"

    @property
    def fitting(self) -> tuple[str, ...]:
        """The words that rhyme with the first line's end, without that word itself."""
        return tuple(word for word in FAMILIES[_FAMILY[self.rhyme]] if word != self.rhyme)


def family_of(word: str) -> int | None:
    """The number of the family of a word; None if it has none."""
    return _FAMILY.get(word)


def is_held_out_pair(one: str, other: str) -> bool:
    """Whether two ends never meet in training; about one pair in six, in either order."""
    pair = " ".join(sorted((one, other)))
    return sha256(pair.encode()).digest()[0] < 43


def is_held_out_frames(first: int, second: int) -> bool:
    """Whether two frames never meet in training: 6 of 30, every frame among them."""
    return (first + second) % len(SECOND) == 0


def couplet(rng: np.random.Generator) -> Couplet:
    """A couplet to train on: frames and pair of ends are none of those held out."""
    while True:
        first, second = int(rng.integers(len(FIRST))), int(rng.integers(len(SECOND)))
        if not is_held_out_frames(first, second):
            break
    ends = [word for family in FAMILIES for word in family]
    while True:
        rhyme = _one(rng, ends)
        partners = [w for w in FAMILIES[_FAMILY[rhyme]] if w != rhyme and not is_held_out_pair(rhyme, w)]
        if partners:
            return _filled(rng, first, second, rhyme, _one(rng, partners))


def held_out_couplets(count: int, *, seed: int = 11) -> Iterator[Couplet]:
    """`count` couplets in held-out frames; the first lines' ends go round all words of all families."""
    rng = np.random.default_rng(seed)
    frames = [(i, j) for i in range(len(FIRST)) for j in range(len(SECOND)) if is_held_out_frames(i, j)]
    ends = [word for family in FAMILIES for word in family]
    for number in range(count):
        rhyme = ends[number % len(ends)]
        partners = [word for word in FAMILIES[_FAMILY[rhyme]] if word != rhyme]
        yield _filled(rng, *frames[int(rng.integers(len(frames)))], rhyme, _one(rng, partners))


def _filled(rng: np.random.Generator, first: int, second: int, rhyme: str, end: str) -> Couplet:
    lines = []
    for frame, last in ((FIRST[first], rhyme), (SECOND[second], "")):
        a, n, m, p = (_one(rng, words) for words in (ADJECTIVES, NOUNS, NOUNS, NAMES))
        lines.append(frame.format(a=a, n=n, m=m, p=p, e=last).rstrip())
    return Couplet(lines[0], lines[1], rhyme, end)


def _one(rng: np.random.Generator, words: tuple[str, ...] | list[str]) -> str:
    return words[int(rng.integers(len(words)))]
