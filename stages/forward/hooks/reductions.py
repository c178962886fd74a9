"""Reductions: what a store keeps of an activation instead of its numbers, computed during the pass.

This module names reductions and says what they do to axes. `capture/` computes them: `reduced.py` per prompt,
`vocabulary.py` for logits, `run_reductions.py` over a whole run. A reduction enters the name of the stored
array, and so its key, never the digest of the run. Dictionaries are known by the protocol `Features`.
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


class DictionaryResource(PinnedResource, Protocol):
    """Name and identity of a dictionary on disk (`features.dictionary.StoredDictionary`)."""

    def require_fit(self, config: Architecture, model: str) -> None:
        """Raise DictionaryError unless its layers, widths and hook points are those of a model.

        Arguments:
            config: architecture of the model.
            model: name of the model, for the message.
        """
        ...


class Features(Protocol):
    """The part of a dictionary that reductions need (`features.dictionary.Dictionary`)."""

    @property
    def name(self) -> str:
        """Name or path by which the dictionary was opened."""
        ...

    @property
    def n_features(self) -> int:
        """Number of features per layer; the same for every layer."""
        ...

    @property
    def read_hooks(self) -> tuple[HookPoint, ...]:
        """Hook points whose activations are encoded, one per layer of the dictionary."""
        ...

    def as_resource(self) -> DictionaryResource:
        """Name and identity of the dictionary, without loading weights."""
        ...


@dataclass(frozen=True)
class Encoder:
    """A dictionary whose features are counted."""

    name: str
    """Name by which the dictionary was opened."""
    resource: DictionaryResource
    """Identity and loader of the dictionary."""
    read: tuple[HookPoint, ...]
    """Hook points whose activations it encodes."""


@dataclass(frozen=True)
class Reduction:
    """A reduction of an activation along one axis, computed during the pass."""

    name: str
    """Suffix of stored variables."""
    request: str
    """The reduction as `HookSpec.capture` takes it, e.g. "topk:10"."""
    meaning: str
    """Words that precede the name of an activation, e.g. "L2 norm of"."""
    over: str
    """Axis that is reduced; "last" for the last one, "run" for all tokens of the run, "features" for all."""
    axes: tuple[tuple[str, int], ...] = ()
    """(name, length) of axes that replace the reduced axis."""
    dtype: str | None = None
    """Dtype of the stored numbers; None for the storage dtype of the run."""
    companions: tuple[Reduction, ...] = ()
    """Further reductions computed in the same step, each stored as a separate array."""
    combine: str | None = None
    """How readers combine the segments of a run: "mean", "sum" or "max"; None unless it is over the run."""
    statistic: str = ""
    """What is counted of features: "count", "sum" or "max"."""
    encoder: Encoder | None = field(default=None, compare=False)
    """Dictionary whose features are counted."""
    identity: str | None = None
    """Digest of that dictionary."""

    @property
    def is_of_logits(self) -> bool:
        """Whether it applies to logits, and to nothing else."""
        return self.over == "vocab"

    @property
    def is_of_run(self) -> bool:
        """Whether all tokens of all prompts are reduced to one row."""
        return self.combine is not None

    @property
    def ranks(self) -> int:
        """Number k of largest logits kept per token; 0 for other reductions."""
        return self.axes[0][1] if self.is_of_logits and self.axes else 0

    def canonical(self) -> dict[str, Any]:
        """Plain JSON values for a digest; a dictionary enters by its identity, never by its name."""
        # The name holds only 16 digits of the dictionary's digest; the key gets all of them.
        return {"reduce": self.name, **({} if self.identity is None else {"dictionary": self.identity})}

    def dims(self, kind: HookKind) -> tuple[str, ...]:
        """Axes of a reduced activation.

        Arguments:
            kind: hook point kind whose activation is reduced.

        Raises:
            HookPointNotFound: where the kind lacks the axis that is reduced.
        """
        if self.is_of_logits != (kind.name == LOGITS):
            raise HookPointNotFound(self._misplaced(kind))
        # Batch is packed into the token axis of a store, and an axis of length one is dropped there.
        axes = tuple(dim for dim in kind.dims if dim not in ("batch", "one"))
        if "position" not in axes or (self.over == "last" and axes[-1] == "position"):
            raise HookPointNotFound(
                f"expected a hook point with a row of numbers per token to keep the {self.request} of, found "
                f"{kind.path!r} with axes {list(kind.dims)}; capture it whole"
            )
        removed = {"last": axes[-1:], "run": ("position",), "features": axes}.get(self.over, (self.over,))
        return (*(dim for dim in axes if dim not in removed), *(axis for axis, _ in self.axes))

    def require_read(self, point: HookPoint) -> None:
        """Raise HookPointNotFound unless the counted features are encoded from this hook point."""
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
                f"expected {_LOGITS!r} to keep the {self.request} of, found {kind.path!r}; capture "
                f"{_LOGITS!r} with it, or choose another reduction"
            )
        return (
            f"expected 'topk:K' or 'logsumexp' for {_LOGITS!r}, which is too large to store otherwise, found "
            f"{self.request!r}; choose one of them"
        )


NORM = Reduction("norm", "norm", "L2 norm of", "last")
"""L2 norm of each row: a number per token, or per token and head."""
MEAN = Reduction("mean", "mean", "mean over the tokens of a prompt of", "position")
"""Mean over the tokens of each prompt: a row per prompt."""
RUN_MEAN = Reduction(
    *("run_mean", "run_mean", "mean over the tokens of the run of", "run"),
    *((_PARTS,), "float64"),
    combine="mean",
)
"""Mean over the run: exact sums of each segment, which readers add and divide (store/runs/run_sums.py)."""
LOGSUMEXP = Reduction("logsumexp", "logsumexp", "natural log of the sum of exp of", "vocab", dtype="float32")
"""Log-normaliser in nats, one number per token: a logit minus it is a log-probability."""
REDUCTIONS = {reduction.name: reduction for reduction in (NORM, MEAN, RUN_MEAN, LOGSUMEXP)}


def topk(k: int) -> Reduction:
    """The k largest logits of each token, descending, and their token ids; ties go to the smaller id."""
    # k is part of the axis name, since one run may hold several top-k reductions.
    axes, request = ((f"rank_{k}", k),), f"topk:{k}"
    ids = Reduction(f"topk_{k}_ids", request, f"token ids of the {k} largest", "vocab", axes, "int32")
    return Reduction(f"topk_{k}", request, f"the {k} largest", "vocab", axes, "float32", (ids,))


def features(dictionary: Features) -> Reduction:
    """For each feature of a dictionary, over the run: number of active tokens, activation sum and maximum."""
    resource = dictionary.as_resource()
    identity = digest("dictionary", resource.identity())
    name, request = f"features_{identity[:16]}", f"features:{dictionary.name}"
    encoder = Encoder(dictionary.name, resource, tuple(dictionary.read_hooks))
    # Axis and array are named by the digest, so that two dictionaries in one run never share an array.
    axis = (f"feature_{identity[:16]}", dictionary.n_features)

    def over_features(statistic: str, meaning: str, dtype: str, *more: tuple[str, int]) -> Reduction:
        return Reduction(
            *(f"{name}_{statistic}", request, f"{meaning} of features of {dictionary.name} in", "features"),
            *((axis, *more), dtype),
            combine="max" if statistic == "max" else "sum",
            statistic=statistic,
            encoder=encoder,
            identity=identity,
        )

    total = over_features("sum", "sum of the activations", "float64", _PARTS)
    # float32 holds every activation of float32 and narrower dictionaries exactly; a maximum adds no rounding.
    largest = over_features("max", "largest activation, 0 where never active,", "float32")
    return replace(over_features("count", "number of active tokens", "int64"), companions=(total, largest))


def as_reduction(request: str | Features) -> Reduction:
    """A reduction from the `reduce` argument of `HookSpec.capture`.

    Arguments:
        request: "norm", "mean", "run_mean", "logsumexp", "topk:10", or a dictionary to count features of.

    Raises:
        HookPointNotFound: for any other text; names the nearest reduction.
    """
    if not isinstance(request, str) and hasattr(request, "as_resource"):
        return features(request)
    name = str(request)
    if (match := _TOPK.fullmatch(name)) is not None and int(match[1]) > 0:
        return topk(int(match[1]))
    if name not in REDUCTIONS:
        known = [*REDUCTIONS, "topk:10"]
        near = nearest(name, known)
        hint = f"; nearest is {near!r}" if near else ""
        raise HookPointNotFound(f"expected a reduction such as {', '.join(known)}, found {name!r}{hint}")
    return REDUCTIONS[name]
