"""Active features of one prompt, and the reconstruction error that they leave.

Border: declares one run; the dictionary encodes. The dictionary is given by name, and opened only to compute.
corpus/encode.py encodes whole corpora.

Axes: active = one active (layer, position, feature), sorted in this order; layer, position; named = a
requested feature. Units: activations have none; errors are mean squares of activations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from ....pipeline import Output
from ...causal.effects import array, check_tokens
from ...forward.hooks.spec import HookSpec
from ...forward.runs.experiment import CellLabels
from ...forward.runs.run import Run
from ..dictionary import Dictionary
from ..dictionary_experiment import DictionaryExperiment
from ..layers.active import Active

if TYPE_CHECKING:
    import xarray as xr
    from torch import Tensor

    from ...forward.architectures.architecture import Architecture
    from ...forward.hooks.cache import HookCache
    from ...forward.models.model import Model

__all__ = ["FeatureActivity", "FeatureTrace", "PromptFeatures", "as_rows", "read_states", "traces"]

Floats = npt.NDArray[np.float32]


_ROWS = 1024
"""Number of decoder rows that are read at once."""


@dataclass(frozen=True)
class PromptFeatures(DictionaryExperiment):
    """Base class of experiments that encode the states of one prompt, in a single forward pass."""

    tokens: tuple[int, ...]
    """Token ids of the prompt."""
    dictionary: str
    """Argument of `Dictionary.from_pretrained`; excluded from the key of results."""
    features: str
    """Digest of the dictionary (`Dictionary.identity`)."""

    def cells(self, config: Architecture) -> Sequence[CellLabels]:
        """One cell: a single forward pass gives all features."""
        check_tokens(self.tokens)
        return [{}]

    def prepare(self, model: Model) -> Any:
        """The opened dictionary, shared by all cells."""
        return self.opened(model)


@dataclass(frozen=True)
class FeatureActivity(PromptFeatures):
    """All active features of a prompt, with the reconstruction error that they leave."""

    name: ClassVar[str] = "feature_activity"
    version: ClassVar[int] = 1
    outputs: ClassVar[Mapping[str, Output]] = {
        "activation": Output(("active",), "1", "activation"),
        "decoder_norm": Output(("active",), "1", "norm of the decoder vectors"),
        "error": Output(("layer", "position"), "1", "mean squared error of the reconstruction"),
        "size": Output(("layer", "position"), "1", "mean square of the output about its mean over positions"),
    }

    zero_positions: int = 0
    """Number of positions at the start whose features are left out; see `Dictionary.encode`."""

    def runs(self, prepared: Dictionary, cell: CellLabels) -> list[Run]:
        """A run of the prompt that captures the dictionary's read and write hooks."""
        hooks = HookSpec().capture(*prepared.read_hooks, *prepared.write_hooks)
        return [Run(self.tokens, hooks, None)]

    def measure(self, prepared: Dictionary, cell: CellLabels, result: HookCache) -> dict[str, Any]:
        """Indices, activations and decoder norms of active features, and errors by layer and position."""
        states = read_states(prepared, result, prepared.layers)
        active = prepared.encode(states, zero_positions=self.zero_positions)
        rebuilt = prepared.reconstruct(active, states)
        errors, sizes = [], []
        for layer, reconstruction in rebuilt.items():
            # In the dtype of the reconstruction, float32 or float64, whatever the model's dtype is.
            actual = as_rows(result[prepared.write_hook(layer)][0]).to(reconstruction)
            errors.append(array((actual - reconstruction).square().mean(-1)))
            # About the mean over positions: a constant offset is not counted as explained variance.
            sizes.append(array((actual - actual.mean(0)).square().mean(-1)))
        return {
            "indices": active.indices.cpu().numpy(),
            "value": array(active.value),
            # By layer, as the active features are sorted.
            "norm": np.concatenate([_written_norms(prepared, active, layer) for layer in prepared.layers]),
            "error": np.stack(errors),
            "size": np.stack(sizes),
        }

    def dataset(self, prepared: Dictionary, cell: CellLabels, measured: Sequence[Any]) -> xr.Dataset:
        """activation and decoder_norm [active] with coordinates; error and size [layer, position]."""
        import xarray as xr

        (result,) = measured
        layer, position, feature = result["indices"].T
        return xr.Dataset(
            {
                name: self.outputs[name].variable(result[field])
                for name, field in zip(self.outputs, ("value", "norm", "error", "size"), strict=True)
            },
            coords={
                "active_layer": ("active", layer.astype(np.int32)),
                "active_position": ("active", position.astype(np.int32)),
                "active_feature": ("active", feature.astype(np.int64)),
                "layer": list(prepared.layers),
                "position": np.arange(len(self.tokens)),
            },
        )


