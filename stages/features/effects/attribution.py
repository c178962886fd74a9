"""Attribution of features: what each of them carries of what makes two prompts differ, and what none does.

Where a dictionary writes, the clean run differs from the corrupted one by what features do, each its change
of activation along its decoder vector, and by a rest: the dictionary's error, its skip and its scale.
Patching one of them is an addition, whose first order is its product with the gradient of the corrupted run's
metric there (Marks et al. 2024, "Sparse Feature Circuits", section 3.1; the error a cell of its own). Cells
of a place add up to attribution patching of the place itself.

The largest estimates are checked by exact runs, beside as many other cells drawn at random and, for each of
the largest, a random direction as long as what the cell writes.

Border: token ids and a dictionary in, labelled numbers out; runs are the planner's. Planning imports no
torch.

Axes: cell, a feature or a rest at a position: features by layer, position and index, then rests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from ....pipeline import Output
from ....store.arrays import Floats
from ....store.errors import StageError
from ...causal.attribution.check import LARGEST, RANDOM, agreement
from ...causal.attribution.patching import cotangent_of_pair, plain
from ...causal.controls import random_directions
from ...causal.grids.patching import check_lengths
from ...causal.grids.patching_grid import in_range
from ...causal.grids.patching_metrics import Metric, check_metrics, read_metrics, required_tokens
from ...causal.grids.patching_results import as_vector
from ...forward.hooks.objective import objective_of
from ...forward.hooks.spec import Capture, HookSpec
from ...forward.hooks.wants import Logits
from ...forward.runs.experiment import CellLabels
from ...forward.runs.run import Run
from ..dictionary import BLOCK_BYTES, Dictionary
from ..dictionary_experiment import DictionaryExperiment
from .activity import as_rows
from .injection import added_at

if TYPE_CHECKING:
    import xarray as xr
    from torch import Tensor

    from ...forward.architectures.architecture import Architecture
    from ...forward.hooks.cache import HookCache
    from ...forward.models.model import Model

__all__ = ["REST", "Attributed", "FeatureAttribution", "OfPair"]

REST = -1
"""Index of what no feature accounts for."""
Ints = npt.NDArray[np.int64]
_CLEAN, _CORRUPTED = 0, 1


@dataclass(frozen=True, eq=False)
class Attributed:
    """Both runs taken apart.

    clean, corrupted: logits wanted. place: layer (of a feature the one it reads, of a rest the one written),
    position and index of each cell, [cell, 3]. change: of a feature its activation, clean less corrupted; of
    a rest its norm. effect: estimated, of the metric as it is. rests, and gradients of the corrupted run: by
    written layer, [position, d_out].
    """

    dictionary: Dictionary
    heads: int | None
    clean: Floats
    corrupted: Floats
    place: Ints
    change: Floats
    effect: Floats
    rests: Mapping[int, Tensor]
    gradients: Mapping[int, Tensor]

    def written(self, cell: int) -> dict[int, Tensor]:
        """What the cell adds at its position: layer -> float32 [d_out]."""
        layer, position, feature = map(int, self.place[cell])
        if feature == REST:
            return {layer: self.rests[layer][position].float()}
        return self.of_feature(layer, feature, float(self.change[cell]))

    def of_feature(self, layer: int, feature: int, amount: float) -> dict[int, Tensor]:
        """What so much of a feature writes: layer -> float32 [d_out]."""
        targets = self.dictionary.targets(layer)
        return {m: amount * self.dictionary.decoder_vector((layer, feature), m) for m in targets}


@dataclass(frozen=True, kw_only=True)
class OfPair(DictionaryExperiment):
    """What a dictionary writes in one run is added to another.

    clean, corrupted: token ids of equal length. metric: with a gradient (`Recovery` of one that has).
    dictionary: its name, no part of the key; features: its identity. at: the position whose next-token logits
    are read. seed: of what is drawn.
    """

    clean: tuple[int, ...]
    corrupted: tuple[int, ...]
    metric: Metric
    dictionary: str
    features: str
    at: int = -1
    seed: int = 0

    @property
    def want(self) -> Logits:
        """Logits at one position, of the tokens that the metric reads."""
        return Logits((self.at,), required_tokens((self.metric,)))

    def params(self) -> dict[str, Any]:
        """The metric as plain values."""
        return {**super().params(), "metric": self.metric.canonical()}

    def value(self, logits: Floats, clean: Floats) -> float:
        """The metric of one run, not yet rescaled."""
        return float(read_metrics((self.metric,), logits, clean)[0])

    def run_with(self, held: Attributed, position: int, vectors: Mapping[int, Tensor]) -> Run:
        """The corrupted run with vectors added at a position, by layer."""
        rows = {layer: {position: vector} for layer, vector in vectors.items()}
        return Run(self.corrupted, added_at(held.dictionary, rows, held.heads), self.want)

    def effects(self, held: Attributed, numbers: Any) -> Floats:
        """Values of the metric -> by how much they are more than that of the corrupted run, rescaled."""
        clean, corrupted = (self.value(each, held.clean) for each in (held.clean, held.corrupted))
        # Differences: a rescaled metric moves by as much less as it is scaled.
        none = self.metric.scaled(np.array(corrupted), clean, corrupted)
        return self.metric.scaled(np.asarray(numbers, np.float64), clean, corrupted) - none


@dataclass(frozen=True, kw_only=True)
class FeatureAttribution(OfPair):
    """Every feature that is active in either run, at each position, and every rest.

    verify: largest estimates run exactly, and as many others; 0 for none. The other fields: of `OfPair`.
    """

    name: ClassVar[str] = "feature_attribution"
    version: ClassVar[int] = 1
    outputs: ClassVar[Mapping[str, Output]] = {
        "estimate": Output(("cell",), "as the metric", "first-order effect of the cell's clean value"),
        "change": Output(("cell",), "1", "clean less corrupted activation; of a rest its norm"),
        "layer": Output(("cell",), "1", "layer a feature reads, or a rest is written at"),
        "position": Output(("cell",), "1", "its position"),
        "feature": Output(("cell",), "1", "its index, -1 for the rest"),
        "chosen_cell": Output(("check",), "1", "cell that is run exactly"),
        "sort": Output(("check",), "1", "whether among the largest estimates or drawn at random"),
        "exact": Output(("check",), "as the metric", "effect of the cell's clean value, by a run"),
        "random": Output(
            ("check",), "as the metric", "effect of a random direction as long; NaN for cells drawn at random"
        ),
        "correlation": Output(("chosen",), "1", "Pearson correlation of estimates and exact effects"),
        "rank_correlation": Output(("chosen",), "1", "Spearman correlation of the two"),
        "worst_miss": Output(("chosen",), "as the metric", "largest difference of the two"),
        "unpatched": Output(("run",), "as the metric", "metric of the runs nothing was patched in"),
    }

    verify: int = 0

    def __post_init__(self) -> None:
        check_lengths(self.clean, self.corrupted, None)
        if self.verify < 0:
            raise StageError(f"{self.name}: expected a number of cells to verify, found {self.verify}")

    def cells(self, config: Architecture) -> Sequence[CellLabels]:
        """One: which cells are largest depends on all. Raises StageError for a metric without gradient,
        PromptError for tokens out of range, ConfigError for a model that cannot be gone back through."""
        config.require_gradients()
        check_metrics((self.metric,), config.vocab_size)
        objective_of(plain(self.metric))
        in_range(f"{self.name}, at", "position", (self.at,), len(self.corrupted))
        return [{}]

    def prepare(self, model: Model) -> Attributed:
        """One pass of both runs, and back; features of both, and what each cell does to first order."""
        dictionary = self.opened(model)
        points = dict.fromkeys((*dictionary.read_hooks, *dictionary.write_hooks))
        asked = HookSpec().capture(*points, *(f"grad:{point}" for point in dictionary.write_hooks))
        cotangent = cotangent_of_pair(self.metric, self.want)
        rows = [self.clean, self.corrupted]
        logits, found = model.backward(rows, model.bind(asked), self.want, cotangent)
        clean, corrupted = (as_vector(logits[row : row + 1]) for row in (_CLEAN, _CORRUPTED))
        return self._taken_apart(model, dictionary, found, clean, corrupted)

    def _taken_apart(
        self,
        model: Model,
        dictionary: Dictionary,
        found: Mapping[Capture, Tensor],
        clean: Floats,
        corrupted: Floats,
    ) -> Attributed:
        def rows(point: Any, row: int, *, is_gradient: bool = False) -> Tensor:
            return as_rows(found[Capture(point, is_gradient=is_gradient)][row])

        active = [
            dictionary.encode({n: rows(dictionary.read_hook(n), row) for n in dictionary.layers})
            for row in (_CLEAN, _CORRUPTED)
        ]
        place, change = _differences(*((each.indices.cpu().numpy(), each.value) for each in active))
        rests, gradients = {}, {}
        for layer in dictionary.write_layers:
            point = dictionary.write_hook(layer)
            rests[layer] = rows(point, _CLEAN).double() - rows(point, _CORRUPTED).double()
            gradients[layer] = rows(point, _CORRUPTED, is_gradient=True).double()
        effect = _effects(dictionary, place, change, gradients, rests)
        of_rests = [
            ((layer, position, REST), float(rest[position].norm()), float(rest[position] @ slope[position]))
            for (layer, rest), slope in zip(rests.items(), gradients.values(), strict=True)
            for position in range(len(rest))
        ]
        places, norms, effects = zip(*of_rests, strict=True)
        return Attributed(
            dictionary,
            model.config.axis_sizes.get("head"),
            clean,
            corrupted,
            np.concatenate([place, np.array(places, np.int64)]),
            np.concatenate([change, np.array(norms)]),
            np.concatenate([effect, np.array(effects)]),
            rests,
            gradients,
        )

    def runs(self, prepared: Attributed, cell: CellLabels) -> Sequence[Run]:
        """One for each chosen cell, then one for a random direction in place of each of the largest."""
        chosen, count = self._picked(prepared)
        added: list[tuple[Any, dict[int, Tensor]]] = [(number, prepared.written(number)) for number in chosen]
        for draw, (number, vectors) in enumerate(added[:count]):
            drawn = {
                layer: vector.new_tensor(random_directions(vector.cpu().numpy(), 1, seed=self.seed + draw)[0])
                for layer, vector in vectors.items()
            }
            added.append((number, drawn))
        position = prepared.place[:, 1].tolist()
        return [self.run_with(prepared, position[number], vectors) for number, vectors in added]

    def measure(self, prepared: Attributed, cell: CellLabels, result: HookCache) -> float:
        """The metric of one run, not yet rescaled."""
        return self.value(as_vector(result.logits), prepared.clean)

    def dataset(self, prepared: Attributed, cell: CellLabels, measured: Sequence[float]) -> xr.Dataset:
        """Effects of all cells, exact ones of some, and how they agree."""
        import xarray as xr

        clean, corrupted = (self.value(each, prepared.clean) for each in (prepared.clean, prepared.corrupted))
        chosen, count = self._picked(prepared)
        estimate = self.effects(prepared, prepared.effect + corrupted)
        exact = self.effects(prepared, measured[: len(chosen)])
        random = np.full(len(chosen), np.nan)
        random[:count] = self.effects(prepared, measured[len(chosen) :])
        sorts = {LARGEST: slice(0, count), RANDOM: slice(count, None), "all": slice(None)}
        told = [agreement(estimate[chosen][which], exact[which]) for which in sorts.values()]
        layer, position, feature = prepared.place.T
        data = {
            "estimate": estimate,
            "change": prepared.change,
            "layer": layer,
            "position": position,
            "feature": feature,
            "chosen_cell": chosen,
            "sort": [LARGEST] * count + [RANDOM] * (len(chosen) - count),
            "exact": exact,
            "random": random,
            "unpatched": [clean, corrupted],
            **{name: [each[name] for each in told] for name in told[0]},
        }
        given = {name: self.outputs[name].variable(np.asarray(values)) for name, values in data.items()}
        coords = {"chosen": list(sorts), "run": ["clean", "corrupted"]}
        return xr.Dataset(given, coords, {"metric": self.metric.name, "units": self.metric.units})

    def _picked(self, prepared: Attributed) -> tuple[Ints, int]:
        """Cells that are run, and how many of them are the largest."""
        order = np.argsort(-np.abs(prepared.effect), kind="stable")
        count = min(self.verify, len(order))
        others = np.random.default_rng(self.seed).permutation(order[count:])[:count]
        return np.concatenate([order[:count], others]), count


def _differences(
    clean: tuple[npt.NDArray[Any], Tensor], corrupted: tuple[npt.NDArray[Any], Tensor]
) -> tuple[Ints, Floats]:
    """Features active in either run [n, 3], in order, and by how much more each is in the clean one [n]."""
    where = np.concatenate([clean[0], corrupted[0]]).astype(np.int64)
    place, of = np.unique(where, axis=0, return_inverse=True)
    change = np.zeros(len(place))
    signed = [sign * value.double().cpu().numpy() for sign, (_, value) in ((1, clean), (-1, corrupted))]
    np.add.at(change, of.reshape(-1), np.concatenate(signed))
    return place, change


def _effects(
    dictionary: Dictionary,
    place: Ints,
    change: Floats,
    gradients: Mapping[int, Tensor],
    rests: Mapping[int, Tensor],
) -> Floats:
    """What each feature's change does to first order, [n]; taken from the rests [position, d_out], which are
    changed in place. Decoder rows are read block by block."""
    import torch

    effect = np.zeros(len(place))
    for layer in dictionary.layers:
        mine = np.flatnonzero(place[:, 0] == layer)
        for start in range(0, len(mine), most := max(1, BLOCK_BYTES // (4 * dictionary.d_out))):
            some = mine[start : start + most]
            position, feature = (torch.from_numpy(place[some, axis]) for axis in (1, 2))
            amount = torch.from_numpy(change[some])
            for target in dictionary.targets(layer):
                rows = dictionary.layer(layer).decoder_rows(feature, target).double()
                written = amount.to(rows)[:, None] * rows
                rest = rests[target]  # where the model computes, which need not be where the dictionary does
                rest.index_add_(0, position.to(rest.device), -written.to(rest))
                effect[some] += (written * gradients[target].to(rows)[position]).sum(1).cpu().numpy()
    return effect
