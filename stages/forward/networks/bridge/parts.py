"""What of a layer adds to its stream: modules whose results add up to the difference it makes.

    norms before:      x -> x + a + m               (and x + a where there is one part)
    norms of stream:   x -> N2(N1(x + a) + m)       (BERT: the norm of the sum becomes the stream)

Only sums are looked for; which of two parts mixes positions is measured elsewhere (probe.py).

Border: the calls of one layer; states as they were copied.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from .trace import Call, Slot, same

__all__ = ["PartSums", "find_sums", "is_close"]

TOLERANCE = 1e-5
"""Of the largest entry: sums of float32 in another order are apart by 1e-7 of it."""
MOST = 64
"""States of a layer that are tried."""

Norms = Literal["before", "of stream"]
Found = tuple[Call, Slot]


@dataclass(frozen=True)
class PartSums:
    """How a layer comes by what it gives.

    parts: (call, slot) of what is added, in order of their ends. norms: what becomes the stream: sums, or
    norms of them, which are `through`: calls and the slot of what they take.
    """

    parts: tuple[Found, ...]
    norms: Norms
    through: tuple[Found, ...] = ()


def is_close(one: Tensor, other: Tensor, scale: Tensor | None = None) -> bool:
    """Whether two states are one up to the order of a sum."""
    if one.shape != other.shape:
        return False
    largest = float((other if scale is None else scale).abs().max())
    return bool(float((one - other).abs().max()) <= TOLERANCE * max(largest, 1e-30))


def find_sums(inside: Sequence[Call], x: Tensor, y: Tensor) -> PartSums | None:
    """How the calls inside a layer make y of x; None where no sum is found."""
    states = list(_states(inside, x))[:MOST]
    return _added(states, x, y) or _normed(inside, states, x, y)


def _states(inside: Sequence[Call], x: Tensor) -> Iterator[tuple[Call, Slot, Tensor]]:
    """What the calls gave that could be added: of the stream's shape, and neither nothing nor the stream; the
    outermost first, so that a module is found before what it ends with."""
    for call in sorted(inside, key=lambda each: (len(each.above), each.ended)):
        for slot, value in call.made.items():
            if value.shape == x.shape and not same(value, x) and float(value.abs().max()) > 0:
                yield call, slot, value


def _added(states: Sequence[tuple[Call, Slot, Tensor]], x: Tensor, y: Tensor) -> PartSums | None:
    delta = y - x
    for one, other in itertools.combinations(states, 2):
        if _apart(one[0], other[0]) and is_close(one[2] + other[2], delta, y):
            first, second = sorted((one, other), key=lambda each: each[0].ended)
            return PartSums((first[:2], second[:2]), "before")
    for call, slot, value in states:
        if is_close(value, delta, y):
            return PartSums(((call, slot),), "before")
    return None


def _normed(
    inside: Sequence[Call], states: Sequence[tuple[Call, Slot, Tensor]], x: Tensor, y: Tensor
) -> PartSums | None:
    """Two parts, each added and the sum normed."""
    takers = [(call, slot, u) for call in inside for slot, u in call.taken.items() if u.shape == x.shape]
    last = [each for each in takers if any(same(made, y) for made in each[0].made.values())]
    for first in takers:
        for one in states:
            if one[0].ended > first[0].began or not is_close(x + one[2], first[2]):
                continue
            for middle in first[0].made.values():
                for second, other in itertools.product(last, states):
                    follows = first[0].ended < other[0].began and other[0].ended < second[0].began
                    if follows and middle.shape == x.shape and is_close(middle + other[2], second[2]):
                        through = (first[:2], second[:2])
                        return PartSums((one[:2], other[:2]), "of stream", through)
    return None


def _apart(one: Call, other: Call) -> bool:
    """Whether neither call was made within the other."""
    return one not in other.above and other not in one.above
