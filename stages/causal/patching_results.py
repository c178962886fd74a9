"""What is kept of patched runs: logits and token texts in, labelled arrays of metrics out.

Border: numbers of runs and their labels; which runs there are is in patching_grid.py. Never imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ...store.errors import TokenizerError
from ..forward.architectures.points import HookPoint
from .patching_metrics import Metric, read

if TYPE_CHECKING:
    import xarray as xr
    from torch import Tensor

    from ..forward.architectures.architecture import Architecture
    from ..forward.models.model import Model

__all__ = ["Blank", "Prepared", "as_vector", "metrics_of", "stack", "token_texts"]

Floats = npt.NDArray[np.float64]


@dataclass
class Prepared:
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
        self._sizes = {
            "position": length,
            "query_position": length,
            "key_position": length,
            **config.axis_sizes,
        }

    def __missing__(self, key: Any) -> npt.NDArray[np.float32]:
        mark, point = (0, key) if isinstance(key, HookPoint) else key
        marks: dict[Any, int] = {"clean": 1, "corrupted": 0}
        constant = marks.get(mark, mark)
        return np.broadcast_to(np.float32(constant), [self._sizes[axis] for axis in point.dims[1:]])


def metrics_of(
    prepared: Prepared, chosen: Sequence[Metric], values: Floats, dims: Sequence[str]
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
    arrays: dict[str, Any] = {}
    for i, metric in enumerate(chosen):
        scaled = metric.scaled(values[..., i], clean[i], runs.get("corrupted", clean)[i])
        told = {"units": metric.units, "long_name": metric.long_name}
        arrays[metric.name] = (dims, scaled.mean(-1), told)
        if values.shape[-2] > 1:
            told = {**told, "long_name": f"standard deviation over samples of {metric.long_name}"}
            arrays[f"{metric.name}_std"] = (dims, scaled.std(-1), told)
    told = {
        "units": "as the metric",
        "long_name": "metric of the runs nothing was patched in; of a recovery, the metric it rescales",
    }
    arrays["unpatched"] = (["run", "metric"], np.stack(list(runs.values())), told)
    return xr.Dataset(arrays, {"run": list(runs), "metric": [metric.name for metric in chosen]})


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
