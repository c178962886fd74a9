"""Which edges between heads and MLPs does a task need? Circuit discovery.

Every edge of the model's graph is scored by gradients (stages/circuits/methods.py) and left out by itself,
exactly (forward/edges/effects.py), on some pairs of a task. The edges of largest |score| are the circuit; on
other pairs it is run with every other edge carrying what its source adds in the corrupted prompt
(stages/circuits/evaluation.py), beside random circuits of as many edges, grown from the logits down.

Defaults: copying of random tokens, and on shipped models facts. Faithfulness is the share of the metric's
difference between the model and no edge at all that is left, not clipped. Of a task that the model does not
do nothing is claimed. By position edges are told apart by where they are read, in pairs of one length; then
exact effects are not told, as each position would cost as much as all of them together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ...stages.circuits.circuit import Circuit
from ...stages.circuits.experiment import EdgeExperiment, one_length
from ...stages.circuits.scores import EdgeEffects, EdgeScores
from ...stages.circuits.selected import SelectedCircuits
from ..claim import Claim
from ..labelled import labelled
from ..settings import CircuitSettings, Count, Natural, setting
from ..views import CircuitDrawing, Data, Figure, Heatmap, Table, View
from ..workflow import Nodes
from .tasks import CircuitWorkflow

if TYPE_CHECKING:
    from ...store.arrays import Floats

__all__ = ["CircuitDiscovery", "CircuitDiscoverySettings"]


@dataclass(frozen=True)
class CircuitDiscoverySettings(CircuitSettings):
    """What `--set` can change."""

    size: Natural = setting(0, "edges of the circuit; 0: one in ten of all there are")
    by_position: bool = setting(
        False, "whether edges are told apart by position; for tasks whose prompts have one length"
    )
    listed: Count = setting(25, "edges in the table, the largest |score| first")
    drawn: Count = setting(60, "edges that are drawn, of those that lead from the input to the logits")


class CircuitDiscovery(CircuitWorkflow):
    """Circuits of tasks and their faithfulness."""

    name = "circuit_discovery"
    question = "Which edges between heads and MLPs does a task need?"
    needs = "attention"
    done_node = "circuit"
    settings_type = CircuitDiscoverySettings
    settings: CircuitDiscoverySettings

    def positions(self, task: str) -> int | None:
        """Number of positions that edges of a task distinguish; None without by_position."""
        return one_length(sum(self.pairs[task], ())) if self.settings.by_position else None

    def edges(self, task: str) -> int:
        """Number of edges in the graph of a task, counted at every position with by_position."""
        return len(Circuit.whole(self.layout, self.positions(task)))

    def size(self, task: str) -> int:
        """Number of edges of the circuit: the setting, else a tenth of all edges and at least one."""
        return self.settings.size or max(1, self.edges(task) // 10)

    def plan(self) -> Nodes:
        """Of each task the scores, the exact effects, the circuit on other pairs, and random ones on
        these."""
        nodes: Nodes = {}
        for task in self.tasks:
            chosen_on, scored = self.pairs[task]
            circuit = SelectedCircuits(
                chosen_on=chosen_on,
                pairs=scored,
                sizes=(self.size(task),),
                selection=self.settings.selection,
                by_position=self.settings.by_position,
                **self.scoring,
            )
            experiments: dict[str, EdgeExperiment] = {
                "scores": EdgeScores(pairs=chosen_on, by_position=self.settings.by_position, **self.scoring),
                "circuit": circuit,
                **self.grown(task, (self.size(task),), self.positions(task)),
            }
            if not self.settings.by_position:
                experiments["effects"] = EdgeEffects(pairs=chosen_on)
            for experiment in experiments.values():
                experiment.check(self.subject.config)
            nodes |= {f"{task}_{name}": self.on_model(each) for name, each in experiments.items()}
        return nodes

    def circuit(self, task: str) -> Circuit:
        """Circuit of a task."""
        return Circuit(self.layout, self.result(f"{task}_circuit")["chosen"].values[0] > 0)

    def faithful(self, task: str) -> Floats:
        """Percent of a task that its circuit keeps, [pair]."""
        result = self.result(f"{task}_circuit").load()
        clean, empty = (result[name].values for name in ("clean", "empty"))
        kept: Floats = 100 * (result["value"].values[0] - empty) / float((clean - empty).mean())
        return kept

    def claim(self, task: str) -> Claim:
        """What the circuit of a task keeps of it on held-out pairs, beside random ones."""
        text = f"{self.size(task)} of {self.edges(task)} edges keep what the model does in {task}"
        of, seed = "random circuits of as many edges", self.settings.seed
        kept, random = self.faithful(task), self.random_kept(task)
        return Claim.against(text, kept, random, of, unit="%", held_out=True, seed=seed)

    def views(self) -> Iterator[View]:
        """What is claimed; each task's circuit, drawn and as a table of edges."""
        told = {task: self.document(task) for task in self.tasks}
        yield Data(
            json={
                **self.subject.about,
                "edges_of_the_model": int(self.layout.edges.sum()),
                "circuits": told,
            }
        )
        for task in self.tasks:
            yield self._table(task, told[task])
            by_position = [] if self.positions(task) is None else [self._map(task)]
            yield from by_position
            yield Figure(
                name=f"circuit_discovery_{task}",
                title=f"What {self.subject.name} needs for {task}",
                caption=f"{told[task]['faithfulness_percent']:.0f} % of the task is kept",
                panels=(self._drawing(task), *by_position, *([self.findings] if self.done else [])),
                columns=1,
            )

    def document(self, task: str) -> dict[str, Any]:
        """A task's circuit in numbers, for tables and JSON."""
        scores = self.result(f"{task}_scores")["score"].values
        circuit, every = self.circuit(task), Circuit.whole(self.layout, self.positions(task)).chosen
        effects = None
        if not self.settings.by_position:
            effects = self.result(f"{task}_effects")["effect"].mean("pair").values
        places = [tuple(map(int, place)) for place in np.argwhere(circuit.chosen)]
        order = np.argsort(-np.abs(scores[circuit.chosen]), kind="stable").tolist()
        claim = self.claim(task)
        return {
            "circuit": circuit.to_json(),
            "edges_there_are": self.edges(task),
            "pruned_edges": len(circuit.pruned()),
            "faithfulness_percent": claim.effect,
            "faithfulness_interval_95": claim.spread,
            "random_faithfulness_percent": claim.null.values,
            **(
                {}
                if effects is None
                else {"scores_and_exact_effects": _agreement(scores[every], effects[every])}
            ),
            "edges": [
                {
                    "edge": self.layout.name(*place[-2:]),
                    **({} if len(place) == 2 else {"position": place[0]}),
                    "score": float(scores[place]),
                    **({} if effects is None else {"exact_effect": float(effects[place])}),
                }
                for place in (places[number] for number in order)
            ],
        }

    def _table(self, task: str, told: dict[str, Any]) -> Table:
        shown = min(self.settings.listed, len(told["edges"]))
        unit = self.result(f"{task}_scores")["score"].attrs["units"]
        return Table.of(
            told["edges"][:shown],
            ("edge", "edge"),
            *([("position", "position", "d")] if self.settings.by_position else []),
            ("score", "score", "+.4f"),
            *([] if self.settings.by_position else [("exact effect", "exact_effect", "+.4f")]),
            title=f"{task}: {shown} of the circuit's {len(told['edges'])} edges, the largest |score| first",
            caption=f"{_of(told)}. Estimated (score) and exact change of right over wrong answer, in {unit}, "
            "where this edge alone is left out; mean over the pairs edges were chosen on",
            sources=tuple(name for name in self.nodes if name.startswith(f"{task}_")),
        )

    def _drawing(self, task: str) -> CircuitDrawing:
        scores, found = self.result(f"{task}_scores")["score"].values, self.circuit(task).pruned()
        if self.settings.by_position:  # an edge as wide as at the position where it has the largest score
            held = np.where(found.chosen, scores, 0.0)
            largest = np.abs(held).argmax(0, keepdims=True)
            scores = np.take_along_axis(held, largest, 0)[0]
        pruned = found.anywhere
        masked = np.where(pruned.chosen, scores, 0.0)
        shown = Circuit.top(self.layout, masked, min(self.settings.drawn, len(pruned))) & pruned
        names = [name.partition("->") for name in shown.edges]
        columns, rows = np.nonzero(shown.chosen.T)
        return CircuitDrawing(
            title=f"{task}: the circuit",
            caption=f"the strongest {len(shown)} of {len(pruned)} edges from the input to the logits",
            upstream=tuple(source for source, _, _ in names),
            downstream=tuple(destination for _, _, destination in names),
            weights=scores[rows, columns],
            weight_name="|score|",
            n_layers=self.layout.num_layers,
            n_heads=self.layout.num_heads,
        )

    def _map(self, task: str) -> Heatmap:
        """How much of the circuit is read where: |score| of its edges by layer of what reads and position."""
        scores, circuit = self.result(f"{task}_scores")["score"].values, self.circuit(task)
        held = np.where(circuit.chosen, np.abs(scores), 0.0).sum(1)
        layers = [self.layout.layer_of(column) for column in range(held.shape[1])]
        summed = np.zeros((self.layout.num_layers + 1, len(held)))
        np.add.at(summed, layers, held.T)
        names = [*map(str, range(self.layout.num_layers)), "logits"]
        unit = self.result(f"{task}_scores")["score"].attrs["units"]
        return Heatmap.of(
            labelled(summed, "|score| of the circuit's edges", unit, read_in=names, position=None),
            f"{task}: where the circuit reads",
            "sum of |score| over the circuit's edges, by the layer that reads and the position it reads at",
            sources=(f"{task}_scores", f"{task}_circuit"),
        )


