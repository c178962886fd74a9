"""Mean activations over prompts, the replacement values of mean ablation."""

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
    """Index of the position axis at a hook point, in an activation without its batch axis."""
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
    """Mean activation at each hook point over prompts and positions.

    Arguments:
        model: a loaded model.
        points: hook points.
        prompts: token ids of each prompt.
        skip: number of first positions of each prompt to leave out, such as BOS.
        per_position: whether to average each position separately; prompts must then have one length.

    Returns:
        Hook point -> mean without batch axis, summed in float64, in the dtype of the model. The position
        axis has length 1, or with `per_position` one entry per position.
    """
    sums: dict[HookPoint, Tensor] = {}
    for _, cache in stream(model, [Run(ids, HookSpec().capture(*points), None) for ids in prompts]):
        for point in points:
            axis = position_axis(point)
            # Sums over many tokens lose digits in the dtype of the model.
            value = cache[point][0].double()
            value = value.narrow(axis, skip, value.shape[axis] - skip)
            prompt_sum = value if per_position else value.sum(axis, keepdim=True)
            sums[point] = sums[point] + prompt_sum if point in sums else prompt_sum
    # Every token counts alike, so that long prompts weigh more than short ones.
    count = len(prompts) if per_position else sum(len(ids) - skip for ids in prompts)
    return {point: (total / count).to(model.dtype) for point, total in sums.items()}
