"""Circuit discovery by exact runs: ACDC, and elimination by score within a budget (elimination.py).

    acdc = CircuitSearch(pairs=pairs, threshold=0.05)
    budget = CircuitSearch(pairs=pairs, rule="budget", threshold=0.1, method="EAP-IG-inputs")

Border: pairs in, a labelled circuit out. Torch is imported when it runs.

Axes: source, destination.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from ...pipeline import Output
from ...store.arrays import Floats
from ...store.errors import StageError
from ..causal.grids.patching_metrics import KL
from ..forward.edges.layout import Bools
from ..forward.runs.experiment import CellLabels
from .elimination import Step, downwards, eliminated
from .evaluation import require_gap
from .experiment import EdgeExperiment, labels
from .names import Method
from .scores import EdgeScores

if TYPE_CHECKING:
    import xarray as xr

    from ..forward.architectures.architecture import Architecture
    from ..forward.edges.layout import Layout
    from ..forward.models.model import Model

__all__ = ["CircuitSearch"]


@dataclass(frozen=True, kw_only=True)
class CircuitSearch(EdgeExperiment):
    """Searches a circuit by leaving out edges of the full model one by one.

    "Worse" is in nats for a KL, which is worse where it is larger. For other metrics it is the share of the
    difference between the full model and the empty circuit that is lost.
    """

    threshold: float
    """How much worse the metric may become: by each edge ("acdc"), or by all edges left out ("budget")."""
    rule: Literal["acdc", "budget"] = "acdc"
    """Rule of the search: "acdc", or "budget", which tests edges in ascending order of |score|."""
    method: Method = "EAP-IG-inputs"
    """Method that estimates the scores for "budget"."""
    steps: int = 5
    """Number of steps of integrated gradients in these scores."""

    name: ClassVar[str] = "circuit_search"
    version: ClassVar[int] = 2
    outputs: ClassVar[Mapping[str, Output]] = {
        "chosen": Output(("source", "destination"), "1", "1 for an edge of the circuit, else 0"),
        "worse": Output((), "<unit>", "how much worse the circuit is than the full model"),
        "steps": Output((), "1", "edges tested; all edges into one destination together count as one"),
        "circuits_run": Output((), "1", "circuits run during the search"),
    }

    def params(self) -> dict[str, Any]:
        """Fields that enter the key of results; method and steps only if the rule uses scores."""
        params = super().params()
        return (
            params
            if self.rule == "budget"
            else {name: value for name, value in params.items() if name not in ("method", "steps")}
        )

    def outputs_on(self, config: Architecture) -> Mapping[str, Output]:
        """Declared outputs; `worse` is in nats for KL metrics, else a share without unit."""
        unit = self.unit if self.is_divergence else "1"
        return {**self.outputs, "worse": Output((), unit, self.outputs["worse"].long_name)}

    @property
    def is_divergence(self) -> bool:
        """Whether all metrics are `KL`, which is itself the distance from the full model."""
        return all(isinstance(pair.metric, KL) for pair in self.pairs)

    def check(self, config: Architecture) -> Layout:
        """Check the fields against a model, as `EdgeExperiment.check`.

        Raises:
            StageError: The rule is unknown, the threshold is below 0, or only some metrics are `KL`.
        """
        if self.rule not in ("acdc", "budget"):
            raise StageError(f"expected rule to be 'acdc' or 'budget', found {self.rule!r}")
        if not (np.isfinite(self.threshold) and self.threshold >= 0):
            raise StageError(f"expected threshold to be finite and at least 0, found {self.threshold}")
        # A KL is worse where it grows, other metrics where they fall towards `empty`: their mean has no
        # direction.
        if not self.is_divergence and any(isinstance(pair.metric, KL) for pair in self.pairs):
            raise StageError(
                "expected the metric KL for every pair or for none, as it is the only one that grows when a "
                "circuit is worse, found both; search them separately"
            )
        if self.rule == "budget":
            self._scores.check(config)
        return super().check(config)

    @property
    def _scores(self) -> EdgeScores:
        return EdgeScores(
            pairs=self.pairs,
            alternative=self.alternative,
            seed=self.seed,
            memory=self.memory,
            method=self.method,
            steps=self.steps,
        )

    def dataset(self, prepared: Model, cell: CellLabels, measured: Sequence[Any]) -> xr.Dataset:
        """chosen [source, destination], and the cost of the search."""
        import xarray as xr

        from .runs import CircuitRuns

        layout, declared = self.check(prepared.config), self.outputs_on(prepared.config)
        runs = CircuitRuns(prepared, layout, self.pairs, self.alternative, self.seed, self.memory)
        clean = float(runs.clean.mean())
        empty = float(runs.values(np.zeros_like(layout.edges)[None]).mean())
        if not self.is_divergence:
            require_gap(clean, empty)
        # A KL of 0 is the full model, so it needs no scale; the sign makes larger mean worse.
        gap = -1.0 if self.is_divergence else clean - empty

        def worse(masks: Bools, first: int) -> Floats:
            losses: Floats = (clean - runs.values(masks, first).mean(1)) / gap
            return losses

        order: list[Step]
        if self.rule == "acdc":
            order = downwards(layout)
            elimination = eliminated(
                layout, order, worse, lambda after, before: after - before < self.threshold
            )
        else:
            scores = self._scores.dataset(prepared, cell, ())["score"].values
            edges = np.argwhere(layout.edges)
            ascending = np.argsort(np.abs(scores[layout.edges]), kind="stable")
            order = [(int(source), int(destination)) for source, destination in edges[ascending]]
            elimination = eliminated(layout, order, worse, lambda after, before: after <= self.threshold)
        variables = {
            "chosen": elimination.chosen.astype(np.int8),
            "worse": elimination.worse,
            "steps": elimination.steps,
            "circuits_run": elimination.runs,
        }
        return xr.Dataset(
            {name: declared[name].variable(value) for name, value in variables.items()}, coords=labels(layout)
        )
