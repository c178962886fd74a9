"""Feature attribution compared with random features that are selected in the same way.

The feature with the largest of thousands of estimates changes the answer; so would the largest of as many
random features. For the null distribution, every feature that differs between two runs is replaced by a
random feature of its layer that writes a vector of the same norm at the same position with the same sign, and
the replacement with the largest estimate is run exactly, like the feature under test. Because each draw
repeats the selection, neither held-out prompts nor a correction for the number of candidates is needed.

The norm is taken over all layers that a feature writes to, as everywhere (doses.py).

Border: declares runs; estimates and cells are computed in attribution.py. Planning imports no torch.

Axes: cause, the feature under test, then one per draw.
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
from .attribution import REST, FeatureAttribution, Ints, PairAttribution, PromptPairExperiment

if TYPE_CHECKING:
    import xarray as xr

    from ...forward.architectures.architecture import Architecture
    from ...forward.hooks.cache import HookCache
    from ...forward.models.model import Model

__all__ = ["RandomAttribution"]

POOL = 512
"""Largest number of features per layer from which random ones are drawn: all their decoder rows are read."""


@dataclass(frozen=True)
class CauseFeatures:
    """The feature under test, followed by the random feature of each draw (axis `cause`)."""

    attributed: PairAttribution
    """First-order effects of all features in the pair of prompts."""
    place: Ints
    """Layer, position and index of each feature, int64 [cause, 3]."""
    change: Floats
    """Change of each feature's activation that is added to the corrupted run [cause]."""
    estimate: Floats
    """First-order effect of the change on the metric, before the metric is rescaled [cause]."""
    candidates: int
    """Number of features among which the one with the largest estimate was selected."""


@dataclass(frozen=True, kw_only=True)
class RandomAttribution(PromptPairExperiment):
    """Exact effects of the feature with the largest estimate, and of the best among as many random features.

    Raises:
        InterventionError: No feature differs between the runs, or a layer has fewer than two features that
            write.
    """

    name: ClassVar[str] = "random_attribution"
    version: ClassVar[int] = 1
    outputs: ClassVar[Mapping[str, Output]] = {
        "estimate": Output(("cause",), "as the metric", "first-order effect of the feature"),
        "exact": Output(("cause",), "as the metric", "effect of the feature in an exact run"),
        "layer": Output(("cause",), "1", "layer that the feature reads"),
        "position": Output(("cause",), "1", "position of the feature"),
        "feature": Output(("cause",), "1", "index of the feature"),
        "change": Output(("cause",), "1", "units of the feature that are added"),
        "candidates": Output((), "1", "number of features among which the largest was selected"),
    }

    draws: int = 50
    """Number of draws of the null distribution."""

    def __post_init__(self) -> None:
        if self.draws < 1:
            raise StageError(
                f"{self.name}: expected draws of at least 1 for the null distribution, found {self.draws}"
            )

    @property
    def attribution(self) -> FeatureAttribution:
        """The experiment that estimates the effects of all features."""
        return FeatureAttribution(
            clean=self.clean,
            corrupted=self.corrupted,
            metric=self.metric,
            dictionary=self.dictionary,
            features=self.features,
            at=self.at,
        )

    def cells(self, config: Architecture) -> Sequence[CellLabels]:
        """One cell: the null distribution belongs to the choice among all features.

        Raises:
            StageError: The metric has no gradient.
            PromptError: A token is out of range.
            ConfigError: The model has no backward pass.
        """
        return self.attribution.cells(config)

    def prepare(self, model: Model) -> CauseFeatures:
        """The feature with the largest estimate, and the largest replacement of each draw."""
        attributed = self.attribution.prepare(model)
        is_feature = attributed.place[:, 2] != REST
        # Remainders are left out: there is no random feature that could replace them.
        place, change = attributed.place[is_feature], attributed.change[is_feature]
        estimate = attributed.effect[is_feature]
        if not len(place):
            raise InterventionError(
                "expected features of the dictionary that are active in the clean or the corrupted prompt, "
                "found none to test; use other prompts"
            )
        largest = int(np.abs(estimate).argmax())
        rng = np.random.default_rng(self.seed)
        replaceable = []
        for layer in np.unique(place[:, 0]).tolist():
            of_layer = place[:, 0] == layer
            replaceable.append(_ReplaceableFeatures(attributed, place[of_layer], change[of_layer], rng))
        # Selected like the feature under test: the largest estimate over all layers together.
        drawn = [
            max((features.largest(rng) for features in replaceable), key=lambda candidate: abs(candidate[2]))
            for _ in range(self.draws)
        ]
        tested = (place[largest], change[largest], estimate[largest])
        places, changes, estimates = zip(tested, *drawn, strict=True)
        return CauseFeatures(attributed, np.array(places), np.array(changes), np.array(estimates), len(place))

    def runs(self, prepared: CauseFeatures, cell: CellLabels) -> Sequence[Run]:
        """One run per cause: the feature under test, then the selected feature of every draw."""
        attributed = prepared.attributed
        return [
            self.run_with(attributed, position, attributed.of_feature(layer, feature, change))
            for (layer, position, feature), change in zip(
                prepared.place.tolist(), prepared.change.tolist(), strict=True
            )
        ]

    def measure(self, prepared: CauseFeatures, cell: CellLabels, result: HookCache) -> float:
        """Metric of one run, before rescaling by the clean and corrupted runs."""
        return self.value(as_vector(result.logits), prepared.attributed.clean)

    def dataset(self, prepared: CauseFeatures, cell: CellLabels, measured: Sequence[float]) -> xr.Dataset:
        """Estimated and exact effect [cause] of the feature under test and of each draw's random feature."""
        import xarray as xr

        attributed = prepared.attributed
        corrupted = self.value(attributed.corrupted, attributed.clean)
        estimate = self.effects(attributed, prepared.estimate + corrupted)
        exact = self.effects(attributed, measured)
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
        variables = {name: self.outputs[name].variable(np.asarray(values)) for name, values in data.items()}
        return xr.Dataset(variables, attrs={"metric": self.metric.name, "units": self.metric.units})


