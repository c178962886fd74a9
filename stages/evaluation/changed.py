"""Changes under which a model is evaluated: interventions, mean ablation, or a dictionary's reconstructions.

Every evaluation (loss, layer order, recall) is a subclass of `ChangedModelExperiment`, so that each can be
made of the unchanged and of the changed model, on the same tokens.

Border: makes the HookSpec of prompts of one length, and the part of a key that identifies the change.
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
from ..forward.hooks.spec import Capture, HookSpec
from ..forward.hooks.wants import ALL_LOGITS, Logits
from ..forward.runs.experiment import CellLabels, Experiment
from ..forward.runs.means import mean_activations

if TYPE_CHECKING:
    from torch import Tensor

    from ...pipeline.pinned import Pinned
    from ..forward.hooks.cache import HookCache
    from ..forward.hooks.spec import BoundSpec
    from ..forward.models.model import Model
    from ..forward.runs.run import Run

__all__ = ["Means", "ChangedModelExperiment", "Prompts", "batches", "log_probabilities"]

Prompts = tuple[tuple[int, ...], ...]
"""Token ids of several prompts."""
SKIP = 1
"""Number of first positions that a dictionary does not reconstruct, as in its training."""
BATCH_TOKENS = 4096
"""Most tokens in one batch of prompts; part of no key, but rounding depends on it (`batches`)."""
LOGIT_BYTES = 1 << 26
"""Most bytes of log-probabilities in memory at a time: 64 MiB."""


@dataclass(frozen=True)
class Means:
    """Mean ablation: hook points set to their mean over reference prompts.

    Raises:
        ConfigError: for hook points without a position axis, or references of at most `skip` tokens.
    """

    points: tuple[str, ...]
    """Names of the hook points."""
    references: Prompts
    """Token ids of the prompts over whose positions the mean is taken, all together."""
    skip: int = SKIP
    """Number of first positions that keep their activations and are left out of the mean: a BOS token, or a
    first token that serves as attention sink, has activations unlike all others.
    """

    def __post_init__(self) -> None:
        # A mean over positions is set position by position; an attention pattern has no such row.
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
        """Plain values that identify the change in a key."""
        return {
            "points": list(self.points),
            # By digest: reference prompts may be a corpus, and a key is stored as text with each result.
            "references": digest("references", [list(ids) for ids in self.references]),
            "skip": self.skip,
        }

    @property
    def kinds(self) -> frozenset[str]:
        """Kinds of its hook points, without layers: "resid_post"."""
        return frozenset(HookPoint.parse(point).kind for point in self.points)

    def taken(self, model: Model) -> dict[HookPoint, Tensor]:
        """Mean activation of every hook point of these kinds, in all layers."""
        # All layers, not only the changed ones: controls draw other layers, and share this pass (`baseline`).
        points = [point for point in model.config.hook_points if point.kind in self.kinds]
        return mean_activations(model, points, self.references, skip=self.skip)

    def spec(self, means: dict[HookPoint, Tensor], length: int) -> HookSpec:
        """Interventions on prompts of one length.

        Arguments:
            means: result of `taken`.
            length: number of tokens of each prompt.

        Raises:
            HookPointNotFound: for a hook point that the model does not have.
        """
        spec, positions = HookSpec(), tuple(range(self.skip, length))
        for point in map(HookPoint.parse, self.points if positions else ()):
            if point not in means:
                raise HookPointNotFound(f"the model has no hook point {str(point)!r}")
            spec = spec.intervene(point, Replace(means[point], positions=positions))
        return spec


@dataclass(frozen=True, kw_only=True)
class ChangedModelExperiment(Experiment):
    """Base of experiments on a model, unchanged or under one change.

    Raises:
        ConfigError: for several changes, a HookSpec that captures, or `turned` without a dictionary.
    """

    resources: ClassVar[tuple[str, ...]] = ("model", "dictionary")

    hooks: HookSpec | None = None
    """Interventions; None for none."""
    mean: Means | None = None
    """Mean ablation; None for none."""
    dictionary: str = ""
    """Name of a dictionary whose reconstructions replace the activations that it writes, at all its layers at
    once; not part of the key, which has `features`.
    """
    features: str = ""
    """Digest of the dictionary's files, its identity in the key."""
    turned: int | None = None
    """Seed of random rotations of the dictionary's errors, a control (random_errors.py); None for the
    reconstructions themselves.
    """

    def __post_init__(self) -> None:
        is_set = {
            "interventions": self.hooks is not None,
            "means": self.mean is not None,
            "a dictionary": bool(self.dictionary),
        }
        changes = [name for name, is_change in is_set.items() if is_change]
        if len(changes) > 1:
            raise ConfigError(
                f"expected one change of the model, found {' and '.join(changes)}; evaluate one after the "
                "other"
            )
        if self.hooks is not None and self.hooks.num_captures:
            raise ConfigError(f"{self.name}: expected interventions alone, found captures; leave them out")
        if self.turned is not None and not self.dictionary:
            raise ConfigError(f"{self.name}: expected a dictionary whose errors are turned, found none")

    @property
    def change(self) -> dict[str, Any]:
        """Parameters that identify the change in a key."""
        hooks = None if self.hooks is None else self.hooks.canonical()
        params: dict[str, Any] = {"hooks": hooks, "features": self.features or None}
        # Only where set: a key does not change when a further kind of change is added to this class.
        if self.mean is not None:
            params["mean"] = self.mean.canonical()
        if self.turned is not None:
            params["turned"] = self.turned
        return params

    @property
    def baseline(self) -> Hashable:
        """Identity of what `prepare` computes: means of some kinds over some references, or a dictionary."""
        if self.mean is not None:
            return "mean", self.mean.kinds, self.mean.references, self.mean.skip
        return "dictionary", self.dictionary, self.features

    @property
    def pinned(self) -> Sequence[Pinned]:
        """The dictionary's files, if the change reads a dictionary."""
        return (self._resource,) if self.dictionary else ()

    @property
    def _resource(self) -> StoredDictionary:
        return StoredDictionary(self.dictionary, self.features, "cpu")

    def prepare(self, model: Model) -> tuple[Model, Any]:
        """The model, and the means or reconstructions that `bound` reads; None for neither."""
        if self.mean is not None:
            return model, self.mean.taken(model)
        if not self.dictionary:
            return model, None
        # Imported here: both import torch, which planning an experiment must not.
        from ..features.training.replacement import ReconstructionRuns
        from .random_errors import RandomErrors

        dictionary = self._resource.opened
        dictionary.require_fit(model.config, model.name)
        layers = {layer: dictionary.layer(layer) for layer in dictionary.layers}
        read, write = (at(dictionary.layers[0]).kind for at in (dictionary.read_hook, dictionary.write_hook))
        return model, RandomErrors(ReconstructionRuns(model, layers, read, write, SKIP))

    def bound(self, prepared: tuple[Model, Any], rows: list[list[int]]) -> BoundSpec:
        """HookSpec of prompts of one length, bound to the model.

        Arguments:
            prepared: result of `prepare`.
            rows: token ids of the prompts.
        """
        model, payload = prepared
        if self.mean is not None:
            return model.bind(self.mean.spec(payload, len(rows[0])))
        if not self.dictionary:
            spec = model.bind(self.hooks)
            spec.require_one_payload()
            return spec
        # Prompts of SKIP tokens have nothing to reconstruct.
        if len(rows[0]) <= SKIP:
            return model.bind(None)
        return model.bind(
            payload.worker.closed_loop(rows) if self.turned is None else payload(rows, self.turned)
        )

    def runs(self, prepared: Any, cell: CellLabels) -> Sequence[Run]:
        """None: reconstructions are known only once the model has run, so no runs can be planned."""
        return []

    def measure(self, prepared: Any, cell: CellLabels, result: HookCache) -> None:
        """Never called, as there are no runs; `dataset` runs the model."""


