"""Base of experiments that change one layer after another on one prompt: knockout and steering sweeps.

A subclass says which runs a layer needs. Each layer is a stored cell, and every run is compared with the
unchanged run (effects.py).

Border: token ids and numbers; subclasses define the intervention. Torch is imported when it runs.

Axes: layer, then those of the subclass; rank = place in a list of tokens, the largest value first.
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
    """Base class of experiments that change one layer, or one window of layers, at a time on one prompt."""

    tokens: tuple[int, ...]
    """Token ids of the prompt."""
    _: KW_ONLY
    layers: tuple[int, ...] | None = None
    """Layers of the sweep, one stored cell each; None for all layers."""
    target: tuple[int, ...] = ()
    """Token ids of a word whose probability is measured; may be empty."""
    top_k: int = 10
    """Number of tokens, those of most changed probability, that are stored for each run."""

    @abstractmethod
    def check(self, config: Architecture) -> None:
        """Raise InterventionError or StageError if the fields do not fit the model."""

    @property
    def width(self) -> int:
        """Number of neighbouring layers that a cell changes together; the first is the cell's label."""
        return 1

    def params(self) -> dict[str, Any]:
        """Fields that enter the key of results: all except `layers`, which are labels of cells."""
        return {name: value for name, value in vars(self).items() if name != "layers"}

    def cells(self, config: Architecture) -> Sequence[CellLabels]:
        """One cell per layer.

        Raises:
            PromptError: The prompt is empty.
            InterventionError, StageError: The fields do not fit the model (`check`).
        """
        check_tokens(self.tokens, self.target)
        check_target(self.target, config)
        self.check(config)
        return [{"layer": layer} for layer in layers_of(self.layers, config.num_layers, self.width)]

    def changed(self, cell: CellLabels) -> range:
        """Layers that the runs of a cell change together."""
        # A window is labelled by its first layer, unlike that of a patching grid, which is centred.
        return range(cell["layer"], cell["layer"] + self.width)

    def prepare(self, model: Model) -> Baseline:
        """Result of the unchanged run, without attention patterns.

        Raises:
            PromptError: A token of the target is outside the vocabulary.
        """
        return baseline_run(model, self.tokens, self.target)

    def sketch(self, config: Architecture, cell: CellLabels) -> Sequence[Run]:
        """The runs themselves: their interventions hold no activations of the model."""
        return self.runs(Baseline.sketch(config), cell)

    def measure(self, prepared: Baseline, cell: CellLabels, result: HookCache) -> dict[str, Any] | Floats:
        """Effects of one run on the next token (`EFFECTS`)."""
        return effect(prepared.logits, read_logits(result), self.target, self.top_k)

    def joined(self, parts: Sequence[xr.Dataset]) -> xr.Dataset:
        """Cells of all layers, concatenated along `layer`."""
        return along_layers(parts)

    def run_of(self, hooks: HookSpec) -> Run:
        """Run of the prompt, followed by the target, with interventions and captures `hooks`."""
        ids, want = with_target(self.tokens, self.target)
        return Run(ids, hooks, want)
