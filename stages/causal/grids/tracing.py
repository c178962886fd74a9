"""Causal tracing: where is a fact recalled when its subject is drowned in noise?

Gaussian noise is added to the embeddings of the subject, which corrupts the answer; then one state of the
clean run is put back, place by place, and the metric says how much of the answer it restores (Meng, Bau,
Andonian & Belinkov 2022, "Locating and Editing Factual Associations in GPT", section 2). Attention and MLP
outputs are restored in windows of layers, as there. What is reported is the mean over noise samples, and
their standard deviation.

Noise: standard normal numbers of a seeded generator times `multiplier` times the standard deviation of all
entries of the embedding matrix (ROME takes that of the embeddings of known subjects, and 3 for the
multiplier). Sample s is the same whatever the number of samples.

Border: token ids, subject positions and hook points in, labelled arrays out; grid and axes are in
patching_grid.py. Planning imports no torch.
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
from .patching_results import Blank, PreparedGrid, as_vector, token_texts

if TYPE_CHECKING:
    import xarray as xr

    from ...forward.architectures.architecture import Architecture
    from ...forward.models.model import Model
    from ...forward.runs.experiment import CellLabels

__all__ = ["CausalTracing", "embedding_deviation"]

EMBED = HookPoint("embed")
ROWS = 4096  # of the embedding matrix read at a time


@dataclass(frozen=True, kw_only=True)
class CausalTracing(Grid):
    """A prompt whose subject is noised, with one state of the clean run put back at a time.

    tokens: of the prompt. subject: positions that get noise. multiplier: of the standard deviation of the
    embeddings. samples: noises tried. seed: of the noise. The rest: see `Grid`; ROME restores resid_post with
    window=1 and attn_out and mlp_out with window=10.
    """

    tokens: tuple[int, ...]
    subject: tuple[int, ...]
    multiplier: float = 3.0
    samples: int = 10
    seed: int = 0

    name: ClassVar[str] = "causal_tracing"
    version: ClassVar[int] = 1

    @property
    def prompt(self) -> tuple[int, ...]:
        """The one prompt there is."""
        return self.tokens

    @property
    def num_samples(self) -> int:
        """As many as noises are tried."""
        return self.samples

    def check(self, config: Architecture) -> None:
        """As `Grid.check`, and of subject and noise."""
        super().check(config)
        if not self.subject:
            raise StageError("causal_tracing: expected subject positions to put noise on, found none")
        in_range(f"{self.name}, subject", "position", self.subject, len(self.tokens))
        if self.samples < 1 or not self.multiplier > 0:
            raise StageError(
                "causal_tracing: expected at least one sample and a positive multiplier, found "
                f"samples={self.samples}, multiplier={self.multiplier}"
            )
        if self.over == "edge":
            raise StageError("causal_tracing: a weight of the pattern cannot be put back alone; use knockout")

    def prepare(self, model: Model) -> PreparedGrid:
        """The clean run with its states, and one noised run per sample with nothing put back."""
        held = self.held(model.config)
        deviation = self.multiplier * embedding_deviation(model)
        noise = [
            Add(self.noise(sample, model.config.hidden_size) * deviation, positions=self.subject)
            for sample in range(self.samples)
        ]
        asked = [Run(self.tokens, HookSpec().capture(*held), self.want)]
        asked += [Run(self.tokens, HookSpec().intervene(EMBED, each), self.want) for each in noise]
        found = dict(stream(model, asked))
        states: dict[Any, Any] = {point: found[0][point][0] for point in held}
        texts = token_texts(model, self.tokens)
        unpatched = [as_vector(found[1 + sample].logits) for sample in range(self.samples)]
        return PreparedGrid(
            model.config,
            as_vector(found[0].logits),
            unpatched,
            {**states, "noise": noise, "deviation": deviation},
            {} if texts is None else {"token": texts},
        )

    def blank(self, config: Architecture) -> Mapping[Any, Any]:
        """Stands for activations nobody has computed; the noise is known up to its scale."""
        blank = Blank(config, len(self.prompt))
        blank["noise"] = [
            Add(self.noise(sample, config.hidden_size), positions=self.subject)
            for sample in range(self.samples)
        ]
        return blank

    def noise(self, sample: int, hidden_size: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Standard normal numbers of one sample, float32 [subject, hidden]."""
        return np.random.default_rng([self.seed, sample]).standard_normal(
            (len(self.subject), hidden_size), np.float32
        )

    def base(self, prepared: PreparedGrid, sample: int) -> HookSpec:
        """The noise of one sample on the subject's embeddings, and nothing put back."""
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
        """The clean state put back at one place, in every layer of the window."""
        for layer in layers:
            point = HookPoint(kind, layer)
            spec = spec.intervene(
                point, Replace(part_of(prepared.activations[point], point, place), **where(place, point))
            )
        return spec

    def dataset(self, prepared: PreparedGrid, cell: CellLabels, measured: Sequence[Any]) -> xr.Dataset:
        """As `Grid.dataset`, with the positions that got noise and its standard deviation."""
        made = super().dataset(prepared, cell, measured)
        length = len(self.tokens)
        noise = {"standard_deviation_of_noise": prepared.activations["deviation"]}
        return made.assign_attrs(subject=[position % length for position in self.subject], **noise)


@plain_torch()
def embedding_deviation(model: Model) -> float:
    """Standard deviation of all entries of the embedding matrix, as they enter the first block but for
    positions."""
    import torch

    from ...forward.networks.history import STREAM

    size = model.config.vocab_size
    total = squares = 0.0
    with torch.no_grad():
        for start in range(0, size, ROWS):
            ids = torch.arange(start, min(size, start + ROWS), device=model.device)
            rows = model.network.embed(ids[None], None)[STREAM].double()
            # Row by row first: torch shares one long sum among its threads, and each adds up its own part.
            total += float(rows.sum(-1).sum())
            squares += float(rows.square().sum(-1).sum())
    count = size * model.config.hidden_size
    return float(np.sqrt(max(0.0, squares / count - (total / count) ** 2)))
