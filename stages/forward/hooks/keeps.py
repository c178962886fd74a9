"""Keep: what a store saves of a captured activation: every number, selected tokens, or a reduction.

The forward pass is the same in all three cases. So a `Keep` enters the name and key of the stored array,
never the digest of the run. This module holds values only; `capture/` cuts and reduces the tensors.
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
    """Token selection and reduction that a store applies to a captured activation."""

    selection: Selection | None = None
    """Selected tokens; None stores every token."""
    reduction: Reduction | None = None
    """Reduction stored instead of the activation, e.g. its L2 norm; None stores the activation."""

    @property
    def suffix(self) -> str:
        """Suffix of the stored array's name, e.g. "__norm"; empty where everything is kept."""
        names = [part.name for part in (self.selection, self.reduction) if part is not None]
        return "".join(f"__{name}" for name in names)

    @property
    def arguments(self) -> str:
        """Arguments of `HookSpec.capture` as Python text that follows the points, e.g. ", reduce='norm'"."""
        positions = "" if self.selection is None else f", positions={_selection_text(self.selection)}"
        return positions if self.reduction is None else f"{positions}, reduce={self.reduction.request!r}"

    def canonical(self) -> list[Any]:
        """Token selection and reduction as plain JSON values; an empty list where every number is kept."""
        selection = [] if self.selection is None else [self.selection.canonical()]
        return selection if self.reduction is None else [*selection, self.reduction.canonical()]

    @property
    def stored(self) -> tuple[Keep, ...]:
        """`Keep` of every stored array: this one, and another per further array of its reduction.

        A top-k, for example, stores logits and token ids.
        """
        companions = () if self.reduction is None else self.reduction.companions
        return (self, *(replace(self, reduction=reduction) for reduction in companions))

    def require(self, point: HookPoint, name: str) -> None:
        """Validate selection and reduction against the axes of a hook point.

        Arguments:
            point: hook point of the activation.
            name: the point as the user wrote it, for messages.

        Raises:
            HookPointNotFound: where the activation has no token axis to select from or to reduce.
        """
        dims = BY_NAME[point.kind].dims
        # Whole logits would be the largest array of a corpus: vocabulary times tokens.
        if point.kind == LOGITS and self.reduction is None:
            raise HookPointNotFound(
                f"{name!r} is too large to store in full: expected a reduction, found none; add "
                "reduce='topk:10' or reduce='logsumexp' (--reduce on the command line)"
            )
        if self.reduction is not None:
            self.reduction.dims(BY_NAME[point.kind])
            self.reduction.require_read(point)
            if self.selection is not None and self.reduction.over == "prompt":
                raise HookPointNotFound(
                    f"reduce={self.reduction.request!r} covers all tokens of a prompt: expected no "
                    f"positions=, found {self.selection}; leave out either positions= or reduce="
                )
        if self.selection is not None and "position" not in dims:
            owners = "a pair of tokens" if "query_position" in dims else "no token"
            raise HookPointNotFound(
                f"{name!r}: expected a hook point with one row per token to select {self.selection} from, "
                f"found one whose numbers belong to {owners}; capture it without positions="
            )


WHOLE = Keep()
"""Keeps every number of an activation."""


def _selection_text(selection: Selection) -> str:
    (value,) = list(selection.canonical().values())[:1]
    # The canonical form of a mask is its digest: no text that could be passed to `capture` again.
    if isinstance(value, str):
        return f"<{selection}>"
    return str(selection).removeprefix("positions ")
