"""Datasets of patched runs: logits and token texts in, labelled arrays of metrics out.

Border: numbers of runs and their labels; patching_grid.py lists the runs. Never imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ....pipeline import Output
from ....store.arrays import Floats
from ....store.errors import TokenizerError
from ...forward.architectures.points import HookPoint
from .patching_metrics import Metric, read_metrics

if TYPE_CHECKING:
    import xarray as xr
    from torch import Tensor

    from ...forward.architectures.architecture import Architecture
    from ...forward.models.model import Model

__all__ = [
    "Blank",
    "PreparedGrid",
    "as_vector",
    "metric_outputs",
    "metrics_of",
    "outputs_along",
    "stack",
    "token_labels",
]


@dataclass
class PreparedGrid:
    """Results of a grid's unpatched runs, with the activations that its patches need."""

    config: Architecture
    """Architecture of the model."""
    clean: Floats
    """Logits of the clean run, float64 [token], of the tokens that the metrics read."""
    unpatched: list[Floats]
    """The same logits of the corrupted run, one per sample; empty if the clean run itself is changed."""
    activations: Any
    """Activations that patches use; each subclass of `Grid` defines the keys, usually hook points."""
    tokens: Mapping[str, list[str]]
    """Name of a token coordinate -> texts of its tokens."""


class Blank(dict[Any, Any]):
    """Placeholder for activations, without batch axis, while runs are only planned: constants.

    Keys are hook points or (sample or run, hook point). Each sample and run has its own constant, so that
    runs which will differ are not merged in the plan.
    """

    def __init__(self, config: Architecture, length: int) -> None:
        self._config = config
        self._of_prompts = dict.fromkeys(("position", "query_position", "key_position"), length)

    def __missing__(self, key: Any) -> npt.NDArray[np.float32]:
        label, point = (0, key) if isinstance(key, HookPoint) else key
        constants: dict[Any, int] = {"clean": 1, "corrupted": 0}
        # Equal payloads would let the planner merge runs that will differ.
        constant = constants.get(label, label)
        sizes = {**self._of_prompts, **self._config.sizes_in(point.layer)}
        # broadcast_to: a read-only view of one number, whatever the size of the activation.
        return np.broadcast_to(np.float32(constant), [sizes[axis] for axis in point.dims[1:]])


UNPATCHED = Output(
    ("run", "metric"),
    "as the metric",
    "metric of the unpatched runs; of a recovery, the metric that it rescales",
)
"""Declared output of every grid: metrics of the clean and the corrupted run."""


def outputs_along(*dims: str) -> dict[str, Output]:
    """Declared outputs along some axes of an experiment whose metrics are parameters, so not yet named."""
    return {
        "<metric>": Output(dims, "<unit>", "each metric under its name, in its unit"),
        "<metric>_std": Output(dims, "<unit>", "standard deviation over samples", is_optional=True),
        "unpatched": UNPATCHED,
    }


def metric_outputs(metrics: Sequence[Metric], dims: Sequence[str], num_samples: int) -> dict[str, Output]:
    """Declared outputs for given metrics; with several samples also their standard deviations.

    Arguments:
        metrics: Metrics of every run.
        dims: Axes of each metric.
        num_samples: Number of samples per place.
    """
    outputs = {}
    for metric in metrics:
        outputs[metric.name] = Output(tuple(dims), metric.units, metric.long_name)
        if num_samples > 1:
            meaning = f"standard deviation over samples of {metric.long_name}"
            outputs[f"{metric.name}_std"] = Output(tuple(dims), metric.units, meaning)
    return outputs | {"unpatched": UNPATCHED}


def metrics_of(
    prepared: PreparedGrid, metrics: Sequence[Metric], values: Floats, dims: Sequence[str]
) -> xr.Dataset:
    """Dataset of the metrics of patched and unpatched runs, with one variable per metric.

    Arguments:
        prepared: Results of the unpatched runs.
        metrics: Metrics of every run.
        values: Metrics of the patched runs before rescaling [*dims, sample, metric]. The result holds means
        over
            samples, and standard deviations if there are several.
        dims: Axes of the patched places.
    """
    import xarray as xr

    clean = read_metrics(metrics, prepared.clean, prepared.clean)
    runs = {"clean": clean}
    if prepared.unpatched:
        runs["corrupted"] = np.mean(
            [read_metrics(metrics, logits, prepared.clean) for logits in prepared.unpatched], axis=0
        )
    samples = values.shape[-2]
    variables: dict[str, Any] = {}
    for i, metric in enumerate(metrics):
        # Rescaled sample by sample before the mean, so that the standard deviation is on the same scale.
        scaled = metric.scaled(values[..., i], clean[i], runs.get("corrupted", clean)[i])
        variables[metric.name] = scaled.mean(-1)
        if samples > 1:
            variables[f"{metric.name}_std"] = scaled.std(-1)
    variables["unpatched"] = np.stack(list(runs.values()))
    outputs = metric_outputs(metrics, dims, samples)
    return xr.Dataset(
        {name: outputs[name].variable(array) for name, array in variables.items()},
        {"run": list(runs), "metric": [metric.name for metric in metrics]},
    )


def stack(parts: Sequence[xr.Dataset], axis: str) -> xr.Dataset:
    """Results of several layers, or kinds of hook points, concatenated along that axis.

    Arguments:
        parts: One dataset per layer or kind; variables without a layer axis are equal in all.
        axis: Axis of the concatenation, "layer" or "kind".
    """
    import xarray as xr

    # Only these are concatenated; the others would get a layer axis of equal rows.
    changing = [name for name, variable in parts[0].data_vars.items() if "layer" in variable.dims]
    return xr.concat(
        parts,
        axis,
        data_vars=changing,
        coords="minimal",
        compat="override",
        join="exact",
        combine_attrs="override",
    )


def as_vector(logits: Tensor) -> Floats:
    """Logits [1, 1, vocab] of one position, or [1, label] of one prompt, as a float64 array of one axis."""
    # float() first, as numpy has no bfloat16.
    vector: Floats = logits.flatten(0, -2)[0].detach().float().cpu().numpy().astype(np.float64)
    return vector


def token_labels(model: Model, **prompts: Sequence[int]) -> dict[str, list[str]]:
    """Texts of the tokens of some prompts, for coordinates; empty for a model without tokenizer.

    Arguments:
        model: The model.
        prompts: Token ids by name of the coordinate.
    """
    try:
        return {name: [model.tokenizer.decode_token(token) for token in ids] for name, ids in prompts.items()}
    except TokenizerError:
        return {}
