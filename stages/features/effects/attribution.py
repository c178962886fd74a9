"""Attribution patching of features: the first-order effect of each feature's clean activation on a metric.

At the dictionary's write hooks, the clean run differs from the corrupted run by the features' contributions
(change of activation times decoder vector) and by a remainder: the dictionary's error, its skip connection
and its scale. Patching one of them is an addition, whose first-order effect is its product with the gradient
of the corrupted run's metric there (Marks et al. 2024, "Sparse Feature Circuits", section 3.1; the error term
is a cell of its own). The cells of one layer and position add up to attribution patching of that hook point.

The largest estimates are checked by exact runs, together with as many cells drawn at random and, for each of
the largest, a random direction of the same norm.

Border: token ids and a dictionary in, labelled numbers out; the planner makes the runs. Planning imports no
torch.

Axes: cell, a feature or a remainder at a position: features by layer, position and index, then remainders.
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
from ..layers.layout import FeatureId
from .activity import as_rows
from .injection import Injection, added, added_at

if TYPE_CHECKING:
    import xarray as xr
    from torch import Tensor

    from ...forward.architectures.architecture import Architecture
    from ...forward.hooks.cache import HookCache
    from ...forward.models.model import Model

__all__ = ["REST", "FeatureAttribution", "PairAttribution", "PromptPairExperiment"]

REST = -1
"""Value in place of a feature's index that marks a remainder, which no feature accounts for."""
Ints = npt.NDArray[np.int64]
_CLEAN, _CORRUPTED = 0, 1


@dataclass(frozen=True, eq=False)
class PairAttribution:
    """Difference of clean and corrupted run, in cells: a feature or remainder at one position each."""

    dictionary: Dictionary
    """The dictionary of the features."""
    heads: int | None
    """Number of attention heads of the model; None for models without heads."""
    clean: Floats
    """Logits of the clean run that the metric reads."""
    corrupted: Floats
    """Logits of the corrupted run that the metric reads."""
    place: Ints
    """Layer, position and index of each cell, int64 [cell, 3]. The layer is the one that a feature reads, or
    the one to which a remainder is written."""
    change: Floats
    """Clean minus corrupted activation of a feature; norm of a remainder [cell]."""
    effect: Floats
    """Estimated effect of each cell on the metric before rescaling [cell]."""
    rests: Mapping[int, Tensor]
    """Remainder [position, d_out] by written layer."""
    gradients: Mapping[int, Tensor]
    """Gradient [position, d_out] of the corrupted run's metric by written layer."""

    def written(self, cell: int) -> dict[int, Tensor]:
        """Vectors that patching a cell adds at its position, float32 [d_out] by layer."""
        layer, position, feature = map(int, self.place[cell])
        if feature == REST:
            return {layer: self.rests[layer][position].float()}
        return self.of_feature(layer, feature, float(self.change[cell]))

    def of_feature(self, layer: int, feature: int, amount: float) -> dict[int, Tensor]:
        """Vectors that a change of a feature's activation adds, float32 [d_out] by layer.

        Arguments:
            layer: Layer that the feature reads.
            feature: Index of the feature within the layer.
            amount: Change of its activation.
        """
        return added(self.dictionary, [Injection(FeatureId(layer, feature), amount)])


