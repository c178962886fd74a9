"""What may be kept of an activation in place of its numbers, made while the pass goes by.

Border: names and what they do to axes; who computes them is the harvest (`capture/reduced.py`). Which
reduction it is stands in the name of the stored array, and so in its key, never in the run's.
"""

from __future__ import annotations

from dataclasses import dataclass

from ....store.errors import HookPointNotFound, nearest
from ..architectures.points import HookKind


@dataclass(frozen=True)
class Reduction:
    """One way to make less of an activation. meaning: of what, in words. over: the axis it takes away."""

    name: str
    meaning: str
    over: str

    def dims(self, kind: HookKind) -> tuple[str, ...]:
        """What is left of a point's axes; HookPointNotFound where it has no such axis."""
        own = tuple(dim for dim in kind.dims if dim not in ("batch", "one"))
        if "position" not in own or (self.over == "last" and own[-1] == "position"):
            raise HookPointNotFound(
                f"expected a hook point with a row of numbers per token to keep the {self.name} of, found "
                f"{kind.path!r} with axes {list(kind.dims)}; capture it whole"
            )
        gone = own[-1] if self.over == "last" else self.over
        return tuple(dim for dim in own if dim != gone)


NORM = Reduction("norm", "L2 norm of", "last")
"""Of each row: a number per token, or per token and head."""
MEAN = Reduction("mean", "mean over the tokens of a prompt of", "position")
"""A row per prompt."""
REDUCTIONS = {each.name: each for each in (NORM, MEAN)}


def as_reduction(name: str) -> Reduction:
    """A reduction by name; HookPointNotFound names the nearest."""
    if name not in REDUCTIONS:
        near = nearest(name, REDUCTIONS)
        hint = f"; nearest is {near!r}" if near else ""
        raise HookPointNotFound(f"expected a reduction among {', '.join(REDUCTIONS)}, found {name!r}{hint}")
    return REDUCTIONS[name]
