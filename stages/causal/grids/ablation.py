"""Ablation: what is lost when a head, an MLP or a position says nothing of its own?

An activation is replaced, place by place, by zero, by its mean over reference prompts, or by what it was in a
reference prompt drawn at random (Wang et al. 2022, "Interpretability in the Wild", and Chan et al. 2022,
"Causal scrubbing", on why the mean and the resample are fairer than zero). Metrics compare with the run in
which nothing is replaced, which they call clean.

Border: token ids and hook points in, labelled arrays out; grid and axes are in patching_grid.py, attention
edges are cut elsewhere. Planning imports no torch.
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
from .patching_results import PreparedGrid, as_vector, token_texts

if TYPE_CHECKING:
    from torch import Tensor

    from ...forward.architectures.architecture import Architecture
    from ...forward.models.model import Model

__all__ = ["Ablation"]

WAYS = ("zero", "mean", "resample")


@dataclass(frozen=True, kw_only=True)
class Ablation(Grid):
    """A prompt with one part of the model silenced at a time.

    tokens: of the prompt. how: "zero"; "mean", over all positions of all references, or per position of
    references as long as the prompt; "resample", what one reference as long as the prompt has at the same
    positions, drawn by seed for each of `samples` and the same for every place. The rest: see `Grid`; a head
    is kind z with over="head", an MLP is kind mlp_out with over="layer".
    """

    tokens: tuple[int, ...]
    how: str = "zero"
    references: tuple[tuple[int, ...], ...] = ()
    per_position: bool = False
    samples: int = 1
    seed: int = 0

    name: ClassVar[str] = "ablation"
    version: ClassVar[int] = 1
    has_corrupted: ClassVar[bool] = False

    @property
    def prompt(self) -> tuple[int, ...]:
        """The one that is ablated."""
        return self.tokens

    @property
    def num_samples(self) -> int:
        """One per reference drawn; zero and mean have one."""
        return self.samples

    def check(self, config: Architecture) -> None:
        """As `Grid.check`, and of what takes the place of what is ablated."""
        super().check(config)
        if self.how not in WAYS:
            near = nearest(self.how, WAYS)
            hint = f"did you mean {near!r}?" if near else f"there are {', '.join(WAYS)}"
            raise StageError(f"ablation: no way {self.how!r} to ablate; {hint}")
        if "pattern" in self.kinds:
            raise StageError(
                "ablation: expected kinds of vectors, found 'pattern'; cut attention by knockout"
            )
        if (self.how == "zero") == bool(self.references):
            found = f"{len(self.references)} references" if self.references else "no references"
            raise StageError(
                f"ablation: zero takes no reference prompts, mean and resample some; found {self.how!r} with "
                f"{found}"
            )
        if self.samples < 1 or (self.samples > 1 and self.how != "resample"):
            raise StageError(
                f"ablation: expected one sample, or several of 'resample', found {self.samples} of "
                f"{self.how!r}"
            )
        if self.per_position and self.how != "mean":
            raise StageError(f"ablation: per_position is a way to take the mean, found it with {self.how!r}")
        if self.how == "resample" or self.per_position:
            for reference in self.references:
                if len(reference) != len(self.tokens):
                    raise PromptError(
                        f"ablation: expected references of {len(self.tokens)} tokens, as the prompt has, "
                        f"found one of {len(reference)}; choose references of that length, or the mean over "
                        "all positions"
                    )

    def drawn(self) -> list[int]:
        """Which reference each sample is taken from."""
        return [
            int(np.random.default_rng([self.seed, sample]).integers(len(self.references)))
            for sample in range(self.samples)
        ]

    def prepare(self, model: Model) -> PreparedGrid:
        """The prompt as it is, and what takes the place of its activations."""
        ((_, clean),) = stream(model, [Run(self.tokens, None, self.want)])
        held = self.held(model.config)
        texts = token_texts(model, self.tokens)
        tokens = {} if texts is None else {"token": texts}
        instead: dict[Any, Tensor] = {}
        if self.how == "mean":
            instead = self._means(model, held)
        elif self.how == "resample":
            drawn = self.drawn()
            several = sorted(set(drawn))
            asked = [Run(self.references[i], HookSpec().capture(*held), None) for i in several]
            caches = {several[i]: cache for i, cache in stream(model, asked)}
            instead = {(s, point): caches[i][point][0] for s, i in enumerate(drawn) for point in held}
        return PreparedGrid(model.config, as_vector(clean.logits), [], instead, tokens)

    def _means(self, model: Model, held: Sequence[HookPoint]) -> dict[Any, Tensor]:
        """Mean activations by (0, hook point), expanded over the positions of the prompt."""
        means = mean_activations(model, held, self.references, per_position=self.per_position)
        return {(0, point): mean.expand(self._shape(mean, point)) for point, mean in means.items()}

    def _shape(self, total: Tensor, point: HookPoint) -> tuple[int, ...]:
        """Of an activation of the prompt, from that of one position."""
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
        """The place silenced in every layer of the window."""
        for layer in layers:
            point = HookPoint(kind, layer)
            if self.how == "zero":
                spec = spec.intervene(point, Zero(**where(place, point)))
            else:
                value = part_of(prepared.activations[sample, point], point, place)
                spec = spec.intervene(point, Replace(value, **where(place, point)))
        return spec