def batches(prompts: Sequence[Sequence[int]]) -> Iterator[tuple[list[int], list[list[int]]]]:
    """(indices, prompts) of prompts of equal length, at most `BATCH_TOKENS` tokens together."""
    # Batches depend on the prompts alone: rounding of a pass depends on what shares its batch.
    by_length: dict[int, list[int]] = defaultdict(list)
    for index, ids in enumerate(prompts):
        by_length[len(ids)].append(index)
    for length, indices in sorted(by_length.items()):
        size = max(1, BATCH_TOKENS // max(1, length))
        for start in range(0, len(indices), size):
            part = indices[start : start + size]
            yield part, [list(prompts[index]) for index in part]


@steps_in_plain_torch
def log_probabilities(
    model: Model, rows: list[list[int]], spec: BoundSpec, *, last: bool = False
) -> Iterator[tuple[slice, Tensor]]:
    """Next-token log-probabilities of prompts of one length, a few positions at a time.

    Arguments:
        model: the model.
        rows: token ids of the prompts.
        spec: interventions on these prompts, bound to the model.
        last: whether to compute the last position only.

    Returns:
        Pairs of a slice of positions and float32 [prompt, position, vocab] in nats.

    Raises:
        ConfigError: for a model that does not predict the next token.
    """
    model.config.require_next_token()
    length, point = len(rows[0]), HookPoint("final_norm")
    # One position needs no splitting, and a bridged model has no final norm to capture.
    if last or point not in model.config.known_points:
        logits, _ = model.run_batch(rows, spec, Logits(positions=(-1,)) if last else ALL_LOGITS)
        assert logits is not None  # wanted above
        yield slice(length - 1 if last else 0, length), logits.float().log_softmax(-1)
        return
    final_norm = Capture(point, "after")
    _, captured = model.run_batch(rows, replace(spec, captures=(*spec.captures, final_norm)), None)
    states = captured[final_norm]
    # Logits of all positions may exceed the model in memory: states are captured and unembedded in parts.
    # 4 bytes: log-probabilities are float32 whatever the dtype of the model.
    step = max(1, LOGIT_BYTES // (4 * len(rows) * model.config.vocab_size))
    for start in range(0, length, step):
        positions = slice(start, min(start + step, length))
        yield positions, model.network.unembed(states[:, positions], ALL_LOGITS).float().log_softmax(-1)
