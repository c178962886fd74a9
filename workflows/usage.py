"""Which workflows use a stage or an experiment, from the graphs of all workflows with default settings.

Border: builds graphs; computes nothing, loads no weights and never imports torch.
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
    """Registry entry of a stage or experiment, with the workflows that use it."""

    declaration: Declaration
    """Name, parameters and home module of the stage."""
    workflows: tuple[str, ...]
    """Names of the workflows whose graph contains the stage."""
    form_of: str = ""
    """Name of another form of the stage that workflows use in its place, if they do not use this one; empty
    otherwise."""

    @property
    def doors(self) -> tuple[str, ...]:
        """How users reach the stage: names of workflows; without any, the form used instead; without that,
        the module to import."""
        if self.workflows:
            return self.workflows
        return (f"form of {self.form_of}" if self.form_of else f"library: {self.declaration.home}",)

    def to_json(self) -> dict[str, Any]:
        """JSON fields: those of the declaration, `workflows`, and `form_of` (None if empty)."""
        use = {"workflows": list(self.workflows), "form_of": self.form_of or None}
        return {**self.declaration.to_json(), **use}


def uses() -> dict[str, Use]:
    """Use of every stage and experiment, by name, in the order of the registry."""
    declarations = {name: stage.declaration() for name, stage in registry().items()}
    users: dict[str, list[str]] = {name: [] for name in declarations}
    for workflow in WORKFLOWS:
        for name in dict.fromkeys(_registered_names(in_order(build(workflow).nodes.values()))):
            users[name].append(workflow)
    # Reversed, so that of several used forms in one module the first one wins.
    used = {declarations[name].home: name for name in reversed(declarations) if users[name]}
    return {
        name: Use(declaration, tuple(users[name]), "" if users[name] else used.get(declaration.home, ""))
        for name, declaration in declarations.items()
    }


def _registered_names(nodes: Iterable[Node]) -> Iterator[str]:
    """Names under which the stages and experiments of some nodes are registered."""
    for node in nodes:
        if isinstance(node, ExperimentNode):
            yield node.experiment.registered
        elif isinstance(node, StageNode):
            yield node.name
