"""Pushes along a feature's decoder vector: added after one layer, and followed through the later layers.

A transcoder's feature writes a vector to each of its layers. Added after a single one of them, the vector is
a push like any other (stages/causal/convergence.py defines what is measured). Strength counts units of the
feature.

Null distribution: other features of the same layer, whose vector is scaled in each layer to the norm of the
tested feature's vector.

Border: declares runs. The dictionary is given by name, and opened only to compute.

Axes: layer (at which the vector is added; the feature must write to it), strength, read_layer, hidden.
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
"""(layer, index) of a feature."""


def written(dictionary: Dictionary, feature: Feature, n_layers: int) -> Array:
    """Vector that one unit of a feature writes to each layer, float32 [layer, hidden]; zero where it writes
    nothing.

    Arguments:
        dictionary: The dictionary of the feature.
        feature: (layer, index) of the feature.
        n_layers: Number of layers of the model.

    Raises:
        InterventionError: The feature does not write to the residual stream.
    """
    feature_id = FeatureId(*feature)
    if dictionary.write_hook(feature_id.layer).dims[-1] != "hidden":
        raise InterventionError(
            f"expected a feature that writes to the residual stream, found {feature_id}, which writes at "
            f"{dictionary.write_hook(feature_id.layer)}; use another dictionary"
        )
    vectors = np.zeros((n_layers, dictionary.d_out), np.float32)
    for target in dictionary.targets(feature_id.layer):
        vectors[target] = array(dictionary.decoder_vector(feature_id, target))
    return vectors


@dataclass(frozen=True)
class FeatureVectors(DictionaryExperiment, ContrastiveVectors):
    """Vectors that one unit of a feature writes, by layer, and the undisturbed states to which they are
    added.

    positive and positive_positions are the prompt and the position of the push; the negative side is empty.
    """

    name: ClassVar[str] = "feature_vectors"
    version: ClassVar[int] = 1
    outputs: ClassVar[Mapping[str, Output]] = {
        **ContrastiveVectors.outputs,
        "vector": Output(("layer", "hidden"), "activation", "decoder vector of the feature"),
        "norm": Output(("layer",), "activation", "norm of the decoder vector"),
    }

    # Dataclass fields after one with a default need defaults too; only `negative` is left empty.
    negative: PromptTokens = ()
    """Empty: a feature needs no contrast."""
    dictionary: str = ""
    """Dictionary name, excluded from the key."""
    features: str = ""
    """Identity of the dictionary."""
    feature: Feature = (0, 0)
    """(layer, index) of the feature."""

    def cells(self, config: Architecture) -> Sequence[CellLabels]:
        """One cell, the positive side.

        Raises:
            PromptError: The position is not in the prompt.
            DictionaryError: The dictionary has no such feature.
        """
        self._places("positive")
        self.resource.opened.feature(self.feature)
        return [{"side": "positive"}]

    def prepare(self, model: Model) -> Array:
        """Vectors of one unit [layer, hidden]; computed by `written`, with its errors."""
        return written(self.opened(model), self.feature, model.config.num_layers)

    def dataset(self, prepared: Array, cell: CellLabels, measured: Sequence[Any]) -> xr.Dataset:
        """mean_state [side, layer, hidden], vector [layer, hidden], norm [layer]."""
        states = super().dataset(prepared, cell, measured)
        vectors = {"vector": prepared, "norm": np.linalg.norm(prepared, axis=1)}
        return states.assign({name: self.outputs[name].variable(values) for name, values in vectors.items()})

    def joined(self, parts: Sequence[xr.Dataset]) -> xr.Dataset:
        """Result of the single cell, unchanged."""
        return parts[0]

    def computed(self, model: Model) -> xr.Dataset:
        """The dataset computed in memory with a loaded model, without a store."""
        (cell,), prepared = self.cells(model.config), self.prepare(model)
        passes = (model.forward(run.prompt, run.hooks, want=None) for run in self.runs(prepared, cell))
        return self.dataset(prepared, cell, [self.measure(prepared, cell, result) for result in passes])


@dataclass(frozen=True)
class _FeatureDirection(DictionaryExperiment):
    """Common base of pushes along a feature and of their null; a second base defines the measurement."""

    positive: PromptTokens = ()
    """Empty: the direction comes from the dictionary."""
    negative: PromptTokens = ()
    """Empty, likewise."""
    dictionary: str = ""
    """Dictionary name, excluded from the key."""
    features: str = ""
    """Identity of the dictionary."""
    feature: Feature = (0, 0)
    """(layer, index) of the feature."""

    def params(self) -> dict[str, Any]:
        """All parameters except the dictionary's name and the layers."""
        # Layers are labels of cells: further layers leave stored cells valid.
        return {name: value for name, value in super().params().items() if name != "layers"}


