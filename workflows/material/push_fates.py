"""Persistence of steering pushes over later layers in one prompt, compared with random pushes.

Border: results of experiments; stages/causal/pushes/absorption.py defines when a push is absorbed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from ...stages.causal.convergence import cosine
from ...stages.causal.pushes.absorption import Fate, fates, label, share_left
from ..claim import Claim

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["PushFates"]


@dataclass(frozen=True, eq=False)
class PushFates:
    """Outcomes of the steering pushes of one prompt, and of random pushes of the same norm, over later
    layers."""

    text: str
    """The pushes in words, as the beginning of a claim: "pushes from 'A' away from 'B'"."""
    similarity: xr.DataArray
    """Cosine similarity of pushed and original states, [layer, strength, read_layer]."""
    vectors: xr.Dataset
    """Result of the experiment `ContrastiveVectors`, which gives the vector that is added after each layer;
    its positive side is the pushed prompt."""
    strengths: tuple[float, ...]
    """Factors of the vector, from the axis `strength`, whose pushes are compared with random pushes."""
    drawn: xr.Dataset | None
    """Random pushes of the null distribution: cosine similarity to the original states as `similarity`, with
    the axis `draw` in front, and right after the push as `pushed`; None if no random pushes were run."""
    reachable_from: Mapping[int, int | None]
    """Pushed layer -> first layer after which the push can reach the last position; None if it cannot."""
    of: str = "random directions of the same norm, at the same position"
    """What random pushes add, in the words of claims."""

    @cached_property
    def of_all(self) -> dict[tuple[int, float], Fate]:
        """Outcome of each push, by (layer, strength): whether it is absorbed, and where."""
        grid = self.similarity.isel(read_layer=0, drop=True).transpose("layer", "strength")
        pushed = self.vectors.sel(layer=grid["layer"].values)
        state = pushed["mean_state"].sel(side="positive").transpose("layer", "hidden").values
        vector = pushed["vector"].transpose("layer", "hidden").values
        layers, strengths = (grid[axis].values for axis in grid.dims)
        # Similarity right after the push, before any layer has processed it.
        pushed_similarity = [
            [cosine(state[i], state[i] + s * vector[i]) for s in strengths] for i in range(len(layers))
        ]
        return fates(self.similarity, grid.copy(data=np.array(pushed_similarity)), self.reachable_from)

    @property
    def held(self) -> dict[tuple[int, float], Fate]:
        """Outcomes of the pushes that are compared with random ones, by (layer, strength)."""
        return {key: fate for key, fate in self.of_all.items() if key[1] in self.strengths}

    @cached_property
    def claim(self) -> Claim | None:
        """Claim about the share of their largest distance from the undisturbed run that pushes keep until the
        last layer; None if no push has a verdict."""
        layers = sorted({layer for (layer, _), fate in self.held.items() if fate.is_verdict})
        drawn, random_shares = self.drawn, list[float]()
        draws = [] if drawn is None else [drawn.isel(draw=number) for number in range(drawn.sizes["draw"])]
        for draw in draws:
            share = share_left(fates(draw["similarity"], draw["pushed"], self.reachable_from).values())
            # NaN: no push of this draw has a verdict.
            if not np.isnan(share):
                random_shares.append(share)
        if not layers or (draws and not random_shares):
            return None
        after = f"layer {layers[0]}" if len(layers) == 1 else f"layers {layers[0]} to {layers[-1]}"
        times = " and ".join(f"{strength:g}" for strength in self.strengths)
        text = (
            f"{self.text}, added after {after} at strength {times}: share of their largest distance from the "
            "undisturbed run that is left at the last layer"
        )
        # Absorbed pushes keep less of their distance than random ones (stages/causal/pushes/absorption.py).
        return Claim.against(text, share_left(self.held.values()), random_shares, self.of, side="below")

    @property
    def label(self) -> str:
        """Summary of all compared pushes, such as "attractor" or "no verdict" (`absorption.label`)."""
        is_beyond = self.claim is not None and self.claim.is_beyond_chance
        return label(self.held.values(), is_beyond_chance=is_beyond)

    @property
    def words(self) -> Collection[str]:
        """Names of all outcomes of the pushes, such as "absorbed", sorted and without duplicates."""
        return sorted({fate.word for fate in self.of_all.values()})
