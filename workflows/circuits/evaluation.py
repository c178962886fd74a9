"""How much of a task does a circuit do, how much is left without it, and which of its edges does it need?

Circuits of growing size are chosen on some pairs of a task and run on others with every other edge left out
(stages/circuits/evaluation.py): faithfulness by share of edges, and its areas CPR and CMD as the Mechanistic
Interpretability Benchmark has them (Mueller et al., 2025); completeness, what the model keeps without the
circuit; minimality, what one more edge out changes. Beside them random circuits of the same sizes, grown from
the logits down.

Defaults: copying of random tokens, and on shipped models facts; the benchmark's sizes; edges left out carry
what their source adds in the corrupted prompt. Of a task that the model does not do nothing is claimed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ...stages.circuits.circuit import Circuit
from ...stages.circuits.evaluation import areas, faithfulness
from ...stages.circuits.experiment import EdgeExperiment
from ...stages.circuits.pairs import Alternative
from ...stages.circuits.selected import SelectedCircuits
from ...store.errors import ConfigError
from ..claim import Claim
from ..settings import CircuitSettings, Count, Share, setting
from ..views import Data, Figure, Line, Lines, Table, View
from ..workflow import Nodes
from .tasks import CircuitWorkflow

if TYPE_CHECKING:
    from ...store.arrays import Floats

__all__ = ["CircuitEvaluation", "CircuitEvaluationSettings"]

SHARES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""The benchmark's."""


@dataclass(frozen=True)
class CircuitEvaluationSettings(CircuitSettings):
    """What `--set` can change.

    Raises ConfigError for shares that are fewer than two, do not ascend, or begin at 0.
    """

    alternative: Alternative = setting(
        "corrupted", "what edges carry that are left out; mean and resampled: of the pairs' clean prompts"
    )
    shares: tuple[Share, ...] = setting(SHARES, "sizes of circuits, as shares of all edges, ascending")
    share: Share = setting(0.02, "that of the circuit which is run without each of its edges")
    listed: Count = setting(10, "edges listed that a circuit needs most, and least")

    def __post_init__(self) -> None:
        if len(self.shares) < 2 or list(self.shares) != sorted(set(self.shares)) or self.shares[0] == 0:
            raise ConfigError(f"expected two or more ascending shares above 0, found {self.shares}")
        if self.share == 0:
            raise ConfigError("expected a share above 0 for the circuit told, found 0")


