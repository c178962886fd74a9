"""Means of activations over prompts: what mean ablation puts in their place.

Border: hook points and token ids in, tensors out; what is done with them is for those who ask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ....pipeline.ambient import plain_torch
from ..architectures.points import HookPoint
from ..hooks.spec import HookSpec
from .run import Run, stream

if TYPE_CHECKING:
    from torch import Tensor

    from ..models.model import Model

__all__ = ["mean_activations", "position_axis"]


def position_axis(point: HookPoint) -> int:
    """Which axis of its activation, without the batch, counts positions."""
    return point.dims.index("position") - 1


@plain_torch()
def mean_activations(
    model: Model,
    points: Sequence[HookPoint],
    prompts: Sequence[Sequence[int]],
    *,
    skip: int = 0,
    per_position: bool = False,
) -> dict[HookPoint, Tensor]:
    """Mean activation at each hook point, without the batch axis, summed in float64, in the model's dtype.

    prompts: token ids. skip: first positions of each that do not count. Over all other positions of all
    prompts, whose axis then has size 1; per_position: over prompts of one length, position by position.
    """
    sums: dict[HookPoint, Tensor] = {}
    for _, cache in stream(model, [Run(ids, HookSpec().capture(*points), None) for ids in prompts]):
        for point in points:
            axis = position_axis(point)
            value = cache[point][0].double()
            value = value.narrow(axis, skip, value.shape[axis] - skip)
            part = value if per_position else value.sum(axis, keepdim=True)
            sums[point] = sums[point] + part if point in sums else part
    count = len(prompts) if per_position else sum(len(ids) - skip for ids in prompts)
    return {point: (total / count).to(model.dtype) for point, total in sums.items()}
