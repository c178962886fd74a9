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
"""Largest number of hidden states inside a layer that are tried as summands."""

Norms = Literal["before", "of stream"]
CallSlot = tuple[Call, Slot]
"""Module call, and slot of a tensor among its arguments or results."""


@dataclass(frozen=True)
class PartSums:
    """The modules of a layer (attention, MLP) whose outputs sum up to the change that the layer makes to the
    residual stream."""

    parts: tuple[CallSlot, ...]
    """Calls of these modules with the places of the outputs that are added, in order of completion."""
    norms: Norms
    """Whether the sums are themselves the stream ("before": pre-norm), or are normalised ("of stream":
    post-norm)."""
    through: tuple[CallSlot, ...] = ()
    """With post-norm, calls of the norms with the places of their inputs; () with pre-norm."""


def is_close(state: Tensor, reference: Tensor, scale: Tensor | None = None) -> bool:
    """Whether two hidden states are equal up to the rounding of sums in another order (`TOLERANCE`).

    Arguments:
        state: a hidden state.
        reference: the hidden state that it is compared with; states of other shapes are not close.
        scale: tensor to whose largest entry the tolerance is relative; None for `reference`.
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
    """(call, place, output) of module outputs that the layer could add to the stream x: of its shape, neither
    zero nor x itself. Outermost calls come first, so that a module is found before its last submodule."""
    for call in sorted(inside, key=lambda call: (len(call.above), call.ended)):
        for slot, value in call.made.items():
            if value.shape == x.shape and not same(value, x) and float(value.abs().max()) > 0:
                yield call, slot, value


def _added(states: Sequence[tuple[Call, Slot, Tensor]], x: Tensor, y: Tensor) -> PartSums | None:
    """Two outputs, or else one, that sum to the change y - x of a pre-norm layer; None if there are none.

    Arguments:
        states: (call, place, output) of the candidates.
        x: Input of the layer.
        y: Output of the layer.
    """
    change = y - x
    for (call1, slot1, output1), (call2, slot2, output2) in itertools.combinations(states, 2):
        is_nested = call1 in call2.above or call2 in call1.above
        if not is_nested and is_close(output1 + output2, change, y):
            part1, part2 = (call1, slot1), (call2, slot2)
            return PartSums((part1, part2) if call1.ended < call2.ended else (part2, part1), "before")
    for call, slot, output in states:
        if is_close(output, change, y):
            return PartSums(((call, slot),), "before")
    return None


def _normed(
    inside: Sequence[Call], states: Sequence[tuple[Call, Slot, Tensor]], x: Tensor, y: Tensor
) -> PartSums | None:
    """The two parts a and m of a post-norm layer y = N2(N1(x + a) + m), and its norms; None if there are
    none.

    Arguments:
        inside: Calls of modules within the layer, of which two may be the norms.
        states: (call, place, output) of the candidates for a and m.
        x: Input of the layer.
        y: Output of the layer.
    """
    inputs = [(call, slot, u) for call in inside for slot, u in call.taken.items() if u.shape == x.shape]
    ends_with_y = [item for item in inputs if any(same(made, y) for made in item[0].made.values())]
    for (norm1, slot1, input1), (part1, part1_slot, a) in itertools.product(inputs, states):
        if part1.ended > norm1.began or not is_close(x + a, input1):
            continue
        for middle in norm1.made.values():
            for (norm2, slot2, input2), (part2, part2_slot, m) in itertools.product(ends_with_y, states):
                is_in_order = norm1.ended < part2.began and part2.ended < norm2.began
                if is_in_order and middle.shape == x.shape and is_close(middle + m, input2):
                    parts = ((part1, part1_slot), (part2, part2_slot))
                    return PartSums(parts, "of stream", ((norm1, slot1), (norm2, slot2)))
    return None
