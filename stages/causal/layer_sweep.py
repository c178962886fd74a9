"""One prompt, one layer changed after another: what sweeps of knockout and steering have in common.

A `LayerSweep` says which runs a layer needs; here they become cells that are stored layer by layer, measured
against the unchanged run as effects.py measures.

Border: token ids and numbers; what is changed is said by the experiment that inherits. Never imports torch
until it runs.

Axes: layer, then the experiment's own; rank.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

from ...store.arrays import Floats
from ..forward.hooks.spec import HookSpec
from ..forward.runs.experiment import CellLabels, Experiment
from ..forward.runs.run import Run
from .effects import (
    Baseline,
    along_layers,
    baseline_run,
    check_target,
    check_tokens,
    effect,
    layers_of,
    read_logits,
    with_target,
)

if TYPE_CHECKING:
    import xarray as xr

    from ..forward.architectures.architecture import Architecture
    from ..forward.hooks.cache import HookCache
    from ..forward.models.model import Model

__all__ = ["LayerSweep"]


@dataclass(frozen=True)
class LayerSweep(Experiment):
    """A prompt, what is followed, one cell per layer.

    tokens: ids of the prompt. layers: None for all. target: the pieces of a word to follow, may be empty.
    top_k: how many changed tokens are kept of each run.
    """

    tokens: tuple[int, ...]
    _: KW_ONLY
    layers: tuple[int, ...] | None = None
    target: tuple[int, ...] = ()
    top_k: int = 10

    @abstractmethod
    def check(self, config: Architecture) -> None:
        """Raise InterventionError or StageError for what this model or prompt does not have."""

    @property
    def width(self) -> int:
        """How many layers are changed together, from the one that labels a cell on."""
        return 1

    def params(self) -> dict[str, Any]:
        """Which layers is said by the cells: one more layer leaves the others what they are."""
        return {name: value for name, value in vars(self).items() if name != "layers"}

    def cells(self, config: Architecture) -> Sequence[CellLabels]:
        """One per layer. Raises what `check` does, and PromptError for a prompt of no tokens."""
        check_tokens(self.tokens, self.target)
        check_target(self.target, config)
        self.check(config)
        return [{"layer": layer} for layer in layers_of(self.layers, config.num_layers, self.width)]

    def changed(self, cell: CellLabels) -> range:
        """The layers that a cell changes together."""
        return range(cell["layer"], cell["layer"] + self.width)

    def prepare(self, model: Model) -> Baseline:
        """The unchanged run, without attention weights. PromptError for a target beyond the vocabulary."""
        return baseline_run(model, self.tokens, self.target)

    def sketch(self, config: Architecture, cell: CellLabels) -> Sequence[Run]:
        """The runs themselves: nothing in them comes from the model."""
        return self.runs(Baseline.sketch(config), cell)

    def measure(self, prepared: Baseline, cell: CellLabels, result: HookCache) -> dict[str, Any] | Floats:
        """What changed, and by how much."""
        return effect(prepared.logits, read_logits(result), self.target, self.top_k)

    def joined(self, parts: Sequence[xr.Dataset]) -> xr.Dataset:
        """Cells of all layers, along `layer`."""
        return along_layers(parts)

    def run_of(self, hooks: HookSpec) -> Run:
        """The prompt, its target behind it, under some hooks."""
        ids, want = with_target(self.tokens, self.target)
        return Run(ids, hooks, want)
