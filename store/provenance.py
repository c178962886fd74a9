"""Provenance notes: request, inputs, versions, host and time of a computation, stored beside its data.

For people and for `lineage`. No key and no cache decision depends on a note, so it may contain what keys must
not.
"""

from __future__ import annotations

import json
import os
import platform
import secrets
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from .files import Folder
from .sealed import sealed, unsealed

LABELS = "labels-"
"""Prefix of files in the same folder that hold prompt labels (runs/prompt_labels.py) instead of notes."""
_LIBRARIES = ("mizarr", "torch", "zarr", "xarray", "dask", "numpy")


def put_provenance(files: Folder, data: str, note: Mapping[str, Any]) -> None:
    """Store a note on how a run or result was computed, with versions, host and time added.

    Arguments:
        files: The store's files.
        data: Folder of the run or result.
        note: Fields of the note, as plain JSON values.
    """
    now = datetime.now(UTC)
    # Names sort by time, and the random part lets two processes write in the same microsecond.
    name = f"{data}/provenance/{now:%Y%m%dT%H%M%S.%f}-{secrets.token_hex(3)}.json"
    fields = {"at": now.isoformat(timespec="seconds"), **environment(), **note}
    files.put_new(name, sealed(dict(sorted(fields.items()))))


def get_provenance(files: Folder, data: str) -> list[dict[str, Any]]:
    """Read all notes on how a run or result was computed, oldest first.

    Arguments:
        files: The store's files.
        data: Folder of the run or result.

    Raises:
        CorruptEntry: A note is damaged.
    """
    names = [name for name in note_names(files, data) if not name.rpartition("/")[2].startswith(LABELS)]
    texts = ((name, files.get(name)) for name in names)
    return [unsealed(name, text) for name, text in texts if text is not None]


def model_note(files: Folder, data: str) -> dict[str, Any] | None:
    """Read the oldest note that names the model of a run; None if no note does.

    Arguments:
        files: The store's files.
        data: Folder of the run.
    """
    notes = get_provenance(files, data)
    return next((note for note in notes if isinstance(note.get("model"), str)), None)


def note_names(files: Folder, data: str) -> list[str]:
    """Paths of all notes and prompt labels of a run or result, relative to the store, oldest first.

    Arguments:
        files: The store's files.
        data: Folder of the run or result.
    """
    names = files.children(f"{data}/provenance")
    return sorted(f"{data}/provenance/{name}" for name in names if name != "zarr.json")


@cache
def environment() -> dict[str, Any]:
    """Versions of Python and libraries, host and process id, as noted with every computation.

    Versions come from package metadata, so no library is imported.
    """
    versions = {"python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "versions": versions,
        "host": platform.node(),
        "platform": platform.platform(),
        "pid": os.getpid(),
    }


def as_json(value: Mapping[str, Any]) -> bytes:
    """Content of a small JSON file: sorted, indented, with a final newline. TypeError for non-JSON values."""
    return json.dumps(value, sort_keys=True, indent=1, allow_nan=False).encode() + b"\n"
