"""What is done to a model while it is evaluated: nothing, interventions, or a dictionary's reconstructions.

Border: says which spec prompts of one length run under, and what of it is identity; what is measured is each
experiment's. Whatever is asked of a model can so be asked of the changed one, of the same tokens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from ...store.errors import ConfigError
from ..features.dictionary import Dictionary
from ..forward.hooks.spec import HookSpec
from ..forward.runs.experiment import CellLabels, Experiment

if TYPE_CHECKING:
    from torch import Tensor

    from ..forward.hooks.cache import HookCache
    from ..forward.hooks.spec import BoundSpec
    from ..forward.models.model import Model
    from ..forward.runs.run import Run

__all__ = ["OfChanged", "Prompts", "batches", "log_probabilities"]

Prompts = tuple[tuple[int, ...], ...]
SKIP = 1
"""First positions whose activations a dictionary leaves alone, as its training does."""
BATCH_TOKENS = 4096
LOGIT_BYTES = 1 << 26
"""Of log-probabilities that exist at a time."""


@dataclass(frozen=True, kw_only=True)
class OfChanged(Experiment):
    """An experiment on a model, or on one that is changed.

    hooks: interventions. dictionary: name of one whose reconstructions stand where it writes, all at once; in
    no key. features: its identity. Raises ConfigError for both at once, and for a spec that captures.
    """

    resources: ClassVar[tuple[str, ...]] = ("model", "dictionary")

    hooks: HookSpec | None = None
    dictionary: str = ""
    features: str = ""

    def __post_init__(self) -> None:
        if self.dictionary and self.hooks is not None:
            raise ConfigError(
                "expected interventions or a dictionary, found both; evaluate one after the other"
            )
        if self.hooks is not None and self.hooks.num_captures:
            raise ConfigError(f"{self.name}: expected interventions alone, found captures; leave them out")

    @property
    def change(self) -> dict[str, Any]:
        """What of the change is in keys."""
        hooks = None if self.hooks is None else self.hooks.canonical()
        return {"hooks": hooks, "features": self.features or None}

    def confirm(self) -> None:
        """Raise SourceChanged when the files under the dictionary's name are another's."""
        if self.dictionary:
            Dictionary.from_pretrained(self.dictionary).confirm(self.features)

    def prepare(self, model: Model) -> tuple[Model, Callable[[list[list[int]]], BoundSpec]]:
        """The model, and what gives the spec of prompts of one length."""
        if not self.dictionary:
            bound = model.bind(self.hooks)
            return model, lambda rows: bound
        from ..features.training.replacement import Replacement

        held = Dictionary.from_pretrained(self.dictionary)
        held.require_fit(model.config, model.name)
        layers = {layer: held.layer(layer) for layer in held.layers}
        read, write = (at(held.layers[0]).kind for at in (held.read_hook, held.write_hook))
        worker = Replacement(model, layers, read, write, SKIP)

        def replaced(rows: list[list[int]]) -> BoundSpec:
            spec = worker.closed_loop(rows) if len(rows[0]) > SKIP else None
            return model.bind(spec)

        return model, replaced

    def runs(self, prepared: Any, cell: CellLabels) -> Sequence[Run]:
        """None that could be planned: what reconstructions are is known when the model has run."""
        return []

    def measure(self, prepared: Any, cell: CellLabels, result: HookCache) -> None:
        """Of no run."""


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


def log_probabilities(
    model: Model, rows: list[list[int]], spec: BoundSpec, *, last: bool = False
) -> Iterator[tuple[slice, Tensor]]:
    """(positions, log-probabilities [prompt, position, vocab] of what follows, nats, float32) of prompts of
    one length, a few positions at a time; last: of the last position alone."""
    from ..forward.architectures.points import HookPoint
    from ..forward.hooks.spec import Capture
    from ..forward.hooks.wants import ALL_LOGITS, Logits

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
