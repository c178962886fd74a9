"""Tasks for workflows on circuits and paths: pairs to choose edges or senders on, and held-out pairs.

Claims are only made about tasks that the model does: on the held-out pairs, the right answer has a higher
logit, or probability, than the wrong one more often than chance explains (a one-sided sign test).

Border: texts, token ids and results; loads no model and never imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from ...stages.causal.controls import CHANCE, by_sign
from ...stages.causal.grids.patching_metrics import LogitDifference
from ...stages.circuits.circuit import Circuit
from ...stages.circuits.evaluation import CircuitValues, faithfulness
from ...stages.circuits.experiment import EdgeExperiment
from ...stages.circuits.pairs import Pair
from ...stages.circuits.tasks.table import TASKS, task_pairs
from ...stages.forward.edges.layout import Layout
from ...stages.forward.models.files import SHIPPED
from ...stages.forward.runs.duration import PassWork
from ...store.errors import ConfigError
from ..claim import Claim
from ..material.answers import answer_pieces, encoded
from ..material.facts.fact_pairs import pair_records
from ..material.sizes import affordable
from ..settings import CircuitSettings, TaskSettings
from ..workflow import ModelWorkflow, Nodes

if TYPE_CHECKING:
    import xarray as xr

    from ...store import Store
    from ...store.arrays import Floats

__all__ = ["FACTS", "NAMES", "CircuitWorkflow", "TaskWorkflow"]

FACTS = "facts"
"""Name of the task made of pairs of facts: shipped facts of one relation, or those of `data`."""
SHIPPED_TASKS = ("copying", FACTS)
"""Tasks by default for a model that ships with mizarr."""
PAIRS, FEWEST_PAIRS = 8, 5
"""Largest and smallest number of pairs by default. A sign test of 4 pairs or fewer finds nothing at the 5 %
level: 1 / 2^4 is 6 %."""
PROMPT_LENGTH = 16
"""Tokens of a prompt of a task, about."""
RANDOM = "random"
"""Name of the result with random circuits, after the name of the task: "copying_random"."""
NAMES = (
    "a3.h0: head 0 of layer 3; a3.h0<q>, <k>, <v>: inputs of its queries, keys, values; m3: MLP of layer 3."
)
"""Sentence for captions that explains the names of heads, inputs of heads, and MLPs."""


class TaskWorkflow(ModelWorkflow):
    """Base class of workflows about tasks, such as copying, and the model's graph of heads and MLPs."""

    settings: TaskSettings
    general_tasks: ClassVar[tuple[str, ...]] = ("ioi",)
    """Tasks by default for a model that does not ship with mizarr."""

    @cached_property
    def layout(self) -> Layout:
        """Graph of the model's heads and MLPs. Raises ConfigError for a model whose residual stream is not
        the sum of their outputs."""
        return Layout.of(self.subject.config)

    @cached_property
    def tasks(self) -> tuple[str, ...]:
        """Names of the tasks: the setting `tasks`, or the default ones. Raises ConfigError for an unknown
        task."""
        settings = self.settings
        tasks = settings.tasks or ((FACTS,) if settings.data else self._default_tasks())
        if settings.data and FACTS not in tasks:
            raise ConfigError(
                f"expected {FACTS} among the tasks, as data names files of facts, found {', '.join(tasks)}; "
                f"add {FACTS} to tasks, or leave data out"
            )
        if len(set(tasks)) < len(tasks):
            raise ConfigError(f"expected different tasks, found {', '.join(tasks)}; name each once")
        for task in tasks:
            if task not in (FACTS, *TASKS):
                raise ConfigError(f"no task {task!r}; there are {', '.join((FACTS, *TASKS))}")
        return tasks

    def _default_tasks(self) -> tuple[str, ...]:
        """Default tasks: SHIPPED_TASKS for a model shipped with mizarr; for other models the `general_tasks`
        that have pairs in the tokenizer, or else SHIPPED_TASKS."""
        if self.subject.files.name in SHIPPED:
            return SHIPPED_TASKS
        fitting = tuple(task for task in self.general_tasks if self._has_pairs(task))
        return fitting or SHIPPED_TASKS

    def _has_pairs(self, task: str) -> bool:
        """Whether the tokenizer has pairs of a task, such as years that it splits."""
        try:
            task_pairs(self.subject.tokenizer, task, 2 * PAIRS, seed=self.settings.seed)
        except ConfigError:
            return False
        return True

    @property
    def passes_per_pair(self) -> float:
        """Number of whole forward passes that one pair to choose on and one held-out pair take, about."""
        raise NotImplementedError

    @property
    def pass_operations(self) -> float:
        """Floating-point operations of one forward pass of a prompt, about."""
        config = self.subject.config
        return PassWork(PROMPT_LENGTH * config.num_layers, logit_rows=1).operations(config)

    @property
    def operations_per_pair(self) -> float:
        """Floating-point operations of one pair to choose on and one held-out pair, in all tasks, about."""
        return len(self.tasks) * self.passes_per_pair * self.pass_operations

    @cached_property
    def n_pairs(self) -> int:
        """Number of pairs to choose on, and of held-out pairs: the setting, or by default PAIRS or as many as
        the model's size allows (material/sizes.py)."""
        return self.settings.pairs or affordable(self.operations_per_pair, PAIRS, least=FEWEST_PAIRS)

    @cached_property
    def pairs(self) -> Mapping[str, tuple[tuple[Pair, ...], tuple[Pair, ...]]]:
        """By task: pairs to choose edges or senders on, and as many held-out pairs.

        Raises ConfigError for a model without a graph, and for a task with too few pairs for this tokenizer.
        """
        # Raises for a model without a graph, before its tokenizer is loaded.
        Layout.of(self.subject.config)
        count, seed, tokenizer = self.n_pairs, self.settings.seed, self.subject.tokenizer
        by_task = {}
        for task in self.tasks:
            pairs = (
                self._facts(2 * count) if task == FACTS else task_pairs(tokenizer, task, 2 * count, seed=seed)
            )
            by_task[task] = (tuple(pairs[:count]), tuple(pairs[count:]))
        return by_task

    def _facts(self, count: int) -> list[Pair]:
        """The first `count` pairs of facts of equal length, of `data` or shipped ones, whose answers begin
        with different tokens; the metric is the difference of the logits of these tokens."""
        pairs = list[Pair]()
        for prompt, counterfactual, *answers in pair_records(self.subject, self.settings.data):
            if len(pairs) == count:
                break
            clean, corrupted = (tuple(encoded(self.subject, text).ids) for text in (prompt, counterfactual))
            right_token, wrong_token = (answer_pieces(self.subject, prompt, answer)[0] for answer in answers)
            if len(clean) == len(corrupted) and right_token != wrong_token:
                pairs.append(Pair(clean, corrupted, LogitDifference(right_token, wrong_token)))
        if len(pairs) < count:
            raise ConfigError(
                f"expected {count} pairs of facts with equally many tokens in both prompts and answers that "
                f"begin with different tokens, found {len(pairs)} with this tokenizer; ask for fewer: "
                f"pairs={len(pairs) // 2}"
            )
        return pairs

    @property
    def num_edges(self) -> int:
        """Number of edges of the model's graph, without positions."""
        return int(self.layout.edges.sum())

    def checked_nodes(self, task: str, experiments: Mapping[str, EdgeExperiment]) -> Nodes:
        """Nodes of the experiments of one task, named "<task>_<experiment>".

        Raises ConfigError for an experiment that does not fit the model, before anything runs.

        Arguments:
            task: name of the task.
            experiments: experiments by name.
        """
        for experiment in experiments.values():
            experiment.check(self.subject.config)
        return {f"{task}_{name}": self.on_model(each) for name, each in experiments.items()}

    done_node: ClassVar[str]
    """Name suffix of the result that stores the metric of clean held-out prompts, such as "circuit"."""

    def is_done(self, values: xr.Dataset) -> bool:
        """Whether the model does a task: the right answer is above the wrong one in more pairs than by chance
        (a sign test at level CHANCE). values: result with the variable `clean`, [pair]."""
        return by_sign(values["clean"].values) <= CHANCE

    @cached_property
    def done(self) -> list[str]:
        """Tasks that the model does, by name; claims are restricted to these tasks."""
        return [task for task in self.tasks if self.is_done(self.result(f"{task}_{self.done_node}"))]

    @property
    def not_done(self) -> str:
        """Caption sentence on the tasks that the model fails; "" without a failed task."""
        tasks = [task for task in self.tasks if task not in self.done]
        if not tasks:
            return ""
        return (
            f"The model does not do {' and '.join(tasks)}: the right answer is above the wrong one in "
            "no more pairs than by chance, so that nothing is claimed of it."
        )


