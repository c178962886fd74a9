"""What is kept of patched runs: logits and token texts in, labelled arrays of metrics out.

Border: numbers of runs and their labels; which runs there are is in patching_grid.py. Never imports torch.
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
from .patching_metrics import Metric, read

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
    "token_texts",
]


@dataclass
class PreparedGrid:
    """What the runs of a grid are made of and measured against.

    clean: logits of the clean run, float64 [vocab wanted]. unpatched: the same of the run that is changed,
    one per sample; none where there is no run but the clean one. activations: by hook point, as the
    experiment needs them. tokens: labels of positions, coordinate -> texts.
    """

    config: Architecture
    clean: Floats
    unpatched: list[Floats]
    activations: Any
    tokens: Mapping[str, list[str]]


class Blank(dict[Any, Any]):
    """What stands for activations where runs are only planned: constants of the right shape, without a batch
    axis, for any hook point or (mark, hook point).

    Marks are samples, or the run ("clean", "corrupted"); each has a constant of its own, so that runs which
    will differ do.
    """

    def __init__(self, config: Architecture, length: int) -> None:
        self._config = config
        self._of_prompts = dict.fromkeys(("position", "query_position", "key_position"), length)

    def __missing__(self, key: Any) -> npt.NDArray[np.float32]:
        mark, point = (0, key) if isinstance(key, HookPoint) else key
        marks: dict[Any, int] = {"clean": 1, "corrupted": 0}
        constant = marks.get(mark, mark)
        sizes = {**self._of_prompts, **self._config.sizes_in(point.layer)}
        return np.broadcast_to(np.float32(constant), [sizes[axis] for axis in point.dims[1:]])


UNPATCHED = Output(
    ("run", "metric"),
    "as the metric",
    "metric of the runs nothing was patched in; of a recovery, the metric it rescales",
)


def outputs_along(*dims: str) -> dict[str, Output]:
    """What experiments declare whose metrics are parameters; `metric_outputs` knows names and units."""
    return {
        "<metric>": Output(dims, "<unit>", "each metric under its name, in its unit"),
        "<metric>_std": Output(dims, "<unit>", "its standard deviation over samples", is_optional=True),
        "unpatched": UNPATCHED,
    }


def metric_outputs(chosen: Sequence[Metric], dims: Sequence[str], num_samples: int) -> dict[str, Output]:
    """The outputs of these metrics, of so many samples each."""
    found = {}
    for metric in chosen:
        found[metric.name] = Output(tuple(dims), metric.units, metric.long_name)
        if num_samples > 1:
            meaning = f"standard deviation over samples of {metric.long_name}"
            found[f"{metric.name}_std"] = Output(tuple(dims), metric.units, meaning)
    return found | {"unpatched": UNPATCHED}


def metrics_of(
    prepared: PreparedGrid, chosen: Sequence[Metric], values: Floats, dims: Sequence[str]
) -> xr.Dataset:
    """Numbers of runs as labelled arrays, one per metric, and those of the runs nothing was patched in.

    values: [*dims, sample, metric], not yet rescaled; means over samples are kept, of several samples the
    standard deviation, too.
    """
    import xarray as xr

    clean = read(chosen, prepared.clean, prepared.clean)
    runs = {"clean": clean}
    if prepared.unpatched:
        runs["corrupted"] = np.mean(
            [read(chosen, each, prepared.clean) for each in prepared.unpatched], axis=0
        )
    samples = values.shape[-2]
    found: dict[str, Any] = {}
    for i, metric in enumerate(chosen):
        scaled = metric.scaled(values[..., i], clean[i], runs.get("corrupted", clean)[i])
        found[metric.name] = scaled.mean(-1)
        if samples > 1:
            found[f"{metric.name}_std"] = scaled.std(-1)
    found["unpatched"] = np.stack(list(runs.values()))
    outputs = metric_outputs(chosen, dims, samples)
    return xr.Dataset(
        {name: outputs[name].variable(array) for name, array in found.items()},
        {"run": list(runs), "metric": [metric.name for metric in chosen]},
    )


def stack(parts: Sequence[xr.Dataset], axis: str) -> xr.Dataset:
    """Datasets along an axis; variables that have no layers are the same in all and taken from the first."""
    import xarray as xr

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
    """Logits [1, 1, vocab] as float64 [vocab]."""
    vector: Floats = logits[0, 0].detach().float().cpu().numpy().astype(np.float64)
    return vector


def token_texts(model: Model, ids: Sequence[int]) -> list[str] | None:
    """Texts of token ids; None for a model without tokenizer."""
    try:
        return [model.tokenizer.decode_token(token) for token in ids]
    except TokenizerError:
        return None
