"""A dictionary's errors in directions drawn at random: what its reconstructions are held against.

What a reconstruction costs says little by itself: anything put in place of an activation costs something.
Gurnee (2024, "SAE reconstruction errors are (empirically) pathological") holds it against activations
displaced as far, token by token, in random directions. So is done here, with one difference. Errors of
neighbouring tokens are alike, and a direction drawn anew for each would average out over what later tokens
read: so one rotation is drawn for each layer and turns the errors of all tokens. Each of them then points
anywhere, is as long as it was, and lies to the others as it did.

Border: tokens of one length in, interventions out; errors are those of the closed loop of reconstructions
(features/training/replacement.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

    from ..features.training.replacement import Reconstructed
    from ..forward.hooks.spec import HookSpec

__all__ = ["RandomErrors", "turned"]

ROUNDS = 3
"""Of signs and a transform: after one, a vector along an axis would still have entries of one size."""
HELD_BYTES = 1 << 30
"""Of errors kept for further draws on the same prompts."""


def turned(vectors: Tensor, seed: tuple[int, ...]) -> Tensor:
    """Vectors [..., width] under a rotation drawn by `seed`, float32: lengths and angles stay.

    Random signs and a Hartley transform (Bracewell 1983), thrice, each of them orthogonal: as good as a
    rotation drawn evenly for vectors that know nothing of it (Ailon & Chazelle 2009, "The fast
    Johnson-Lindenstrauss transform"), without a matrix of width x width for every layer and draw.
    """
    import torch

    found, rng = vectors.float(), np.random.default_rng(seed)
    for _ in range(ROUNDS):
        signs = rng.choice(np.array([-1, 1], np.float32), found.shape[-1])
        spectrum = torch.fft.fft(found * torch.from_numpy(signs).to(found), norm="ortho")
        found = spectrum.real - spectrum.imag
    return found


class RandomErrors:
    """What is added to each place of a closed loop, by seed. worker: the reconstructions."""

    def __init__(self, worker: Reconstructed) -> None:
        self.worker = worker
        self._held: dict[tuple[tuple[int, ...], ...], dict[int, Tensor]] = {}
        self._bytes = 0

    def __call__(self, rows: list[list[int]], seed: int) -> HookSpec:
        """Errors of prompts of one length, turned, each layer for itself."""
        errors = self._errors(rows)
        return self.worker.added({layer: turned(each, (seed, layer)) for layer, each in errors.items()})

    def _errors(self, rows: list[list[int]]) -> dict[int, Tensor]:
        """As the loop gives them; it takes as many passes as there are layers, whatever the draw."""
        asked = tuple(map(tuple, rows))
        if asked in self._held:
            return self._held[asked]
        found = self.worker.errors(rows)
        size = sum(each.nbytes for each in found.values())
        if self._bytes + size <= HELD_BYTES:
            self._held[asked], self._bytes = found, self._bytes + size
        return found
