"""Integrated gradients: what each position's embedding gives to a metric, along the way from a baseline.

A metric of the prompt, less that of the baseline, is the integral of its gradient along the straight line
between their embeddings, contracted with the way gone (Sundararajan, Taly & Yan 2017, "Axiomatic Attribution
for Deep Networks", eq. 1). By position it is a share of that difference, and the shares add up to it but for
what the steps leave out, which is told. Steps are Gauss-Legendre nodes: exact for polynomials of twice their
number, where a Riemann sum is for constants.

The line is walked by interventions at `hook_embed`, many steps in one batch. Beside it stands what exact runs
say: the metric when the embedding of one position becomes the baseline's, by the planner.

Border: token ids in, labelled arrays out. Planning imports no torch.

Axes: position, step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ....pipeline import Output
from ....store.arrays import Floats
from ....store.errors import PromptError, StageError
from ...forward.architectures.points import HookPoint
from ...forward.hooks.interventions import Replace
from ...forward.hooks.objective import objective_of
from ...forward.hooks.spec import Capture, HookSpec
from ...forward.hooks.wants import Logits
from ...forward.runs.experiment import CellLabels, Experiment
from ...forward.runs.run import Run
from ..grids.patching_grid import in_range
from ..grids.patching_metrics import Metric, check_metrics, read, wanted
from ..grids.patching_results import as_vector, token_texts

if TYPE_CHECKING:
    import xarray as xr
    from torch import Tensor

    from ...forward.architectures.architecture import Architecture
    from ...forward.hooks.cache import HookCache
    from ...forward.models.model import Model

__all__ = ["IntegratedGradients"]

BATCH_TOKENS = 2048
"""Positions of one batch of steps."""


@dataclass(frozen=True)
class Walked:
    """The way from the baseline to the prompt.

    embeddings: of both, [position, hidden]. logits: of both, and at every step. gradients: mean over the way
    [position, hidden], float64.
    """

    start: Tensor
    end: Tensor
    baseline: Floats
    prompt: Floats
    along: list[Floats]
    gradient: Tensor
    tokens: list[str] | None


@dataclass(frozen=True, kw_only=True)
class IntegratedGradients(Experiment):
    """Shares of positions in a metric, and what exact runs without each say.

    prompt: token ids. baseline: as many token ids, or none for embeddings of zero. metric: with a gradient;
    one that compares with a clean run does so with the prompt's. steps: nodes of the quadrature. at: the
    position whose next-token logits are read. exact: whether every position is replaced by a run.
    """

    prompt: tuple[int, ...]
    metric: Metric
    baseline: tuple[int, ...] = ()
    steps: int = 32
    at: int = -1
    exact: bool = True

    name: ClassVar[str] = "integrated_gradients"
    version: ClassVar[int] = 1
    reads_text: ClassVar[bool] = True
    outputs: ClassVar[Mapping[str, Output]] = {
        "attribution": Output(("position",), "as the metric", "share of a position's embedding"),
        "removed": Output(
            ("position",),
            "as the metric",
            "what the metric loses when a position's embedding becomes the baseline's",
            is_optional=True,
        ),
        "value": Output(("run",), "as the metric", "metric of the prompt and of the baseline"),
        "gap": Output((), "as the metric", "difference of the two, less the sum of shares"),
        "path": Output(("step",), "as the metric", "metric along the way"),
    }

    def params(self) -> dict[str, Any]:
        """All fields, the metric as plain values."""
        return {**vars(self), "metric": self.metric.canonical()}

    def cells(self, config: Architecture) -> Sequence[CellLabels]:
        """One. Raises PromptError, StageError or ConfigError for what cannot be."""
        config.require_gradients()
        objective_of(self.metric)
        check_metrics((self.metric,), config.vocab_size)
        if not self.prompt:
            raise PromptError(f"{self.name}: expected a prompt, found no tokens")
        if self.baseline and len(self.baseline) != len(self.prompt):
            raise PromptError(
                f"{self.name}: expected a baseline of {len(self.prompt)} tokens, as the prompt has, found "
                f"{len(self.baseline)}; give another, or none for embeddings of zero"
            )
        if self.steps < 1:
            raise StageError(f"{self.name}: expected at least one step, found {self.steps}")
        in_range(f"{self.name}, at", "position", (self.at,), len(self.prompt))
        return [{"part": "whole"}]

    @property
    def want(self) -> Logits:
        """Logits at one position, of the tokens the metric reads."""
        return Logits((self.at,), wanted((self.metric,)))

    def prepare(self, model: Model) -> Walked:
        """The gradients along the way, and the metric at both ends of it."""
        import torch

        ids = torch.tensor([self.prompt, self.baseline or self.prompt], device=model.device)
        end, start = model.embed(ids)
        start = start if self.baseline else torch.zeros_like(start)
        nodes, weights = np.polynomial.legendre.leggauss(self.steps)
        places, weights = (nodes + 1) / 2, weights / 2
        prompt, baseline = (self._logits(model, x) for x in (end, start))
        total = torch.zeros(start.shape, dtype=torch.float64, device=start.device)
        along: list[Floats] = []
        most = max(1, BATCH_TOKENS // len(self.prompt))
        for first in range(0, self.steps, most):
            share = torch.as_tensor(places[first : first + most], dtype=start.dtype, device=start.device)
            given = torch.lerp(start, end, share[:, None, None])
            logits, gradient = self._back(model, given)
            along += [as_vector(row[None]) for row in logits]
            weight = torch.as_tensor(weights[first : first + most], device=start.device)
            total += torch.einsum("s,spd->pd", weight, gradient.double())
        return Walked(start, end, baseline, prompt, along, total, token_texts(model, self.prompt))

    def runs(self, prepared: Walked, cell: CellLabels) -> Sequence[Run]:
        """The prompt with one embedding of the baseline, position by position."""
        if not self.exact:
            return []
        point, length = HookPoint("embed"), len(self.prompt)
        changes = [Replace(prepared.start[at], positions=(at,)) for at in range(length)]
        return [Run(self.prompt, HookSpec().intervene(point, change), self.want) for change in changes]

    def sketch(self, config: Architecture, cell: CellLabels) -> Sequence[Run]:
        """The runs with constants in place of the baseline."""
        width = config.axis_sizes["hidden"]
        changes = [Replace(np.zeros(width, np.float32), positions=(at,)) for at in range(len(self.prompt))]
        specs = [HookSpec().intervene("hook_embed", change) for change in changes if self.exact]
        return [Run(self.prompt, spec, self.want) for spec in specs]

    def measure(self, prepared: Walked, cell: CellLabels, result: HookCache) -> float:
        """The metric of one run."""
        return self._read(as_vector(result.logits), prepared.prompt)

    def dataset(self, prepared: Walked, cell: CellLabels, measured: Sequence[float]) -> xr.Dataset:
        """Shares by position, what is left over, and the metric along the way."""
        import xarray as xr

        moved = prepared.end.double() - prepared.start.double()
        shares = (moved * prepared.gradient).sum(-1).cpu().numpy()
        value, base = (self._read(each, prepared.prompt) for each in (prepared.prompt, prepared.baseline))
        data: dict[str, Any] = {
            "attribution": shares,
            "value": [value, base],
            "gap": value - base - shares.sum(),
            "path": [self._read(each, prepared.prompt) for each in prepared.along],
        }
        if self.exact:
            data["removed"] = value - np.array(measured)
        coords: dict[str, Any] = {
            "position": np.arange(len(self.prompt)),
            "run": ["prompt", "baseline"],
            "step": (np.polynomial.legendre.leggauss(self.steps)[0] + 1) / 2,
        }
        if prepared.tokens is not None:
            coords["token"] = ("position", prepared.tokens)
        given = {name: self.outputs[name].variable(np.asarray(each)) for name, each in data.items()}
        return xr.Dataset(given, coords, {"metric": self.metric.name, "units": self.metric.units})

    def _read(self, logits: Floats, clean: Floats) -> float:
        return float(read((self.metric,), logits, clean)[0])

    def _logits(self, model: Model, embedding: Tensor) -> Floats:
        """Of a run that starts from this embedding [position, hidden]."""
        spec = model.bind(HookSpec().intervene("hook_embed", Replace(embedding)))
        logits, _ = model.run_batch([self.prompt], spec, self.want)
        assert logits is not None  # they are wanted
        return as_vector(logits)

    def _back(self, model: Model, embeddings: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [step, 1, tokens], and gradients at embeddings [step, position, hidden]."""
        point = HookPoint("embed")
        spec = HookSpec().intervene(point, Replace(embeddings)).capture(Capture(point, is_gradient=True).name)
        spec = spec.gradient_of(self.metric, at=self.at, baseline=self.prompt)
        count = len(embeddings)
        logits, found = model.differentiate(
            [self.prompt] * count, model.bind(spec), [0] * count, want=self.want
        )
        return logits, found[Capture(point, is_gradient=True)]
