"""Pairs of tasks for questions about circuits and paths: some that edges or senders are chosen on, others
that they are scored on.

A model claims something of a task only if it does it: the right answer is above the wrong one in more of the
pairs to score on than a coin would make it (a sign test).

Border: texts, token ids and results; loads no model and never imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from math import comb
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from ...stages.causal.controls import CHANCE
from ...stages.causal.grids.patching_metrics import LogitDifference
from ...stages.circuits.circuit import Circuit
from ...stages.circuits.evaluation import CircuitValues, faithfulness
from ...stages.circuits.experiment import EdgeExperiment
from ...stages.circuits.pairs import Pair
from ...stages.circuits.tasks.table import TASKS, task_pairs
from ...stages.forward.edges.layout import Layout
from ...stages.forward.models.files import SHIPPED
from ...store.errors import ConfigError
from ..claim import Claim
from ..material.answers import answer_pieces, encoded
from ..material.facts.fact_data import FIELDS
from ..material.facts.fact_pairs import pair_records
from ..settings import CircuitSettings, TaskSettings
from ..workflow import ModelWorkflow, Nodes

if TYPE_CHECKING:
    import xarray as xr

    from ...store import Store
    from ...store.arrays import Floats

__all__ = ["FACTS", "NAMES", "CircuitWorkflow", "TaskWorkflow", "by_sign"]

FACTS = "facts"
"""Pairs of facts: the shipped ones of one relation, or those of `data`."""
RANDOM = "random"
"""Name of what is computed of random circuits, behind that of the task."""
NAMES = "a3.h0: head 0 of layer 3; a3.h0<q>, <k>, <v>: what its queries, keys, values read; m3: its MLP."
"""What names of nodes mean, for readers of a page."""


class TaskWorkflow(ModelWorkflow):
    """A question about a model as a graph that does tasks."""

    settings: TaskSettings

    @cached_property
    def layout(self) -> Layout:
        """The model's graph. Raises ConfigError for a model whose parts are no sum."""
        return Layout.of(self.subject.config)

    @cached_property
    def tasks(self) -> tuple[str, ...]:
        """As asked, or what the model is thought to do. Raises ConfigError for a task there is not."""
        given = self.settings
        usual = ("copying", FACTS) if given.model in SHIPPED else ("copying",)
        usual = (FACTS,) if given.data else usual
        chosen = given.tasks or usual
        if given.data and FACTS not in chosen:
            raise ConfigError(
                f"expected {FACTS} among the tasks, as data names facts, found {', '.join(chosen)}"
            )
        if len(set(chosen)) < len(chosen):
            raise ConfigError(f"expected tasks that differ, found {', '.join(chosen)}")
        for task in chosen:
            if task not in (FACTS, *TASKS):
                raise ConfigError(f"no task {task!r}; there are {', '.join((FACTS, *TASKS))}")
        return chosen

    @cached_property
    def pairs(self) -> Mapping[str, tuple[tuple[Pair, ...], tuple[Pair, ...]]]:
        """Of each task those that something is chosen on, and those that it is scored on. Raises ConfigError
        for a model that is no graph, and for a task that a tokenizer leaves too few pairs of."""
        Layout.of(self.subject.config)  # a model that is none is refused before its tokenizer is asked
        count, seed, tokenizer = self.settings.pairs, self.settings.seed, self.subject.tokenizer
        found = {}
        for task in self.tasks:
            all_of = (
                self._facts(2 * count) if task == FACTS else task_pairs(tokenizer, task, 2 * count, seed=seed)
            )
            found[task] = (tuple(all_of[:count]), tuple(all_of[count:]))
        return found

    def _facts(self, count: int) -> list[Pair]:
        """Pairs of facts, of `data` or the shipped ones, told by the first pieces of their answers, where
        these differ."""
        found, data = list[Pair](), self.settings.data
        for record in pair_records(self.subject, data):
            if len(found) == count:
                break
            texts, answers = [record[name] for name in FIELDS[:2]], [record[name] for name in FIELDS[2:]]
            clean, corrupted = (tuple(encoded(self.subject, text).ids) for text in texts)
            right, wrong = (answer_pieces(self.subject, texts[0], answer)[0] for answer in answers)
            if len(clean) == len(corrupted) and right != wrong:
                found.append(Pair(clean, corrupted, LogitDifference(right, wrong)))
        if len(found) < count:
            raise ConfigError(
                f"facts: expected {count} pairs of equal length whose answers begin differently, found "
                f"{len(found)} with this tokenizer; ask for fewer: pairs={len(found) // 2}"
            )
        return found

    done_node: ClassVar[str]
    """Result that says whether the model does a task, behind the name of the task: "circuit"."""

    def is_done(self, values: xr.Dataset) -> bool:
        """Whether the model does a task, by the clean metric of pairs."""
        return by_sign(values["clean"].values) <= CHANCE

    @cached_property
    def done(self) -> list[str]:
        """Names of the tasks that the model does; claims are made about these only."""
        return [task for task in self.tasks if self.is_done(self.result(f"{task}_{self.done_node}"))]

    @property
    def not_done(self) -> str:
        """Sentence about the tasks that the model does not do; empty where it does all of them."""
        tasks = [task for task in self.tasks if task not in self.done]
        if not tasks:
            return ""
        return (
            f"The model does not do {' and '.join(tasks)}: the right answer is above the wrong one in no "
            "more pairs than by chance, so that nothing is claimed of it."
        )


