"""Integrated gradients: attribution of a metric to the embedding of each position.

The metric of the prompt minus that of a baseline equals the integral of its gradient along the straight line
between their embeddings, contracted with the difference of the embeddings (Sundararajan, Taly & Yan 2017,
"Axiomatic Attribution for Deep Networks", eq. 1). The terms of one position are its attribution; they add up
to the difference except for the quadrature error, which is reported as `gap`. Steps are Gauss-Legendre nodes:
n steps are exact for polynomials of degree 2n - 1, where a Riemann sum is exact for constants only.

Interventions at `hook_embed` place the embeddings, many steps in one batch. For comparison, exact runs give
the metric with the embedding of one position replaced by the baseline's.

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
from ..grids.patching_metrics import Metric, check_metrics, read_metrics, required_tokens
from ..grids.patching_results import as_vector, token_labels

if TYPE_CHECKING:
    import xarray as xr
    from torch import Tensor

    from ...forward.architectures.architecture import Architecture
    from ...forward.hooks.cache import HookCache
    from ...forward.models.model import Model

__all__ = ["IntegratedGradients"]

BATCH_TOKENS = 2048
"""Largest number of positions (steps times prompt length) in one forward and backward pass."""


@dataclass(frozen=True)
class GradientPath:
    """Gradients and logits along the straight line from the baseline's to the prompt's embedding."""

    start: Tensor
    """Baseline embedding [position, hidden]."""
    end: Tensor
    """Prompt embedding [position, hidden]."""
    baseline: Floats
    """Logits of the baseline run, for the tokens that the metric reads."""
    prompt: Floats
    """Logits of the prompt run, for the same tokens."""
    along: list[Floats]
    """Logits at every step between the two, for the same tokens."""
    gradient: Tensor
    """Weighted mean of the gradient over the steps, float64 [position, hidden]."""
    tokens: dict[str, list[str]]
    """Texts of the prompt's tokens under the name "token"; empty for a model without a tokenizer."""


