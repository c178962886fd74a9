"""What a page asks of a workflow.

Border: names of what is shown and made; how it came about the workflow knows.
"""

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
"""Stands behind what a question describes."""


class Reported(Protocol):
    """A workflow that has run, as its page sees it."""

    settings: Any
    store: Store | None

    @property
    def nodes(self) -> Mapping[str, ResultNode]:
        """Computed nodes by the names of their results."""
        ...

    @property
    def name(self) -> str:
        """Of the workflow, as the command line knows it."""
        ...

    @property
    def question(self) -> str:
        """What it answers, in a sentence."""
        ...

    @property
    def descriptive(self) -> str:
        """What it describes, if it makes no causal claim; else empty."""
        ...

    @property
    def caution(self) -> str:
        """What stands on every answer about a model whose layout was trusted; empty for all others."""
        ...

    @property
    def trained_with_help(self) -> str:
        """What stands on every answer about a model whose training asked something of its inside; empty for
        all others."""
        ...

    @property
    def shown(self) -> tuple[View, ...]:
        """The views, in the order of reading."""
        ...

    def draw(self, folder: Path) -> list[Path]:
        """What came out, as PNG files in `folder`."""
        ...