@dataclass(frozen=True)
class FeaturePushes(_FeatureDirection, PushedStates):
    """Pushes along a feature, at each of its layers separately and at several strengths.

    tokens, position, strengths, layers, target: as in `PushedStates`; the feature must write to all `layers`.
    positive and negative are empty. dictionary, features, feature: as in `FeatureVectors`.
    """

    name: ClassVar[str] = "feature_pushes"
    version: ClassVar[int] = 1

    def cells(self, config: Architecture) -> Sequence[CellLabels]:
        """As `PushedStates.cells`; InterventionError for a layer that the feature does not write to."""
        _check_layers(self)
        return super().cells(config)

    @property
    def contrast(self) -> ContrastiveVectors:
        """See `Pushes`: the vectors that one unit of the feature writes."""
        return vectors_of(self)


@dataclass(frozen=True)
class _PreparedPushes(Undisturbed):
    """The dictionary, in addition to the undisturbed run and the vectors."""

    dictionary: Dictionary
    """The dictionary from which random features are drawn."""


@dataclass(frozen=True)
class RandomFeaturePushes(_FeatureDirection, RandomPushes):
    """Null distribution of `FeaturePushes`: another feature of the layer, scaled to the same norm in each
    layer.

    draw: index of the random feature. The other fields: see `FeaturePushes`.
    """

    name: ClassVar[str] = "random_feature_pushes"
    version: ClassVar[int] = 1

    def cells(self, config: Architecture) -> Sequence[CellLabels]:
        """As `RandomPushes.cells`; InterventionError for a layer that the feature does not write to."""
        _check_layers(self)
        return super().cells(config)

    @property
    def contrast(self) -> ContrastiveVectors:
        """See `Pushes`: the vectors of the tested feature, whose norms the random feature gets."""
        return vectors_of(self)

    @property
    def baseline(self) -> Hashable:
        """All fields that determine the undisturbed run: without draw, strengths and layers."""
        # The feature as well: `Undisturbed` holds its vectors.
        return (self.tokens, self.position, self.features, self.feature)

    def prepare(self, model: Model) -> _PreparedPushes:
        """The undisturbed run, the tested feature's vectors, and the dictionary to draw from."""
        return _PreparedPushes(**vars(super().prepare(model)), dictionary=self.opened(model))

    def directions(self, prepared: Undisturbed) -> Array:
        """The random feature's vectors, scaled to the norms of the tested feature's [layer, hidden].

        Raises:
            InterventionError: The random feature writes nothing to a layer to which the tested feature
                writes.
        """
        assert isinstance(prepared, _PreparedPushes)
        layer, vectors = self.feature[0], prepared.vectors
        drawn = written(prepared.dictionary, (layer, self.draw), len(vectors))
        target_norms, drawn_norms = (
            np.linalg.norm(matrix, axis=1, keepdims=True) for matrix in (vectors, drawn)
        )
        if ((drawn_norms == 0) & (target_norms > 0)).any():
            raise InterventionError(
                f"expected {FeatureId(layer, self.draw)} to write where {FeatureId(*self.feature)} does, "
                "found that it writes nothing; draw others: another seed"
            )
        # Layers to which neither feature writes stay zero.
        scaled: Array = np.divide(
            drawn * target_norms, drawn_norms, out=np.zeros_like(drawn), where=drawn_norms > 0
        )
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
    """Raise InterventionError unless the feature writes to all layers of the pushes."""
    dictionary = pushes.resource.opened
    feature = dictionary.feature(pushes.feature)
    targets = dictionary.targets(feature.layer)
    if pushes.layers is None or not set(pushes.layers) <= set(targets):
        requested = "all" if pushes.layers is None else list(pushes.layers)
        raise InterventionError(
            f"expected layers that {feature} writes to, {list(targets)}, found {requested}"
        )
