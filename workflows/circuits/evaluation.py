"""Faithfulness, completeness and minimality: how much of a task does a circuit do, and which edges does it
need?

Circuits of growing size are selected on some pairs of a task and run on held-out pairs with every other edge
ablated (stages/circuits/evaluation.py):
- faithfulness by share of edges, and its areas CPR and CMD of the Mechanistic Interpretability Benchmark
  (Mueller et al. 2025, "MIB");
- completeness: faithfulness of the model without the circuit;
- minimality: change of faithfulness when one more edge is ablated.

Null distribution: random circuits of the same sizes, grown from the logits down.
Nothing is claimed of a task that the model does not do. Default tasks: copying of random tokens and facts for
models that ship with mizarr, indirect objects (IOI) for others. Default sizes are the benchmark's, or fewer
for a large model. An ablated edge carries the output of its source in the corrupted prompt.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from ...stages.circuits.circuit import Circuit
from ...stages.circuits.evaluation import areas, faithfulness
from ...stages.circuits.experiment import EdgeExperiment
from ...stages.circuits.pairs import Alternative
from ...stages.circuits.selected import SelectedCircuits
from ...store.errors import ConfigError
from ..claim import Claim
from ..material.sizes import affordable
from ..settings import CircuitSettings, Count, Share, setting
from ..views import Data, Figure, Line, Lines, Table, View
from ..workflow import Nodes
from .tasks import CIRCUIT_RUN, FORWARD_AND_BACKWARD, NAMES, PAIRS, CircuitWorkflow

if TYPE_CHECKING:
    import xarray as xr

    from ...store.arrays import Floats

__all__ = ["CircuitEvaluation", "CircuitEvaluationSettings"]

SHARES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Default sizes of circuits, as shares of all edges: those of the Mechanistic Interpretability Benchmark."""
FEW_SHARES = (0.005, 0.05, 0.5)
"""Default sizes for a large model."""
MINIMAL_SHARE = 0.02
"""Largest default size of the circuit in minimality runs, as a share of all edges."""
CARRIED: dict[Alternative, str] = {
    "corrupted": "the output of their source in the corrupted prompt",
    "zero": "zero instead of the output of their source",
    "mean": "the mean output of their source over the clean prompts",
    "resampled": "the output of their source in another clean prompt",
}
"""What an ablated edge carries, for captions, by value of the setting `alternative`."""


@dataclass(frozen=True)
class CircuitEvaluationSettings(CircuitSettings):
    """Settings of the workflow `circuit_evaluation`: the tasks, how edges are scored and ablated, and the
    sizes of circuits.

    Raises:
        ConfigError: `shares` has fewer than two, does not ascend, or begins at 0; or `share` is 0.
    """

    alternative: Alternative = setting(
        "corrupted", "values of ablated edges; mean and resampled are over the clean prompts of the pairs"
    )
    shares: tuple[Share, ...] = setting(
        (),
        "sizes of circuits as shares of all edges, ascending; none: ten from 0.001 to 1, or three for a "
        "large model",
    )
    share: Share | None = setting(
        None,
        "size, as a share of all edges, of the circuit that is run without each of its edges; none: 0.02, or "
        "less for a large model",
    )
    listed: Count = setting(
        10, "number of edges listed with the largest, and with the smallest, effect on the circuit"
    )

    def __post_init__(self) -> None:
        is_ascending = list(self.shares) == sorted(set(self.shares))
        if self.shares and (len(self.shares) < 2 or not is_ascending or self.shares[0] == 0):
            raise ConfigError(
                f"expected shares to be two or more ascending numbers above 0, found {self.shares}; set for "
                "example shares=0.01,0.1,1"
            )
        if self.share == 0:
            raise ConfigError(
                "expected share, the size of the circuit that is run without each of its edges, above 0, "
                "found 0; set for example share=0.02"
            )


