"""Selected circuits: chosen by scores on some pairs, run on others.

    found = SelectedCircuits(chosen_on=some, pairs=others, sizes=(50, 200))

A circuit is known only when the scores are, so that choosing and running it are one experiment. Circuits of
the same size at random need no scores: `Circuit.grown`, as `CircuitValues` runs them.

Border: pairs in, labelled arrays out. Never imports torch until it runs.

Axes: size (a cell each), pair, source, destination.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from ...pipeline import Output
from ...store.errors import StageError
from ..forward.runs.experiment import CellLabels
from .circuit import Circuit
from .evaluation import without_each
from .experiment import EdgeExperiment, labels, one_length
from .names import Method
from .pairs import Pair
from .scores import AXES, EdgeScores

if TYPE_CHECKING:
    import xarray as xr

    from ..forward.architectures.architecture import Architecture
    from ..forward.edges.layout import Layout
    from ..forward.models.model import Model

__all__ = ["SelectedCircuits"]


@dataclass(frozen=True, kw_only=True)
class SelectedCircuits(EdgeExperiment):
    """Circuits of several sizes, and what the model does under them.

    chosen_on: pairs whose scores choose the edges. pairs: those the circuits are run on. method, steps: of
    the scores. selection: "top", the edges of largest |score|, or "greedy", from the logits down. sizes: in
    edges, ascending. minimal: whether each circuit is also run without each of its edges. by_position:
    whether edges are told apart by position, in pairs of one length.
    """

    chosen_on: tuple[Pair, ...]
    sizes: tuple[int, ...]
    method: Method = "EAP-IG-inputs"
    steps: int = 5
    selection: Literal["top", "greedy"] = "top"
    minimal: bool = False
    by_position: bool = False

    name: ClassVar[str] = "selected_circuits"
    version: ClassVar[int] = 1
    outputs: ClassVar[Mapping[str, Output]] = {
        "chosen": Output(("size", "position?", *AXES), "1", "1 for an edge of the circuit, else 0"),
        "value": Output(("size", "pair"), "<unit>", "the metric where all other edges are left out"),
        "complement": Output(("size", "pair"), "<unit>", "the metric where those of the circuit are"),
        "without": Output(
            ("size", "position?", *AXES),
            "<unit>",
            "the metric, mean over pairs, of the circuit without an edge of it",
            is_optional=True,
        ),
        "clean": Output(("pair",), "<unit>", "the metric of the model"),
        "empty": Output(("pair",), "<unit>", "the metric where every edge is left out"),
    }

    def params(self) -> dict[str, Any]:
        """Sizes are in the cells."""
        left_out = {"sizes"} if self.by_position else {"sizes", "by_position"}
        given = {name: value for name, value in super().params().items() if name not in left_out}
        return {**given, "chosen_on": [pair.canonical() for pair in self.chosen_on]}

    def outputs_on(self, config: Architecture) -> Mapping[str, Output]:
        """In the unit of the metric."""
        left_out = () if self.by_position else ("position?",)
        dims = {
            name: tuple(dim.rstrip("?") for dim in each.dims if dim not in left_out)
            for name, each in self.outputs.items()
        }
        return {
            name: Output(dims[name], each.unit if name == "chosen" else self.unit, each.long_name)
            for name, each in self.outputs.items()
            if self.minimal or name != "without"
        }

    @property
    def scores(self) -> EdgeScores:
        """What the edges are chosen by."""
        return EdgeScores(
            pairs=self.chosen_on,
            alternative=self.alternative,
            seed=self.seed,
            memory=self.memory,
            method=self.method,
            steps=self.steps,
            by_position=self.by_position,
        )

    def check(self, config: Architecture) -> Layout:
        """As of every experiment on edges; StageError for sizes that a model does not have, no draws, or
        pairs of other units to choose on."""
        layout = super().check(config)
        self.scores.check(config)
        places = one_length((*self.chosen_on, *self.pairs)) if self.by_position else None
        most = len(Circuit.whole(layout, places))
        if not self.sizes or sorted(set(self.sizes)) != list(self.sizes) or not 1 <= self.sizes[0] <= most:
            raise StageError(f"expected ascending sizes of at least one edge, found {self.sizes}")
        if self.sizes[-1] > most:
            raise StageError(f"expected sizes of at most {most} edges, found {self.sizes[-1]}")
        if self.selection not in ("top", "greedy"):
            raise StageError(f"expected selection top or greedy, found {self.selection!r}")
        return layout

    def cells(self, config: Architecture) -> Sequence[CellLabels]:
        """One per size, smallest first. Raises what `check` does."""
        self.check(config)
        return [{"size": size} for size in self.sizes]

    def prepare(self, model: Model) -> Any:
        """The model, and the scores all sizes are chosen by."""
        return model, self.scores.dataset(model, {}, ())["score"].values

    def dataset(self, prepared: Any, cell: CellLabels, measured: Sequence[Any]) -> xr.Dataset:
        """One size: its circuit, the rest, and where asked the circuit without each edge."""
        import xarray as xr

        from .runs import Measured

        model, scores = prepared
        layout, declared = self.check(model.config), self.outputs_on(model.config)
        choose = Circuit.top if self.selection == "top" else Circuit.greedy
        circuit = choose(layout, scores, cell["size"])
        nothing = Circuit(layout, np.zeros_like(circuit.chosen))
        asked = [circuit, ~circuit, nothing]
        left = [each for _, each in without_each(circuit)] if self.minimal else []
        runs = Measured(model, layout, self.pairs, self.alternative, self.seed, self.memory)
        values = runs.values(np.stack([each.chosen for each in (*asked, *left)]))
        given: dict[str, Any] = {
            "chosen": circuit.chosen.astype(np.int8)[None],
            "value": values[:1],
            "complement": values[1:2],
            "clean": runs.clean,
            "empty": values[2],
        }
        if self.minimal:
            without = np.full(circuit.chosen.shape, np.nan)
            without[circuit.chosen] = values[len(asked) :].mean(1)
            given["without"] = without[None]
        return xr.Dataset(
            {name: declared[name].variable(each) for name, each in given.items()},
            coords={**labels(layout), "size": [cell["size"]]},
        )

    def joined(self, parts: Sequence[xr.Dataset]) -> xr.Dataset:
        """Cells of all sizes, along `size`."""
        import xarray as xr

        along = [name for name, each in parts[0].data_vars.items() if "size" in each.dims]
        found: xr.Dataset = xr.concat(
            parts, "size", data_vars=along, coords="minimal", compat="override", join="override"
        )
        return found
