"""Control of a dictionary's reconstructions: the activations with randomly rotated reconstruction errors.

Replacing an activation by anything costs loss. Gurnee (2024, "SAE reconstruction errors are (empirically)
pathological") compares reconstructions with activations displaced as far, token by token, in random
directions. Here, one random rotation per layer is applied to the errors of all tokens: errors of neighbouring
tokens are similar, and independent directions would average out in what later tokens read. Norms of the
errors and angles between them stay.

Border: tokens of one length in, interventions out; errors are those of the closed loop of reconstructions
(features/training/replacement.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

    from ..features.training.replacement import ReconstructionRuns
    from ..forward.hooks.spec import HookSpec

__all__ = ["RandomErrors", "rotated"]

ROUNDS = 3
"""Number of rounds of random signs and Hartley transform.

After a single round, a vector along an axis would have entries of equal size.
"""
HELD_BYTES = 1 << 30
"""Largest size in bytes of the errors that are kept for further draws on the same prompts."""


def rotated(vectors: Tensor, seed: tuple[int, ...]) -> Tensor:
    """Vectors under a random rotation, float32 [..., width]; norms and angles between them stay.

    Random signs and a Hartley transform (Bracewell 1983), three times, each of them orthogonal: as good as a
    uniform rotation for vectors that do not depend on it (Ailon & Chazelle 2009, "The fast
    Johnson-Lindenstrauss transform"), without a matrix [width, width] per layer and draw.

    Arguments:
        vectors: Vectors [..., width].
        seed: Seed of the rotation; equal seeds give equal rotations.
    """
    import torch

    rotated_vectors, rng = vectors.float(), np.random.default_rng(seed)
    for _ in range(ROUNDS):
        signs = rng.choice(np.array([-1, 1], np.float32), rotated_vectors.shape[-1])
        spectrum = torch.fft.fft(rotated_vectors * torch.from_numpy(signs).to(rotated_vectors), norm="ortho")
        # The Hartley transform of real numbers, from one FFT.
        rotated_vectors = spectrum.real - spectrum.imag
    return rotated_vectors


class RandomErrors:
    """Makes interventions that add a dictionary's reconstruction errors, randomly rotated, to activations.

    Arguments:
        worker: Computes the reconstruction errors of a model and a dictionary.
    """

    def __init__(self, worker: ReconstructionRuns) -> None:
        self.worker = worker
        self._cached: dict[tuple[tuple[int, ...], ...], dict[int, Tensor]] = {}
        self._bytes = 0

    def __call__(self, rows: list[list[int]], seed: int) -> HookSpec:
        """Intervention that adds rotated errors to the activations where the dictionary writes.

        Arguments:
            rows: Token ids of prompts of one length.
            seed: Seed of the rotations.
        """
        errors = self._errors(rows)
        # The layer is part of the seed, for a rotation of its own per layer, shared by all tokens.
        return self.worker.added({layer: rotated(error, (seed, layer)) for layer, error in errors.items()})

    def _errors(self, rows: list[list[int]]) -> dict[int, Tensor]:
        """Reconstruction errors [prompt, position, width] of some prompts, by layer."""
        # Cached for all draws: the closed loop needs a pass per layer.
        key = tuple(map(tuple, rows))
        if key in self._cached:
            return self._cached[key]
        errors = self.worker.errors(rows)
        n_bytes = sum(error.nbytes for error in errors.values())
        # Beyond the budget errors are computed again for every draw.
        if self._bytes + n_bytes <= HELD_BYTES:
            self._cached[key], self._bytes = errors, self._bytes + n_bytes
        return errors
