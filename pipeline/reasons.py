"""Why a result is not stored: its differences from the most similar stored result, in words.

Border: reads provenance for messages; no cache hit depends on it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ..store.arrays import ranges
from ..store.errors import CorruptEntry
from .context import Selection
from .nodes import remembered

if TYPE_CHECKING:
    from ..store import Store
    from ..store.keys import ResultKey
    from ..store.records import Record

NEWEST = 50
"""Number of stored results of a stage that are compared: enough to find a similar one, and still fast."""


def why_not(store: Store, key: ResultKey | None) -> str:
    """Explain in words why no result has this key: how it differs from the most similar stored result.

    Arguments:
        store: The store to compare with.
        key: Key of the missing result; None while an input is not stored.
    """
    if key is None:
        return "an input will run"
    requests = [note["request"] for note in notes(key.stage, store)]
    if not requests:
        return "there is no result yet"
    request = json.loads(json.dumps(key.request()))  # JSON turns tuples into lists, as in provenance
    # min takes the first of equally short lists: among equally similar results the newest is described.
    fewest = min([differences(request, stored) for stored in requests], key=len)
    return ", ".join(fewest)


def differences(request: Mapping[str, Any], stored: Mapping[str, Any]) -> list[str]:
    """Describe how two results of a stage differ in version, parameters and inputs, one phrase each.

    Arguments:
        request: `ResultKey.request()` of the missing result.
        stored: The same of a stored result, from its provenance.
    """
    phrases = []
    if request["version"] != stored["version"]:
        phrases.append(f"version {stored['version']} -> {request['version']}")
    old_params, new_params = stored["params"], request["params"]
    for name in dict.fromkeys([*new_params, *old_params]):
        in_both = name in old_params and name in new_params
        # By repr, as 1 == 1.0 == True, and these are different parameters.
        if in_both and repr(old_params[name]) == repr(new_params[name]):
            continue
        old, new = _shown(old_params, name), _shown(new_params, name)
        # Long values may differ where they are no longer shown.
        phrases.append(f"parameter {name} changed" + (f" {old} -> {new}" if old != new else ""))
    old_inputs, new_inputs = stored["inputs"], request["inputs"]
    input_names = dict.fromkeys([*new_inputs, *old_inputs])
    phrases += [
        f"input {name} changed" for name in input_names if new_inputs.get(name) != old_inputs.get(name)
    ]
    return phrases or ["its stored result was removed"]


def _shown(params: Mapping[str, Any], name: str) -> str:
    """Value of a parameter, cut to 60 characters; "unset" without one."""
    return f"{params[name]!r:.60}" if name in params else "unset"


def missing_cells(missing: Sequence[Selection], total: int) -> str:
    """Describe which parts (cells) of a stage's result are not stored: "layers 6-11 missing".

    Arguments:
        missing: Labels of the missing cells.
        total: Number of all cells.
    """
    layers = {cell.get("layer") for cell in missing}
    segments = {cell.get("segment") for cell in missing}
    numbers = sorted(layer for layer in layers if layer is not None)
    # Cut by layer alone: each missing cell is a whole layer.
    if numbers and len(missing) == len(layers) * len(segments) and len(segments) == 1:
        return f"layer{'s' if len(numbers) > 1 else ''} {ranges(numbers)} missing"
    axes = {axis for cell in missing for axis in cell}
    unit = f"{axes.pop()}s" if axes in ({"segment"}, {"block"}) else "cells"
    layer_note = f" (layers {ranges(numbers)})" if numbers else ""
    return f"{len(missing)} of {total} {unit} missing{layer_note}"


def notes(stage: str, store: Store) -> list[dict[str, Any]]:
    """Provenance of the newest stored results of a stage, newest first; damaged notes are skipped.

    Arguments:
        stage: Name of the stage in keys, or of its cells ("<stage>/cell").
        store: The store to read from.

    Returns:
        For each result the note of its first computation.
    """
    provenance = []
    for record in _newest(stage, store):
        with suppress(CorruptEntry):
            requests = [note for note in store.provenance(record) if "request" in note]
            provenance += requests[:1]
    return provenance


def last_timed(
    name: str, store: Store, fits: Callable[[Mapping[str, Any]], bool] = lambda note: True
) -> dict[str, Any] | None:
    """Newest provenance note of a stage or captured variable that states how long its computation took.

    Arguments:
        name: Name of the stage or variable.
        store: The store to read from.
        fits: Function that decides whether a note is accepted.

    Returns:
        The note; None if no accepted note states seconds.
    """
    for record in _newest(name, store):
        with suppress(CorruptEntry):
            # The last note belongs to the latest computation of the record.
            for note in reversed(store.provenance(record)):
                if "seconds" in note and fits(note):
                    return dict(note)
    return None


def scaled_seconds(note: Mapping[str, Any], share: float) -> float:
    """Estimate the seconds of some work from those of an earlier run.

    The time of set-up (reading the model) is not scaled, as it does not depend on the amount of work.

    Arguments:
        note: Provenance of the earlier run.
        share: Work to do, as a multiple of the earlier run's.
    """
    setup = min(note.get("setup_seconds", 0.0), note["seconds"])
    return float(setup + (note["seconds"] - setup) * share)


def _newest(name: str, store: Store) -> list[Record]:
    """Records of the newest stored results of a stage or captured variable, newest first."""
    records = _by_stage("", store).get(name, ())
    return sorted(records, key=lambda record: record.created, reverse=True)[:NEWEST]


@remembered
def _by_stage(_: str, store: Store) -> dict[str, list[Record]]:
    """All records of the store, by the name of their stage or variable; read once per `one_look` block."""
    records_by_stage: dict[str, list[Record]] = {}
    for record in store.records():
        records_by_stage.setdefault(record.label.rpartition("/")[0], []).append(record)
    return records_by_stage
