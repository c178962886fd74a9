"""Random pushes: null distribution of steering by contrastive vectors.

The control of `PushedStates` (convergence.py): at every layer a random direction, uniform on the sphere and
of the norm of that layer's contrastive vector, is added at the same position and strengths. One experiment is
one draw; `Draws` repeats it.

Border: token ids and positions; absorption.py decides whether a push was absorbed.

Axes: layer (where the vector is added), strength, read_layer.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ....pipeline import Output
from ....store.arrays import Array
from ...forward.hooks.spec import HookSpec
from ...forward.runs.experiment import CellLabels
from ...forward.runs.run import Run
from ..controls import random_directions
from ..convergence import Pushes, cosine
from ..effects import array

if TYPE_CHECKING:
    import xarray as xr

    from ...forward.architectures.architecture import Architecture
    from ...forward.hooks.cache import HookCache
    from ...forward.models.model import Model

__all__ = ["RandomPushes", "Undisturbed"]


@dataclass(frozen=True)
class Undisturbed:
    """States of the unsteered run, and the contrastive vectors whose norms the random directions get."""

    last: Array
    """State of the last token after each layer, float32 [layer, hidden]."""
    at_push: Array
    """State at the steered position after each layer, float32 [layer, hidden]."""
    vectors: Array
    """Contrastive vector of each layer [layer, hidden]."""


@dataclass(frozen=True)
class RandomPushes(Pushes):
    """Adds a random direction, with the norm of the contrastive vector, after one layer at a time.

    Fields other than `draw` are those of `Pushes`.
    """

    name: ClassVar[str] = "random_pushes"
    version: ClassVar[int] = 1
    outputs: ClassVar[Mapping[str, Output]] = {
        "similarity": Output(
            ("layer", "strength", "read_layer"),
            "1",
            "cosine of the last token's state with that of the unsteered run",
        ),
        "pushed": Output(
            ("layer", "strength"),
            "1",
            "cosine of the state after the push with the state before, at its position",
        ),
    }

    draw: int = 0
    """Seed of the directions of all layers."""

    @property
    def baseline(self) -> Hashable:
        """Fields on which `prepare` depends; experiments that agree in them share its result."""
        # Draws that agree in these share one unsteered run and one set of vectors.
        return (self.tokens, self.position, self.contrast)

    def prepare(self, model: Model) -> Undisturbed:
        """States of the unsteered run, and the contrastive vectors."""
        result = model.forward(self.tokens, HookSpec().capture("blocks.*.hook_resid_post"), want=None)
        states = np.stack([array(result[point][0]) for point in result])
        return Undisturbed(
            states[:, -1],
            states[:, self.position % len(self.tokens)],
            self.contrast.computed(model)["vector"].values,
        )

    def cells(self, config: Architecture) -> Sequence[CellLabels]:
        """One cell for all layers, because a draw is small; raises the errors of `Pushes.cells`."""
        return [{"layers": [cell["layer"] for cell in super().cells(config)]}]

    def runs(self, prepared: Undisturbed, cell: CellLabels) -> list[Run]:
        """One run per layer and strength; strength varies fastest."""
        ids, directions, n_layers = tuple(self.tokens), self.directions(prepared), len(prepared.last)
        layers = cell["layers"]
        return [run for layer in layers for run in self.pushed(ids, None, layer, n_layers, directions[layer])]

    def measure(self, prepared: Undisturbed, cell: CellLabels, result: HookCache) -> Array:
        """Cosine of the last token's state with the unsteered one after each layer, [read_layer]."""
        return self.similarity(prepared.last, result)

    def dataset(self, prepared: Undisturbed, cell: CellLabels, measured: Sequence[Any]) -> xr.Dataset:
        """similarity [layer, strength, read_layer] and pushed [layer, strength]."""
        import xarray as xr

        layers, vectors = cell["layers"], self.directions(prepared)
        # resid_post at the pushed position is this sum, so that no run has to capture it.
        before = prepared.at_push
        pushed = [[cosine(before[i], before[i] + s * vectors[i]) for s in self.strengths] for i in layers]
        similarity = np.array(measured).reshape(len(layers), len(self.strengths), -1)
        arrays = {"similarity": similarity, "pushed": np.array(pushed)}
        return xr.Dataset(
            {name: self.outputs[name].variable(values) for name, values in arrays.items()},
            coords={
                "layer": list(layers),
                "strength": list(self.strengths),
                "read_layer": np.arange(len(prepared.last)),
            },
        )

    def directions(self, prepared: Undisturbed) -> Array:
        """Random directions of this draw, with the contrastive vectors' norms, float32 [layer, hidden]."""
        directions: Array = random_directions(prepared.vectors, 1, seed=self.draw)[0]
        return directions
