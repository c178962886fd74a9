"""Which features are active in one prompt, and what they leave unexplained.

Border: declares one run; encoding is the dictionary's. The dictionary is named, and opened only to compute.
Whole corpora are encode.py's.

Axes: active = one (layer, position, feature) that is active, sorted in this order; layer, position; named = a
feature asked for. Units: activations have none; errors are means of squares of activations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

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

__all__ = ["FeatureActivity", "FeatureTrace", "as_rows"]


_ROWS = 1024  # decoder rows gathered at a time


@dataclass(frozen=True)
class FeatureActivity(DictionaryExperiment):
    """Everything active in a prompt.

    tokens: the prompt. dictionary: its name, no part of the key; features: its identity. zero_positions:
    first positions without features, see `Dictionary.encode`.
    """

    name: ClassVar[str] = "feature_activity"
    version: ClassVar[int] = 1
    outputs: ClassVar[Mapping[str, Output]] = {
        "activation": Output(("active",), "1", "activation"),
        "decoder_norm": Output(("active",), "1", "norm of what one unit writes"),
        "error": Output(("layer", "position"), "1", "mean squared error of the reconstruction"),
        "size": Output(("layer", "position"), "1", "mean square of the output about its mean over positions"),
    }

    tokens: tuple[int, ...]
    dictionary: str
    features: str
    zero_positions: int = 0

    def cells(self, config: Architecture) -> Sequence[CellLabels]:
        """One cell: a single pass gives all of it."""
        check_tokens(self.tokens)
        return [{}]

    def prepare(self, model: Model) -> Dictionary:
        """The dictionary, open for all cells."""
        return self.opened(model)

    def runs(self, prepared: Dictionary, cell: CellLabels) -> list[Run]:
        """The prompt, with what features read and write."""
        hooks = HookSpec().capture(*prepared.read_hooks, *prepared.write_hooks)
        return [Run(self.tokens, hooks, None)]

    def measure(self, prepared: Dictionary, cell: CellLabels, result: HookCache) -> dict[str, Any]:
        """Indices, activations, and per layer and position the errors."""
        states = {layer: as_rows(result[prepared.read_hook(layer)][0]) for layer in prepared.layers}
        active = prepared.encode(states, zero_positions=self.zero_positions)
        rebuilt = prepared.reconstruct(active, states)
        errors, sizes = [], []
        for layer, given in rebuilt.items():
            true = as_rows(result[prepared.write_hook(layer)][0]).to(given)
            errors.append(array((true - given).square().mean(-1)))
            sizes.append(array((true - true.mean(0)).square().mean(-1)))
        return {
            "indices": active.indices.cpu().numpy(),
            "value": array(active.value),
            "norm": np.concatenate([_norms(prepared, active, layer) for layer in prepared.layers]),
            "error": np.stack(errors),
            "size": np.stack(sizes),
        }

    def dataset(self, prepared: Dictionary, cell: CellLabels, measured: Sequence[Any]) -> xr.Dataset:
        """activation [active] with its coordinates; error and size [layer, position]."""
        import xarray as xr

        (found,) = measured
        layer, position, feature = found["indices"].T
        return xr.Dataset(
            {
                name: self.outputs[name].variable(found[field])
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
class FeatureTrace(DictionaryExperiment):
    """How active some features are along a prompt; only their layers are opened.

    tokens: the prompt. dictionary: its name, no part of the key; features: its identity. chosen: (layer,
    index) of each.
    """

    name: ClassVar[str] = "feature_trace"
    version: ClassVar[int] = 1
    outputs: ClassVar[Mapping[str, Output]] = {
        "trace": Output(("named", "position"), "1", "activation"),
    }

    tokens: tuple[int, ...]
    dictionary: str
    features: str
    chosen: tuple[tuple[int, int], ...]

    def cells(self, config: Architecture) -> Sequence[CellLabels]:
        """One cell: a single pass gives all of it."""
        check_tokens(self.tokens)
        return [{}]

    def prepare(self, model: Model) -> Dictionary:
        """The dictionary, open for all cells."""
        return self.opened(model)

    def runs(self, prepared: Dictionary, cell: CellLabels) -> list[Run]:
        """The prompt, with what the features read."""
        layers = sorted({layer for layer, _ in self.chosen})
        return [Run(self.tokens, HookSpec().capture(*map(prepared.read_hook, layers)), None)]

    def measure(self, prepared: Dictionary, cell: CellLabels, result: HookCache) -> Any:
        """Activations [feature, position], float32, features in the order of `chosen`."""
        found = np.zeros((len(self.chosen), len(self.tokens)), np.float32)
        for layer in {layer for layer, _ in self.chosen}:
            mine = [i for i, one in enumerate(self.chosen) if one[0] == layer]
            dense = prepared.layer(layer).encode(as_rows(result[prepared.read_hook(layer)][0]))
            found[mine] = array(dense[:, [self.chosen[i][1] for i in mine]]).T
        return found

    def dataset(self, prepared: Dictionary, cell: CellLabels, measured: Sequence[Any]) -> xr.Dataset:
        """trace [named, position], with the features' layers and indices."""
        import xarray as xr

        (found,) = measured
        layers, indices = np.array(self.chosen, np.int64).reshape(-1, 2).T
        return xr.Dataset(
            {"trace": self.outputs["trace"].variable(found)},
            coords={
                "source_layer": ("named", layers.astype(np.int32)),
                "feature": ("named", indices),
                "position": np.arange(len(self.tokens)),
            },
        )


def _norms(dictionary: Dictionary, active: Active, layer: int) -> Any:
    """Norms of what a unit of each active feature of a layer writes, to all its layers together: [active]."""
    features = active.feature[active.layer == layer]
    found = np.zeros(len(features), np.float32)
    for start in range(0, len(features), _ROWS):
        some = slice(start, start + _ROWS)
        rows = [dictionary.layer(layer).decoder_rows(features[some], m) for m in dictionary.targets(layer)]
        found[some] = array(sum(part.square().sum(1) for part in rows)) ** 0.5
    return found


def as_rows(x: Tensor) -> Tensor:
    """[position, width] of a hook point's [position, width], or [head, position, d_head] with heads side by
    side, as dictionaries of heads read them."""
    return x if x.ndim == 2 else x.transpose(0, 1).flatten(1)
