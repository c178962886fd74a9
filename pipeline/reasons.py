"""Why a result is not stored, in words: what differs from the nearest result that is.

Border: reads provenance for people; nothing here decides a cache hit.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ..store.errors import CorruptEntry
from .context import Selection
from .nodes import remembered

if TYPE_CHECKING:
    from ..store import Store
    from ..store.keys import ResultKey
    from ..store.records import Record

NEWEST = 50
"""Stored results of a stage that are compared: enough to find a neighbour, few enough to stay fast."""


def why_not(store: Store, key: ResultKey | None) -> str:
    """Why there is no result under a key: the fewest differences to a stored result of the same stage."""
    if key is None:
        return "an input will run"
    requests = [note["request"] for note in notes(key.stage, store)]
    if not requests:
        return "there is no result yet"
    wanted = json.loads(json.dumps(key.request()))  # as provenance spells it: lists for tuples
    found = sorted((differences(wanted, stored) for stored in requests), key=len)
    return ", ".join(found[0])


def differences(wanted: Mapping[str, Any], stored: Mapping[str, Any]) -> list[str]:
    """What differs between two requests, one phrase each: version, parameters, inputs."""
    found = []
    if wanted["version"] != stored["version"]:
        found.append(f"version {stored['version']} -> {wanted['version']}")
    for name in dict.fromkeys([*wanted["params"], *stored["params"]]):
        params = stored["params"], wanted["params"]
        if len({repr(each[name]) if name in each else None for each in params}) == 1:
            continue
        old, new = (_shown(each, name) for each in params)
        # Long values may differ where they are no longer shown.
        found.append(f"parameter {name} changed" + (f" {old} -> {new}" if old != new else ""))
    inputs = dict.fromkeys([*wanted["inputs"], *stored["inputs"]])
    was, now = stored["inputs"], wanted["inputs"]
    found += [f"input {name} changed" for name in inputs if now.get(name) != was.get(name)]
    return found or ["its stored result was removed"]


def _shown(params: Mapping[str, Any], name: str) -> str:
    return f"{params[name]!r:.60}" if name in params else "unset"


def missing_cells(missing: Sequence[Selection], total: int) -> str:
    """Cells for people: "layers 6-11 missing", "3 of 40 segments missing", "2 of 100 blocks missing"."""
    layers = {cell.get("layer") for cell in missing}
    segments = {cell.get("segment") for cell in missing}
    numbers = [layer for layer in layers if layer is not None]
    if numbers and len(missing) == len(layers) * len(segments) and len(segments) == 1:
        return f"layer{'s' if len(numbers) > 1 else ''} {spans(numbers)} missing"
    axes = {axis for cell in missing for axis in cell}
    what = f"{axes.pop()}s" if axes in ({"segment"}, {"block"}) else "cells"
    of = f" (layers {spans(numbers)})" if numbers else ""
    return f"{len(missing)} of {total} {what} missing{of}"


def spans(numbers: Iterable[int]) -> str:
    """Numbers as ranges: 0-3, 7, 9-10."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def notes(stage: str, store: Store) -> list[dict[str, Any]]:
    """Provenance of the newest stored results of a stage, newest first; `verify` tells what is damaged."""
    found = []
    for record in _newest(stage, store):
        with suppress(CorruptEntry):
            written = [note for note in store.provenance(record) if "request" in note]
            found += written[:1]
    return found


def last_timed(
    name: str, store: Store, fits: Callable[[Mapping[str, Any]], bool] = lambda note: True
) -> dict[str, Any] | None:
    """The newest note, among those that fit, that says how long a stage or a captured variable took."""
    for record in _newest(name, store):
        with suppress(CorruptEntry):
            for note in reversed(store.provenance(record)):
                if "seconds" in note and fits(note):
                    return dict(note)
    return None


def scaled_seconds(note: Mapping[str, Any], share: float) -> float:
    """Expected seconds of `share` times the work of an earlier run; its set-up is needed once, not scaled."""
    setup = min(note.get("setup_seconds", 0.0), note["seconds"])
    return float(setup + (note["seconds"] - setup) * share)


def _newest(name: str, store: Store) -> list[Record]:
    of_it = _by_stage("", store).get(name, ())
    return sorted(of_it, key=lambda record: record.created, reverse=True)[:NEWEST]


@remembered
def _by_stage(_: str, store: Store) -> dict[str, list[Record]]:
    """Every record by the stage that made it; one pass over the key files per look."""
    found: dict[str, list[Record]] = {}
    for record in store.records():
        found.setdefault(record.label.rpartition("/")[0], []).append(record)
    return found