FORWARD_AND_BACKWARD = 3
"""Cost of a forward and a backward pass, in forward passes."""
CIRCUIT_RUN = 2
"""Cost of the run of a circuit, whose heads read other streams for queries, keys and values, in forward
passes."""


class CircuitWorkflow(TaskWorkflow):
    """Base class of workflows that compare circuits of tasks with random circuits."""

    settings: CircuitSettings

    @property
    def scoring(self) -> dict[str, Any]:
        """Arguments of experiments that score edges: method and number of steps."""
        return {"method": self.settings.method, "steps": self.settings.steps}

    def first_nodes(self) -> Nodes:
        """Nodes that tell whether the model does each task; `run` computes them first, as other tasks need no
        random circuits."""
        tasks = (task for task in self.tasks if f"{task}_{RANDOM}" in self.nodes)
        return {name: self.nodes[name] for name in (f"{task}_{self.done_node}" for task in tasks)}

    def settle(self, store: Store, *, refuses: bool = True) -> Self:
        """Removes the random circuits of tasks that the model does not do from `nodes`; see `Workflow`."""
        needless = [
            name.removesuffix(self.done_node) + RANDOM
            for name, node in self.first_nodes().items()
            if not self.is_done(node.open(store))
        ]
        self.nodes = {name: node for name, node in self.nodes.items() if name not in needless}
        return self

    def random_kept(self, task: str) -> Floats:
        """Faithfulness of random circuits in percent, [circuit]; empty without controls."""
        name = f"{task}_{RANDOM}"
        return 100 * faithfulness(self.result(name).load()) if name in self.nodes else np.empty(0)

    def grown(
        self, task: str, sizes: tuple[int, ...], positions: int | None = None, **options: Any
    ) -> dict[str, EdgeExperiment]:
        """Experiment that runs random circuits on the held-out pairs of a task, as {RANDOM: experiment};
        empty with controls=0.

        Arguments:
            task: name of the task.
            sizes: numbers of edges, ascending; settings.controls random circuits are drawn of each.
            positions: number of positions that edges distinguish; None for edges without position.
            options: further arguments of `CircuitValues`.
        """
        count, seed = self.settings.controls, self.settings.seed
        if not count:
            return {}
        draws = [
            # `seed` itself draws the pairs of the task.
            Circuit.growing(self.layout, sizes, seed=seed + 1 + draw, positions=positions)
            for draw in range(count)
        ]
        # Sizes first, then draws, so that results reshape to [size, draw].
        circuits = tuple(circuit for of_a_size in zip(*draws, strict=True) for circuit in of_a_size)
        return {RANDOM: CircuitValues(pairs=self.pairs[task][1], circuits=circuits, **options)}

    def claim(self, task: str) -> Claim:
        """Claim about the circuits of a task on held-out pairs, against random circuits of the same sizes."""
        raise NotImplementedError

    def claims(self) -> Iterator[Claim]:
        """One claim per task that passes the sign test (`done`)."""
        return map(self.claim, self.done)

    def claims_caption(self) -> str:
        """Caption of the claims: how circuits were chosen and scored, and names of nodes."""
        count = self.n_pairs
        return (
            f"{self.not_done} A circuit is a set of edges between heads, MLPs, input and logits; all other "
            f"edges are ablated. Edges were chosen by {self.settings.method} on {count} pairs of prompts of "
            f"each task; circuits were run on {count} held-out pairs. Control: random circuits of the same "
            f"size, grown from the logits down so that each of their edges has a path to the logits. {NAMES}"
        ).strip()
