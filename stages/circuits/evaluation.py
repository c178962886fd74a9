"""Evaluation of circuits: what a model still does when only some of its edges carry what it computes.

    values = CircuitValues(pairs=pairs, circuits=(found, ~found), alternative="mean")
    faithfulness(values)                       # 1 as the model, 0 as nothing at all

A circuit is run with every edge outside of it carrying what stands for its source
(forward/edges/circuits.py). Faithfulness is the share of the model's effect that is left (Wang et al.,
Interpretability in the Wild, 2023, section 4; normalised as by Hanna et al., 2024, equation 4); completeness
is that of the complement, of which a circuit that holds all there is leaves nothing; minimality is what
leaving one more edge out changes. The areas are those of the Mechanistic Interpretability Benchmark (Mueller
et al., MIB, 2025, section 4.2).

Border: pairs and circuits in, labelled arrays out. Never imports torch until it runs.

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

__all__ = ["CircuitValues", "areas", "faithfulness", "without_each"]


@dataclass(frozen=True, kw_only=True)
class CircuitValues(EdgeExperiment):
    """The metric of each pair under each circuit, as it is, and with no edge at all."""

    circuits: tuple[Circuit, ...]

    name: ClassVar[str] = "circuit_values"
    version: ClassVar[int] = 1
    outputs: ClassVar[Mapping[str, Output]] = {
        "value": Output(("circuit", "pair"), "<unit>", "the metric where the other edges are left out"),
        "size": Output(("circuit",), "1", "edges of the circuit"),
        "clean": Output(("pair",), "<unit>", "the metric of the model"),
        "empty": Output(("pair",), "<unit>", "the metric where every edge is left out"),
    }

    def params(self) -> dict[str, Any]:
        """Circuits by what they are."""
        return {**super().params(), "circuits": [circuit.digest for circuit in self.circuits]}

    def outputs_on(self, config: Architecture) -> Mapping[str, Output]:
        """In the unit of the metric."""
        return {
            name: each if name == "size" else Output(each.dims, self.unit, each.long_name)
            for name, each in self.outputs.items()
        }

    def check(self, config: Architecture) -> Layout:
        """As of every experiment on edges; ConfigError for a circuit of another graph, StageError for
        none."""
        layout = super().check(config)
        if not self.circuits:
            raise StageError("expected at least one circuit, found none")
        for circuit in self.circuits:
            if circuit.layout != layout:
                raise ConfigError(
                    f"expected circuits of {layout.num_layers} layers of {layout.num_heads} heads, as the "
                    f"model has, found one of {circuit.layout.num_layers} of {circuit.layout.num_heads}"
                )
            if circuit.positions is not None:
                one_length(self.pairs, circuit.positions)
        return layout

    def dataset(self, prepared: Model, cell: CellLabels, measured: Sequence[Any]) -> xr.Dataset:
        """value [circuit, pair], size [circuit], clean and empty [pair]."""
        import xarray as xr

        from .runs import Measured

        layout, declared = self.check(prepared.config), self.outputs_on(prepared.config)
        told = next((circuit.positions for circuit in self.circuits if circuit.positions), None)
        circuits = [circuit if told is None else circuit.at(told) for circuit in self.circuits]
        masks = np.stack([*(each.chosen for each in circuits), np.zeros_like(circuits[0].chosen)])
        found = Measured(prepared, layout, self.pairs, self.alternative, self.seed, self.memory)
        values = found.values(masks)
        given = {
            "value": values[:-1],
            "size": np.array([len(circuit) for circuit in self.circuits]),
            "clean": found.clean,
            "empty": values[-1],
        }
        return xr.Dataset({name: declared[name].variable(each) for name, each in given.items()})


def faithfulness(values: xr.Dataset) -> Floats:
    """(M(circuit) - M(nothing)) / (M(model) - M(nothing)) of the means over pairs, [circuit]; not clipped.

    Raises StageError where model and nothing do not differ: there is nothing to be faithful to.
    """
    clean, empty = (float(values[name].mean("pair")) for name in ("clean", "empty"))
    if abs(clean - empty) <= 1e-7 * max(1.0, abs(clean), abs(empty)):
        raise StageError(
            f"expected a metric in which the model and no edge at all differ, found {clean:.6g} and "
            f"{empty:.6g}; choose other pairs, another metric, or another alternative"
        )
    found: Floats = (values["value"].mean("pair").values - empty) / (clean - empty)
    return found


def areas(shares: Any, faithful: Any) -> tuple[float, float]:
    """CPR and CMD of MIB: the area under faithfulness [size], and that between it and 1, over the share of
    edges that circuits have [size], ascending, by trapezoids. Raises StageError for fewer than two sizes, or
    others."""
    x, f = np.asarray(shares, np.float64), np.asarray(faithful, np.float64)
    if x.ndim != 1 or x.shape != f.shape or len(x) < 2 or not (np.diff(x) > 0).all():
        raise StageError(
            f"expected faithfulness of two or more circuits, by ascending share of edges, found {x.tolist()}"
        )
    return float(np.trapezoid(f, x)), float(np.trapezoid(np.abs(1 - f), x))


def without_each(circuit: Circuit) -> Iterator[tuple[str, Circuit]]:
    """Each edge by name, and the circuit without it."""
    for place in zip(*np.nonzero(circuit.chosen), strict=True):
        left = circuit.chosen.copy()
        left[place] = False
        *at, source, destination = map(int, place)
        name = circuit.layout.name(source, destination)
        yield f"{name}@{at[0]}" if at else name, Circuit(circuit.layout, left)
