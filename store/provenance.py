"""How a result came about: what was asked, from what, with which versions, by whom; and walks back along it.

Border: plain values beside the data, for people and for `lineage`. Nothing in here is digested or decides a
cache
hit, so it may say what keys must not: host, time, library versions.
"""

from __future__ import annotations

import json
import os
import platform
import secrets
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from .files import Folder

_LIBRARIES = ("mizarr", "torch", "zarr", "xarray", "dask", "numpy")


def put_provenance(files: Folder, data: str, note: Mapping[str, Any]) -> None:
    """Add a note, plain JSON values, to what is known about the folder `data`."""
    now = datetime.now(UTC)
    name = f"{data}/provenance/{now:%Y%m%dT%H%M%S.%f}-{secrets.token_hex(3)}.json"
    files.put_new(name, as_json({"at": now.isoformat(timespec="seconds"), **environment(), **note}))


def get_provenance(files: Folder, data: str) -> list[dict[str, Any]]:
    """All notes on the folder `data`, oldest first."""
    texts = (files.get(name) for name in sorted(_notes(files, data)))
    return [json.loads(text) for text in texts if text is not None]


def _notes(files: Folder, data: str) -> Iterator[str]:
    return (name for name in files.list(f"{data}/provenance") if not name.endswith("/zarr.json"))


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
