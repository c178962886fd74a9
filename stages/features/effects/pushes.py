"""Pushes along a feature: what it writes to a layer, added there by itself, and followed from there on.

A transcoder's feature writes a vector to each of its layers; added after one of them alone, it is a push like
any other (stages/causal/convergence.py, which says what is measured). Strength counts units of the feature.

Null: other features of the same layer, whose vector is brought to the length of the feature's in each layer.

Border: declares runs. The dictionary is named, and opened only to compute.

Axes: layer (where the vector is added, one that the feature writes to), strength, read_layer, hidden.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ....pipeline import Output
from ....store.arrays import Array
from ....store.errors import InterventionError
from ...causal.convergence import ContrastiveVectors, PromptTokens, PushedStates
from ...causal.effects import array
from ...causal.random_pushes import RandomPushes, Undisturbed
from ...forward.runs.experiment import CellLabels
from ..dictionary import Dictionary
from ..dictionary_experiment import DictionaryExperiment
from ..layers.layout import FeatureId

if TYPE_CHECKING:
    import xarray as xr

    from ...forward.architectures.architecture import Architecture
    from ...forward.models.model import Model

__all__ = ["FeaturePushes", "FeatureVectors", "RandomFeaturePushes", "vectors_of", "written"]

Feature = tuple[int, int]
"""Layer and index."""


def written(dictionary: Dictionary, feature: Feature, n_layers: int) -> Array:
    """What one unit of a feature writes to each layer, float32 [layer, hidden]; zero where it does not.

    Raises InterventionError where it does not write to the residual stream.
    """
    found = FeatureId(*feature)
    if dictionary.write_hook(found.layer).dims[-1] != "hidden":
        raise InterventionError(
            f"expected a feature that writes to the residual stream, found {found}, which writes at "
            f"{dictionary.write_hook(found.layer)}; use another dictionary"
        )
    vectors = np.zeros((n_layers, dictionary.d_out), np.float32)
    for target in dictionary.targets(found.layer):
        vectors[target] = array(dictionary.decoder_vector(found, target))
    return vectors


@dataclass(frozen=True)
class FeatureVectors(DictionaryExperiment, ContrastiveVectors):
    """What one unit of a feature writes, by layer, and the undisturbed states where it is added.

    positive, positive_positions: the prompt, and where it is pushed; there is no other side. dictionary: its
    name, no part of the key; features: its identity. feature: layer and index.
    """

    name: ClassVar[str] = "feature_vectors"
    version: ClassVar[int] = 1
    outputs: ClassVar[Mapping[str, Output]] = {
        **ContrastiveVectors.outputs,
        "vector": Output(("layer", "hidden"), "activation", "what one unit of the feature writes"),
        "norm": Output(("layer",), "activation", "length of that"),
    }

    negative: PromptTokens = ()
    dictionary: str = ""
    features: str = ""
    feature: Feature = (0, 0)

    def cells(self, config: Architecture) -> Sequence[CellLabels]:
        """The one side. Raises PromptError, or DictionaryError for a feature there is not."""
        self._places("positive")
        self.resource.opened.feature(self.feature)
        return [{"side": "positive"}]

    def prepare(self, model: Model) -> Array:
        """What one unit writes [layer, hidden], as `written` gives it, and raises."""
        return written(self.opened(model), self.feature, model.config.num_layers)

    def dataset(self, prepared: Array, cell: CellLabels, measured: Sequence[Any]) -> xr.Dataset:
        """mean_state [side, layer, hidden], vector [layer, hidden], norm [layer]."""
        found = super().dataset(prepared, cell, measured)
        own = {"vector": prepared, "norm": np.linalg.norm(prepared, axis=1)}
        return found.assign({name: self.outputs[name].variable(values) for name, values in own.items()})

    def joined(self, parts: Sequence[xr.Dataset]) -> xr.Dataset:
        """The one cell there is, as it was computed."""
        return parts[0]

    def computed(self, model: Model) -> xr.Dataset:
        """The same in memory, for whoever holds a model."""
        (cell,), prepared = self.cells(model.config), self.prepare(model)
        passes = (model.forward(run.prompt, run.hooks, want=None) for run in self.runs(prepared, cell))
        return self.dataset(prepared, cell, [self.measure(prepared, cell, one) for one in passes])


@dataclass(frozen=True)
class _AlongFeature(DictionaryExperiment):
    """What pushes along a feature and their null have in common; beside a base that says what is measured."""

    positive: PromptTokens = ()
    negative: PromptTokens = ()
    dictionary: str = ""
    features: str = ""
    feature: Feature = (0, 0)

    def params(self) -> dict[str, Any]:
        """All but where the dictionary lies, and which layers."""
        return {name: value for name, value in super().params().items() if name != "layers"}


@dataclass(frozen=True)
class FeaturePushes(_AlongFeature, PushedStates):
    """What a feature writes to each of its layers, added there by itself, at several strengths.

    tokens, position, strengths, layers, target: as in `PushedStates`; layers must be some that the feature
    writes to. positive, negative: none. dictionary, features, feature: as in `FeatureVectors`.
    """

    name: ClassVar[str] = "feature_pushes"
    version: ClassVar[int] = 1

    def cells(self, config: Architecture) -> Sequence[CellLabels]:
        """As `PushedStates`. Raises InterventionError for a layer that the feature does not write to."""
        _check_layers(self)
        return super().cells(config)

    @property
    def contrast(self) -> ContrastiveVectors:
        """See `Pushes`: what one unit of the feature writes."""
        return vectors_of(self)


@dataclass(frozen=True)
class _Prepared(Undisturbed):
    """The dictionary, beside what random pushes are made of."""

    dictionary: Dictionary


@dataclass(frozen=True)
class RandomFeaturePushes(_AlongFeature, RandomPushes):
    """The same with another feature of the layer, as long in each layer as the one it stands for.

    draw: index of the other feature. The rest: see `FeaturePushes`.
    """

    name: ClassVar[str] = "random_feature_pushes"
    version: ClassVar[int] = 1

    def cells(self, config: Architecture) -> Sequence[CellLabels]:
        """As `RandomPushes`. Raises InterventionError for a layer that the feature does not write to."""
        _check_layers(self)
        return super().cells(config)

    @property
    def contrast(self) -> ContrastiveVectors:
        """See `Pushes`: what one unit of the feature writes that the drawn one stands beside."""
        return vectors_of(self)

    @property
    def baseline(self) -> Hashable:
        """All but the draw, the strengths and the layers."""
        return (self.tokens, self.position, self.features, self.feature)

    def prepare(self, model: Model) -> _Prepared:
        """The undisturbed run, the vectors, and the dictionary the draws are from."""
        return _Prepared(**vars(super().prepare(model)), dictionary=self.opened(model))

    def directions(self, prepared: Undisturbed) -> Array:
        """The drawn feature's vectors at the length of the other's, [layer, hidden]. Raises InterventionError
        for one that writes nothing to a layer where that one does."""
        assert isinstance(prepared, _Prepared)
        layer, vectors = self.feature[0], prepared.vectors
        drawn = written(prepared.dictionary, (layer, self.draw), len(vectors))
        wanted, own = (np.linalg.norm(each, axis=1, keepdims=True) for each in (vectors, drawn))
        if ((own == 0) & (wanted > 0)).any():
            raise InterventionError(
                f"expected {FeatureId(layer, self.draw)} to write where {FeatureId(*self.feature)} does, "
                "found that it writes nothing; draw others: another seed"
            )
        scaled: Array = np.divide(drawn * wanted, own, out=np.zeros_like(drawn), where=own > 0)
        return scaled


def vectors_of(pushes: FeaturePushes | RandomFeaturePushes) -> FeatureVectors:
    """The vectors of pushes along a feature."""
    return FeatureVectors(
        (pushes.tokens,),
        positive_positions=(pushes.position,),
        dictionary=pushes.dictionary,
        features=pushes.features,
        feature=pushes.feature,
    )


def _check_layers(pushes: FeaturePushes | RandomFeaturePushes) -> None:
    dictionary = pushes.resource.opened
    feature = dictionary.feature(pushes.feature)
    targets = dictionary.targets(feature.layer)
    if pushes.layers is None or not set(pushes.layers) <= set(targets):
        found = "all" if pushes.layers is None else list(pushes.layers)
        raise InterventionError(f"expected layers that {feature} writes to, {list(targets)}, found {found}")
