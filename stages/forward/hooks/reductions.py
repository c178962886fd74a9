"""What may be kept of an activation in place of its numbers, made while the pass goes by.

Border: names and what they do to axes; who computes them is the harvest (`capture/reduced.py`, and
`capture/vocabulary.py` for logits). Which reduction it is stands in the name of the stored array, and so in
its key, never in the run's.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ....store.errors import HookPointNotFound, nearest
from ....store.runs.run_sums import PART, QUANTA
from ..architectures.points import BY_NAME, LOGITS, HookKind

_TOPK = re.compile(r"topk:(\d+)")
_LOGITS = BY_NAME[LOGITS].path


@dataclass(frozen=True)
class Reduction:
    """One way to make less of an activation. name: as variables are named by it. told: as people ask for it.
    meaning: of what, in words. over: the axis it takes away, "last" for whichever that is, "run" for all
    tokens of all prompts. axis, size: what
    stands in its place, "" for nothing. dtype: of the numbers; None for the run's storage dtype. beside: what
    is stored with it, made on the way.
    """

    name: str
    told: str
    meaning: str
    over: str
    axis: str = ""
    size: int = 0
    dtype: str | None = None
    beside: tuple[Reduction, ...] = ()

    @property
    def is_of_logits(self) -> bool:
        """Whether it is for logits alone, and they for such."""
        return self.over == "vocab"

    @property
    def is_of_run(self) -> bool:
        """Whether it is one for all tokens of all prompts."""
        return self.over == "run"

    def dims(self, kind: HookKind) -> tuple[str, ...]:
        """What is left of a point's axes; HookPointNotFound where it has no such axis."""
        if self.is_of_logits != (kind.name == LOGITS):
            raise HookPointNotFound(self._misplaced(kind))
        own = tuple(dim for dim in kind.dims if dim not in ("batch", "one"))
        if "position" not in own or (self.over == "last" and own[-1] == "position"):
            raise HookPointNotFound(
                f"expected a hook point with a row of numbers per token to keep the {self.told} of, found "
                f"{kind.path!r} with axes {list(kind.dims)}; capture it whole"
            )
        gone = {"last": own[-1], "run": "position"}.get(self.over, self.over)
        return (*(dim for dim in own if dim != gone), *([self.axis] if self.axis else []))

    def _misplaced(self, kind: HookKind) -> str:
        if self.is_of_logits:
            return (
                f"expected {_LOGITS!r} to keep the {self.told} of, found {kind.path!r}; ask it of the logits"
            )
        return (
            f"expected 'topk:K' or 'logsumexp' of {_LOGITS!r}, which a store keeps nothing else of, found "
            f"{self.told!r}; ask for one of them"
        )


NORM = Reduction("norm", "norm", "L2 norm of", "last")
"""Of each row: a number per token, or per token and head."""
MEAN = Reduction("mean", "mean", "mean over the tokens of a prompt of", "position")
"""A row per prompt."""
RUN_MEAN = Reduction(
    "run_mean", "run_mean", "mean over the tokens of the run of", "run", PART, len(QUANTA), "float64"
)
"""One row: sums of each segment, exact, that readers divide (store/runs/run_sums.py)."""
LOGSUMEXP = Reduction("logsumexp", "logsumexp", "natural log of the sum of exp of", "vocab", dtype="float32")
"""What a logit is above its log-probability, in nats: a number per token."""
REDUCTIONS = {each.name: each for each in (NORM, MEAN, RUN_MEAN, LOGSUMEXP)}


def topk(k: int) -> Reduction:
    """The k largest logits of each token, descending, equal ones by smaller id, and beside them their ids."""
    axis, told = f"rank_{k}", f"topk:{k}"
    ids = Reduction(f"topk_{k}_ids", told, f"token ids of the {k} largest", "vocab", axis, k, "int32")
    return Reduction(f"topk_{k}", told, f"the {k} largest", "vocab", axis, k, "float32", (ids,))


def as_reduction(told: str) -> Reduction:
    """A reduction as people ask for it: "norm", "mean", "run_mean", "logsumexp", "topk:10"; HookPointNotFound
    names the nearest."""
    if (found := _TOPK.fullmatch(told)) is not None and int(found[1]) > 0:
        return topk(int(found[1]))
    if told not in REDUCTIONS:
        known = [*REDUCTIONS, "topk:10"]
        near = nearest(told, known)
        hint = f"; nearest is {near!r}" if near else ""
        raise HookPointNotFound(f"expected a reduction such as {', '.join(known)}, found {told!r}{hint}")
    return REDUCTIONS[told]
