"""Word lists of the tasks; each task keeps the words that are one token.

Border: plain data.
"""

from __future__ import annotations

__all__ = ["FEMALE", "IDENTIFIERS", "MALE", "NOUNS", "PLACES", "PRAISE", "REVIEWED", "SPANS", "THINGS"]


def _split(words: str) -> tuple[str, ...]:
    return tuple(words.split())


MALE = _split(
    "John James David Michael Robert William Richard Thomas Charles Daniel Matthew Anthony Mark Paul "
    "Steven Andrew Kevin Brian George Edward Peter Jack Henry Frank Simon Adam Louis Martin Tom Joe Sam "
    "Max Alan"
)
FEMALE = _split(
    "Mary Patricia Jennifer Linda Elizabeth Barbara Susan Jessica Sarah Karen Lisa Nancy Margaret Sandra "
    "Emily Anna Laura Alice Julia Kate Jane Emma Rachel Maria Amy Ruth Rose Lucy Helen Diana Martha Ann "
    "Clara"
)
PLACES = ("store", "park", "school", "office", "garden", "house", "station", "church", "market", "hotel")
THINGS = ("drink", "book", "ring", "letter", "gift", "flower", "key", "ball", "paper", "coat")
NOUNS = tuple(
    (noun, f"{noun}s")
    for noun in _split(
        "boy girl book key car house author teacher student friend brother sister king letter door "
        "picture name hand eye year day street window horse"
    )
)
"""Nouns as (singular, plural)."""
PRAISE = tuple(
    tuple(pair.split("/"))
    for pair in _split(
        "great/terrible wonderful/horrible amazing/awful excellent/bad fantastic/poor beautiful/ugly "
        "perfect/broken nice/boring lovely/stupid brilliant/weak"
    )
)
"""Adjectives as (positive, negative)."""
REVIEWED = ("movie", "book", "show", "story", "song", "game", "play", "film")
SPANS = ("war", "reign", "siege", "voyage", "project", "trial", "strike", "study", "tour", "conflict")
IDENTIFIERS = _split(
    "load size file last name path list line text data port host user key index width height count value "
    "type state order group token start end mode level time date code page table field input output item "
    "color image source target model format result"
)