class CircuitWorkflow(TaskWorkflow):
    """A question about circuits that do tasks."""

    settings: CircuitSettings

    @property
    def scoring(self) -> dict[str, Any]:
        """What experiments that score edges are told."""
        return {"method": self.settings.method, "steps": self.settings.steps}

    def first_nodes(self) -> Nodes:
        """See `Workflow`: what says whether the model does each task that has random circuits."""
        tasks = (task for task in self.tasks if f"{task}_{RANDOM}" in self.nodes)
        return {name: self.nodes[name] for name in (f"{task}_{self.done_node}" for task in tasks)}

    def settle(self, store: Store, *, refuses: bool = True) -> Self:
        """See `Workflow`: without random circuits of tasks that the model does not do."""
        needless = [
            name.removesuffix(self.done_node) + RANDOM
            for name, node in self.first_nodes().items()
            if not self.is_done(node.open(store))
        ]
        self.nodes = {name: node for name, node in self.nodes.items() if name not in needless}
        return self

    def random_kept(self, task: str) -> Floats:
        """Percent of a task that random circuits keep, [circuit]; none where none were run."""
        name = f"{task}_{RANDOM}"
        return 100 * faithfulness(self.result(name).load()) if name in self.nodes else np.empty(0)

    def grown(
        self, task: str, sizes: tuple[int, ...], positions: int | None = None, **told: Any
    ) -> dict[str, EdgeExperiment]:
        """Random circuits of these sizes, as many of each as there are controls, on the pairs of a task.
        positions: how many they tell apart, if any."""
        count, seed = self.settings.controls, self.settings.seed
        if not count:
            return {}
        draws = [
            Circuit.growing(self.layout, sizes, seed=seed + 1 + draw, positions=positions)
            for draw in range(count)
        ]
        circuits = tuple(each for of_a_size in zip(*draws, strict=True) for each in of_a_size)
        return {RANDOM: CircuitValues(pairs=self.pairs[task][1], circuits=circuits, **told)}

    def claim(self, task: str) -> Claim:
        """What the circuits of a task do on held-out pairs, beside random circuits of the same size."""
        raise NotImplementedError

    def claims(self) -> Iterator[Claim]:
        """The claim of each task that the model does."""
        return map(self.claim, self.done)

    def claims_caption(self) -> str:
        """How circuits were chosen and scored, and what names mean."""
        count = self.settings.pairs
        return (
            f"{self.not_done} Edges were chosen by {self.settings.method} on {count} pairs of each "
            f"task, and circuits run on {count} others. Random circuits are grown from the logits down, so "
            f"that all they hold can matter. {NAMES}"
        ).strip()


def by_sign(values: Floats) -> float:
    """Probability that a coin makes as many of these values positive (sign test, one side)."""
    count, positive = len(values), int((np.asarray(values) > 0).sum())
    return float(sum(comb(count, k) for k in range(positive, count + 1)) / 2**count)
