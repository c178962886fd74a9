"""Reductions: what a store keeps of an activation instead of its numbers, computed during the pass.

This module names reductions and says what they do to axes. `capture/` computes them: `reduced.py` per prompt,
`vocabulary.py` for logits, `run_reductions.py` over a whole run. A reduction enters the name of the stored
array, and so its key, never the digest of the run. Dictionaries are known by the protocol `Features`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, cast

from ....pipeline.pinned import PinnedResource
from ....store.digest import digest
from ....store.errors import HookPointNotFound, nearest
from ....store.runs.run_sums import PART, QUANTA
from ..architectures.points import BY_NAME, LOGITS, HookKind, HookPoint

if TYPE_CHECKING:
    from ....store.arrays import Floats
    from ..architectures.architecture import Architecture

_TOPK = re.compile(r"topk:(\d{1,9})")
_LOGITS = BY_NAME[LOGITS].path
_PARTS = (PART, len(QUANTA))


class DictionaryResource(PinnedResource, Protocol):
    """A dictionary of features on disk: its name, identity and loader (`features.dictionary`)."""

    def require_fit(self, config: Architecture, model: str) -> None:
        """Raise DictionaryError unless layers, widths and hook points of the dictionary fit a model.

        Arguments:
            config: architecture of the model.
            model: name of the model, for the message.
        """
        ...


class Features(Protocol):
    """What reductions need to know of a dictionary of features, e.g. of a sparse autoencoder."""

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
        """The dictionary on disk, by name and identity; loads no weights."""
        ...


class Scorer(Protocol):
    """What reductions need to know of a trained probe (`monitors.trained`)."""

    @property
    def name(self) -> str:
        """Name of the probe in messages."""
        ...

    @property
    def identity(self) -> str:
        """Digest of weights, bias, pooling, hook point and model."""
        ...

    @property
    def point(self) -> HookPoint:
        """Hook point whose activations are scored."""
        ...

    @property
    def pooling(self) -> str:
        """How the tokens of a prompt are pooled before scoring: "last", "mean" or "max"; "token" for a score
        of each token."""
        ...

    @property
    def weight(self) -> Floats:
        """Weights, [hidden]."""
        ...

    @property
    def bias(self) -> float:
        """Bias, in log-odds."""
        ...

    def require_fit(self, config: Architecture, model: str, identity: str) -> None:
        """Raise StageError unless the probe was trained on this model, and states have its width.

        Arguments:
            config: architecture of the model.
            model: name of the model, for the message.
            identity: digest of the model.
        """
        ...


@dataclass(frozen=True)
class Encoder:
    """A dictionary (e.g. a sparse autoencoder) whose features are counted over a run."""

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
    """Suffix of the stored array's name, e.g. "norm"."""
    request: str
    """The reduction as `HookSpec.capture` takes it, e.g. "topk:10"."""
    meaning: str
    """Words that precede the name of an activation, e.g. "L2 norm of"."""
    over: str
    """Axis that is reduced: "position" (tokens of a prompt), "vocab", "last" for the last axis, "run" for all
    tokens of the run, "prompt" for all axes of a prompt, "features" for all axes, which one axis of features
    replaces."""
    axes: tuple[tuple[str, int], ...] = ()
    """(name, length) of axes that replace the reduced axis."""
    dtype: str | None = None
    """Dtype of the stored numbers; None for the storage dtype of the run."""
    companions: tuple[Reduction, ...] = ()
    """Further reductions computed in the same step, each stored as a separate array."""
    combine: str | None = None
    """How readers combine the segments of a run: "mean", "sum" or "max"; None for reductions per prompt."""
    statistic: str = ""
    """Statistic of each feature over the run: "count" of active tokens, "sum" or "max" of the activations;
    empty for reductions without a dictionary."""
    encoder: Encoder | None = field(default=None, compare=False)
    """Dictionary whose features are counted; None for other reductions."""
    scorer: Scorer | None = field(default=None, compare=False)
    """Probe whose scores are stored; None for other reductions."""
    identity: str | None = None
    """Digest of the dictionary whose features are counted, or of the probe; None for other reductions."""

    @property
    def is_of_logits(self) -> bool:
        """Whether the reduction applies to logits only, such as top-k and logsumexp."""
        return self.over == "vocab"

    @property
    def is_of_run(self) -> bool:
        """Whether the reduction covers all tokens of all prompts of a run, e.g. "run_mean"."""
        return self.combine is not None

    @property
    def ranks(self) -> int:
        """Number k of largest logits kept per token; 0 for other reductions."""
        return self.axes[0][1] if self.is_of_logits and self.axes else 0

    def canonical(self) -> dict[str, Any]:
        """The reduction as plain JSON values, for a digest; dictionary or probe by their digest."""
        # The name holds only 16 digits of the digest; the key gets all of them.
        source = "dictionary" if self.scorer is None else "probe"
        return {"reduce": self.name, **({} if self.identity is None else {source: self.identity})}

    def dims(self, kind: HookKind) -> tuple[str, ...]:
        """Axes of the stored array after the reduction.

        Arguments:
            kind: hook point kind whose activation is reduced.

        Raises:
            HookPointNotFound: where the kind lacks the axis that is reduced.
        """
        if self.is_of_logits != (kind.name == LOGITS):
            raise HookPointNotFound(self._wrong_point_message(kind))
        # Batch is packed into the token axis of a store, and an axis of length one is dropped there.
        axes = tuple(dim for dim in kind.dims if dim not in ("batch", "one"))
        if "position" not in axes or (self.over == "last" and axes[-1] == "position"):
            raise HookPointNotFound(
                f"reduce={self.request!r}: expected a hook point with a row of numbers per token, found "
                f"{kind.path!r} with axes {list(kind.dims)}; capture it without reduce="
            )
        whole = {"last": axes[-1:], "run": ("position",), "prompt": axes, "features": axes}
        removed = whole.get(self.over, (self.over,))
        return (*(dim for dim in axes if dim not in removed), *(axis for axis, _ in self.axes))

    def require_read(self, point: HookPoint) -> None:
        """Raise HookPointNotFound at another point than the dictionary or probe of the reduction reads."""
        if self.scorer is not None and point != self.scorer.point:
            raise HookPointNotFound(
                f"reduce={self.scorer.name}: expected the hook point of this probe, '{self.scorer.point}', "
                f"found '{point}'; capture probe.point"
            )
        if self.encoder is None or point in self.encoder.read:
            return
        read = sorted(map(str, self.encoder.read))
        last = f" … {read[-1]!r}" if len(read) > 1 else ""
        raise HookPointNotFound(
            f"reduce={self.encoder.name}: expected a hook point that this dictionary reads "
            f"({read[0]!r}{last}), found '{point}'; capture dictionary.read_hooks"
        )

    def _wrong_point_message(self, kind: HookKind) -> str:
        if self.is_of_logits:
            return (
                f"reduce={self.request!r}: expected hook point {_LOGITS!r}, found {kind.path!r}; capture "
                f"{_LOGITS!r}, or choose another reduction"
            )
        return (
            f"{_LOGITS!r} is too large to store in full: expected reduce='topk:10' (or another number) or "
            f"reduce='logsumexp', found {self.request!r}; choose one of the two"
        )


