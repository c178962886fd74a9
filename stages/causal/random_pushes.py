"""Random pushes: what becomes of a state that is pushed as far in a direction nobody chose.

The null of `PushedStates` (convergence.py): at every layer a direction drawn evenly from the sphere, as long
as the contrastive vector of that layer, added at the same position and strengths. One experiment is one draw;
`Draws` does many.

Border: token ids and positions. Whether a push was absorbed, absorption.py says.

Axes: layer (where it is pushed), strength, read_layer.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ...pipeline import Output
from ...store.arrays import Array
from ..forward.hooks.spec import HookSpec
from ..forward.runs.experiment import CellLabels
from ..forward.runs.run import Run
from .controls import random_directions
from .convergence import Pushes, cosine
from .effects import array

if TYPE_CHECKING:
    import xarray as xr

    from ..forward.architectures.architecture import Architecture
    from ..forward.hooks.cache import HookCache
    from ..forward.models.model import Model

__all__ = ["RandomPushes", "Undisturbed"]


@dataclass(frozen=True)
class Undisturbed:
    """What random pushes are made of.

    last, at_push: undisturbed states of the last token and where it is pushed, [layer, hidden]. vectors: what
    random ones are as long as, [layer, hidden].
    """

    last: Array
    at_push: Array
    vectors: Array


@dataclass(frozen=True)
class RandomPushes(Pushes):
    """A random direction as long as the contrastive vector, added after each layer by itself.

    draw: seed of the directions, of all layers. The rest: see `Pushes`.
    """

    name: ClassVar[str] = "random_pushes"
    version: ClassVar[int] = 1
    outputs: ClassVar[Mapping[str, Output]] = {
        "similarity": Output(
            ("layer", "strength", "read_layer"),
            "1",
            "cosine of the last token's state with the undisturbed one",
        ),
        "pushed": Output(
            ("layer", "strength"), "1", "cosine of the pushed state with what it was, at its position"
        ),
    }

    draw: int = 0

    @property
    def baseline(self) -> Hashable:
        """All but the draw, the strengths and the layers."""
        return (self.tokens, self.position, self.contrast)

    def prepare(self, model: Model) -> Undisturbed:
        """The undisturbed run, and the vectors."""
        result = model.forward(self.tokens, HookSpec().capture("blocks.*.hook_resid_post"), want=None)
        states = np.stack([array(result[point][0]) for point in result])
        return Undisturbed(
            states[:, -1],
            states[:, self.position % len(self.tokens)],
            self.contrast.computed(model)["vector"].values,
        )

    def cells(self, config: Architecture) -> Sequence[CellLabels]:
        """One for all layers: a draw is small, and nobody asks for half of one. Raises as `Pushes`."""
        return [{"layers": [each["layer"] for each in super().cells(config)]}]

    def runs(self, prepared: Undisturbed, cell: CellLabels) -> list[Run]:
        """One per layer and strength."""
        ids, directions, n_layers = tuple(self.tokens), self.directions(prepared), len(prepared.last)
        layers = cell["layers"]
        return [run for layer in layers for run in self.pushed(ids, None, layer, n_layers, directions[layer])]

    def measure(self, prepared: Undisturbed, cell: CellLabels, result: HookCache) -> Array:
        """How similar the last token's state is after each layer, [read_layer]."""
        return self.similarity(prepared.last, result)

    def dataset(self, prepared: Undisturbed, cell: CellLabels, measured: Sequence[Any]) -> xr.Dataset:
        """similarity [layer, strength, read_layer], pushed [layer, strength]."""
        import xarray as xr

        layers, vectors = cell["layers"], self.directions(prepared)
        before = prepared.at_push
        pushed = [[cosine(before[i], before[i] + s * vectors[i]) for s in self.strengths] for i in layers]
        similarity = np.array(measured).reshape(len(layers), len(self.strengths), -1)
        own = {"similarity": similarity, "pushed": np.array(pushed)}
        return xr.Dataset(
            {name: self.outputs[name].variable(values) for name, values in own.items()},
            coords={
                "layer": list(layers),
                "strength": list(self.strengths),
                "read_layer": np.arange(len(prepared.last)),
            },
        )

    def directions(self, prepared: Undisturbed) -> Array:
        """[layer, hidden], in every layer as long as the vector they stand beside."""
        found: Array = random_directions(prepared.vectors, 1, seed=self.draw)[0]
        return found