@dataclass(frozen=True, kw_only=True)
class PromptPairExperiment(DictionaryExperiment):
    """Base class of experiments that patch features from a clean run into a corrupted run."""

    clean: tuple[int, ...]
    """Token ids of the clean prompt."""
    corrupted: tuple[int, ...]
    """Token ids of the corrupted prompt, of equal length."""
    metric: Metric
    """Differentiable metric of the logits, or `Recovery` of such a metric."""
    dictionary: str
    """Argument of `Dictionary.from_pretrained`; excluded from the key of results."""
    features: str
    """Digest of the dictionary (`Dictionary.identity`)."""
    at: int = -1
    """Position whose next-token logits the metric reads."""
    seed: int = 0
    """Seed of all random draws."""

    @property
    def want(self) -> Logits:
        """Logits at position `at` of the tokens that the metric reads."""
        return Logits((self.at,), required_tokens((self.metric,)))

    def params(self) -> dict[str, Any]:
        """Parameters for the key, with the metric as plain values."""
        return {**super().params(), "metric": self.metric.canonical()}

    def value(self, logits: Floats, clean: Floats) -> float:
        """Metric of one run, before rescaling by the clean and corrupted runs.

        Arguments:
            logits: Logits of the run, as `want` selects them.
            clean: The same logits of the clean run, with which some metrics compare.
        """
        return float(read_metrics((self.metric,), logits, clean)[0])

    def run_with(self, attribution: PairAttribution, position: int, vectors: Mapping[int, Tensor]) -> Run:
        """The corrupted run with vectors added at one position.

        Arguments:
            attribution: Holds the dictionary and the number of heads.
            position: Position at which the vectors are added.
            vectors: Vector [d_out] by layer.
        """
        rows = {layer: {position: vector} for layer, vector in vectors.items()}
        return Run(self.corrupted, added_at(attribution.dictionary, rows, attribution.heads), self.want)

    def effects(self, attribution: PairAttribution, values: Any) -> Floats:
        """Effects: metric values minus the corrupted run's value, rescaled as the metric defines.

        Arguments:
            attribution: Holds the logits of the clean and the corrupted run.
            values: Metric values before rescaling.
        """
        clean, corrupted = (
            self.value(logits, attribution.clean) for logits in (attribution.clean, attribution.corrupted)
        )
        # A rescaled metric is affine in the value, so effects are differences of rescaled values.
        baseline = self.metric.scaled(np.array(corrupted), clean, corrupted)
        return self.metric.scaled(np.asarray(values, np.float64), clean, corrupted) - baseline


