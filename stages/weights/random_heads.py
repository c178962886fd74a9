"""Heads with the singular values of a real one that write, or read, elsewhere: what circuits are held
against.

Border: matrices in, matrices out. A score between two heads is large by chance where matrices are of low rank
and the stream is narrow, so that it says something only beside heads of equal size. Of a writing matrix
W = L Q', with Q orthonormal, a random one is L P' with P drawn evenly among all such: the same norms, and the
same singular values of everything the head does, turned at random in the stream.
"""

from __future__ import annotations

import numpy as np

from ...store.arrays import Array, Floats

__all__ = ["random_writers"]


def random_writers(written: Array, rng: np.random.Generator) -> Floats:
    """Writing matrices [..., d_head, hidden], each turned at random: float64 of that shape.

    Rows whose entries sum to zero stay so, as where the mean of the stream is folded away.
    """
    wide = np.asarray(written, np.float64)
    _, triangle = np.linalg.qr(np.swapaxes(wide, -1, -2))
    drawn = rng.standard_normal(np.swapaxes(wide, -1, -2).shape)
    largest = np.abs(wide).sum(axis=-1).max(initial=0.0)
    if np.abs(wide.sum(axis=-1)).max(initial=0.0) <= 1e-5 * largest:
        drawn -= drawn.mean(axis=-2, keepdims=True)
    turned, _ = np.linalg.qr(drawn)
    found: Floats = np.swapaxes(turned[..., : triangle.shape[-2]] @ triangle, -1, -2)
    return found
