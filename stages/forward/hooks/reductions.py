"""What may be kept of an activation in place of its numbers, made while the pass goes by.

Border: names and what they do to axes; who computes them is the harvest (`capture/reduced.py`, for logits
`capture/vocabulary.py`, for a run as a whole `capture/of_run.py`). Which reduction it is stands in the name
of the stored array, and so in its key, never in the run's. A dictionary is what answers as `Features`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from ....pipeline.pinned import PinnedResource
from ....store.digest import digest
from ....store.errors import HookPointNotFound, nearest
from ....store.runs.run_sums import PART, QUANTA
from ..architectures.points import BY_NAME, LOGITS, HookKind, HookPoint

if TYPE_CHECKING:
    from ..architectures.architecture import Architecture

_TOPK = re.compile(r"topk:(\d{1,9})")
_LOGITS = BY_NAME[LOGITS].path
_PARTS = (PART, len(QUANTA))


class Opens(PinnedResource, Protocol):
    """A dictionary by name and identity (`features.dictionary.StoredDictionary`)."""

    def require_fit(self, config: Architecture, model: str) -> None:
        """Raise DictionaryError unless layers, widths and hook points are those of a model."""
        ...


class Features(Protocol):
    """What a dictionary says of itself (`features.dictionary.Dictionary`)."""

    @property
    def name(self) -> str:
        """As it was asked for."""
        ...

    @property
    def n_features(self) -> int:
        """Of each layer: all have as many."""
        ...

    @property
    def read_hooks(self) -> tuple[HookPoint, ...]:
        """Where features read, a point for each of its layers."""
        ...

    def as_resource(self) -> Opens:
        """The same by name and identity, nothing opened."""
        ...


@dataclass(frozen=True)
class Encoder:
    """A dictionary whose features are counted. read: where they read."""

    name: str
    resource: Opens
    read: tuple[HookPoint, ...]


@dataclass(frozen=True)
class Reduction:
    """One way to make less of an activation. name: as variables are named by it. told: as people ask for it.
    meaning: of what, in words. over: the axis it takes away, "last" for whichever that is, "run" for all
    tokens of all prompts, "features" for those and their numbers. axes: with their sizes, what stands in its
    place. dtype: of the numbers; None for the run's storage dtype. beside: what is stored with it, made on
    the way. combine: of what is kept of a run, how its segments become one: "mean", "sum" or "max". figure,
    encoder, identity: what is told of features, whose, and which dictionary that is.
    """

    name: str
    told: str
    meaning: str
    over: str
    axes: tuple[tuple[str, int], ...] = ()
    dtype: str | None = None
    beside: tuple[Reduction, ...] = ()
    combine: str | None = None
    figure: str = ""
    encoder: Encoder | None = field(default=None, compare=False)
    identity: str | None = None

    @property
    def is_of_logits(self) -> bool:
        """Whether it is for logits alone, and they for such."""
        return self.over == "vocab"

    @property
    def is_of_run(self) -> bool:
        """Whether it is one for all tokens of all prompts."""
        return self.combine is not None

    @property
    def ranks(self) -> int:
        """How many logits of each token are kept."""
        return self.axes[0][1] if self.is_of_logits and self.axes else 0

    def canonical(self) -> dict[str, Any]:
        """Plain JSON values that identify it; of a dictionary its identity, never its name."""
        return {"reduce": self.name, **({} if self.identity is None else {"dictionary": self.identity})}

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
        gone = {"last": own[-1:], "run": ("position",), "features": own}.get(self.over, (self.over,))
        return (*(dim for dim in own if dim not in gone), *(axis for axis, _ in self.axes))

    def require_read(self, point: HookPoint) -> None:
        """Raise HookPointNotFound for a point at which the features that are counted read nothing."""
        if self.encoder is None or point in self.encoder.read:
            return
        read = sorted(map(str, self.encoder.read))
        last = f" … {read[-1]!r}" if len(read) > 1 else ""
        raise HookPointNotFound(
            f"expected a hook point that the features of {self.encoder.name} read ({read[0]!r}{last}), found "
            f"'{point}'; capture its read_hooks"
        )

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
    *("run_mean", "run_mean", "mean over the tokens of the run of", "run"),
    *((_PARTS,), "float64"),
    combine="mean",
)
"""One row: sums of each segment, exact, that readers divide (store/runs/run_sums.py)."""
LOGSUMEXP = Reduction("logsumexp", "logsumexp", "natural log of the sum of exp of", "vocab", dtype="float32")
"""What a logit is above its log-probability, in nats: a number per token."""
REDUCTIONS = {each.name: each for each in (NORM, MEAN, RUN_MEAN, LOGSUMEXP)}


def topk(k: int) -> Reduction:
    """The k largest logits of each token, descending, equal ones by smaller id, and beside them their ids."""
    axes, told = ((f"rank_{k}", k),), f"topk:{k}"
    ids = Reduction(f"topk_{k}_ids", told, f"token ids of the {k} largest", "vocab", axes, "int32")
    return Reduction(f"topk_{k}", told, f"the {k} largest", "vocab", axes, "float32", (ids,))


def features(dictionary: Features) -> Reduction:
    """Of each feature of a dictionary, over the run: the number of tokens it is active at, and beside it the
    sum and the largest of its activations."""
    resource = dictionary.as_resource()
    identity = digest("dictionary", resource.identity())
    name, told = f"features_{identity[:16]}", f"features:{dictionary.name}"
    encoder = Encoder(dictionary.name, resource, tuple(dictionary.read_hooks))
    axis = (f"feature_{identity[:16]}", dictionary.n_features)

    def made(figure: str, meaning: str, dtype: str, *more: tuple[str, int]) -> Reduction:
        return Reduction(
            *(f"{name}_{figure}", told, f"{meaning} of features of {dictionary.name} in", "features"),
            *((axis, *more), dtype),
            combine="max" if figure == "max" else "sum",
            figure=figure,
            encoder=encoder,
            identity=identity,
        )

    total = made("sum", "sum of the activations", "float64", _PARTS)
    largest = made("max", "largest activation, 0 where never active,", "float32")
    return replace(made("count", "number of active tokens", "int64"), beside=(total, largest))


def as_reduction(told: str | Features) -> Reduction:
    """A reduction as people ask for it: "norm", "mean", "run_mean", "logsumexp", "topk:10", or a dictionary,
    for `features`; HookPointNotFound names the nearest."""
    if not isinstance(told, str) and hasattr(told, "as_resource"):
        return features(told)
    asked = str(told)
    if (found := _TOPK.fullmatch(asked)) is not None and int(found[1]) > 0:
        return topk(int(found[1]))
    if asked not in REDUCTIONS:
        known = [*REDUCTIONS, "topk:10"]
        near = nearest(asked, known)
        hint = f"; nearest is {near!r}" if near else ""
        raise HookPointNotFound(f"expected a reduction such as {', '.join(known)}, found {asked!r}{hint}")
    return REDUCTIONS[asked]
