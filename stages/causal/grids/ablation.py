"""Ablation: change of a metric when a head, an MLP or a position is replaced by an uninformative value.

An activation is replaced, place by place, by zero, by its mean over reference prompts, or by its value in a
reference prompt drawn at random (Wang et al. 2022, "Interpretability in the Wild", and Chan et al. 2022,
"Causal scrubbing": mean and resample stay closer to the model's distribution than zero). Metrics compare with
the run without replacement, which is their clean run.

Border: token ids and hook points in, labelled arrays out; patching_grid.py defines grid and axes, knockout.py
cuts attention edges. Planning imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ....store.errors import PromptError, StageError, nearest
from ...forward.architectures.points import HookPoint
from ...forward.hooks.interventions import Replace, Zero
from ...forward.hooks.spec import HookSpec
from ...forward.runs.means import mean_activations, position_axis
from ...forward.runs.run import Run, stream
from .patching_grid import Grid, GridPlace, part_of, where
from .patching_results import PreparedGrid, as_vector, token_labels

if TYPE_CHECKING:
    from torch import Tensor

    from ...forward.architectures.architecture import Architecture
    from ...forward.models.model import Model

__all__ = ["Ablation"]

METHODS = ("zero", "mean", "resample")
"""Ways to replace an activation, the values of `Ablation.how`."""


@dataclass(frozen=True, kw_only=True)
class Ablation(Grid):
    """Ablates one place (a head, an MLP, a position) of a prompt per run.

    A head is kind z with over="head", an MLP is kind mlp_out with over="layer".
    """

    tokens: tuple[int, ...]
    """Token ids of the prompt."""
    how: str = "zero"
    """What replaces an activation: "zero", its "mean" over references, or "resample": its value in one."""
    references: tuple[tuple[int, ...], ...] = ()
    """Token ids of reference prompts, of the prompt's length for "resample" and `per_position`."""
    per_position: bool = False
    """Whether means are taken position by position instead of over all positions of all references."""
    samples: int = 1
    """Number of reference prompts drawn for "resample"; all ablations take values of the same prompts."""
    seed: int = 0
    """Seed of the draw of references."""

    name: ClassVar[str] = "ablation"
    version: ClassVar[int] = 1
    has_corrupted: ClassVar[bool] = False

    @property
    def prompt(self) -> tuple[int, ...]:
        """The prompt that is ablated."""
        return self.tokens

    @property
    def num_samples(self) -> int:
        """Number of references that are drawn; 1 for "zero" and "mean"."""
        return self.samples

    def check(self, config: Architecture) -> None:
        """Check the fields against a model, as `Grid.check` does.

        Raises:
            StageError: The method is unknown, or references, samples or per_position do not fit it.
            PromptError: A reference must have the length of the prompt, and has another.
        """
        super().check(config)
        if self.how not in METHODS:
            near = nearest(self.how, METHODS)
            hint = f"; did you mean {near!r}?" if near else ""
            raise StageError(
                f"ablation: expected how to be one of {', '.join(METHODS)}, found {self.how!r}{hint}"
            )
        if "pattern" in self.kinds:
            raise StageError(
                "ablation: expected hook points that hold vectors, found 'pattern'; cut attention edges with "
                "EdgeKnockout"
            )
        if (self.how == "zero") == bool(self.references):
            found = f"{len(self.references)} references" if self.references else "no references"
            raise StageError(
                "ablation: expected reference prompts for how='mean' and how='resample', and none for "
                f"how='zero', found how={self.how!r} with {found}"
            )
        if self.samples < 1 or (self.samples > 1 and self.how != "resample"):
            raise StageError(
                f"ablation: expected samples=1, or more with how='resample', found samples={self.samples} "
                f"with how={self.how!r}"
            )
        if self.per_position and self.how != "mean":
            raise StageError(
                f"ablation: expected per_position only with how='mean', found it with how={self.how!r}"
            )
        # Both take activations position by position, so lengths must agree.
        if self.how == "resample" or self.per_position:
            for reference in self.references:
                if len(reference) != len(self.tokens):
                    raise PromptError(
                        f"ablation: expected reference prompts of {len(self.tokens)} tokens, the length of "
                        f"the prompt, found one of {len(reference)}; choose references of that length, or "
                        "the mean over all positions"
                    )

    def drawn(self) -> list[int]:
        """Index of the reference that is drawn for each sample."""
        return [
            # Seeded per sample: sample s is the same however many are drawn.
            int(np.random.default_rng([self.seed, sample]).integers(len(self.references)))
            for sample in range(self.samples)
        ]

    def prepare(self, model: Model) -> PreparedGrid:
        """Result of the unablated run, and the replacing activations by (sample, hook point)."""
        # The unablated run takes the place of a clean run in metrics that compare with one.
        ((_, clean),) = stream(model, [Run(self.tokens, None, self.want)])
        points = self.points(model.config)
        tokens = token_labels(model, token=self.tokens)
        replacements: dict[Any, Tensor] = {}
        if self.how == "mean":
            replacements = self._means(model, points)
        elif self.how == "resample":
            drawn = self.drawn()
            # A reference that was drawn twice is run once.
            distinct = sorted(set(drawn))
            runs = [Run(self.references[i], HookSpec().capture(*points), None) for i in distinct]
            caches = {distinct[i]: cache for i, cache in stream(model, runs)}
            replacements = {(s, point): caches[i][point][0] for s, i in enumerate(drawn) for point in points}
        return PreparedGrid(model.config, as_vector(clean.logits), [], replacements, tokens)

    def _means(self, model: Model, points: Sequence[HookPoint]) -> dict[Any, Tensor]:
        """Mean activations, expanded over the positions of the prompt, by (sample 0, hook point)."""
        means = mean_activations(model, points, self.references, per_position=self.per_position)
        return {(0, point): mean.expand(self._shape(mean, point)) for point, mean in means.items()}

    def _shape(self, total: Tensor, point: HookPoint) -> tuple[int, ...]:
        """Shape of the prompt's activation at a hook point, from a mean that has one position."""
        # expand makes a view: a mean is stored once, however long the prompt.
        shape = list(total.shape)
        shape[position_axis(point)] = len(self.tokens)
        return tuple(shape)

    def change(
        self,
        spec: HookSpec,
        prepared: PreparedGrid,
        kind: str,
        layers: Sequence[int],
        place: GridPlace,
        sample: int,
    ) -> HookSpec:
        """Extend `spec` by interventions that ablate one place in several layers with a sample's values."""
        for layer in layers:
            point = HookPoint(kind, layer)
            if self.how == "zero":
                spec = spec.intervene(point, Zero(**where(place, point)))
            else:
                value = part_of(prepared.activations[sample, point], point, place)
                spec = spec.intervene(point, Replace(value, **where(place, point)))
        return spec
