"""Circuits found by exact runs: ACDC, and elimination by score within a budget (elimination.py).

    found = CircuitSearch(pairs=pairs, threshold=0.05)           # ACDC
    found = CircuitSearch(pairs=pairs, rule="budget", threshold=0.1, method="EAP-IG-inputs")

Border: pairs in, a labelled circuit out. Never imports torch until it runs.

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
    """The edges that are left where all others may be left out.

    rule: "acdc", or "budget": edges by ascending |score|. threshold: by how much worse the metric may become,
    by one edge (acdc) or by all that are left out (budget); in its unit for KL, which is worse where it is
    larger, else as a share of what lies between the model and no edge at all. method, steps: of the scores.
    """

    threshold: float
    rule: Literal["acdc", "budget"] = "acdc"
    method: Method = "EAP-IG-inputs"
    steps: int = 5

    name: ClassVar[str] = "circuit_search"
    version: ClassVar[int] = 2
    outputs: ClassVar[Mapping[str, Output]] = {
        "chosen": Output(("source", "destination"), "1", "1 for an edge that is left, else 0"),
        "worse": Output((), "<unit>", "how much worse than the model the circuit is"),
        "steps": Output((), "1", "edges put to the test, or all into a destination at once"),
        "circuits_run": Output((), "1", "circuits run for it"),
    }

    def params(self) -> dict[str, Any]:
        """Scores count where the rule goes by them."""
        given = super().params()
        return given if self.rule == "budget" else {n: v for n, v in given.items() if n not in _OF_SCORES}

    def outputs_on(self, config: Architecture) -> Mapping[str, Output]:
        """In the unit of the metric, or as a share."""
        unit = self.unit if self.is_divergence else "1"
        return {**self.outputs, "worse": Output((), unit, self.outputs["worse"].long_name)}

    @property
    def is_divergence(self) -> bool:
        """Whether the metric says by itself how far a run is from the model's."""
        return all(isinstance(pair.metric, KL) for pair in self.pairs)

    def check(self, config: Architecture) -> Layout:
        """As of every experiment on edges; StageError for a rule there is not, a threshold below 0, or
        metrics of which some alone are a KL."""
        if self.rule not in ("acdc", "budget"):
            raise StageError(f"expected rule acdc or budget, found {self.rule!r}")
        if not (np.isfinite(self.threshold) and self.threshold >= 0):
            raise StageError(f"expected a threshold of at least 0, found {self.threshold}")
        if not self.is_divergence and any(isinstance(pair.metric, KL) for pair in self.pairs):
            raise StageError("expected a KL of every pair or of none, found both; search them apart")
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
        """chosen [source, destination], and what it took."""
        import xarray as xr

        from .runs import Measured

        layout, declared = self.check(prepared.config), self.outputs_on(prepared.config)
        runs = Measured(prepared, layout, self.pairs, self.alternative, self.seed, self.memory)
        clean = float(runs.clean.mean())
        empty = float(runs.values(np.zeros_like(layout.edges)[None]).mean())
        if not self.is_divergence and abs(clean - empty) <= 1e-7 * max(1.0, abs(clean), abs(empty)):
            raise StageError(
                f"expected a metric in which the model and no edge at all differ, found {clean:.6g} and "
                f"{empty:.6g}; choose other pairs, or another alternative"
            )
        gap = -1.0 if self.is_divergence else clean - empty

        def worse(masks: Bools, first: int) -> Floats:
            found: Floats = (clean - runs.values(masks, first).mean(1)) / gap
            return found

        order: list[Step]
        if self.rule == "acdc":
            order = downwards(layout)
            found = eliminated(layout, order, worse, lambda after, before: after - before < self.threshold)
        else:
            scores = self._scores.dataset(prepared, cell, ())["score"].values
            places = np.argwhere(layout.edges)
            ascending = np.argsort(np.abs(scores[layout.edges]), kind="stable")
            order = [(int(source), int(destination)) for source, destination in places[ascending]]
            found = eliminated(layout, order, worse, lambda after, before: after <= self.threshold)
        given = {
            "chosen": found.chosen.astype(np.int8),
            "worse": found.worse,
            "steps": found.steps,
            "circuits_run": found.runs,
        }
        return xr.Dataset(
            {name: declared[name].variable(each) for name, each in given.items()}, coords=labels(layout)
        )


_OF_SCORES = ("method", "steps")
