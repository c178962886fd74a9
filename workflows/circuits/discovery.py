"""Which edges between heads and MLPs does a task need? Circuit discovery.

On some pairs of a task, every edge of the model's graph is scored by gradients (stages/circuits/methods.py),
and the exact effect of ablating it alone is measured (forward/edges/effects.py). The edges with the largest
|score| form the circuit. On held-out pairs the circuit is run with every other edge corrupted: it carries the
output of its source in the corrupted prompt (stages/circuits/evaluation.py). Null distribution: random
circuits with as many edges, grown from the logits down.

In a large model the exact effects are left out: it has 100,000 edges and more, and each costs a run.

Faithfulness is (circuit - empty) / (model - empty) in the task's metric, not clipped, where "empty" is the
model with every edge corrupted. Nothing is claimed of a task that the model does not do. Default tasks:
copying of random tokens and facts for models that ship with mizarr, indirect objects (IOI) and years
(greater_than) for others.

With `by_position` an edge at one position is distinct from the same edge at another, for pairs of one length.
Exact effects are left out then, too, as every position would cost as many runs as the whole graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from ...stages.circuits.circuit import Circuit
from ...stages.circuits.experiment import EdgeExperiment, one_length
from ...stages.circuits.scores import EdgeEffects, EdgeScores
from ...stages.circuits.selected import SelectedCircuits
from ...stages.forward.models.files import SHIPPED
from ...store.errors import ConfigError
from ..claim import Claim
from ..labelled import labelled
from ..material.sizes import affordable, intervention_operations
from ..settings import CircuitSettings, Count, Natural, setting
from ..views import CircuitDrawing, Data, Figure, Heatmap, Table, View
from ..workflow import Nodes
from .tasks import CIRCUIT_RUN, FORWARD_AND_BACKWARD, NAMES, CircuitWorkflow

if TYPE_CHECKING:
    from ...store.arrays import Floats

__all__ = ["CircuitDiscovery", "CircuitDiscoverySettings"]


@dataclass(frozen=True)
class CircuitDiscoverySettings(CircuitSettings):
    """Settings of the workflow `circuit_discovery`: the tasks, how edges are scored, and the size of the
    circuit. Raises ConfigError for both `effects` and `by_position`."""

    size: Natural = setting(0, "number of edges of the circuit; 0: a tenth of all edges")
    by_position: bool = setting(
        False, "score edges separately at each position; for tasks whose prompts have one length"
    )
    effects: bool | None = setting(
        None,
        "measure the exact effect of every edge, one run each; none: if the model is small enough, and "
        "by_position is not set",
    )
    listed: Count = setting(25, "edges listed in the table, largest |score| first")
    drawn: Count = setting(60, "edges drawn, among those on a path from the input to the logits")

    def __post_init__(self) -> None:
        if self.effects and self.by_position:
            raise ConfigError(
                "expected effects=true or by_position=true, found both, which would take a run for every "
                "edge at every position; leave one out"
            )


class CircuitDiscovery(CircuitWorkflow):
    """Workflow that finds a circuit for each task: scores edges by gradients, selects a circuit, and measures
    its faithfulness on held-out pairs."""

    name = "circuit_discovery"
    question = "Which edges between heads and MLPs does a task need?"
    needs = "attention"
    done_node = "circuit"
    settings_type = CircuitDiscoverySettings
    settings: CircuitDiscoverySettings

    general_tasks = ("ioi", "greater_than")

    @property
    def passes_per_pair(self) -> float:
        """See `TaskWorkflow`: gradients at every step, and runs of the circuit and of random circuits."""
        return FORWARD_AND_BACKWARD * self.settings.steps + CIRCUIT_RUN * (3 + self.settings.controls)

    def positions(self, task: str) -> int | None:
        """Number of positions at which a task's edges are distinct; None if edges are the same at every
        position."""
        # One length for both halves: edges chosen at positions of one half are run at those of the other.
        return one_length(sum(self.pairs[task], ())) if self.settings.by_position else None

    def edges(self, task: str) -> int:
        """Number of edges in the graph of a task; with the setting by_position, each edge counts once per
        position."""
        return len(Circuit.whole(self.layout, self.positions(task)))

    def size(self, task: str) -> int:
        """Number of edges of a task's circuit: the setting `size`, else a tenth of the graph's edges, at
        least 1."""
        return self.settings.size or max(1, self.edges(task) // 10)

    def plan(self) -> Nodes:
        """Nodes of each task: scores and exact effects of edges, and runs of the circuit and of random
        circuits on held-out pairs."""
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
            if self.has_effects:
                experiments["effects"] = EdgeEffects(pairs=chosen_on)
            nodes |= self.checked_nodes(task, experiments)
        return nodes

    @cached_property
    def has_effects(self) -> bool:
        """Whether the exact effect of every edge is measured: the setting, or by default for models that ship
        with mizarr, and where the model's size allows one run for each edge and pair (material/sizes.py)."""
        settings, config = self.settings, self.subject.config
        if settings.effects is not None or self.subject.files.name in SHIPPED:
            return not settings.by_position if settings.effects is None else settings.effects
        lengths = [len(pair.clean) for chosen_on, _ in self.pairs.values() for pair in chosen_on]
        one_run = intervention_operations(config, float(np.mean(lengths)))
        n_runs = self.num_edges * len(lengths)
        return not settings.by_position and affordable(one_run * n_runs, 1, least=0) > 0

    def circuit(self, task: str) -> Circuit:
        """Circuit of a task: the selected edges, as `SelectedCircuits` stored them."""
        return Circuit(self.layout, self.result(f"{task}_circuit")["chosen"].values[0] > 0)

    def faithful(self, task: str) -> Floats:
        """Faithfulness of a task's circuit in percent, [pair]: 100 is the whole model, 0 the model with every
        edge corrupted. All pairs share one denominator: the mean difference between these two models."""
        result = self.result(f"{task}_circuit").load()
        clean, empty = (result[name].values for name in ("clean", "empty"))
        # One denominator for all pairs, as in `faithfulness`: that of a single pair may be near 0.
        faithfulness: Floats = 100 * (result["value"].values[0] - empty) / float((clean - empty).mean())
        return faithfulness

    def claim(self, task: str) -> Claim:
        """Claim about the faithfulness of a task's circuit on held-out pairs, against random circuits."""
        text = f"a circuit of {self.size(task)} of {self.edges(task)} edges preserves {task} (faithfulness)"
        of, seed = "random circuits with as many edges", self.settings.seed
        faithful, random = self.faithful(task), self.random_kept(task)
        return Claim.against(text, faithful, random, of, unit="%", held_out=True, seed=seed)

    def views(self) -> Iterator[View]:
        """Views of each task: a table of the circuit's edges, a heatmap of positions with the setting
        `by_position`, and a drawing."""
        documents = {task: self.document(task) for task in self.tasks}
        yield Data(
            json={
                **self.subject.about,
                "edges_of_the_model": self.num_edges,
                "circuits": documents,
            }
        )
        for task in self.tasks:
            yield self._table(task, documents[task])
            by_position = [] if self.positions(task) is None else [self._map(task)]
            yield from by_position
            yield Figure(
                name=f"circuit_discovery_{task}",
                title=f"Circuit of {self.subject.name} for {task}",
                caption="Faithfulness: how much of the model's behaviour on held-out pairs of prompts the "
                "circuit keeps when all other edges are corrupted. It is "
                f"{documents[task]['faithfulness_percent']:.0f} % (100 %: as the whole model; 0 %: as with "
                "every edge corrupted).",
                panels=(self._drawing(task), *by_position, *([self.findings] if self.done else [])),
                columns=1,
            )

    def document(self, task: str) -> dict[str, Any]:
        """JSON document of a task's circuit: its edges with scores and exact effects, and its faithfulness;
        tables read it too."""
        scores = self.result(f"{task}_scores")["score"].values
        circuit, claim = self.circuit(task), self.claim(task)
        effects, agreement = None, {}
        if self.has_effects:
            in_graph = Circuit.whole(self.layout).chosen
            effects = self.result(f"{task}_effects")["effect"].mean("pair").values
            agreement = {"scores_and_exact_effects": _agreement(scores[in_graph], effects[in_graph])}
        # Each row: (position,) source, destination. In the same order as the boolean index below.
        indices = np.argwhere(circuit.chosen)
        largest_first = np.argsort(-np.abs(scores[circuit.chosen]), kind="stable")
        edges = []
        for index in map(tuple, indices[largest_first].tolist()):
            edge: dict[str, Any] = {"edge": self.layout.name(*index[-2:])}
            if self.settings.by_position:
                edge["position"] = index[0]
            edge["score"] = float(scores[index])
            if effects is not None:
                edge["exact_effect"] = float(effects[index])
            edges.append(edge)
        return {
            "circuit": circuit.to_json(),
            "edges_there_are": self.edges(task),
            "pruned_edges": len(circuit.pruned()),
            "faithfulness_percent": claim.effect,
            "faithfulness_interval_95": claim.spread,
            "random_faithfulness_percent": claim.null.values,
            **agreement,
            "edges": edges,
        }

    def _table(self, task: str, document: dict[str, Any]) -> Table:
        """Table of the edges of a task's circuit. document: the task's JSON document."""
        shown = min(self.settings.listed, len(document["edges"]))
        unit = self.result(f"{task}_scores")["score"].attrs["units"]
        measured = "; exact effect: the measured change" if self.has_effects else ""
        return Table.of(
            document["edges"][:shown],
            ("edge", "edge"),
            *([("position", "position", "d")] if self.settings.by_position else []),
            ("score", "score", "+.4f"),
            *([("exact effect", "exact_effect", "+.4f")] if self.has_effects else []),
            title=f"{task}: {shown} of the circuit's {len(document['edges'])} edges, largest |score| first",
            caption=f"One row per edge, from the output of one node to the input of a later one. {NAMES} "
            f"{_summary(document)}. Score: gradient estimate of how much the metric changes, in {unit}, when "
            f"this edge alone is corrupted{measured}. Mean over the pairs on which edges were chosen.",
            sources=tuple(name for name in self.nodes if name.startswith(f"{task}_")),
        )

    def _drawing(self, task: str) -> CircuitDrawing:
        """Drawing of the edges with the largest |score| on paths from the input to the logits."""
        scores, circuit = self.result(f"{task}_scores")["score"].values, self.circuit(task).pruned()
        if self.settings.by_position:
            # An edge is drawn once, with its score at the position of the largest |score|.
            by_position = np.where(circuit.chosen, scores, 0.0)
            largest = np.abs(by_position).argmax(0, keepdims=True)
            scores = np.take_along_axis(by_position, largest, 0)[0]
        pruned = circuit.anywhere
        masked = np.where(pruned.chosen, scores, 0.0)
        # Where edges of the circuit score exactly 0, `top` may pick edges outside it: hence `& pruned`.
        shown = Circuit.top(self.layout, masked, min(self.settings.drawn, len(pruned))) & pruned
        names = [name.partition("->") for name in shown.edges]
        # Transposed, as `edges` lists its names by destination first.
        columns, rows = np.nonzero(shown.chosen.T)
        return CircuitDrawing(
            title=f"{task}: the circuit",
            caption="Each point: a head or MLP, by layer, with the input at the bottom and the logits on "
            f"top. Each line: an edge of the circuit. Drawn are the {len(shown)} edges with the largest "
            f"|score| of the {len(pruned)} that are on a path from the input to the logits.",
            upstream=tuple(source for source, _, _ in names),
            downstream=tuple(destination for _, _, destination in names),
            weights=scores[rows, columns],
            weight_name="|score|",
            n_layers=self.layout.num_layers,
            n_heads=self.layout.num_heads,
        )

    def _map(self, task: str) -> Heatmap:
        """Heatmap of the sum of |score| over the circuit's edges, by layer of the destination and
        position."""
        scores, circuit = self.result(f"{task}_scores")["score"].values, self.circuit(task)
        by_destination = np.where(circuit.chosen, np.abs(scores), 0.0).sum(1)
        layers = [self.layout.layer_of(column) for column in range(by_destination.shape[1])]
        summed = np.zeros((self.layout.num_layers + 1, len(by_destination)))
        # `np.add.at` sums entries of equal layer; `summed[layers] += ...` would keep only the last.
        np.add.at(summed, layers, by_destination.T)
        names = [*map(str, range(self.layout.num_layers)), "logits"]
        unit = self.result(f"{task}_scores")["score"].attrs["units"]
        return Heatmap.of(
            labelled(summed, "|score| of the circuit's edges", unit, read_in=names, position=None),
            f"{task}: where the circuit reads",
            "Each cell: sum of |score| over the edges of the circuit that end in one layer (row) at one "
            "token position (column).",
            sources=(f"{task}_scores", f"{task}_circuit"),
        )


