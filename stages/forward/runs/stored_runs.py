"""Results of runs in the store: stored ones are read, missing ones are computed and stored in groups.

A group is up to `GROUP` consecutive runs of equal shape (prompt length, logits, captures), stored as one
labelled dataset with the axis `run` first. A group is published when its last run is computed, so that a
killed call continues where it stopped. Appending runs to a list does not change the keys of earlier full
groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from ....pipeline.memory import Took, measured
from ....store.keys import ResultKey, RunKey
from ....store.runs.packed import PackedTokens
from ..hooks.cache import HookCache
from ..hooks.spec import Capture
from ..models.model import Model
from ..models.source import ModelSource
from ..passes.branches import Wanted

if TYPE_CHECKING:
    import xarray as xr

    from ....store import Store

__all__ = ["GROUP", "stored"]

GROUP = 64
"""Most runs of one stored dataset: few files for many runs, and little lost when a call is killed."""
VERSION = 1
"""Version of the layout of the stored dataset, part of its key."""


Compute = Callable[[Sequence[int]], Iterable[tuple[int, HookCache]]]
"""Computes the runs with given indices; yields (position in the argument, result) in any order."""


@dataclass(frozen=True)
class RunGroup:
    """Consecutive runs of equal prompt length, logits and captures, stored as one dataset."""

    runs: tuple[int, ...]
    """Indices of the runs in the list of all runs."""
    key: ResultKey
    """Key of the stored dataset."""
    captures: tuple[Capture, ...]
    """Captures of each run, the same for all."""
    tokens: tuple[int, ...] | range | None = None
    """Numbers of the labels or tokens whose logits each run returns; None for all."""


def stored(model: Model, resolved: Sequence[Wanted], store: Store, compute: Compute) -> dict[int, HookCache]:
    """Read the results of runs from a store; compute the missing ones and store them.

    Arguments:
        model: a model with an identity.
        resolved: all runs, with tokenised prompts.
        store: store of the results.
        compute: computes the runs with given indices; yields (position among these indices, result).

    Returns:
        Index in `resolved` -> result.
    """
    source = ModelSource(model)
    groups = list(_split_into_groups(source.identity.digest, resolved))
    results: dict[int, HookCache] = {}
    waiting: dict[int, RunGroup] = {}
    for group in groups:
        if store.lookup(group.key) is not None:
            results.update(_read_group(store, group, resolved, model))
        else:
            waiting.update(dict.fromkeys(group.runs, group))
    # A killed call may have stored some groups: runs of the others are computed together.
    missing = list(waiting)
    with measured() as took:
        for number, result in compute(missing):
            index = missing[number]
            results[index] = result
            group = waiting[index]
            # The planner yields in its own order, so any run may be the last of its group.
            if all(i in results for i in group.runs):
                _publish_group(store, group, [results[i] for i in group.runs], source, took)
    return results


def _split_into_groups(identity: str, resolved: Sequence[Wanted]) -> Iterator[RunGroup]:
    """Split a list of runs into groups of consecutive runs of equal shape, at most `GROUP` each."""
    start = 0
    while start < len(resolved):
        first_run = resolved[start]
        stop = start
        while stop < len(resolved) and stop - start < GROUP and _shape(resolved[stop]) == _shape(first_run):
            stop += 1
        # Digests of run keys, as captures of the same run have them.
        digests = [_run_digest(identity, run) for run in resolved[start:stop]]
        request = {**_shape(first_run), "runs": digests}
        key = ResultKey("runs", VERSION, request, {"model": identity})
        wanted = None if first_run.want is None else first_run.want.tokens
        yield RunGroup(tuple(range(start, stop)), key, first_run.spec.captures, wanted)
        start = stop


def _publish_group(
    store: Store, group: RunGroup, results: Sequence[HookCache], source: ModelSource, took: Took
) -> None:
    """Store the results of a group as one dataset.

    Arguments:
        store: store of the results.
        group: the runs and the key of their dataset.
        results: result of each run.
        source: the model; SourceChanged is raised if it no longer has the identity in the key.
        took: time and memory since the call began; groups that are computed together cannot be told apart.
    """
    import xarray as xr

    arrays: dict[str, Any] = {}
    coords: dict[str, Any] = {"run": np.arange(len(results))}
    if results[0].has_logits:
        logits, head = torch.cat([result.logits for result in results]), results[0].head
        attrs = {"units": "logits", "long_name": "next-token logits"}
        dims: tuple[str, ...] = ("run", "want_position", "want_token")
        if head.kind == "labels":
            attrs["long_name"] = "logits of labels"
            dims = ("run", "label") if head.is_pooled else ("run", "want_position", "label")
            label_numbers = range(len(head.labels)) if group.tokens is None else group.tokens
            coords["label"] = [head.labels[number] for number in label_numbers]
        arrays["logits"] = (dims, _as_numpy(logits), attrs)
    for number, capture in enumerate(group.captures):
        values = torch.cat([result.require(capture.point, when=capture.when) for result in results])
        dims = ("run", *(_axis_name(axis, number) for axis in capture.point.dims[1:]))
        arrays[_variable_name(capture)] = (
            dims,
            _as_numpy(values),
            {"long_name": f"{capture.point}, {capture.when}"},
        )
    dataset = xr.Dataset(arrays, coords)
    note = {**source.provenance(), **took(), "bytes_written": int(dataset.nbytes)}
    store.put_result(group.key, dataset, provenance=note, confirm=source.check)


def _read_group(
    store: Store, group: RunGroup, resolved: Sequence[Wanted], model: Model
) -> Iterator[tuple[int, HookCache]]:
    """Read the results of a stored group, as (index of the run, result on the model's device) pairs."""
    dataset = store.open_result(group.key).load()
    for row, index in enumerate(group.runs):
        logits = _tensor(dataset, "logits", row, model) if "logits" in dataset else None
        captured = {
            capture: _tensor(dataset, _variable_name(capture), row, model) for capture in group.captures
        }
        # Stored without the position axis where the head gives one vector of logits per prompt.
        if logits is not None and model.config.head.is_pooled:
            logits = logits[:, None]
        yield index, HookCache([list(resolved[index].tokens)], logits, captured, model.config.head)


def _shape(run: Wanted) -> dict[str, Any]:
    """Prompt length, logits and captures of a run, as JSON values; equal for all runs of a group."""
    want = None if run.want is None else [_as_list(run.want.positions), _as_list(run.want.tokens)]
    return {
        "length": len(run.tokens),
        "want": want,
        "captures": [[str(capture.point), capture.when] for capture in run.spec.captures],
    }


def _as_list(indices: Sequence[int] | None) -> list[int] | None:
    # A range and a tuple of the same tokens have one key.
    return None if indices is None else list(indices)


def _run_digest(identity: str, run: Wanted) -> str:
    tokens = PackedTokens.from_lists([list(run.tokens)])
    return RunKey(identity, tokens.digest, run.spec.run_digest).digest


def _variable_name(capture: Capture) -> str:
    """Name of a capture in the stored dataset; one per layer, because runs may capture any layers."""
    layer = "" if capture.point.layer is None else f"_{capture.point.layer}"
    return f"{capture.variable}{layer}"


def _axis_name(axis: str, number: int) -> str:
    """Axis name in the stored dataset; numbered by capture if the length may differ between captures."""
    return axis if axis in ("position", "query_position", "key_position", "hidden") else f"{axis}_{number}"


def _as_numpy(values: torch.Tensor) -> npt.NDArray[Any]:
    """Convert a tensor to numpy; bfloat16, which numpy lacks, becomes float32, which holds it exactly."""
    wide = values.float() if values.dtype == torch.bfloat16 else values
    return wide.cpu().numpy()


def _tensor(dataset: xr.Dataset, name: str, row: int, model: Model) -> torch.Tensor:
    values = np.ascontiguousarray(dataset[name].values[row : row + 1])
    return torch.from_numpy(values).to(model.device, model.dtype)
