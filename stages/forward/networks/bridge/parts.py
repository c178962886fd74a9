"""Find the modules of a layer (attention, MLP) whose outputs are added to the residual stream.

    norms before:      x -> x + a + m               (or x + a for a layer with one part)
    norms of stream:   x -> N2(N1(x + a) + m)       (BERT: post-norm)

Only sums are searched for; adding.py measures which of two parts mixes positions.

Border: traced calls of one layer, with copies of their states.
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
"""Largest difference of equal states, relative to the largest entry: float32 sums in another order differ by
1e-7."""
MOST = 64
"""Largest number of states of a layer that are tried."""

Norms = Literal["before", "of stream"]
CallSlot = tuple[Call, Slot]
"""A call, and where the tensor is among its arguments or results."""


@dataclass(frozen=True)
class PartSums:
    """The modules whose outputs sum up to the change that a layer makes to the stream."""

    parts: tuple[CallSlot, ...]
    """Calls with the slots of the outputs that are added, in order of completion."""
    norms: Norms
    """Whether the sums are the stream, or their norms."""
    through: tuple[CallSlot, ...] = ()
    """With post-norm, calls of the norms with the slots of their inputs."""


def is_close(state: Tensor, reference: Tensor, scale: Tensor | None = None) -> bool:
    """Whether two states are equal up to the order of a sum.

    Arguments:
        state: a state.
        reference: another one.
        scale: tensor whose largest entry the tolerance is relative to; None for `reference`.
    """
    if state.shape != reference.shape:
        return False
    largest = float((reference if scale is None else scale).abs().max())
    return bool(float((state - reference).abs().max()) <= TOLERANCE * max(largest, 1e-30))


def find_sums(inside: Sequence[Call], x: Tensor, y: Tensor) -> PartSums | None:
    """Find the parts by which a layer computes its output from its input.

    Arguments:
        inside: Calls of modules within the layer.
        x: Input of the layer.
        y: Output of the layer, of the same shape.

    Returns:
        The parts and where the norms are; None if no sum is found.
    """
    states = list(_states(inside, x))[:MOST]
    return _added(states, x, y) or _normed(inside, states, x, y)


def _states(inside: Sequence[Call], x: Tensor) -> Iterator[tuple[Call, Slot, Tensor]]:
    """Outputs of calls that could be added: of the stream's shape, neither zero nor the stream itself.
    Outermost calls come first, so that a module is found before its last submodule."""
    for call in sorted(inside, key=lambda call: (len(call.above), call.ended)):
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
    """Two parts of a post-norm layer: each is added, and the sum is normalised."""
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


def _apart(a: Call, b: Call) -> bool:
    """Whether neither call was made within the other."""
    return a not in b.above and b not in a.above
