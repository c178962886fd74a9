"""How a result came about: what was asked, from what, with which versions, by whom; and walks back along it.

Border: plain values beside the data, for people and for `lineage`. Nothing in here enters a key or decides a
cache hit, so it may say what keys must not: host, time, library versions. Notes check themselves (sealed.py).
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
"""Begins the names of files beside the notes that hold labels of prompts (runs/prompt_labels.py)."""
_LIBRARIES = ("mizarr", "torch", "zarr", "xarray", "dask", "numpy")


def put_provenance(files: Folder, data: str, note: Mapping[str, Any]) -> None:
    """Add a note, plain JSON values, to what is known about the folder `data`."""
    now = datetime.now(UTC)
    name = f"{data}/provenance/{now:%Y%m%dT%H%M%S.%f}-{secrets.token_hex(3)}.json"
    told = {"at": now.isoformat(timespec="seconds"), **environment(), **note}
    files.put_new(name, sealed(dict(sorted(told.items()))))


def get_provenance(files: Folder, data: str) -> list[dict[str, Any]]:
    """All notes on the folder `data`, oldest first. Raises CorruptEntry for one that is not as written."""
    names = [name for name in note_names(files, data) if not name.rpartition("/")[2].startswith(LABELS)]
    texts = ((name, files.get(name)) for name in names)
    return [unsealed(name, text) for name, text in texts if text is not None]


def note_names(files: Folder, data: str) -> list[str]:
    """The files of all notes on a folder, oldest first, and of labels of prompts."""
    names = files.children(f"{data}/provenance")
    return sorted(f"{data}/provenance/{name}" for name in names if name != "zarr.json")


@cache
def environment() -> dict[str, Any]:
    """Versions, host and process of this computation; read from package metadata, so nothing is imported."""
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
    """A small JSON file: sorted, indented, one line break at the end; TypeError for what is not plain."""
    return json.dumps(value, sort_keys=True, indent=1, allow_nan=False).encode() + b"\n"
