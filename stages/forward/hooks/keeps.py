"""What of a captured activation is kept in a store: all of it, the tokens of a selection, or a reduction.

The pass computes and hands over the same; only what becomes of it differs. So a keep is part of what is
stored, by name and key, and never of which run it is. Border: values; who cuts tensors by them is the harvest
(`capture/`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ....store.errors import HookPointNotFound
from ....store.runs.selections import Selection
from ..architectures.points import BY_NAME, LOGITS, HookPoint
from .reductions import Reduction


@dataclass(frozen=True)
class Keep:
    """What is kept of an activation. selection: of which tokens; None for all. reduction: what is made of it;
    None for the numbers themselves."""

    selection: Selection | None = None
    reduction: Reduction | None = None

    @property
    def suffix(self) -> str:
        """What the name of an array ends in."""
        names = [each.name for each in (self.selection, self.reduction) if each is not None]
        return "".join(f"__{name}" for name in names)

    @property
    def arguments(self) -> str:
        """As `HookSpec.capture` is told it, behind the points."""
        positions = "" if self.selection is None else f", positions={_said(self.selection)}"
        return positions if self.reduction is None else f"{positions}, reduce={self.reduction.told!r}"

    def canonical(self) -> list[Any]:
        """Plain JSON values; nothing where all is kept."""
        told = [] if self.selection is None else [self.selection.canonical()]
        return told if self.reduction is None else [*told, self.reduction.canonical()]

    @property
    def stored(self) -> tuple[Keep, ...]:
        """What is stored for it, an array each."""
        beside = () if self.reduction is None else self.reduction.beside
        return (self, *(replace(self, reduction=each) for each in beside))

    def require(self, point: HookPoint, name: str) -> None:
        """Raise HookPointNotFound where an activation has no tokens to choose among, or nothing to reduce."""
        dims = BY_NAME[point.kind].dims
        if point.kind == LOGITS and self.reduction is None:
            raise HookPointNotFound(
                f"expected a reduction of {name!r}, which no store keeps whole, found none; add "
                "reduce='topk:10' or reduce='logsumexp' (--reduce)"
            )
        if self.reduction is not None:
            self.reduction.dims(BY_NAME[point.kind])
            self.reduction.require_read(point)
            if self.selection is not None and self.reduction.over == "position":
                raise HookPointNotFound(
                    f"expected a {self.reduction.told} over all tokens of a prompt, found it of "
                    f"{self.selection}; leave positions away, or capture them whole"
                )
        if self.selection is not None and "position" not in dims:
            what = "two tokens" if "query_position" in dims else "no token"
            raise HookPointNotFound(
                f"expected a hook point with a row per token to keep {self.selection} of, found {name!r}, "
                f"which has {what} to a row; capture it whole"
            )


WHOLE = Keep()
"""All of it."""


def _said(selection: Selection) -> str:
    """A selection as it may be written; a mask only by what it is."""
    (told,) = list(selection.canonical().values())[:1]
    if isinstance(told, str):
        return f"<{selection}>"
    return str(selection).removeprefix("positions ")