@dataclass(frozen=True)
class FeatureTrace(PromptFeatures):
    """Activations of a few features at every prompt position; reads only their layers from disk."""

    name: ClassVar[str] = "feature_trace"
    version: ClassVar[int] = 1
    outputs: ClassVar[Mapping[str, Output]] = {
        "trace": Output(("named", "position"), "1", "activation"),
    }

    chosen: tuple[tuple[int, int], ...]
    """(layer, index) of each feature."""

    def runs(self, prepared: Dictionary, cell: CellLabels) -> list[Run]:
        """One run of the prompt, which captures the states that the features read."""
        layers = sorted({layer for layer, _ in self.chosen})
        return [Run(self.tokens, HookSpec().capture(*map(prepared.read_hook, layers)), None)]

    def measure(self, prepared: Dictionary, cell: CellLabels, result: HookCache) -> Any:
        """Activations float32 [feature, position], features in the order of `chosen`."""
        states = read_states(prepared, result, sorted({layer for layer, _ in self.chosen}))
        return traces(prepared, self.chosen, states, len(self.tokens))

    def dataset(self, prepared: Dictionary, cell: CellLabels, measured: Sequence[Any]) -> xr.Dataset:
        """Dataset with the variable `trace`: activations [named, position]. The layer and index of each
        feature on the axis `named` are coordinates."""
        import xarray as xr

        (trace,) = measured
        layers, indices = np.array(self.chosen, np.int64).reshape(-1, 2).T
        return xr.Dataset(
            {"trace": self.outputs["trace"].variable(trace)},
            coords={
                "source_layer": ("named", layers.astype(np.int32)),
                "feature": ("named", indices),
                "position": np.arange(len(self.tokens)),
            },
        )


def _written_norms(dictionary: Dictionary, active: Active, layer: int) -> Any:
    """Norm of the decoder vectors, over all written layers, of a layer's active features [active]."""
    features = active.feature[active.layer == layer]
    norms = np.zeros(len(features), np.float32)
    for start in range(0, len(features), _ROWS):
        block = slice(start, start + _ROWS)
        rows = [dictionary.layer(layer).decoder_rows(features[block], m) for m in dictionary.targets(layer)]
        # Norm over all targets: the square root of the sum of squares by layer.
        norms[block] = array(sum(part.square().sum(1) for part in rows)) ** 0.5
    return norms


def read_states(dictionary: Dictionary, result: HookCache, layers: Sequence[int]) -> dict[int, Tensor]:
    """States that the features of some layers read in a pass over one prompt.

    Arguments:
        dictionary: The dictionary, which names the hook point that each layer's features read.
        result: Activations of the pass, with these hook points captured; only the first prompt is read.
        layers: Layers of the dictionary.

    Returns:
        States [position, d_in] by layer, heads concatenated.

    Raises:
        DictionaryError: The dictionary is a crosscoder, whose features read several hook points at once.
    """
    return {layer: as_rows(result[dictionary.read_hook(layer)][0]) for layer in layers}


def traces(
    dictionary: Dictionary, features: Sequence[tuple[int, int]], states: Mapping[int, Tensor], length: int
) -> Floats:
    """Activations of features along a prompt, float32 [feature, position].

    Arguments:
        dictionary: The dictionary of the features.
        features: (layer, index) of each feature.
        states: States [position, d_in] that the features of each layer read.
        length: Number of positions.
    """
    activations = np.zeros((len(features), length), np.float32)
    for layer in {layer for layer, _ in features}:
        rows = [i for i, feature in enumerate(features) if feature[0] == layer]
        # All features of the layer are encoded, because those of a TopK compete with each other.
        dense = dictionary.layer(layer).encode(states[layer])
        activations[rows] = array(dense[:, [features[i][1] for i in rows]]).T
    return activations


def as_rows(x: Tensor) -> Tensor:
    """States as [position, width]; heads [head, position, d_head] are concatenated."""
    return x if x.ndim == 2 else x.transpose(0, 1).flatten(1)
