"""The attributes of a workflow that its page reads, as a protocol."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from ...pipeline.nodes import ResultNode
    from ...store import Store
    from ..views import View

__all__ = ["NO_CLAIM", "Reported"]

NO_CLAIM = "This describes the model and makes no causal claim."
"""Sentence that follows the description of a workflow without claims."""


class Reported(Protocol):
    """A workflow that has run, with the attributes that its page reads."""

    settings: Any
    """Settings of the workflow, a dataclass instance."""
    store: Store | None
    """Store of the results; None for a workflow that stores nothing."""

    @property
    def nodes(self) -> Mapping[str, ResultNode]:
        """Name of each result -> node of the computation graph that computes it."""
        ...

    @property
    def name(self) -> str:
        """Name of the workflow on the command line."""
        ...

    @property
    def question(self) -> str:
        """The question that the workflow answers, one sentence."""
        ...

    @property
    def descriptive(self) -> str:
        """Sentence that says what the results describe, if the workflow makes no causal claim; else ""."""
        ...

    @property
    def summary(self) -> str:
        """Sentence with the main numbers that claims do not state; may be empty."""
        ...

    @property
    def caution(self) -> str:
        """Warning if the tensor layout of the model was trusted without a check; else ""."""
        ...

    @property
    def trained_with_help(self) -> str:
        """Note if the training loss of the model included terms about its internals; else ""."""
        ...

    @property
    def shown(self) -> tuple[View, ...]:
        """The views of the workflow's results, in reading order."""
        ...

    def draw(self, folder: Path) -> list[Path]:
        """Write the workflow's figures as PNG files into a folder; returns the paths of the files."""
        ...