class CircuitEvaluation(CircuitWorkflow):
    """Workflow that measures how faithful circuits of growing size are, and which edges of one circuit a task
    needs."""

    name = "circuit_evaluation"
    question = "How much of a task does a circuit do alone, and which of its edges does it need?"
    needs = "attention"
    done_node = "circuits"
    settings_type = CircuitEvaluationSettings
    settings: CircuitEvaluationSettings

    @property
    def passes_per_pair(self) -> float:
        """See `TaskWorkflow`: gradients at every step, and runs of circuits and random circuits of each
        size."""
        n_circuits = len(self.shares_run) * (1 + self.settings.controls)
        return FORWARD_AND_BACKWARD * self.settings.steps + CIRCUIT_RUN * n_circuits

    @cached_property
    def shares_run(self) -> tuple[float, ...]:
        """Sizes of circuits as shares of all edges: the setting, or by default SHARES or, where their random
        circuits are not affordable (material/sizes.py), FEW_SHARES."""
        n_runs = len(self.tasks) * len(SHARES) * (1 + self.settings.controls) * PAIRS
        is_small = affordable(CIRCUIT_RUN * self.pass_operations * n_runs, 1, least=0) > 0
        return self.settings.shares or (SHARES if is_small else FEW_SHARES)

    @cached_property
    def minimal_size(self) -> int:
        """Number of edges of the circuit in minimality runs: from the setting, or by default MINIMAL_SHARE of
        all edges, limited by the cost of the model; at least 1."""
        if self.settings.share is not None:
            return max(1, self._edges(self.settings.share))
        per_edge = len(self.tasks) * self.n_pairs * CIRCUIT_RUN * self.pass_operations
        return affordable(per_edge, max(1, self._edges(MINIMAL_SHARE)), least=20)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of edges of the evaluated circuits, distinct and ascending; shares of less than one edge
        are left out."""
        return tuple(sorted({size for share in self.shares_run if (size := self._edges(share))}))

    def _edges(self, share: float) -> int:
        """Number of edges in a share of the graph's edges, rounded down."""
        return int(share * self.num_edges)

    def plan(self) -> Nodes:
        """Nodes of each task: runs of circuits and random circuits of every size, and of one circuit minus
        each of its edges."""
        if len(self.sizes) < 2:
            raise ConfigError(
                f"expected shares that give circuits of two or more sizes in a graph of {self.num_edges} "
                f"edges, found the sizes {self.sizes}; add larger shares"
            )
        nodes: Nodes = {}
        for task in self.tasks:
            chosen_on, scored = self.pairs[task]
            options: dict[str, Any] = {
                "chosen_on": chosen_on,
                "pairs": scored,
                "alternative": self.settings.alternative,
                "selection": self.settings.selection,
                **self.scoring,
            }
            experiments: dict[str, EdgeExperiment] = {
                "circuits": SelectedCircuits(sizes=self.sizes, **options),
                **self.grown(task, self.sizes, alternative=self.settings.alternative),
                "minimal": SelectedCircuits(
                    sizes=(self.minimal_size,),
                    minimal=True,
                    **options,
                ),
            }
            nodes |= self.checked_nodes(task, experiments)
        return nodes

    def curves(self, task: str) -> dict[str, Floats]:
        """Faithfulness in percent, by name: "circuit" [size]; "complement", of the model without the circuit,
        [size]; "random", of random circuits, [size, draw]."""
        circuits = self.result(f"{task}_circuits").load()
        return {
            "circuit": 100 * faithfulness(circuits),
            "complement": 100 * _complement(circuits),
            # `grown` lists random circuits by size first, then by draw.
            "random": self.random_kept(task).reshape(len(self.sizes), -1),
        }

    @property
    def shares(self) -> Floats:
        """Sizes of the evaluated circuits as shares of all edges, [size]."""
        shares: Floats = np.array(self.sizes) / self.num_edges
        return shares

    def claim(self, task: str) -> Claim:
        """Claim about the area under the faithfulness curve of a task, against that of random circuits."""
        curves = self.curves(task)
        effect, _ = areas(self.shares, curves["circuit"])
        random = [areas(self.shares, draw)[0] for draw in curves["random"].T]
        text = f"circuits of growing size preserve {task} (area under faithfulness by share of edges, CPR)"
        of = "sequences of random circuits of the same sizes"
        return Claim.against(text, effect, random, of, unit="%", held_out=True)

    def document(self, task: str) -> dict[str, Any]:
        """JSON document of a task: faithfulness by size, the areas under it, and the effect of each edge;
        tables read it too."""
        curves, minimal = self.curves(task), self.result(f"{task}_minimal").load()
        under, between = areas(self.shares, curves["circuit"] / 100)
        circuit = Circuit(self.layout, minimal["chosen"].values[0] > 0)
        # Means over pairs, as in `faithfulness`: the denominator of a single pair may be near 0.
        clean, empty = (float(minimal[name].mean()) for name in ("clean", "empty"))
        without = (minimal["without"].values[0] - empty) / (clean - empty)
        with_all = float(faithfulness(minimal)[0])
        lost = [
            {
                "edge": self.layout.name(int(s), int(d)),
                "lost_percent": 100 * (with_all - float(without[s, d])),
            }
            for s, d in np.argwhere(circuit.chosen)
        ]
        return {
            "sizes": list(self.sizes),
            "faithfulness_percent": curves["circuit"],
            "complement_percent": curves["complement"],
            "random_percent": curves["random"],
            "cpr": under,
            "cmd": between,
            "circuit": circuit.to_json(),
            "circuit_percent": 100 * with_all,
            "without_circuit_percent": 100 * float(_complement(minimal)[0]),
            "lost_without_edge": sorted(lost, key=lambda row: -abs(row["lost_percent"])),
        }

    def views(self) -> Iterator[View]:
        """Views of each task: faithfulness by size of the circuit, and a table of the edges of one circuit by
        their effect."""
        documents = {task: self.document(task) for task in self.tasks}
        yield Data(json={**self.subject.about, "evaluated": documents})
        for task in self.tasks:
            curve = self._curve(task, documents[task])
            yield curve
            yield self._table(task, documents[task])
            yield Figure(
                name=f"circuit_evaluation_{task}",
                title=f"Faithfulness of circuits of {self.subject.name} for {task}",
                caption="A circuit is a set of edges between heads, MLPs, input and logits. All edges "
                f"outside it are ablated: they carry {CARRIED[self.settings.alternative]}.",
                panels=(curve, *([self.findings] if self.done else [])),
                columns=1,
            )

    def _curve(self, task: str, document: dict[str, Any]) -> Lines:
        """Faithfulness by size of circuits, of the model without them, and of random circuits."""
        random = document["random_percent"]
        return Lines(
            title=f"{task}: faithfulness by size",
            caption="x: size of a circuit, as a share of the model's edges. y: faithfulness on held-out "
            "pairs (100 %: as the whole model; 0 %: as with every edge ablated). Curves: the circuits, and "
            "the model without them. Dashed: control, the median of random circuits of the same sizes. Area "
            f"under the circuits' curve (CPR): {document['cpr']:.3f}. Area between it and 100 % (CMD): "
            f"{document['cmd']:.3f}. Areas are over the share of edges, not its logarithm.",
            x=tuple((100 * self.shares).tolist()),
            x_name="percent of the model's edges",
            log_x=True,
            y_name="faithfulness",
            unit="%",
            lines=(
                Line("circuit", document["faithfulness_percent"], strong=True),
                Line("model without the circuit", document["complement_percent"]),
                *([Line("random circuits", np.median(random, axis=1), control=True)] if random.size else []),
            ),
            sources=tuple(name for name in (f"{task}_circuits", f"{task}_random") if name in self.nodes),
        )

    def _table(self, task: str, document: dict[str, Any]) -> Table:
        """Table of the edges with the largest and with the smallest effect on a circuit."""
        lost, listed = document["lost_without_edge"], self.settings.listed
        shown = lost if len(lost) <= 2 * listed else [*lost[:listed], *lost[-listed:]]
        return Table.of(
            shown,
            ("edge", "edge"),
            ("faithfulness lost", "lost_percent", "{:+.2f} %".format),
            title=f"{task}: a circuit of {len(lost)} edges with one of them ablated",
            caption=f"One row per edge: {_shown_edges(len(shown), len(lost), listed)}. Faithfulness lost: "
            "that of the circuit minus that of the circuit without this edge, in percentage points. "
            f"Faithfulness is {document['circuit_percent']:.1f} % for the circuit and "
            f"{document['without_circuit_percent']:.1f} % for the model without it. {NAMES}",
            sources=(f"{task}_minimal",),
        )


def _complement(circuits: xr.Dataset) -> Floats:
    """Faithfulness of the model without each circuit, [size]."""
    # `faithfulness` reads the variable "value".
    return faithfulness(circuits.drop_vars("value").rename(complement="value"))


def _shown_edges(n_shown: int, n_edges: int, listed: int) -> str:
    """Which edges of a circuit its table lists, in words for the caption."""
    if n_shown == n_edges:
        return "every edge"
    return f"the {listed} edges with the largest effect and the {listed} with the smallest"
