"""Evaluation of circuits: how much of the model's behaviour a circuit preserves.

    values = CircuitValues(pairs=pairs, circuits=(circuit, ~circuit), alternative="mean")
    faithfulness(values)                       # 1: as the full model, 0: as no edges

In a run of a circuit every other edge carries the replacement of its source (forward/edges/circuits.py).
Faithfulness is the share of the model's effect that remains (Wang et al. 2023, "Interpretability in the
Wild", section 4; normalised as in Hanna et al. 2024, equation 4). Completeness is the faithfulness of the
complement, near 0 if the circuit contains all that matters. Minimality is the change from leaving out one
more edge. Areas are those of the Mechanistic Interpretability Benchmark (Mueller et al. 2025, MIB, section
4.2).

Border: pairs and circuits in, labelled arrays out. Torch is imported when it runs.

Axes: circuit, pair.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ...pipeline import Output
from ...store.arrays import Floats
from ...store.errors import ConfigError, StageError
from ..forward.runs.experiment import CellLabels
from .circuit import Circuit
from .experiment import EdgeExperiment, one_length

if TYPE_CHECKING:
    import xarray as xr

    from ..forward.architectures.architecture import Architecture
    from ..forward.edges.layout import Layout
    from ..forward.models.model import Model

__all__ = ["CircuitValues", "areas", "faithfulness", "require_gap", "without_each"]


@dataclass(frozen=True, kw_only=True)
class CircuitValues(EdgeExperiment):
    """Metric of each pair of prompts in runs of some circuits, of the full model, and of no edges."""

    circuits: tuple[Circuit, ...]
    """Circuits of the model's graph; those with positions need prompts of as many tokens."""

    name: ClassVar[str] = "circuit_values"
    version: ClassVar[int] = 1
    outputs: ClassVar[Mapping[str, Output]] = {
        "value": Output(("circuit", "pair"), "<unit>", "metric of the circuit: other edges are left out"),
        "size": Output(("circuit",), "1", "number of edges of the circuit"),
        "clean": Output(("pair",), "<unit>", "metric of the full model"),
        "empty": Output(("pair",), "<unit>", "metric where every edge is left out"),
    }

    def params(self) -> dict[str, Any]:
        """Fields that enter the key of results; circuits enter by their digest."""
        return {**super().params(), "circuits": [circuit.digest for circuit in self.circuits]}

    def outputs_on(self, config: Architecture) -> Mapping[str, Output]:
        """Declared outputs, in the unit of the metric except `size`."""
        return {**super().outputs_on(config), "size": self.outputs["size"]}

    def check(self, config: Architecture) -> Layout:
        """Check the fields against a model, as `EdgeExperiment.check`.

        Raises:
            ConfigError: A circuit is of another model's graph.
            StageError: There are no circuits.
            PromptError: Prompts have another length than the number of a circuit's positions.
        """
        layout = super().check(config)
        if not self.circuits:
            raise StageError("expected at least one circuit to evaluate, found none")
        for circuit in self.circuits:
            if circuit.layout != layout:
                raise ConfigError(
                    f"expected circuits of a model with {layout.num_layers} layers of {layout.num_heads} "
                    f"heads, found one of {circuit.layout.num_layers} layers of {circuit.layout.num_heads} "
                    "heads; use the model that the circuit was found in"
                )
            if circuit.positions is not None:
                one_length(self.pairs, circuit.positions)
        return layout

    def dataset(self, prepared: Model, cell: CellLabels, measured: Sequence[Any]) -> xr.Dataset:
        """value [circuit, pair], size [circuit], clean and empty [pair]."""
        import xarray as xr

        from .runs import CircuitRuns

        layout, declared = self.check(prepared.config), self.outputs_on(prepared.config)
        positions = next((circuit.positions for circuit in self.circuits if circuit.positions), None)
        # Masks of one batch need one shape: circuits without positions are repeated at each position.
        circuits = [circuit if positions is None else circuit.at(positions) for circuit in self.circuits]
        masks = np.stack([*(item.chosen for item in circuits), np.zeros_like(circuits[0].chosen)])
        runs = CircuitRuns(prepared, layout, self.pairs, self.alternative, self.seed, self.memory)
        values = runs.values(masks)
        variables = {
            "value": values[:-1],
            "size": np.array([len(circuit) for circuit in self.circuits]),
            "clean": runs.clean,
            "empty": values[-1],
        }
        return xr.Dataset({name: declared[name].variable(item) for name, item in variables.items()})


def faithfulness(values: xr.Dataset) -> Floats:
    """Faithfulness of circuits, float64 [circuit]: 1 as the full model, 0 as no edges; not clipped.

    It is (M(circuit) - M(empty)) / (M(clean) - M(empty)), with M the mean of the metric over pairs.

    Arguments:
        values: Result of `CircuitValues`.

    Raises:
        StageError: The full model and the empty circuit have equal metrics.
    """
    # Ratio of means, not mean of ratios: a pair with a small difference would dominate.
    clean, empty = (float(values[name].mean("pair")) for name in ("clean", "empty"))
    require_gap(clean, empty)
    shares: Floats = (values["value"].mean("pair").values - empty) / (clean - empty)
    return shares


def require_gap(clean: float, empty: float) -> None:
    """Check that the full model and the empty circuit differ, so that faithfulness is defined.

    Arguments:
        clean: Metric of the full model, mean over pairs.
        empty: Metric of the empty circuit, mean over pairs.

    Raises:
        StageError: Both are equal up to float32 rounding, so that their quotient would be noise.
    """
    if abs(clean - empty) <= 1e-7 * max(1.0, abs(clean), abs(empty)):
        raise StageError(
            "expected a metric that differs between the full model and the circuit without edges, found "
            f"{clean:.6g} and {empty:.6g}; choose other pairs, another metric, or another alternative"
        )


def areas(shares: Any, faithful: Any) -> tuple[float, float]:
    """(CPR, CMD) of the benchmark MIB: area under faithfulness, and area between faithfulness and 1.

    Faithfulness is a function of the share of edges; areas are by the trapezoidal rule.

    Arguments:
        shares: Share of all edges in each circuit, ascending [size].
        faithful: Faithfulness of each circuit [size].

    Raises:
        StageError: There are fewer than two circuits, or the shares do not ascend.
    """
    x, f = np.asarray(shares, np.float64), np.asarray(faithful, np.float64)
    if x.ndim != 1 or x.shape != f.shape or len(x) < 2 or not (np.diff(x) > 0).all():
        raise StageError(
            "expected the faithfulness of at least two circuits in ascending order of their share of edges, "
            f"found the shares {x.tolist()}"
        )
    return float(np.trapezoid(f, x)), float(np.trapezoid(np.abs(1 - f), x))


def without_each(circuit: Circuit) -> Iterator[tuple[str, Circuit]]:
    """Yield (name of an edge, the circuit without this edge) for each edge of a circuit."""
    for index in zip(*np.nonzero(circuit.chosen), strict=True):
        remaining = circuit.chosen.copy()
        remaining[index] = False
        *at, source, destination = map(int, index)
        name = circuit.layout.name(source, destination)
        yield f"{name}@{at[0]}" if at else name, Circuit(circuit.layout, remaining)
