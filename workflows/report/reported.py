"""The interface of a workflow that a page needs."""

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
"""Sentence after the description of a workflow without claims."""


class Reported(Protocol):
    """A workflow that has run, as its page needs it."""

    settings: Any
    """Dataclass of its settings."""
    store: Store | None
    """Store of the results; None for a workflow without results."""

    @property
    def nodes(self) -> Mapping[str, ResultNode]:
        """Nodes of the results, by name."""
        ...

    @property
    def name(self) -> str:
        """Name of the workflow on the command line."""
        ...

    @property
    def question(self) -> str:
        """The question that it answers, one sentence."""
        ...

    @property
    def descriptive(self) -> str:
        """What its results describe, if it makes no causal claim; else empty."""
        ...

    @property
    def summary(self) -> str:
        """The main numbers in one sentence, as far as claims do not say them; may be empty."""
        ...

    @property
    def caution(self) -> str:
        """Warning shown with results of a model whose layout was trusted without a check; else empty."""
        ...

    @property
    def trained_with_help(self) -> str:
        """Note shown with results of a model whose training loss included its internals; else empty."""
        ...

    @property
    def shown(self) -> tuple[View, ...]:
        """The views, in reading order."""
        ...

    def draw(self, folder: Path) -> list[Path]:
        """Write the figures as PNG files into a folder; returns their paths."""
        ...
