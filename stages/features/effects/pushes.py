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
from ...causal.pushes.random_pushes import RandomPushes, Undisturbed
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
    """Decoder vectors of a feature for all layers of a model, float32 [layer, hidden]; zero without one.

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
            f"expected a feature that writes to the residual stream, found {feature_id} of "
            f"{dictionary.name}, which writes at {dictionary.write_hook(feature_id.layer)}; use another "
            "dictionary"
        )
    vectors = np.zeros((n_layers, dictionary.d_out), np.float32)
    for target in dictionary.targets(feature_id.layer):
        vectors[target] = array(dictionary.decoder_vector(feature_id, target))
    return vectors


@dataclass(frozen=True)
class FeatureVectors(DictionaryExperiment, ContrastiveVectors):
    """Decoder vectors of a feature by layer, and the states of a run without push at the pushed position.

    `positive` and `positive_positions` are the prompt and the position of the push; `negative` is empty.
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
    """Empty: a feature needs no contrasting prompts."""
    dictionary: str = ""
    """Argument of `Dictionary.from_pretrained`; excluded from the key of results."""
    features: str = ""
    """Digest of the dictionary (`Dictionary.identity`)."""
    feature: Feature = (0, 0)
    """(layer, index) of the feature whose vectors are pushed along."""

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
        """Decoder vectors of the feature [layer, hidden].

        Raises:
            InterventionError: The feature does not write to the residual stream.
        """
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
        """The same dataset, computed with a loaded model and without a store."""
        (cell,), prepared = self.cells(model.config), self.prepare(model)
        passes = (model.forward(run.prompt, run.hooks, want=None) for run in self.runs(prepared, cell))
        return self.dataset(prepared, cell, [self.measure(prepared, cell, result) for result in passes])


@dataclass(frozen=True)
class _FeatureDirection(DictionaryExperiment):
    """Common fields of pushes along a feature and of their null distribution."""

    positive: PromptTokens = ()
    """Empty: the direction comes from the dictionary."""
    negative: PromptTokens = ()
    """Empty: the direction comes from the dictionary."""
    dictionary: str = ""
    """Argument of `Dictionary.from_pretrained`; excluded from the key of results."""
    features: str = ""
    """Digest of the dictionary (`Dictionary.identity`)."""
    feature: Feature = (0, 0)
    """(layer, index) of the feature."""

    def params(self) -> dict[str, Any]:
        """Fields that enter the key of results: all except the dictionary's name and the layers."""
        # Layers are labels of cells: further layers leave stored cells valid.
        return {name: value for name, value in super().params().items() if name != "layers"}


@dataclass(frozen=True)
class FeaturePushes(_FeatureDirection, PushedStates):
    """Adds a feature's decoder vector at one layer at a time, at several strengths, and follows later layers.

    The fields tokens, position, strengths, layers and target are those of `PushedStates`; the feature must
    write to all `layers`.
    """

    name: ClassVar[str] = "feature_pushes"
    version: ClassVar[int] = 1

    def cells(self, config: Architecture) -> Sequence[CellLabels]:
        """One cell per layer, as in `PushedStates`.

        Raises:
            InterventionError: The feature does not write to one of the layers.
        """
        _check_layers(self)
        return super().cells(config)

    @property
    def contrast(self) -> ContrastiveVectors:
        """Experiment that computes the pushed vectors: the feature's decoder vectors."""
        return vectors_of(self)


@dataclass(frozen=True)
class _PreparedPushes(Undisturbed):
    """The run without push and the feature's vectors, with the dictionary."""

    dictionary: Dictionary
    """The dictionary from which random features are drawn."""


@dataclass(frozen=True)
class RandomFeaturePushes(_FeatureDirection, RandomPushes):
    """Null distribution of `FeaturePushes`: pushes along another feature of the same layer.

    Its vectors are scaled to the norms of the tested feature's vectors, layer by layer. The field `draw` is
    the index of this feature; the other fields are those of `FeaturePushes`.
    """

    name: ClassVar[str] = "random_feature_pushes"
    version: ClassVar[int] = 1

    def cells(self, config: Architecture) -> Sequence[CellLabels]:
        """One cell per layer, as in `RandomPushes`.

        Raises:
            InterventionError: The tested feature does not write to one of the layers.
        """
        _check_layers(self)
        return super().cells(config)

    @property
    def contrast(self) -> ContrastiveVectors:
        """Experiment that computes the tested feature's vectors, whose norms the random ones get."""
        return vectors_of(self)

    @property
    def baseline(self) -> Hashable:
        """Fields that determine the run without push, which experiments with equal fields share."""
        # The feature as well: `Undisturbed` holds its vectors.
        return (self.tokens, self.position, self.features, self.feature)

    def prepare(self, model: Model) -> _PreparedPushes:
        """The run without push, the tested feature's vectors, and the dictionary to draw from."""
        return _PreparedPushes(**vars(super().prepare(model)), dictionary=self.opened(model))

    def directions(self, prepared: Undisturbed) -> Array:
        """Vectors [layer, hidden] of the random feature, scaled to the norms of the tested feature's vectors.

        Raises:
            InterventionError: The random feature's vector is zero in a layer that the tested feature writes.
        """
        assert isinstance(prepared, _PreparedPushes)
        layer, vectors = self.feature[0], prepared.vectors
        drawn = written(prepared.dictionary, (layer, self.draw), len(vectors))
        target_norms, drawn_norms = (
            np.linalg.norm(matrix, axis=1, keepdims=True) for matrix in (vectors, drawn)
        )
        if ((drawn_norms == 0) & (target_norms > 0)).any():
            raise InterventionError(
                f"expected the random feature {FeatureId(layer, self.draw)} to write to every layer that "
                f"{FeatureId(*self.feature)} writes to, found a layer where its vector is zero; choose "
                "another seed to draw other features"
            )
        # Layers to which neither feature writes stay zero.
        scaled: Array = np.divide(
            drawn * target_norms, drawn_norms, out=np.zeros_like(drawn), where=drawn_norms > 0
        )
        return scaled


def vectors_of(pushes: FeaturePushes | RandomFeaturePushes) -> FeatureVectors:
    """Experiment that computes the decoder vectors along which `pushes` push."""
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
            f"expected layers among those that the feature {feature} writes to, {list(targets)}, found "
            f"{requested}"
        )
