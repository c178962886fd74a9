"""Relations of facts: endings that several shipped facts share, such as "is developed by".

Border: texts; knows no tokens.
"""

from __future__ import annotations

from collections import Counter
from functools import cache, lru_cache

from ..subject import shipped_facts

__all__ = ["relation_of"]

SHARED_BY = 3
"""Smallest number of shipped facts that must share an ending for it to count as a relation."""


# Large enough for all shipped facts, which every workflow on pairs looks up.
@lru_cache(maxsize=1 << 14)
def relation_of(text: str, *, words: int = 1) -> str | None:
    """Longest ending of a prompt that `SHARED_BY` or more shipped facts share; None if none do.

    Arguments:
        text: the prompt of a fact.
        words: smallest number of words of the ending.
    """
    return next((ending for ending in _endings(text, words) if _shared()[ending] >= SHARED_BY), None)


def _endings(text: str, words: int) -> list[str]:
    """Endings of a text without its first word, longest first."""
    parts = text.split(" ")
    return [" ".join(parts[i:]) for i in range(1, len(parts) + 1 - words)]


@cache
def _shared() -> Counter[str]:
    """Number of shipped facts with each ending, by ending."""
    return Counter(ending for fact in shipped_facts() for ending in _endings(fact["prompt"], 1))
