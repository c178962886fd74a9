"""Runs and the store: what earlier calls gave is read, the rest is computed and kept group by group.

A group is up to `GROUP` neighbouring runs of equal shape (prompt length, logits wanted, captures): one stored
dataset, labelled, with the axis `run` first. Groups are published as they are finished, so that a killed call
goes on where it was; runs appended to a list leave the groups before them what they were.

Border: keys, datasets and results of runs; what is computed together is the planner's business.
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
"""Runs of one stored dataset: few files for many runs, and little lost when a call is killed."""
VERSION = 1
"""Moves when the stored dataset changes."""


Compute = Callable[[Sequence[int]], Iterable[tuple[int, HookCache]]]


@dataclass(frozen=True)
class RunGroup:
    """Neighbouring runs of equal shape.

    runs: their indices in the list.
    """

    runs: tuple[int, ...]
    key: ResultKey
    captures: tuple[Capture, ...]


def stored(model: Model, wanted: Sequence[Wanted], store: Store, compute: Compute) -> dict[int, HookCache]:
    """Index -> result of every run, from the store where it is there.

    compute: gives (number in the list it gets, result) for the runs with these indices, in any order.
    """
    source = ModelSource(model)
    groups = list(_groups(source.identity.digest, wanted))
    found: dict[int, HookCache] = {}
    waiting: dict[int, RunGroup] = {}
    for group in groups:
        if store.lookup(group.key) is not None:
            found.update(_read(store, group, wanted, model))
        else:
            waiting.update(dict.fromkeys(group.runs, group))
    missing = list(waiting)
    with measured() as took:
        for number, result in compute(missing):
            index = missing[number]
            found[index] = result
            group = waiting[index]
            if all(i in found for i in group.runs):
                _keep(store, group, [found[i] for i in group.runs], source, took)
    return found


def _groups(identity: str, wanted: Sequence[Wanted]) -> Iterator[RunGroup]:
    """The runs of a list in groups, in order."""
    start = 0
    while start < len(wanted):
        first = wanted[start]
        stop = start
        while stop < len(wanted) and stop - start < GROUP and _shape(wanted[stop]) == _shape(first):
            stop += 1
        digests = [_run_digest(identity, run) for run in wanted[start:stop]]
        request = {**_shape(first), "runs": digests}
        key = ResultKey("runs", VERSION, request, {"model": identity})
        yield RunGroup(tuple(range(start, stop)), key, first.spec.captures)
        start = stop


def _keep(
    store: Store, group: RunGroup, results: Sequence[HookCache], source: ModelSource, took: Took
) -> None:
    """Publish what the runs of a group gave, if the model still is what the key says.

    took: what the runs took, and those of groups that were computed before or together with them.
    """
    import xarray as xr

    arrays: dict[str, Any] = {}
    if results[0].has_logits:
        logits = torch.cat([result.logits for result in results])
        named = {"units": "logits", "long_name": "next-token logits"}
        arrays["logits"] = (("run", "want_position", "want_token"), _storable(logits), named)
    for number, capture in enumerate(group.captures):
        values = torch.cat([result.require(capture.point, when=capture.when) for result in results])
        dims = ("run", *(_own(axis, number) for axis in capture.point.dims[1:]))
        arrays[_name(capture)] = (
            dims,
            _storable(values),
            {"long_name": f"{capture.point}, {capture.when}"},
        )
    coords = {"run": np.arange(len(results))}
    given = xr.Dataset(arrays, coords)
    note = {**source.provenance(), **took(), "bytes_written": int(given.nbytes)}
    store.put_result(group.key, given, provenance=note, confirm=source.check)


def _read(
    store: Store, group: RunGroup, wanted: Sequence[Wanted], model: Model
) -> Iterator[tuple[int, HookCache]]:
    """(index, result) of the runs of a stored group, on the model's device."""
    dataset = store.open_result(group.key).load()
    for row, index in enumerate(group.runs):
        logits = _tensor(dataset, "logits", row, model) if "logits" in dataset else None
        captured = {capture: _tensor(dataset, _name(capture), row, model) for capture in group.captures}
        yield index, HookCache([list(wanted[index].tokens)], logits, captured)


def _shape(run: Wanted) -> dict[str, Any]:
    """What runs of one group have in common, as plain values."""
    want = None if run.want is None else [_plain(run.want.positions), _plain(run.want.tokens)]
    return {
        "length": len(run.tokens),
        "want": want,
        "captures": [[str(capture.point), capture.when] for capture in run.spec.captures],
    }


def _plain(chosen: Sequence[int] | None) -> list[int] | None:
    return None if chosen is None else list(chosen)


def _run_digest(identity: str, run: Wanted) -> str:
    tokens = PackedTokens.from_lists([list(run.tokens)])
    return RunKey(identity, tokens.digest, run.spec.run_digest).digest


def _name(capture: Capture) -> str:
    """Name of a capture's variable: one per layer, as runs may capture any layers of any kinds."""
    layer = "" if capture.point.layer is None else f"_{capture.point.layer}"
    return f"{capture.variable}{layer}"


def _own(axis: str, number: int) -> str:
    """Axes other than positions may differ in size between kinds; names keep them apart."""
    return axis if axis in ("position", "query_position", "key_position", "hidden") else f"{axis}_{number}"


def _storable(values: torch.Tensor) -> npt.NDArray[Any]:
    """Results are stored in float32 where the model computes in bfloat16, which holds them exactly."""
    wide = values.float() if values.dtype == torch.bfloat16 else values
    return wide.cpu().numpy()


def _tensor(dataset: xr.Dataset, name: str, row: int, model: Model) -> torch.Tensor:
    values = np.ascontiguousarray(dataset[name].values[row : row + 1])
    return torch.from_numpy(values).to(model.device, model.dtype)
