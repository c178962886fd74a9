"""What is done to a model while it is evaluated: nothing, interventions, means of hook points, or a
dictionary's reconstructions, and what these are held against.

Border: says which spec prompts of one length run under, and what of it is identity; what is measured is each
experiment's. Whatever is asked of a model can so be asked of the changed one, of the same tokens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from ...pipeline.ambient import steps_in_plain_torch
from ...store.digest import digest
from ...store.errors import ConfigError, HookPointNotFound
from ..features.dictionary import StoredDictionary
from ..forward.architectures.points import HookPoint
from ..forward.hooks.interventions import Replace
from ..forward.hooks.spec import HookSpec
from ..forward.runs.experiment import CellLabels, Experiment
from ..forward.runs.means import mean_activations

if TYPE_CHECKING:
    from torch import Tensor

    from ...pipeline.pinned import Pinned
    from ..forward.hooks.cache import HookCache
    from ..forward.hooks.spec import BoundSpec
    from ..forward.models.model import Model
    from ..forward.runs.run import Run

__all__ = ["Means", "OfChanged", "Prompts", "batches", "log_probabilities"]

Prompts = tuple[tuple[int, ...], ...]
SKIP = 1
"""First positions whose activations a dictionary leaves alone, as its training does."""
BATCH_TOKENS = 4096
LOGIT_BYTES = 1 << 26
"""Of log-probabilities that exist at a time."""


@dataclass(frozen=True)
class Means:
    """Hook points that are set to their mean over other prompts.

    points: their string forms. references: token ids of the prompts that the mean is over, of all their
    positions together. skip: first positions of every prompt that are left alone, and out of the mean: what
    stands there is the same in every prompt (a special token), or is treated apart whatever it is (a first
    token that attention rests on). Raises ConfigError for hook points without a row per token, and references
    that have no other positions.
    """

    points: tuple[str, ...]
    references: Prompts
    skip: int = SKIP

    def __post_init__(self) -> None:
        for point in map(HookPoint.parse, self.points):
            if "position" not in point.dims:
                raise ConfigError(
                    f"expected hook points with a row per token to take means of, found {str(point)!r} with "
                    f"axes {', '.join(point.dims[1:])}; set it to zero instead"
                )
        if min(map(len, self.references), default=0) <= self.skip:
            raise ConfigError(
                f"expected prompts of more than {self.skip} tokens to take means over, found "
                f"{min(map(len, self.references), default='none')}"
            )

    def canonical(self) -> dict[str, Any]:
        """Plain values that identify it."""
        return {
            "points": list(self.points),
            "references": digest("references", [list(ids) for ids in self.references]),
            "skip": self.skip,
        }

    @property
    def kinds(self) -> frozenset[str]:
        """Of its hook points, without their layers: "resid_post"."""
        return frozenset(HookPoint.parse(point).kind for point in self.points)

    def taken(self, model: Model) -> dict[HookPoint, Tensor]:
        """The means of every hook point of these kinds, in whichever layers: one look for all draws."""
        points = [point for point in model.config.hook_points if point.kind in self.kinds]
        return mean_activations(model, points, self.references, skip=self.skip)

    def spec(self, means: dict[HookPoint, Tensor], length: int) -> HookSpec:
        """The interventions on prompts of one length."""
        spec, positions = HookSpec(), tuple(range(self.skip, length))
        for point in map(HookPoint.parse, self.points if positions else ()):
            if point not in means:
                raise HookPointNotFound(f"the model has no hook point {str(point)!r}")
            spec = spec.intervene(point, Replace(means[point], positions=positions))
        return spec


@dataclass(frozen=True, kw_only=True)
class OfChanged(Experiment):
    """An experiment on a model, or on one that is changed in one way.

    hooks: interventions. mean: hook points set to their means. dictionary: name of one whose reconstructions
    stand where it writes, all at once; in no key. features: its identity. turned: None, or a seed: in place
    of its reconstructions, what they replace with their errors added in directions drawn at random
    (random_errors.py). Raises ConfigError for several changes at once, a spec that captures, and errors of no
    dictionary.
    """

    resources: ClassVar[tuple[str, ...]] = ("model", "dictionary")

    hooks: HookSpec | None = None
    mean: Means | None = None
    dictionary: str = ""
    features: str = ""
    turned: int | None = None

    def __post_init__(self) -> None:
        given = {
            "interventions": self.hooks is not None,
            "means": self.mean is not None,
            "a dictionary": bool(self.dictionary),
        }
        found = [name for name, is_given in given.items() if is_given]
        if len(found) > 1:
            raise ConfigError(
                f"expected one change of the model, found {' and '.join(found)}; evaluate one after the other"
            )
        if self.hooks is not None and self.hooks.num_captures:
            raise ConfigError(f"{self.name}: expected interventions alone, found captures; leave them out")
        if self.turned is not None and not self.dictionary:
            raise ConfigError(f"{self.name}: expected a dictionary whose errors are turned, found none")

    @property
    def change(self) -> dict[str, Any]:
        """What of the change is in keys."""
        hooks = None if self.hooks is None else self.hooks.canonical()
        found: dict[str, Any] = {"hooks": hooks, "features": self.features or None}
        if self.mean is not None:
            found["mean"] = self.mean.canonical()
        if self.turned is not None:
            found["turned"] = self.turned
        return found

    @property
    def baseline(self) -> Hashable:
        """What means are taken of and over, or the dictionary: one preparation for all draws."""
        if self.mean is not None:
            return "mean", self.mean.kinds, self.mean.references, self.mean.skip
        return "dictionary", self.dictionary, self.features

    @property
    def pinned(self) -> Sequence[Pinned]:
        """The dictionary, where there is one."""
        return (self._resource,) if self.dictionary else ()

    @property
    def _resource(self) -> StoredDictionary:
        return StoredDictionary(self.dictionary, self.features, "cpu")

    def prepare(self, model: Model) -> tuple[Model, Any]:
        """The model, and what `bound` needs beside it."""
        if self.mean is not None:
            return model, self.mean.taken(model)
        if not self.dictionary:
            return model, None
        from ..features.training.replacement import Reconstructed
        from .random_errors import RandomErrors

        held = self._resource.opened
        held.require_fit(model.config, model.name)
        layers = {layer: held.layer(layer) for layer in held.layers}
        read, write = (at(held.layers[0]).kind for at in (held.read_hook, held.write_hook))
        return model, RandomErrors(Reconstructed(model, layers, read, write, SKIP))

    def bound(self, prepared: tuple[Model, Any], rows: list[list[int]]) -> BoundSpec:
        """The spec of prompts of one length."""
        model, held = prepared
        if self.mean is not None:
            return model.bind(self.mean.spec(held, len(rows[0])))
        if not self.dictionary:
            spec = model.bind(self.hooks)
            spec.require_one_payload()
            return spec
        if len(rows[0]) <= SKIP:
            return model.bind(None)
        return model.bind(held.worker.closed_loop(rows) if self.turned is None else held(rows, self.turned))

    def runs(self, prepared: Any, cell: CellLabels) -> Sequence[Run]:
        """None that could be planned: what reconstructions are is known when the model has run."""
        return []

    def measure(self, prepared: Any, cell: CellLabels, result: HookCache) -> None:
        """Never asked: nothing is planned, see `dataset`."""


def batches(prompts: Sequence[Sequence[int]]) -> Iterator[tuple[list[int], list[list[int]]]]:
    """(places, prompts) of one length together, as many as make `BATCH_TOKENS`; which depends on the prompts
    alone."""
    by_length: dict[int, list[int]] = defaultdict(list)
    for place, ids in enumerate(prompts):
        by_length[len(ids)].append(place)
    for length, places in sorted(by_length.items()):
        size = max(1, BATCH_TOKENS // max(1, length))
        for start in range(0, len(places), size):
            some = places[start : start + size]
            yield some, [list(prompts[place]) for place in some]


@steps_in_plain_torch
def log_probabilities(
    model: Model, rows: list[list[int]], spec: BoundSpec, *, last: bool = False
) -> Iterator[tuple[slice, Tensor]]:
    """(positions, log-probabilities [prompt, position, vocab] of what follows, nats, float32) of prompts of
    one length, a few positions at a time; last: of the last position alone. ConfigError for a model that does
    not say what follows."""
    from ..forward.architectures.points import HookPoint
    from ..forward.hooks.spec import Capture
    from ..forward.hooks.wants import ALL_LOGITS, Logits

    model.config.require_next_token()
    length, point = len(rows[0]), HookPoint("final_norm")
    if last or point not in model.config.known_points:
        logits, _ = model.run_batch(rows, spec, Logits(positions=(-1,)) if last else ALL_LOGITS)
        assert logits is not None  # asked for
        yield slice(length - 1 if last else 0, length), logits.float().log_softmax(-1)
        return
    wanted = Capture(point, "after")
    _, held = model.run_batch(rows, replace(spec, captures=(*spec.captures, wanted)), None)
    states = held[wanted]
    step = max(1, LOGIT_BYTES // (4 * len(rows) * model.config.vocab_size))
    for start in range(0, length, step):
        here = slice(start, min(start + step, length))
        yield here, model.network.unembed(states[:, here], ALL_LOGITS).float().log_softmax(-1)