def _agreement(scores: Floats, effects: Floats) -> dict[str, float | None]:
    """How scores of all edges go with their exact effects: correlation of numbers and of ranks, the largest
    difference, and the share of signs that agree among the tenth of largest effect."""
    ranks = [np.argsort(np.argsort(each)) for each in (scores, effects)]
    strongest = np.argsort(-np.abs(effects), kind="stable")[: max(1, len(effects) // 10)]
    signs = np.sign(scores[strongest]) == np.sign(effects[strongest])
    return {
        "correlation": _correlation(scores, effects),
        "rank_correlation": _correlation(*ranks),
        "largest_difference": float(np.abs(scores - effects).max()),
        "signs_that_agree": float(signs.mean()),
    }


def _correlation(one: Any, other: Any) -> float | None:
    if min(np.ptp(one), np.ptp(other)) == 0:
        return None
    return float(np.corrcoef(one, other)[0, 1])


def _of(told: dict[str, Any]) -> str:
    """Faithfulness of a circuit, and the agreement of scores with exact effects, in a sentence."""
    kept = f"{told['faithfulness_percent']:.0f} % of the task is kept"
    if "scores_and_exact_effects" not in told:
        return kept
    agreement = told["scores_and_exact_effects"]["correlation"]
    said = "not to be told" if agreement is None else f"{agreement:.2f}"
    return f"{kept}; over all edges of the model, scores and exact effects correlate {said}"