class _ReplaceableFeatures:
    """Features of one layer that differ between the runs, and a pool of random features to replace them.

    Arguments:
        attributed: First-order effects in the pair of prompts.
        place: Layer, position and index of the features that differ [cell, 3].
        change: Clean minus corrupted activation of each [cell].
        rng: Random generator that draws the pool.

    Raises:
        InterventionError: Fewer than two features of the pool write anything.
    """

    def __init__(
        self, attributed: PairAttribution, place: Ints, change: Floats, rng: np.random.Generator
    ) -> None:
        # Norms of the pool and of the active features are read once, for all draws.
        self.layer, self.place = int(place[0, 0]), place
        dictionary = attributed.dictionary
        active = np.unique(place[:, 2])
        # Without replacement: each feature is equally likely, and its decoder rows are read once.
        pool = rng.permutation(dictionary.n_features)[:POOL]
        norms, unit_effects = _written_norms_and_effects(attributed, self.layer, pool)
        writes = norms > 0
        self.pool, self.norms, self.unit_effects = pool[writes], norms[writes], unit_effects[writes]
        if len(self.pool) < 2:
            raise InterventionError(
                f"expected at least 2 features of layer {self.layer} of {dictionary.name} with decoder "
                "vectors other "
                f"than zero to draw random ones from, found {len(self.pool)}; use a dictionary with more "
                "features"
            )
        active_norms, _ = _written_norms_and_effects(attributed, self.layer, active)
        # Signed amount written by each feature: the replacement writes the same norm with the same sign.
        self.written = change * active_norms[np.searchsorted(active, place[:, 2])]

    def largest(self, rng: np.random.Generator) -> tuple[Ints, float, float]:
        """Replace every feature by a random one, and return the replacement with the largest estimate.

        The result is (layer, position and index [3], change of activation, first-order effect).
        """
        drawn = rng.integers(len(self.pool), size=len(self.place))
        # A feature must not replace itself: the next one of the pool is taken.
        drawn = np.where(self.pool[drawn] == self.place[:, 2], (drawn + 1) % len(self.pool), drawn)
        change = self.written / self.norms[drawn]
        estimate = change * self.unit_effects[drawn, self.place[:, 1]]
        largest = int(np.abs(estimate).argmax())
        place = np.array([self.layer, self.place[largest, 1], self.pool[drawn[largest]]])
        return place, float(change[largest]), float(estimate[largest])


def _written_norms_and_effects(
    attributed: PairAttribution, layer: int, features: Ints
) -> tuple[Floats, Floats]:
    """Norms of features' decoder vectors over all written layers [feature], and first-order effects of an
    activation of 1 at every position [feature, position]."""
    import torch

    dictionary: Dictionary = attributed.dictionary
    squares = np.zeros(len(features))
    unit_effects = np.zeros((len(features), len(attributed.gradients[layer])))
    for target in dictionary.targets(layer):
        rows = dictionary.layer(layer).decoder_rows(torch.from_numpy(features), target).double()
        squares += array((rows**2).sum(1))
        unit_effects += array(rows @ attributed.gradients[target].to(rows).T)
    return np.sqrt(squares), unit_effects
