"""Labels that a corpus brings for its prompts (a class, a source, a document), stored beside a run.

    provenance/labels-<when>-<random>.json     columns by name, one value per prompt; the newest file counts

Labels are in no key: two corpora may hold the same tokens under different labels.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..content import TEXT
from ..files import Folder
from ..provenance import LABELS
from ..sealed import sealed, unsealed

__all__ = ["put_prompt_labels", "read_prompt_labels"]

LARGEST = 32 << 20
"""Limit in bytes on the prompt labels of a run; larger ones are not stored, as they would slow down every
opening of the run."""


def put_prompt_labels(folder: Folder, path: str, columns: Mapping[str, Any]) -> bool:
    """Store labels of a run's prompts (a class, a source, a document) beside the run.

    Arguments:
        folder: The store's files.
        path: Folder of the run.
        columns: Label arrays [prompt] by name.

    Returns:
        True if the labels are stored, False if they have more than 32 MiB.
    """
    values = {name: np.asarray(column).tolist() for name, column in sorted(columns.items())}
    if len(json.dumps(values)) > LARGEST:
        return False
    # Repeated captures of one corpus must not add a file each.
    if _newest(folder, path) != values:
        name = f"{LABELS}{time.time_ns():020d}-{secrets.token_hex(3)}.json"
        folder.put_new(f"{path}/provenance/{name}", sealed({"columns": values}))
    return True


def read_prompt_labels(folder: Folder, path: str) -> dict[str, np.ndarray[Any, Any]]:
    """Read the labels of a run's prompts, as arrays [prompt] by name; empty if none are stored.

    Arguments:
        folder: The store's files.
        path: Folder of the run.

    Raises:
        CorruptEntry: A label file is damaged.
    """
    return {
        name: np.array(values, TEXT if isinstance(next(iter(values), 0), str) else None)
        for name, values in _newest(folder, path).items()
    }


def _newest(folder: Folder, path: str) -> dict[str, list[Any]]:
    """Columns of the newest label file of a run; empty if there is none."""
    names = sorted(name for name in folder.children(f"{path}/provenance") if name.startswith(LABELS))
    if not names or (text := folder.get(f"{path}/provenance/{names[-1]}")) is None:
        return {}
    columns: dict[str, list[Any]] = unsealed(names[-1], text, ("columns",))["columns"]
    return columns
