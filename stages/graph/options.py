"""What decides a graph, besides model, dictionary and prompt.

Border: plain values, made by users and workflows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .rows.selection import RowSelection
from .rows.targets import TargetChoice

__all__ = ["GraphOptions"]


@dataclass(frozen=True, eq=False)
class GraphOptions:
    """What decides a graph, besides model, dictionary and prompt.

    zero_positions: so many first positions have no features and no errors. arithmetic: dtype of the linear
    maps.
    """

    targets: TargetChoice
    selection: RowSelection
    zero_positions: int = 1
    arithmetic: str = "float32"

    def params(self) -> dict[str, Any]:
        """Plain values for a key."""
        return {
            "targets": self.targets.canonical(),
            "selection": self.selection.canonical(),
            "zero_positions": self.zero_positions,
            "arithmetic": self.arithmetic,
        }
