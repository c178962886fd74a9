"""Who uses a stage or an experiment, found by asking every workflow for its nodes at its defaults.

Border: plans graphs; computes nothing, loads no weights and never imports torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ..pipeline import Declaration
from ..pipeline.nodes import Node
from ..pipeline.plan import in_order
from ..pipeline.stage_node import StageNode
from ..stages import registry
from ..stages.forward.runs.experiment import ExperimentNode
from . import WORKFLOWS, build

__all__ = ["Use", "uses"]


@dataclass(frozen=True)
class Use:
    """A declaration of the registry, and what leads to it.

    workflows: those that have it in their graph. form_of: of a form that none has, the form of the same stage
    that some have.
    """

    declaration: Declaration
    workflows: tuple[str, ...]
    form_of: str = ""

    @property
    def doors(self) -> tuple[str, ...]:
        """Workflows that use it, else the form they use instead, else where to import it from."""
        if self.workflows:
            return self.workflows
        return (f"form of {self.form_of}" if self.form_of else f"library: {self.declaration.home}",)

    def to_json(self) -> dict[str, Any]:
        """The declaration as it says itself, `workflows`, and `form_of`, None where it is no form."""
        found = {"workflows": list(self.workflows), "form_of": self.form_of or None}
        return {**self.declaration.to_json(), **found}


def uses() -> dict[str, Use]:
    """Every stage and experiment of the registry with its use, in its order."""
    declared = {name: each.declaration() for name, each in registry().items()}
    having: dict[str, list[str]] = {name: [] for name in declared}
    for workflow in WORKFLOWS:
        for name in dict.fromkeys(_asked(in_order(build(workflow).nodes.values()))):
            having[name].append(workflow)
    used = {declared[name].home: name for name in reversed(declared) if having[name]}
    return {
        name: Use(each, tuple(having[name]), "" if having[name] else used.get(each.home, ""))
        for name, each in declared.items()
    }


def _asked(nodes: Iterable[Node]) -> Iterator[str]:
    """Names of the registry that nodes stand for."""
    for node in nodes:
        if isinstance(node, ExperimentNode):
            yield node.experiment.registered
        elif isinstance(node, StageNode):
            yield node.name