@dataclass(frozen=True, kw_only=True)
class IntegratedGradients(Experiment):
    """Integrated gradients: how much the embedding of each position contributes to a metric."""

    prompt: tuple[int, ...]
    """Token ids of the prompt."""
    metric: Metric
    """Differentiable metric; if it compares with a clean run, the prompt's run is the clean one."""
    baseline: tuple[int, ...] = ()
    """Token ids of the baseline, as many as the prompt has; empty for embeddings of zero."""
    steps: int = 32
    """Number of Gauss-Legendre nodes at which gradients are taken."""
    at: int = -1
    """Position whose next-token logits the metric reads; negative ones count from the end."""
    exact: bool = True
    """Whether to compare with exact runs, each with the embedding of one position replaced."""

    name: ClassVar[str] = "integrated_gradients"
    version: ClassVar[int] = 1
    reads_text: ClassVar[bool] = True
    outputs: ClassVar[Mapping[str, Output]] = {
        "attribution": Output(
            ("position",), "as the metric", "share of the metric due to a position's embedding"
        ),
        "removed": Output(
            ("position",),
            "as the metric",
            "decrease of the metric when a position's embedding is replaced by the baseline's",
            is_optional=True,
        ),
        "value": Output(("run",), "as the metric", "metric of the prompt and of the baseline"),
        "gap": Output((), "as the metric", "difference of the two metrics minus the sum of shares"),
        "path": Output(("step",), "as the metric", "metric at each step from baseline to prompt"),
    }

    def params(self) -> dict[str, Any]:
        """All fields, with the metric as plain values."""
        return {**vars(self), "metric": self.metric.canonical()}

    def cells(self, config: Architecture) -> Sequence[CellLabels]:
        """One cell.

        Raises:
            PromptError: The prompt is empty, or the baseline has another length.
            StageError: `steps` is below 1, or the metric has no gradient.
            ConfigError: The model has no gradients.
        """
        config.require_gradients()
        objective_of(self.metric)
        check_metrics((self.metric,), config)
        if not self.prompt:
            raise PromptError(f"{self.name}: expected a prompt of at least one token, found none")
        if self.baseline and len(self.baseline) != len(self.prompt):
            raise PromptError(
                f"{self.name}: expected a baseline of {len(self.prompt)} tokens, the length of the prompt, "
                f"found {len(self.baseline)}; give another baseline, or leave it out for embeddings of zero"
            )
        if self.steps < 1:
            raise StageError(f"{self.name}: expected steps to be at least 1, found {self.steps}")
        in_range(f"{self.name}, at", "position", (self.at,), len(self.prompt))
        return [{"part": "whole"}]

    @property
    def want(self) -> Logits:
        """Logits at one position, of the tokens that the metric reads."""
        return Logits((self.at,), required_tokens((self.metric,)))

    def prepare(self, model: Model) -> GradientPath:
        """Gradients and logits at every step, and logits at both ends of the path."""
        import torch

        ids = torch.tensor([self.prompt, self.baseline or self.prompt], device=model.device)
        end, start = model.embed(ids)
        # Embeddings of zero are the paper's baseline for text.
        start = start if self.baseline else torch.zeros_like(start)
        # From [-1, 1], where the nodes are defined, to [0, 1]: weights then sum to 1.
        nodes, weights = np.polynomial.legendre.leggauss(self.steps)
        fractions, weights = (nodes + 1) / 2, weights / 2
        prompt, baseline = (self._logits(model, x) for x in (end, start))
        # float64, as the sum of shares is compared with the difference of two metrics.
        total = torch.zeros(start.shape, dtype=torch.float64, device=start.device)
        along: list[Floats] = []
        batch = max(1, BATCH_TOKENS // len(self.prompt))
        for first in range(0, self.steps, batch):
            fraction = torch.as_tensor(
                fractions[first : first + batch], dtype=start.dtype, device=start.device
            )
            embeddings = torch.lerp(start, end, fraction[:, None, None])
            logits, gradient = self._back(model, embeddings)
            along += [as_vector(row[None]) for row in logits]
            weight = torch.as_tensor(weights[first : first + batch], device=start.device)
            total += torch.einsum("s,spd->pd", weight, gradient.double())
        labels = token_labels(model, token=self.prompt)
        return GradientPath(start, end, baseline, prompt, along, total, labels)

    def runs(self, prepared: GradientPath, cell: CellLabels) -> Sequence[Run]:
        """One run per position with its embedding replaced by the baseline's; no runs unless `exact`."""
        if not self.exact:
            return []
        point, length = HookPoint("embed"), len(self.prompt)
        changes = [Replace(prepared.start[at], positions=(at,)) for at in range(length)]
        return [Run(self.prompt, HookSpec().intervene(point, change), self.want) for change in changes]

    def sketch(self, config: Architecture, cell: CellLabels) -> Sequence[Run]:
        """The runs with zeros in place of the baseline's embedding, for planning."""
        width = config.axis_sizes["hidden"]
        changes = [Replace(np.zeros(width, np.float32), positions=(at,)) for at in range(len(self.prompt))]
        specs = [HookSpec().intervene("hook_embed", change) for change in changes if self.exact]
        return [Run(self.prompt, spec, self.want) for spec in specs]

    def measure(self, prepared: GradientPath, cell: CellLabels, result: HookCache) -> float:
        """Value of the metric in one run."""
        return self._read(as_vector(result.logits), prepared.prompt)

    def dataset(self, prepared: GradientPath, cell: CellLabels, measured: Sequence[float]) -> xr.Dataset:
        """Attribution [position], the quadrature error `gap`, and the metric at every step."""
        import xarray as xr

        moved = prepared.end.double() - prepared.start.double()
        # Eq. 1 of the paper: (x - x') times the mean gradient, summed over hidden.
        shares = (moved * prepared.gradient).sum(-1).cpu().numpy()
        value, baseline_value = (
            self._read(entry, prepared.prompt) for entry in (prepared.prompt, prepared.baseline)
        )
        data: dict[str, Any] = {
            "attribution": shares,
            "value": [value, baseline_value],
            "gap": value - baseline_value - shares.sum(),
            "path": [self._read(entry, prepared.prompt) for entry in prepared.along],
        }
        if self.exact:
            data["removed"] = value - np.array(measured)
        coords: dict[str, Any] = {
            "position": np.arange(len(self.prompt)),
            "run": ["prompt", "baseline"],
            "step": (np.polynomial.legendre.leggauss(self.steps)[0] + 1) / 2,
            **{name: ("position", texts) for name, texts in prepared.tokens.items()},
        }
        variables = {name: self.outputs[name].variable(np.asarray(entry)) for name, entry in data.items()}
        return xr.Dataset(variables, coords, {"metric": self.metric.name, "units": self.metric.units})

    def _read(self, logits: Floats, clean: Floats) -> float:
        return float(read_metrics((self.metric,), logits, clean)[0])

    def _logits(self, model: Model, embedding: Tensor) -> Floats:
        """Logits of a run with the embeddings `embedding` [position, hidden], for the metric's tokens."""
        spec = model.bind(HookSpec().intervene("hook_embed", Replace(embedding)))
        logits, _ = model.run_batch([self.prompt], spec, self.want)
        assert logits is not None  # they are wanted
        return as_vector(logits)

    def _back(self, model: Model, embeddings: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [step, 1, tokens] and the metric's gradients [step, position, hidden] at `embeddings`."""
        point = HookPoint("embed")
        spec = HookSpec().intervene(point, Replace(embeddings)).capture(Capture(point, is_gradient=True).name)
        spec = spec.gradient_of(self.metric, at=self.at, baseline=self.prompt)
        count = len(embeddings)
        logits, gradients = model.differentiate(
            [self.prompt] * count, model.bind(spec), [0] * count, want=self.want
        )
        return logits, gradients[Capture(point, is_gradient=True)]