class CircuitEvaluation(CircuitWorkflow):
    """Circuits of every size, and the edges of one circuit."""

    name = "circuit_evaluation"
    question = "How much of a task does a circuit do alone, and which of its edges does it need?"
    needs = "attention"
    done_node = "circuits"
    settings_type = CircuitEvaluationSettings
    settings: CircuitEvaluationSettings

    @property
    def sizes(self) -> tuple[int, ...]:
        """Distinct sizes in edges, ascending; shares of fewer than one edge are left out."""
        return tuple(sorted({size for share in self.settings.shares if (size := self._edges(share))}))

    def _edges(self, share: float) -> int:
        return int(share * int(self.layout.edges.sum()))

    def plan(self) -> Nodes:
        """Per task: circuits of every size, random circuits, and one circuit without each of its edges."""
        if len(self.sizes) < 2:
            raise ConfigError(
                f"expected shares that are two sizes or more of {int(self.layout.edges.sum())} edges, found "
                f"{self.sizes}"
            )
        nodes: Nodes = {}
        for task in self.tasks:
            chosen_on, scored = self.pairs[task]
            told: dict[str, Any] = {
                "chosen_on": chosen_on,
                "pairs": scored,
                "alternative": self.settings.alternative,
                "selection": self.settings.selection,
                **self.scoring,
            }
            experiments: dict[str, EdgeExperiment] = {
                "circuits": SelectedCircuits(sizes=self.sizes, **told),
                **self.grown(task, self.sizes, alternative=self.settings.alternative),
                "minimal": SelectedCircuits(
                    sizes=(max(1, self._edges(self.settings.share)),), minimal=True, **told
                ),
            }
            for experiment in experiments.values():
                experiment.check(self.subject.config)
            nodes |= {f"{task}_{name}": self.on_model(each) for name, each in experiments.items()}
        return nodes

    def curves(self, task: str) -> dict[str, Floats]:
        """Percent of a task that is kept: by circuits and by the rest [size], by random ones [size, draw]."""
        found = self.result(f"{task}_circuits").load()
        rest = found.drop_vars("value").rename(complement="value")
        return {
            "circuit": 100 * faithfulness(found),
            "complement": 100 * faithfulness(rest),
            "random": self.random_kept(task).reshape(len(self.sizes), -1),
        }

    @property
    def shares(self) -> Floats:
        """Sizes as shares of all edges."""
        found: Floats = np.array(self.sizes) / int(self.layout.edges.sum())
        return found

    def claim(self, task: str) -> Claim:
        """The area under the faithfulness of a task, beside that of random circuits."""
        curves = self.curves(task)
        effect, _ = areas(self.shares, curves["circuit"])
        random = [areas(self.shares, draw)[0] for draw in curves["random"].T]
        text = f"circuits of growing size keep what the model does in {task}, on average"
        of = "sequences of random circuits as large"
        return Claim.against(text, effect, random, of, unit="%", held_out=True)

    def document(self, task: str) -> dict[str, Any]:
        """A task in numbers, for tables and JSON."""
        curves, minimal = self.curves(task), self.result(f"{task}_minimal").load()
        under, between = areas(self.shares, curves["circuit"] / 100)
        circuit = Circuit(self.layout, minimal["chosen"].values[0] > 0)
        clean, empty = (float(minimal[name].mean()) for name in ("clean", "empty"))
        without = (minimal["without"].values[0] - empty) / (clean - empty)
        kept = float(faithfulness(minimal)[0])
        places = np.argwhere(circuit.chosen)
        lost = [
            {"edge": self.layout.name(int(s), int(d)), "lost_percent": 100 * (kept - float(without[s, d]))}
            for s, d in places
        ]
        rest = minimal.drop_vars("value").rename(complement="value")
        return {
            "sizes": list(self.sizes),
            "faithfulness_percent": curves["circuit"],
            "complement_percent": curves["complement"],
            "random_percent": curves["random"],
            "cpr": under,
            "cmd": between,
            "circuit": circuit.to_json(),
            "circuit_percent": 100 * kept,
            "without_circuit_percent": 100 * float(faithfulness(rest)[0]),
            "lost_without_edge": sorted(lost, key=lambda each: -abs(each["lost_percent"])),
        }

    def views(self) -> Iterator[View]:
        """What is claimed; faithfulness by size; the edges that one circuit needs."""
        told = {task: self.document(task) for task in self.tasks}
        yield Data(json={**self.subject.about, "evaluated": told})
        for task in self.tasks:
            curve = self._curve(task, told[task])
            yield curve
            yield self._table(task, told[task])
            yield Figure(
                name=f"circuit_evaluation_{task}",
                title=f"How much of {task} circuits of {self.subject.name} do",
                caption=f"edges left out: {self.settings.alternative}",
                panels=(curve, *([self.findings] if self.done else [])),
                columns=1,
            )

    def _curve(self, task: str, told: dict[str, Any]) -> Lines:
        random = told["random_percent"]
        return Lines(
            title=f"{task}: faithfulness by size",
            caption="areas over the share of edges, not its logarithm: under the curve of circuits "
            f"{told['cpr']:.3f} (CPR), between it and 100 % {told['cmd']:.3f} (CMD); dashed: median of "
            "random circuits",
            x=tuple((100 * self.shares).tolist()),
            x_name="percent of the model's edges",
            log_x=True,
            y_name="of the task that is kept",
            unit="%",
            lines=(
                Line("circuit", told["faithfulness_percent"], strong=True),
                Line("all but the circuit", told["complement_percent"]),
                *([Line("random circuits", np.median(random, axis=1), control=True)] if random.size else []),
            ),
            sources=tuple(name for name in (f"{task}_circuits", f"{task}_random") if name in self.nodes),
        )

    def _table(self, task: str, told: dict[str, Any]) -> Table:
        """The edges a circuit needs most and least."""
        lost, listed = told["lost_without_edge"], self.settings.listed
        shown = lost if len(lost) <= 2 * listed else [*lost[:listed], *lost[-listed:]]
        return Table.of(
            shown,
            ("edge", "edge"),
            ("lost without it", "lost_percent", "{:+.2f} %".format),
            title=f"{task}: what a circuit of {len(lost)} edges loses without one of them",
            caption=f"{_which(len(shown), len(lost), listed)}; shares of the whole task, of which the "
            f"circuit keeps {told['circuit_percent']:.1f} %, and the model without it "
            f"{told['without_circuit_percent']:.1f} %",
            sources=(f"{task}_minimal",),
        )


def _which(shown: int, all_of: int, listed: int) -> str:
    """The edges that a table shows, in words."""
    return "every edge" if shown == all_of else f"the {listed} edges it needs most and the {listed} least"
