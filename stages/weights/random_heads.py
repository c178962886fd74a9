"""Random heads: controls of circuits, with a real head's singular values and random directions.

Border: matrices in, matrices out. Scores between low-rank matrices in a narrow stream are large by chance, so
they are compared with heads of equal singular values. For a writing matrix W = L Q^T with orthonormal Q, a
random one is L P^T with P uniform among orthonormal matrices: a random rotation of what the head writes, with
all norms and singular values unchanged.
"""

from __future__ import annotations

import numpy as np

from ...store.arrays import Array, Floats

__all__ = ["random_writers"]


def random_writers(written: Array, rng: np.random.Generator) -> Floats:
    """Writing matrices rotated at random in the stream.

    Arguments:
        written: writing matrices [..., d_head, hidden].
        rng: generator of the rotations, a different one for each matrix.

    Returns:
        float64, same shape, with the same singular values.
    """
    matrices = np.asarray(written, np.float64)
    _, triangle = np.linalg.qr(np.swapaxes(matrices, -1, -2))
    gaussian = rng.standard_normal(np.swapaxes(matrices, -1, -2).shape)
    # Rows of zero mean (where the mean of the stream is folded away) stay so: P is drawn in that subspace.
    largest = np.abs(matrices).sum(axis=-1).max(initial=0.0)
    if np.abs(matrices.sum(axis=-1)).max(initial=0.0) <= 1e-5 * largest:
        gaussian -= gaussian.mean(axis=-2, keepdims=True)
    # Q of a Gaussian matrix is uniform among orthonormal ones up to signs, which no norm depends on.
    rotated, _ = np.linalg.qr(gaussian)
    writers: Floats = np.swapaxes(rotated[..., : triangle.shape[-2]] @ triangle, -1, -2)
    return writers
