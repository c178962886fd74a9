"""What shipped facts say of their subjects: the ending that several of them share, "is developed by".

Border: texts; knows no tokens.
"""

from __future__ import annotations

from collections import Counter
from functools import cache, lru_cache

from ..subject import shipped_facts

__all__ = ["relation_of"]

SHARED_BY = 3
"""An ending is a relation where this many shipped facts have it."""


@lru_cache(maxsize=1 << 14)  # every shipped fact, asked about by each workflow over pairs of them
def relation_of(text: str, *, words: int = 1) -> str | None:
    """The longest ending of a text, of so many words or more, that is a relation; None where none is."""
    return next((ending for ending in _endings(text, words) if _shared()[ending] >= SHARED_BY), None)


def _endings(text: str, words: int) -> list[str]:
    """What a text ends with, longest first, its first word left out."""
    held = text.split(" ")
    return [" ".join(held[i:]) for i in range(1, len(held) + 1 - words)]


@cache
def _shared() -> Counter[str]:
    """How many shipped facts have each ending."""
    return Counter(ending for fact in shipped_facts() for ending in _endings(fact["prompt"], 1))
