"""What became of the pushes of one prompt, and how much is left of them beside random ones.

Border: results of the experiments and where they pushed; what absorbed means is in absorption.py.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from ...stages.causal.absorption import Fate, fates, label, share_left
from ...stages.causal.convergence import cosine
from ..claim import Claim

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["PushFates"]


@dataclass(frozen=True, eq=False)
class PushFates:
    """The pushes of one prompt, and random ones.

    what: the pushes in words. similarity: [layer, strength, read_layer]. vectors: `ContrastiveVectors` of
    them, its positive side the prompt where it is pushed. strengths: of the pushes that are held against
    random ones. drawn: `RandomPushes` along `draw`, None where none were run. first: by layer pushed the one
    after which it may be seen. of: what was drawn, in words.
    """

    what: str
    similarity: xr.DataArray
    vectors: xr.Dataset
    strengths: tuple[float, ...]
    drawn: xr.Dataset | None
    first: Mapping[int, int | None]
    of: str = "random directions as long, at the same place"

    @cached_property
    def of_all(self) -> dict[tuple[int, float], Fate]:
        """What became of each push, by (layer, strength)."""
        grid = self.similarity.isel(read_layer=0, drop=True).transpose("layer", "strength")
        pushed = self.vectors.sel(layer=grid["layer"].values)
        state = pushed["mean_state"].sel(side="positive").transpose("layer", "hidden").values
        vector = pushed["vector"].transpose("layer", "hidden").values
        layers, strengths = (grid[axis].values for axis in grid.dims)
        own = [[cosine(state[i], state[i] + s * vector[i]) for s in strengths] for i in range(len(layers))]
        return fates(self.similarity, grid.copy(data=np.array(own)), self.first)

    @property
    def held(self) -> dict[tuple[int, float], Fate]:
        """Of the pushes that are held against random ones."""
        return {where: each for where, each in self.of_all.items() if where[1] in self.strengths}

    @cached_property
    def claim(self) -> Claim | None:
        """The share of their largest distance that the pushes keep to the end; None without a verdict."""
        layers = sorted({layer for (layer, _), each in self.held.items() if each.is_verdict})
        drawn = self.drawn
        draws = [] if drawn is None else [drawn.isel(draw=number) for number in range(drawn.sizes["draw"])]
        left = [share_left(fates(each["similarity"], each["pushed"], self.first).values()) for each in draws]
        verdicts = [each for each in left if not np.isnan(each)]
        if not layers or (draws and not verdicts):
            return None
        after = f"layer {layers[0]}" if len(layers) == 1 else f"layers {layers[0]} to {layers[-1]}"
        times = " and ".join(f"{strength:g}" for strength in self.strengths)
        text = (
            f"{self.what} after {after}, {times} times, keep this share of their largest distance to the end"
        )
        return Claim.against(text, share_left(self.held.values()), verdicts, self.of, side="below")

    @property
    def label(self) -> str:
        """All of them in two words."""
        is_beyond = self.claim is not None and self.claim.is_beyond_chance
        return label(self.held.values(), is_beyond_chance=is_beyond)

    @property
    def words(self) -> Collection[str]:
        """What became of the pushes, each word once."""
        return sorted({each.word for each in self.of_all.values()})
