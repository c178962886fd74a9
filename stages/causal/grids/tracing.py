"""Causal tracing: where does restoring a state recover a fact whose subject is noised?

Gaussian noise on the embeddings of the subject corrupts the answer; then one state of the clean run is
restored, place by place, and the metric measures the recovery (Meng, Bau, Andonian & Belinkov 2022, "Locating
and Editing Factual Associations in GPT", section 2). Attention and MLP outputs are restored in windows of
layers, as in the paper. Reported are mean and standard deviation over noise samples.

Noise is standard normal, times `multiplier`, times the standard deviation of all entries of the embedding
matrix (ROME uses that of the embeddings of known subjects, with multiplier 3). Sample s does not depend on
the number of samples.

Border: token ids, subject positions and hook points in, labelled arrays out; patching_grid.py defines grid
and axes. Planning imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ....pipeline.ambient import plain_torch
from ....store.errors import StageError
from ...forward.architectures.points import HookPoint
from ...forward.hooks.interventions import Add, Replace
from ...forward.hooks.spec import HookSpec
from ...forward.runs.run import Run, stream
from .patching_grid import Grid, GridPlace, in_range, part_of, where
from .patching_results import Blank, PreparedGrid, as_vector, token_labels

if TYPE_CHECKING:
    import xarray as xr

    from ...forward.architectures.architecture import Architecture
    from ...forward.models.model import Model
    from ...forward.runs.experiment import CellLabels

__all__ = ["CausalTracing", "embedding_deviation"]

EMBED = HookPoint("embed")
"""Hook point that gets the noise."""
ROWS = 4096
"""Number of rows of the embedding matrix that are read at once."""


@dataclass(frozen=True, kw_only=True)
class CausalTracing(Grid):
    """Causal tracing: noise on the subject of a prompt, and one state of the clean run restored per run.

    ROME restores resid_post with window=1, and attn_out and mlp_out with window=10.
    """

    tokens: tuple[int, ...]
    """Token ids of the prompt."""
    subject: tuple[int, ...]
    """Positions of the subject, whose embeddings get noise."""
    multiplier: float = 3.0
    """Standard deviation of the noise, in units of the standard deviation of the embedding matrix."""
    samples: int = 10
    """Number of noise samples."""
    seed: int = 0
    """Seed of the noise."""

    name: ClassVar[str] = "causal_tracing"
    version: ClassVar[int] = 1

    @property
    def prompt(self) -> tuple[int, ...]:
        """The only prompt."""
        return self.tokens

    @property
    def num_samples(self) -> int:
        """Number of noise samples."""
        return self.samples

    def check(self, config: Architecture) -> None:
        """Check the fields against a model, as `Grid.check` does.

        Raises:
            StageError: Subject positions, samples or a positive multiplier are missing, or `over` is "edge".
            InterventionError: A subject position is outside the prompt.
        """
        super().check(config)
        if not self.subject:
            raise StageError(
                "causal_tracing: expected the positions of the subject, whose embeddings get noise, found "
                "none; set subject"
            )
        in_range(f"{self.name}, subject", "position", self.subject, len(self.tokens))
        if self.samples < 1 or not self.multiplier > 0:
            raise StageError(
                "causal_tracing: expected samples of at least 1 and a multiplier above 0, found "
                f"samples={self.samples}, multiplier={self.multiplier}"
            )
        if self.over == "edge":
            raise StageError(
                "causal_tracing: expected another value of over, found 'edge', but a single attention weight "
                "cannot be restored; use EdgeKnockout for attention edges"
            )

    def prepare(self, model: Model) -> PreparedGrid:
        """Results of the clean run, with its states, and of one noised run per sample."""
        points = self.points(model.config)
        deviation = self.multiplier * embedding_deviation(model)
        noise = [
            Add(self.noise(sample, model.config.hidden_size) * deviation, positions=self.subject)
            for sample in range(self.samples)
        ]
        # Run 0 is the clean one, run 1 + s has the noise of sample s.
        runs = [Run(self.tokens, HookSpec().capture(*points), self.want)]
        runs += [Run(self.tokens, HookSpec().intervene(EMBED, addition), self.want) for addition in noise]
        results = dict(stream(model, runs))
        states: dict[Any, Any] = {point: results[0][point][0] for point in points}
        unpatched = [as_vector(results[1 + sample].logits) for sample in range(self.samples)]
        return PreparedGrid(
            model.config,
            as_vector(results[0].logits),
            unpatched,
            {**states, "noise": noise, "deviation": deviation},
            token_labels(model, token=self.tokens),
        )

    def blank(self, config: Architecture) -> Mapping[Any, Any]:
        """Placeholders for activations and noise, from which runs can be planned without the model."""
        # Unscaled noise: the embedding matrix is not read for a plan.
        blank = Blank(config, len(self.prompt))
        blank["noise"] = [
            Add(self.noise(sample, config.hidden_size), positions=self.subject)
            for sample in range(self.samples)
        ]
        return blank

    def noise(self, sample: int, hidden_size: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Standard normal noise of one sample for the subject's embeddings, float32 [subject, hidden].

        Arguments:
            sample: Number of the sample.
            hidden_size: Width of the residual stream.
        """
        # Seeded per sample: sample s is the same however many are drawn.
        return np.random.default_rng([self.seed, sample]).standard_normal(
            (len(self.subject), hidden_size), np.float32
        )

    def base(self, prepared: PreparedGrid, sample: int) -> HookSpec:
        """Intervention that adds the noise of one sample to the subject's embeddings.

        Arguments:
            prepared: Result of `prepare`.
            sample: Number of the sample.
        """
        return HookSpec().intervene(EMBED, prepared.activations["noise"][sample])

    def change(
        self,
        spec: HookSpec,
        prepared: PreparedGrid,
        kind: str,
        layers: Sequence[int],
        place: GridPlace,
        sample: int,
    ) -> HookSpec:
        """Add to `spec` the intervention that restores the clean state of a place in some layers."""
        for layer in layers:
            point = HookPoint(kind, layer)
            spec = spec.intervene(
                point, Replace(part_of(prepared.activations[point], point, place), **where(place, point))
            )
        return spec

    def dataset(self, prepared: PreparedGrid, cell: CellLabels, measured: Sequence[Any]) -> xr.Dataset:
        """Metrics of the restored runs; the subject and the noise's standard deviation are attributes."""
        dataset = super().dataset(prepared, cell, measured)
        length = len(self.tokens)
        noise = {"standard_deviation_of_noise": prepared.activations["deviation"]}
        return dataset.assign_attrs(subject=[position % length for position in self.subject], **noise)


@plain_torch()
def embedding_deviation(model: Model) -> float:
    """Standard deviation of all entries of the model's token embeddings, as they enter the first block."""
    import torch

    from ...forward.networks.history import STREAM

    size = model.config.vocab_size
    total = squares = 0.0
    with torch.no_grad():
        for start in range(0, size, ROWS):
            ids = torch.arange(start, min(size, start + ROWS), device=model.device)
            # `embed`, not the bare matrix: Gemma scales embeddings, and other families norm or project them.
            rows = model.network.embed(ids[None], None)[STREAM].double()
            # Summed row by row first: torch splits one long sum among its threads, so its rounding, and with
            # it the noise, would depend on their number.
            total += float(rows.sum(-1).sum())
            squares += float(rows.square().sum(-1).sum())
    # E[x^2] - E[x]^2 in one pass over the vocabulary; float64 leaves enough digits, and max guards its
    # rounding.
    count = size * model.config.hidden_size
    return float(np.sqrt(max(0.0, squares / count - (total / count) ** 2)))