def _agreement(scores: Floats, effects: Floats) -> dict[str, float | None]:
    """Agreement of scores with exact effects over all edges: Pearson and rank correlation, the largest
    difference, and the share of equal signs among the tenth of edges with the largest |effect|."""
    # Argsort of an argsort gives ranks.
    ranks = [np.argsort(np.argsort(values)) for values in (scores, effects)]
    strongest = np.argsort(-np.abs(effects), kind="stable")[: max(1, len(effects) // 10)]
    signs = np.sign(scores[strongest]) == np.sign(effects[strongest])
    return {
        "correlation": _correlation(scores, effects),
        "rank_correlation": _correlation(*ranks),
        "largest_difference": float(np.abs(scores - effects).max()),
        "signs_that_agree": float(signs.mean()),
    }


def _correlation(x: Any, y: Any) -> float | None:
    """Pearson correlation; None if either is constant."""
    if min(np.ptp(x), np.ptp(y)) == 0:
        return None
    return float(np.corrcoef(x, y)[0, 1])


def _summary(document: dict[str, Any]) -> str:
    """Faithfulness of a circuit, and the correlation of scores with exact effects, as a sentence."""
    faithfulness = f"Faithfulness {document['faithfulness_percent']:.0f} %"
    if "scores_and_exact_effects" not in document:
        return faithfulness
    correlation = document["scores_and_exact_effects"]["correlation"]
    value = "undefined, as one of them is constant" if correlation is None else f"{correlation:.2f}"
    return f"{faithfulness}; correlation of scores with exact effects over all edges of the model: {value}"
