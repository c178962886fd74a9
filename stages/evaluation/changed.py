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
"""Number of positions at the start of a prompt that keep their activations, as in a dictionary's training."""
BATCH_TOKENS = 4096
"""Largest number of tokens in a batch of prompts; in no key, although rounding depends on it (`batches`)."""
LOGIT_BYTES = 1 << 26
"""Largest size in bytes of the log-probabilities in memory at once: 64 MiB."""


@dataclass(frozen=True)
class Means:
    """Mean ablation: hook points are set to their mean activation over reference prompts.

    Raises:
        ConfigError: A hook point has no position axis, or a reference has at most `skip` tokens.
    """

    points: tuple[str, ...]
    """Names of the hook points that are ablated."""
    references: Prompts
    """Token ids of the prompts over whose positions the mean is taken, all together."""
    skip: int = SKIP
    """Number of positions at the start that keep their activations and are left out of the mean.

    A BOS token, or a first token that serves as attention sink, has activations unlike all others.
    """

    def __post_init__(self) -> None:
        # A mean over positions is set position by position; an attention pattern has no such row.
        for point in map(HookPoint.parse, self.points):
            if "position" not in point.dims:
                raise ConfigError(
                    f"expected hook points with a position axis for mean ablation, found {str(point)!r} with "
                    f"the axes {', '.join(point.dims[1:])}; set it to zero instead"
                )
        if min(map(len, self.references), default=0) <= self.skip:
            raise ConfigError(
                f"expected reference prompts of more than {self.skip} tokens for mean ablation, found "
                f"{min(map(len, self.references), default='none')} in the shortest; give longer prompts"
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
        """Kinds of the ablated hook points, without layers, such as "resid_post"."""
        return frozenset(HookPoint.parse(point).kind for point in self.points)

    def taken(self, model: Model) -> dict[HookPoint, Tensor]:
        """Mean activations of all hook points of the ablated kinds, in every layer of the model."""
        # All layers, not only the changed ones: controls draw other layers, and share this pass (`baseline`).
        points = [point for point in model.config.hook_points if point.kind in self.kinds]
        return mean_activations(model, points, self.references, skip=self.skip)

    def spec(self, means: dict[HookPoint, Tensor], length: int) -> HookSpec:
        """Interventions that set the hook points to their means, for prompts of one length.

        Arguments:
            means: Mean activations, from `taken`.
            length: Number of tokens of each prompt.

        Raises:
            HookPointNotFound: The model does not have a hook point.
        """
        spec, positions = HookSpec(), tuple(range(self.skip, length))
        for point in map(HookPoint.parse, self.points if positions else ()):
            if point not in means:
                raise HookPointNotFound(
                    f"expected hook points of the model for mean ablation, found {str(point)!r}, which it "
                    "does not have; `model.hook_points` lists them"
                )
            spec = spec.intervene(point, Replace(means[point], positions=positions))
        return spec


@dataclass(frozen=True, kw_only=True)
class ChangedModelExperiment(Experiment):
    """Base class of experiments on a model that is unchanged or has one change.

    Raises:
        ConfigError: There are several changes, `hooks` captures something, or `turned` has no dictionary.
    """

    resources: ClassVar[tuple[str, ...]] = ("model", "dictionary")

    hooks: HookSpec | None = None
    """Interventions; None for none."""
    mean: Means | None = None
    """Mean ablation; None for none."""
    dictionary: str = ""
    """Name of a dictionary whose reconstructions replace activations at all its layers at once; "" for none.

    Excluded from the key, which contains `features`.
    """
    features: str = ""
    """Digest of the dictionary's files; part of the key."""
    turned: int | None = None
    """Seed of random rotations of the dictionary's errors, a control (random_errors.py).

    None for the reconstructions themselves.
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
                f"expected one change of the model at a time, found {' and '.join(changes)}; evaluate them "
                "in separate experiments"
            )
        if self.hooks is not None and self.hooks.num_captures:
            raise ConfigError(
                f"{self.name}: expected hooks to hold interventions only, found captures; leave out the "
                "captures"
            )
        if self.turned is not None and not self.dictionary:
            raise ConfigError(
                f"{self.name}: expected a dictionary, as turned rotates its errors, found none; name one"
            )

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
        """Identity of what `prepare` computes, which experiments of equal identity share."""
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
        """(model, mean activations or reconstructions that `bound` reads; None if there are neither)."""
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
        """Interventions that make the change on prompts of one length, bound to the model.

        Arguments:
            prepared: Result of `prepare`.
            rows: Token ids of the prompts.
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
        """No planned runs: reconstructions are known only once the model has run."""
        return []

    def measure(self, prepared: Any, cell: CellLabels, result: HookCache) -> None:
        """Never called, as there are no runs; `dataset` runs the model."""


def batches(prompts: Sequence[Sequence[int]]) -> Iterator[tuple[list[int], list[list[int]]]]:
    """Yield (indices, prompts) of batches of prompts of equal length, of at most `BATCH_TOKENS` tokens."""
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
        model: The model.
        rows: Token ids of the prompts.
        spec: Interventions on these prompts, bound to the model.
        last: Whether to compute the last position only.

    Yields:
        (slice of positions, their log-probabilities in nats, float32 [prompt, position, vocab]).

    Raises:
        ConfigError: The model does not predict the next token.
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