NORM = Reduction("norm", "norm", "L2 norm of", "last")
"""L2 norm of each row: a number per token, or per token and head."""
MEAN = Reduction("mean", "mean", "mean over the tokens of a prompt of", "position")
"""Mean over the tokens of each prompt: a row per prompt."""
MAX = Reduction("max", "max", "largest value, over the tokens of a prompt, of", "position")
"""Largest value of each coordinate over the tokens of each prompt: a row per prompt."""
WEIGHTED_MEAN = Reduction(
    "weighted_mean", "weighted_mean", "mean over the tokens of a prompt, weighted by position, of", "position"
)
"""Mean over the tokens of each prompt, with weights 1, 2, 3, … from its first token (Muennighoff 2022,
"SGPT"): a row per prompt."""
RUN_MEAN = Reduction(
    name="run_mean",
    request="run_mean",
    meaning="mean over the tokens of the run of",
    over="run",
    axes=(_PARTS,),
    dtype="float64",
    combine="mean",
)
"""Mean over the run: exact sums of each segment, which readers add and divide (store/runs/run_sums.py)."""
LOGSUMEXP = Reduction("logsumexp", "logsumexp", "natural log of the sum of exp of", "vocab", dtype="float32")
"""Log-normaliser in nats, one number per token: a logit minus it is a log-probability."""
REDUCTIONS = {one.name: one for one in (NORM, MEAN, MAX, WEIGHTED_MEAN, RUN_MEAN, LOGSUMEXP)}


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
    feature_axis = (f"feature_{identity[:16]}", dictionary.n_features)

    def feature_statistic(
        statistic: str, meaning: str, dtype: str, *extra_axes: tuple[str, int]
    ) -> Reduction:
        return Reduction(
            name=f"{name}_{statistic}",
            request=request,
            meaning=f"{meaning} of features of {dictionary.name} in",
            over="features",
            axes=(feature_axis, *extra_axes),
            dtype=dtype,
            combine="max" if statistic == "max" else "sum",
            statistic=statistic,
            encoder=encoder,
            identity=identity,
        )

    # A sum is stored in exact parts, so that it does not depend on the order of the tokens.
    total = feature_statistic("sum", "sum of the activations", "float64", _PARTS)
    # float32 holds every activation of float32 and narrower dictionaries exactly; a maximum adds no rounding.
    largest = feature_statistic("max", "largest activation, 0 where never active,", "float32")
    count = feature_statistic("count", "number of active tokens", "int64")
    return replace(count, companions=(total, largest))


def probe_score(probe: Scorer) -> Reduction:
    """Log-odds by a probe: of each token, or of each prompt where the probe pools tokens."""
    return Reduction(
        name=f"probe_{probe.identity[:16]}",
        request=f"probe:{probe.name}",
        meaning=f"log-odds by {probe.name} (pooling: {probe.pooling}) of",
        over="last" if probe.pooling == "token" else "prompt",
        dtype="float32",
        scorer=probe,
        identity=probe.identity,
    )


def as_reduction(request: str | Features | Scorer) -> Reduction:
    """The `Reduction` for the `reduce` argument of `HookSpec.capture`.

    Arguments:
        request: "norm", "mean", "max", "weighted_mean", "run_mean", "logsumexp", "topk:10", a dictionary to
            count features of, or a trained probe to score with.

    Raises:
        HookPointNotFound: for any other text; names the nearest reduction.
    """
    if not isinstance(request, str) and hasattr(request, "as_resource"):
        return features(cast("Features", request))
    if not isinstance(request, str) and hasattr(request, "pooling"):
        return probe_score(request)
    name = str(request)
    if (match := _TOPK.fullmatch(name)) is not None and int(match[1]) > 0:
        return topk(int(match[1]))
    if name not in REDUCTIONS:
        known = [*REDUCTIONS, "topk:10"]
        near = nearest(name, known)
        hint = f"; nearest is {near!r}" if near else ""
        raise HookPointNotFound(f"reduce=: expected one of {', '.join(known)}, found {name!r}{hint}")
    return REDUCTIONS[name]
