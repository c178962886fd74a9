"""Attribution of features held against random features that are chosen as they were.

The feature with the largest of thousands of estimates moves the answer; so would the largest of as many
others. Here every feature that differs between two runs is exchanged for another one of its layer, drawn at
random, which writes as much at the same position, with the same sign; of these the one with the largest
estimate is put in exactly, as the one that was found. What is drawn pays for the choice itself, so that no
held-out prompts are needed and no number of candidates is divided by.

How much is written: the norm over all layers written to together, as everywhere (doses.py).

Border: declares runs; estimates and cells are attribution.py's. Planning imports no torch.

Axes: cause, the feature found, then those drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from ....pipeline import Output
from ....store.arrays import Floats
from ....store.errors import InterventionError, StageError
from ...causal.effects import array
from ...causal.grids.patching_results import as_vector
from ...forward.runs.experiment import CellLabels
from ...forward.runs.run import Run
from ..dictionary import Dictionary
from .attribution import REST, Attributed, FeatureAttribution, Ints, OfPair

if TYPE_CHECKING:
    import xarray as xr

    from ...forward.architectures.architecture import Architecture
    from ...forward.hooks.cache import HookCache
    from ...forward.models.model import Model

__all__ = ["RandomAttribution"]

POOL = 512
"""Features of a layer that are drawn from, at most: each takes a read of all it writes."""


@dataclass(frozen=True)
class Chosen:
    """A feature of each cause: layer, position and index [cause, 3], change and estimate [cause]."""

    attributed: Attributed
    place: Ints
    change: Floats
    estimate: Floats
    candidates: int


@dataclass(frozen=True, kw_only=True)
class RandomAttribution(OfPair):
    """The feature with the largest estimate, and those that are the largest of as many random ones.

    draws: how often. The other fields: of `OfPair`. Raises InterventionError where no feature differs, or a
    layer has no two that write.
    """

    name: ClassVar[str] = "random_attribution"
    version: ClassVar[int] = 1
    outputs: ClassVar[Mapping[str, Output]] = {
        "estimate": Output(("cause",), "as the metric", "first-order effect of the feature"),
        "exact": Output(("cause",), "as the metric", "its effect, by a run"),
        "layer": Output(("cause",), "1", "layer it reads"),
        "position": Output(("cause",), "1", "its position"),
        "feature": Output(("cause",), "1", "its index"),
        "change": Output(("cause",), "1", "units that are added of it"),
        "candidates": Output((), "1", "features it was chosen among"),
    }

    draws: int = 50

    def __post_init__(self) -> None:
        if self.draws < 1:
            raise StageError(f"{self.name}: expected at least one draw, found {self.draws}")

    @property
    def found(self) -> FeatureAttribution:
        """What finds the features that are exchanged."""
        return FeatureAttribution(
            clean=self.clean,
            corrupted=self.corrupted,
            metric=self.metric,
            dictionary=self.dictionary,
            features=self.features,
            at=self.at,
        )

    def cells(self, config: Architecture) -> Sequence[CellLabels]:
        """One. Raises what `FeatureAttribution` raises."""
        return self.found.cells(config)

    def prepare(self, model: Model) -> Chosen:
        """The largest of what was found, and of every draw."""
        attributed = self.found.prepare(model)
        is_feature = attributed.place[:, 2] != REST
        place, change = attributed.place[is_feature], attributed.change[is_feature]
        estimate = attributed.effect[is_feature]
        if not len(place):
            raise InterventionError("expected features that are active in either prompt, found none")
        most = int(np.abs(estimate).argmax())
        rng = np.random.default_rng(self.seed)
        exchanged = [
            _Exchanged(attributed, place[place[:, 0] == layer], change[place[:, 0] == layer], rng)
            for layer in np.unique(place[:, 0]).tolist()
        ]
        drawn = [
            max((each.largest(rng) for each in exchanged), key=lambda found: abs(found[2]))
            for _ in range(self.draws)
        ]
        own = (place[most], change[most], estimate[most])
        places, changes, estimates = zip(own, *drawn, strict=True)
        return Chosen(attributed, np.array(places), np.array(changes), np.array(estimates), len(place))

    def runs(self, prepared: Chosen, cell: CellLabels) -> Sequence[Run]:
        """One per cause: the feature that was found, then the largest of every draw."""
        held = prepared.attributed
        return [
            self.run_with(held, position, held.of_feature(layer, feature, change))
            for (layer, position, feature), change in zip(
                prepared.place.tolist(), prepared.change.tolist(), strict=True
            )
        ]

    def measure(self, prepared: Chosen, cell: CellLabels, result: HookCache) -> float:
        """The metric of one run, not yet rescaled."""
        return self.value(as_vector(result.logits), prepared.attributed.clean)

    def dataset(self, prepared: Chosen, cell: CellLabels, measured: Sequence[float]) -> xr.Dataset:
        """Both effects of every cause."""
        import xarray as xr

        held = prepared.attributed
        corrupted = self.value(held.corrupted, held.clean)
        estimate = self.effects(held, prepared.estimate + corrupted)
        exact = self.effects(held, measured)
        layer, position, feature = prepared.place.T
        data = {
            "estimate": estimate,
            "exact": exact,
            "layer": layer,
            "position": position,
            "feature": feature,
            "change": prepared.change,
            "candidates": np.array(prepared.candidates),
        }
        given = {name: self.outputs[name].variable(np.asarray(values)) for name, values in data.items()}
        return xr.Dataset(given, attrs={"metric": self.metric.name, "units": self.metric.units})


class _Exchanged:
    """The features of one layer that differ, and some that may stand for them.

    place [cell, 3], change [cell]: of the features that differ.
    """

    def __init__(self, attributed: Attributed, place: Ints, change: Floats, rng: np.random.Generator) -> None:
        self.layer, self.place = int(place[0, 0]), place
        dictionary = attributed.dictionary
        active = np.unique(place[:, 2])
        pool = rng.permutation(dictionary.n_features)[:POOL]
        lengths, units = _written(attributed, self.layer, pool)
        self.pool, self.lengths, self.units = (each[lengths > 0] for each in (pool, lengths, units))
        if len(self.pool) < 2:
            raise InterventionError(
                f"expected features of layer {self.layer} of {dictionary.name} to draw from, found "
                f"{len(self.pool)} that write; ask for a dictionary with more"
            )
        of_active, _ = _written(attributed, self.layer, active)
        self.written = change * of_active[np.searchsorted(active, place[:, 2])]

    def largest(self, rng: np.random.Generator) -> tuple[Ints, float, float]:
        """(place, change, estimate) of the largest estimate, with every feature exchanged."""
        drawn = rng.integers(len(self.pool), size=len(self.place))
        drawn = np.where(self.pool[drawn] == self.place[:, 2], (drawn + 1) % len(self.pool), drawn)
        change = self.written / self.lengths[drawn]
        estimate = change * self.units[drawn, self.place[:, 1]]
        most = int(np.abs(estimate).argmax())
        place = np.array([self.layer, self.place[most, 1], self.pool[drawn[most]]])
        return place, float(change[most]), float(estimate[most])


def _written(attributed: Attributed, layer: int, features: Ints) -> tuple[Floats, Floats]:
    """Of a unit of each feature the norm of all it writes [feature], and its first-order effect at every
    position [feature, position]."""
    import torch

    dictionary: Dictionary = attributed.dictionary
    squares = np.zeros(len(features))
    units = np.zeros((len(features), len(attributed.gradients[layer])))
    for target in dictionary.targets(layer):
        rows = dictionary.layer(layer).decoder_rows(torch.from_numpy(features), target).double()
        squares += array((rows**2).sum(1))
        units += array(rows @ attributed.gradients[target].to(rows).T)
    return np.sqrt(squares), units
