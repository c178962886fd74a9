"""Selected circuits: edges selected by scores on some pairs, run on held-out pairs.

    circuits = SelectedCircuits(chosen_on=train_pairs, pairs=test_pairs, sizes=(50, 200))

Circuits are known only after the scores, so selection and evaluation are one experiment. Random circuits of
equal size need no scores: `Circuit.grown`, evaluated by `CircuitValues`.

Border: pairs in, labelled arrays out. Torch is imported when it runs.

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
from .experiment import EdgeExperiment, concatenated, labels, one_length
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
    """Selects circuits of several sizes by edge scores, and measures held-out pairs in runs of each circuit.

    `EdgeExperiment.pairs` are the held-out pairs.
    """

    chosen_on: tuple[Pair, ...]
    """Pairs on which edges are scored to select the circuits."""
    sizes: tuple[int, ...]
    """Numbers of edges of the circuits, ascending."""
    method: Method = "EAP-IG-inputs"
    """Method that estimates the scores; methods.py defines the methods."""
    steps: int = 5
    """Number of steps of integrated gradients in the scores."""
    selection: Literal["top", "greedy"] = "top"
    """"top" takes the edges of largest |score|; "greedy" grows from the logits (`Circuit.greedy`)."""
    minimal: bool = False
    """Whether to also run each circuit without each single edge, which measures minimality."""
    by_position: bool = False
    """Whether each position has edges of its own; needs prompts of one length."""

    name: ClassVar[str] = "selected_circuits"
    version: ClassVar[int] = 1
    outputs: ClassVar[Mapping[str, Output]] = {
        "chosen": Output(("size", "position?", *AXES), "1", "1 for an edge of the circuit, else 0"),
        "value": Output(("size", "pair"), "<unit>", "metric of the circuit: all other edges are left out"),
        "complement": Output(
            ("size", "pair"), "<unit>", "metric of the complement: the circuit's edges are left out"
        ),
        "without": Output(
            ("size", "position?", *AXES),
            "<unit>",
            "metric of the circuit without this edge, mean over pairs",
            is_optional=True,
        ),
        "clean": Output(("pair",), "<unit>", "metric of the full model"),
        "empty": Output(("pair",), "<unit>", "metric where every edge is left out"),
    }

    def params(self) -> dict[str, Any]:
        """Fields that enter the key of results: all except the sizes, which are labels of cells."""
        # by_position=False is left out, so that circuits without positions keep their keys.
        left_out = {"sizes"} if self.by_position else {"sizes", "by_position"}
        fields = {name: value for name, value in super().params().items() if name not in left_out}
        return {**fields, "chosen_on": [pair.canonical() for pair in self.chosen_on]}

    def outputs_on(self, config: Architecture) -> Mapping[str, Output]:
        """Outputs in the unit of the metric."""
        left_out = () if self.by_position else ("position?",)
        dims = {
            name: tuple(dim.rstrip("?") for dim in output.dims if dim not in left_out)
            for name, output in self.outputs.items()
        }
        return {
            name: Output(dims[name], output.unit if name == "chosen" else self.unit, output.long_name)
            for name, output in self.outputs.items()
            if self.minimal or name != "without"
        }

    @property
    def scores(self) -> EdgeScores:
        """Experiment whose scores select the edges."""
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
        """Check the fields against a model, as `EdgeExperiment.check`.

        Raises:
            StageError: Sizes are missing, do not ascend or exceed the graph, or the selection is unknown.
            PromptError: `by_position` is set, and prompts have several lengths.
        """
        layout = super().check(config)
        self.scores.check(config)
        positions = one_length((*self.chosen_on, *self.pairs)) if self.by_position else None
        n_edges = len(Circuit.whole(layout, positions))
        if not self.sizes or sorted(set(self.sizes)) != list(self.sizes) or not 1 <= self.sizes[0] <= n_edges:
            raise StageError(
                f"expected sizes of circuits in ascending order, each at least 1 edge, found {self.sizes}"
            )
        if self.sizes[-1] > n_edges:
            raise StageError(
                f"expected sizes of at most {n_edges} edges, all that the graph has, found {self.sizes[-1]}"
            )
        if self.selection not in ("top", "greedy"):
            raise StageError(f"expected selection to be 'top' or 'greedy', found {self.selection!r}")
        return layout

    def cells(self, config: Architecture) -> Sequence[CellLabels]:
        """One cell per size, smallest first; raises the errors of `check`."""
        self.check(config)
        return [{"size": size} for size in self.sizes]

    def prepare(self, model: Model) -> Any:
        """(model, edge scores on the pairs `chosen_on`), which all sizes share."""
        return model, self.scores.dataset(model, {}, ())["score"].values

    def dataset(self, prepared: Any, cell: CellLabels, measured: Sequence[Any]) -> xr.Dataset:
        """Circuit of one size, with its metrics, its complement's and, if `minimal`, all without one edge."""
        import xarray as xr

        from .runs import CircuitRuns

        model, scores = prepared
        layout, declared = self.check(model.config), self.outputs_on(model.config)
        select = Circuit.top if self.selection == "top" else Circuit.greedy
        circuit = select(layout, scores, cell["size"])
        nothing = Circuit(layout, np.zeros_like(circuit.chosen))
        # One batch of masks for everything of this size: the pairs' clean runs are computed once.
        circuits = [circuit, ~circuit, nothing]
        reduced = [item for _, item in without_each(circuit)] if self.minimal else []
        runs = CircuitRuns(model, layout, self.pairs, self.alternative, self.seed, self.memory)
        values = runs.values(np.stack([item.chosen for item in (*circuits, *reduced)]))
        variables: dict[str, Any] = {
            "chosen": circuit.chosen.astype(np.int8)[None],
            "value": values[:1],
            "complement": values[1:2],
            "clean": runs.clean,
            "empty": values[2],
        }
        if self.minimal:
            # Boolean indexing visits edges in the order of np.nonzero, in which `without_each` lists them.
            without = np.full(circuit.chosen.shape, np.nan)
            without[circuit.chosen] = values[len(circuits) :].mean(1)
            variables["without"] = without[None]
        return xr.Dataset(
            {name: declared[name].variable(item) for name, item in variables.items()},
            coords={**labels(layout), "size": [cell["size"]]},
        )

    def joined(self, parts: Sequence[xr.Dataset]) -> xr.Dataset:
        """Cells of all sizes, concatenated along `size`."""
        return concatenated(parts, "size")
