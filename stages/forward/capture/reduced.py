"""Norms, pooled prompts and probe scores, computed during the pass so that activations are never stored.

Sums are float64, in an order that depends only on the number of summands. So stored values do not depend on
batches, segments, threads or memory alignment, as the sums of torch may.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ....store.runs.packed import PackedTokens
from ..hooks.keeps import Keep
from ..hooks.reductions import MAX, WEIGHTED_MEAN, Scorer
from .batches import PieceBatch
from .overlap import send


def norms(value: Tensor) -> Tensor:
    """L2 norm of each row over the last axis.

    Arguments:
        value: activations [..., hidden].

    Returns:
        float64 [...].
    """
    # float64: squares of massive activations overflow float16, and lose digits in float32.
    return folded(value.double().square()).sqrt()


def write_pooled(
    value: Tensor, keep: Keep, batch: PieceBatch, buffer: Tensor, tokens: PackedTokens, first_prompt: int
) -> None:
    """Write activations pooled over the positions of each prompt into a segment buffer.

    Arguments:
        value: activations [batch, position, …].
        keep: a reduction over positions, and the positions that it covers.
        batch: the prompts of `value`.
        buffer: [prompt, …], rows of the prompts that end in the segment.
        tokens: prompts of the run.
        first_prompt: number of the prompt in row 0 of the buffer.
    """
    for row, piece in enumerate(batch.pieces):
        size = int(tokens.row_size[piece.prompt])
        if piece.stop == size:  # a batch always starts at position 0, so all positions are in `value`
            places = torch.arange(size)
            if keep.selection is not None:
                places = torch.from_numpy(keep.selection.places(tokens, piece.prompt).copy())
            # `folded` sums the last axis, so positions go there.
            states = value[row, places.to(value.device)].double().movedim(0, -1)
            if keep.reduction == MAX:
                pooled = states.amax(-1)
            elif keep.reduction == WEIGHTED_MEAN:
                weights = (places + 1).to(states)
                pooled = folded(states * weights) / weights.sum()
            else:
                pooled = folded(states) / len(places)
            send(pooled, buffer[piece.prompt - first_prompt])


def token_scores(value: Tensor, probe: Scorer) -> Tensor:
    """Log-odds of each row by a probe.

    Arguments:
        value: activations [..., hidden].
        probe: the probe.

    Returns:
        float64 [...].
    """
    weight = torch.from_numpy(probe.weight).to(value.device, torch.float64)
    return folded(value.double() * weight) + probe.bias


def write_prompt_scores(
    value: Tensor, probe: Scorer, batch: PieceBatch, buffer: Tensor, tokens: PackedTokens, first_prompt: int
) -> None:
    """Write the log-odds of each prompt, pooled as the probe says, into a segment buffer.

    Arguments:
        value: activations [batch, position, hidden].
        probe: a probe of prompts.
        batch: the prompts of `value`.
        buffer: [prompt], rows of the prompts that end in the segment.
        tokens: prompts of the run.
        first_prompt: number of the prompt in row 0 of the buffer.
    """
    for row, piece in enumerate(batch.pieces):
        size = int(tokens.row_size[piece.prompt])
        if piece.stop == size:  # all positions are in `value`, as in `write_pooled`
            states = value[row, :size].double()
            if probe.pooling == "mean":
                pooled = folded(states.movedim(0, -1)) / size
            else:
                pooled = states.amax(0) if probe.pooling == "max" else states[-1]
            send(token_scores(pooled, probe), buffer[piece.prompt - first_prompt])


def folded(value: Tensor) -> Tensor:
    """Sum over the last axis, in an order that depends only on its length.

    The second half of the axis is added to the first, until one number is left.
    """
    while (width := value.shape[-1]) > 1:
        half = (width + 1) // 2
        added = value[..., : width - half] + value[..., half:]
        # With an odd width the middle number has no partner.
        value = torch.cat([added, value[..., width - half : half]], dim=-1)
    return value[..., 0]
