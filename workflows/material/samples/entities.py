"""Entities of several kinds, for the description of their states by the workflow `patchscopes`.

Each is the last word of a short text; the kind is the first word of a description such as "Country in the
Middle East". They were written for mizarr from common knowledge.

Border: texts; knows no tokens and no model.
"""

from __future__ import annotations

__all__ = ["ENTITIES"]

_NAMES = {
    "Country": "France Japan Brazil Kenya Norway Chile Vietnam Poland",
    "City": "Chicago Milan Osaka Munich Toronto Bristol Lyon Boston",
    "River": "Danube Thames Ganges Rhine Nile Seine Volga Mekong",
    "Language": "Latin Arabic Hindi Swahili Korean Hebrew Sanskrit Welsh",
    "Physicist": "Einstein Newton Bohr Heisenberg Maxwell Faraday Feynman Galileo",
    "Metal": "copper iron zinc nickel titanium aluminum silver tin",
    "Fruit": "banana mango apple pear cherry peach grape lemon",
}
# One of each kind in turn. The number of kinds is odd, so that every other entity has all kinds.
ENTITIES: tuple[tuple[str, str], ...] = tuple(
    (f"This text is about {name}", kind)
    for row in zip(*(names.split() for names in _NAMES.values()), strict=True)
    for kind, name in zip(_NAMES, row, strict=True)
)
"""(text that ends with the entity, its kind)."""