@dataclass(frozen=True, kw_only=True)
class FeatureAttribution(PromptPairExperiment):
    """First-order effect of patching each active feature, at each position, and of the remainders."""

    name: ClassVar[str] = "feature_attribution"
    version: ClassVar[int] = 1
    outputs: ClassVar[Mapping[str, Output]] = {
        "estimate": Output(("cell",), "as the metric", "first-order effect of the cell's clean value"),
        "change": Output(("cell",), "1", "clean minus corrupted activation; norm of a remainder"),
        "layer": Output(("cell",), "1", "layer that a feature reads, or a remainder is written to"),
        "position": Output(("cell",), "1", "position of the cell"),
        "feature": Output(("cell",), "1", "index of the feature; -1 for a remainder"),
        "chosen_cell": Output(("check",), "1", "cell checked by an exact run"),
        "sort": Output(("check",), "1", "reason of the check: largest estimate, or drawn at random"),
        "exact": Output(("check",), "as the metric", "effect of the cell's clean value in an exact run"),
        "random": Output(
            ("check",), "as the metric", "effect of a random direction of the same norm; NaN for random cells"
        ),
        "correlation": Output(("chosen",), "1", "Pearson correlation of estimates and exact effects"),
        "rank_correlation": Output(("chosen",), "1", "Spearman correlation of estimates and exact effects"),
        "worst_miss": Output(("chosen",), "as the metric", "largest difference of estimate and exact effect"),
        "unpatched": Output(("run",), "as the metric", "metric of the unpatched clean and corrupted run"),
    }

    verify: int = 0
    """Number of cells of largest estimate that exact runs check, and of random cells in addition; 0: none."""

    def __post_init__(self) -> None:
        check_lengths(self.clean, self.corrupted, None)
        if self.verify < 0:
            raise StageError(f"{self.name}: expected verify to be at least 0, found {self.verify}")

    def cells(self, config: Architecture) -> Sequence[CellLabels]:
        """One cell, since the choice of the largest estimates depends on all.

        Raises:
            StageError: The metric has no gradient.
            PromptError: A token is out of range.
            ConfigError: The model has no backward pass.
        """
        config.require_gradients()
        check_metrics((self.metric,), config)
        objective_of(plain(self.metric))
        in_range(f"{self.name}, at", "position", (self.at,), len(self.corrupted))
        return [{}]

    def prepare(self, model: Model) -> PairAttribution:
        """Change and first-order effect of all cells, from one forward and backward pass of both prompts."""
        dictionary = self.opened(model)
        points = dict.fromkeys((*dictionary.read_hooks, *dictionary.write_hooks))
        spec = HookSpec().capture(*points, *(f"grad:{point}" for point in dictionary.write_hooks))
        cotangent = cotangent_of_pair(self.metric, self.want)
        rows = [self.clean, self.corrupted]
        logits, captured = model.backward(rows, model.bind(spec), self.want, cotangent)
        # Both prompts are one batch: one pass gives the clean activations and the corrupted gradients.
        clean, corrupted = (as_vector(logits[row : row + 1]) for row in (_CLEAN, _CORRUPTED))
        return self._attribution(model, dictionary, captured, clean, corrupted)

    def _attribution(
        self,
        model: Model,
        dictionary: Dictionary,
        captured: Mapping[Capture, Tensor],
        clean: Floats,
        corrupted: Floats,
    ) -> PairAttribution:
        def rows(point: Any, row: int, *, is_gradient: bool = False) -> Tensor:
            return as_rows(captured[Capture(point, is_gradient=is_gradient)][row])

        active = [
            dictionary.encode({n: rows(dictionary.read_hook(n), row) for n in dictionary.layers})
            for row in (_CLEAN, _CORRUPTED)
        ]
        place, change = _differences(
            *((features.indices.cpu().numpy(), features.value) for features in active)
        )
        rests, gradients = {}, {}
        for layer in dictionary.write_layers:
            point = dictionary.write_hook(layer)
            # float64: remainders are small differences of large states.
            rests[layer] = rows(point, _CLEAN).double() - rows(point, _CORRUPTED).double()
            gradients[layer] = rows(point, _CORRUPTED, is_gradient=True).double()
        # Subtracts the features' contributions from `rests`, so it runs before the remainders are measured.
        effect = _effects(dictionary, place, change, gradients, rests)
        remainder_cells = [
            (
                (layer, position, REST),
                float(remainder[position].norm()),
                float(remainder[position] @ slope[position]),
            )
            for (layer, remainder), slope in zip(rests.items(), gradients.values(), strict=True)
            for position in range(len(remainder))
        ]
        places, norms, effects = zip(*remainder_cells, strict=True)
        return PairAttribution(
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

    def runs(self, prepared: PairAttribution, cell: CellLabels) -> Sequence[Run]:
        """Runs that patch each verified cell; then, as controls of the cells with the largest estimates, runs
        that add a random direction of the same norm in place of the patch."""
        # Verified cells come with the largest estimates first; `count` of them get a control.
        verified, count = self._verified_cells(prepared)
        patches: list[tuple[Any, dict[int, Tensor]]] = [
            (number, prepared.written(number)) for number in verified
        ]
        for draw, (number, vectors) in enumerate(patches[:count]):
            random_vectors = {
                layer: vector.new_tensor(random_directions(vector.cpu().numpy(), 1, seed=self.seed + draw)[0])
                for layer, vector in vectors.items()
            }
            patches.append((number, random_vectors))
        position = prepared.place[:, 1].tolist()
        return [self.run_with(prepared, position[number], vectors) for number, vectors in patches]

    def measure(self, prepared: PairAttribution, cell: CellLabels, result: HookCache) -> float:
        """Metric of one run, before rescaling by the clean and corrupted runs."""
        return self.value(as_vector(result.logits), prepared.clean)

    def dataset(self, prepared: PairAttribution, cell: CellLabels, measured: Sequence[float]) -> xr.Dataset:
        """Estimated effects of all cells, exact effects of the verified cells, and their agreement."""
        import xarray as xr

        clean, corrupted = (
            self.value(logits, prepared.clean) for logits in (prepared.clean, prepared.corrupted)
        )
        verified, count = self._verified_cells(prepared)
        estimate = self.effects(prepared, prepared.effect + corrupted)
        exact = self.effects(prepared, measured[: len(verified)])
        random = np.full(len(verified), np.nan)
        random[:count] = self.effects(prepared, measured[len(verified) :])
        sorts = {LARGEST: slice(0, count), RANDOM: slice(count, None), "all": slice(None)}
        agreements = [agreement(estimate[verified][rows], exact[rows]) for rows in sorts.values()]
        layer, position, feature = prepared.place.T
        data = {
            "estimate": estimate,
            "change": prepared.change,
            "layer": layer,
            "position": position,
            "feature": feature,
            "chosen_cell": verified,
            "sort": [LARGEST] * count + [RANDOM] * (len(verified) - count),
            "exact": exact,
            "random": random,
            "unpatched": [clean, corrupted],
            **{name: [figures[name] for figures in agreements] for name in agreements[0]},
        }
        variables = {name: self.outputs[name].variable(np.asarray(values)) for name, values in data.items()}
        coords = {"chosen": list(sorts), "run": ["clean", "corrupted"]}
        return xr.Dataset(variables, coords, {"metric": self.metric.name, "units": self.metric.units})

    def _verified_cells(self, prepared: PairAttribution) -> tuple[Ints, int]:
        """(cells checked by exact runs, those of largest estimate first; number of the latter)."""
        # Stable, so that equal estimates give the same cells on every machine.
        order = np.argsort(-np.abs(prepared.effect), kind="stable")
        count = min(self.verify, len(order))
        # Drawn from the other cells, so that the check also covers small estimates.
        random_cells = np.random.default_rng(self.seed).permutation(order[count:])[:count]
        return np.concatenate([order[:count], random_cells]), count


def _differences(
    clean: tuple[npt.NDArray[Any], Tensor], corrupted: tuple[npt.NDArray[Any], Tensor]
) -> tuple[Ints, Floats]:
    """Features active in either run: sorted (layer, position, index), int64 [n, 3], and the clean minus the
    corrupted activation of each [n].

    Arguments:
        clean: Indices [n, 3] and activations [n] of the clean run's active features.
        corrupted: The same of the corrupted run.
    """
    occurrences = np.concatenate([clean[0], corrupted[0]]).astype(np.int64)
    place, cell = np.unique(occurrences, axis=0, return_inverse=True)
    change = np.zeros(len(place))
    signed = [sign * value.double().cpu().numpy() for sign, (_, value) in ((1, clean), (-1, corrupted))]
    # A feature active in both runs occurs twice, so `np.add.at`. numpy 2.0 returned the inverse as [n, 1].
    np.add.at(change, cell.reshape(-1), np.concatenate(signed))
    return place, change


def _effects(
    dictionary: Dictionary,
    place: Ints,
    change: Floats,
    gradients: Mapping[int, Tensor],
    rests: Mapping[int, Tensor],
) -> Floats:
    """First-order effect [n] of each feature's change on the metric.

    What the features write is subtracted from `rests` [position, d_out] in place, which leaves the
    remainders.
    """
    import torch

    effect = np.zeros(len(place))
    step = max(1, BLOCK_BYTES // (4 * dictionary.d_out))
    for layer in dictionary.layers:
        cells_of_layer = np.flatnonzero(place[:, 0] == layer)
        for start in range(0, len(cells_of_layer), step):
            block = cells_of_layer[start : start + step]
            position, feature = (torch.from_numpy(place[block, axis]) for axis in (1, 2))
            amount = torch.from_numpy(change[block])
            for target in dictionary.targets(layer):
                rows = dictionary.layer(layer).decoder_rows(feature, target).double()
                written = amount.to(rows)[:, None] * rows
                # On the model's device, which may differ from the dictionary's.
                remainder = rests[target]
                remainder.index_add_(0, position.to(remainder.device), -written.to(remainder))
                effect[block] += (written * gradients[target].to(rows)[position]).sum(1).cpu().numpy()
    return effect
