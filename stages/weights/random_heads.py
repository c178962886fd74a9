"""Random heads: controls of circuits, with a real head's singular values and random directions.

Border: matrices in, matrices out. Scores between low-rank matrices in a narrow stream are large by chance, so
they are compared with heads of equal singular values. For a writing matrix W = L Q^T with orthonormal Q, a
random one is L P^T with P uniform among orthonormal matrices: a random rotation of what the head writes, with
all norms and singular values unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...store.arrays import Array, Floats

__all__ = ["RandomWriters"]


@dataclass(frozen=True)
class RandomWriters:
    """Random rotations of what some heads write."""

    triangle: Floats
    """Transposed L of the writing matrices W = L Q^T, float64 [..., d_head, d_head]."""
    hidden_size: int
    """Width of the stream."""
    is_centred: bool
    """Whether the rows of all matrices have zero mean, as where the mean of the stream is folded away."""

    @classmethod
    def of(cls, written: Array) -> RandomWriters:
        """The random counterparts of writing matrices [..., d_head, hidden]."""
        matrices = np.asarray(written, np.float64)
        # Once for all draws, as a decomposition costs as much as drawing.
        _, triangle = np.linalg.qr(np.swapaxes(matrices, -1, -2))
        largest = np.abs(matrices).sum(axis=-1).max(initial=0.0)
        is_centred = bool(np.abs(matrices.sum(axis=-1)).max(initial=0.0) <= 1e-5 * largest)
        return cls(triangle, matrices.shape[-1], is_centred)

    def draw(self, rng: np.random.Generator) -> Floats:
        """Writing matrices rotated at random, float64 [..., d_head, hidden], with equal singular values.

        rng: generator of the rotations, a different one for each matrix.
        """
        *heads, rank, columns = self.triangle.shape
        gaussian = rng.standard_normal((*heads, self.hidden_size, columns))
        if self.is_centred:
            # The rotation is drawn among those that keep the zero mean.
            gaussian -= gaussian.mean(axis=-2, keepdims=True)
        # Q of a Gaussian matrix is uniform among orthonormal ones up to signs, which no norm depends on.
        rotated, _ = np.linalg.qr(gaussian)
        writers: Floats = np.swapaxes(rotated[..., :rank] @ self.triangle, -1, -2)
        return writers
