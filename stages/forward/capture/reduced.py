"""Reductions of activations while a pass goes by, so that the whole is never stored.

Border: tensors of one batch in, rows out; where they go is told by the harvest.

Sums are float64, in an order that follows from how many numbers are added and from nothing else: so what is
stored does not depend on batches, segments, threads or where a row lies in memory, as torch's own sums may.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ....store.runs.packed import PackedTokens
from .batches import PieceBatch
from .overlap import send


def norms(value: Tensor) -> Tensor:
    """L2 norms of the last axis: [..., number] -> float64 [...]."""
    return folded(value.double().square()).sqrt()


def keep_means(value: Tensor, batch: PieceBatch, place: Tensor, tokens: PackedTokens, first: int) -> None:
    """Means over all positions of [batch, position, …] to the prompts that end in a segment, `first` being
    the first of them."""
    for row, piece in enumerate(batch.pieces):
        size = int(tokens.row_size[piece.prompt])
        if piece.stop == size:  # a prompt that ends here is computed here from its beginning
            total = folded(value[row, :size].double().movedim(0, -1))
            send(total / size, place[piece.prompt - first])


def folded(value: Tensor) -> Tensor:
    """Sums over the last axis, the second half added to the first until one number is left."""
    while (width := value.shape[-1]) > 1:
        half = (width + 1) // 2
        added = value[..., : width - half] + value[..., half:]
        value = torch.cat([added, value[..., width - half : half]], dim=-1)
    return value[..., 0]
