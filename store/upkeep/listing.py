"""Summary of the runs in a store for display: model, hook points, size and last use. Reads records and notes
only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath

from ..arrays import ranges
from ..catalog import Catalog
from ..provenance import model_note
from ..records import ACTIVATION
from ..runs.entries import group_attributes
from ..runs.quantised import is_scale
from .collect import Usage

__all__ = ["ListedRun", "captured_hooks", "model_label", "runs"]


@dataclass(frozen=True)
class ListedRun:
    """Summary of one stored run, for lists."""

    run: str
    """Digest of the run, 64 hex digits."""
    model: str
    """Name under which the model was captured; the digest of the model if no name was noted."""
    prompts: int
    """Number of prompts."""
    tokens: int
    """Number of tokens."""
    hooks: tuple[str, ...]
    """Published variables with their layers, such as "resid_post 0-5"."""
    dtype: str
    """Storage dtype."""
    bytes: int
    """Bytes on disk."""
    used: float
    """Last use, seconds since the epoch."""


def runs(store: Catalog, measured: Sequence[Usage]) -> list[ListedRun]:
    """List all stored runs, complete or not, most recently used first.

    Arguments:
        store: The store.
        measured: Disk usage of all runs and results, from `collect.usage`.
    """
    listed = []
    for item in measured:
        if item.kind != ACTIVATION:
            continue
        attributes = group_attributes(store.files, item.data)["mizarr"]
        model = (model_note(store.files, item.data) or {}).get("model")
        listed.append(
            ListedRun(
                item.data.rpartition("/")[2],
                model or attributes["run"]["model"][:12],
                attributes["n_prompts"],
                attributes["n_tokens"],
                captured_hooks(item.labels),
                attributes["dtype"],
                item.bytes,
                item.used,
            )
        )
    return sorted(listed, key=lambda run: (-run.used, run.run))


def model_label(model: str) -> str:
    """Short name of a model for lists: the last component of a path, any other name unchanged.

    >>> model_label("/models/gemma.gguf"), model_label("google/gemma-3-270m")
    ('gemma.gguf', 'google/gemma-3-270m')
    """
    path = PurePath(model)
    return path.name if path.is_absolute() or path.parts[:1] in ((".",), ("..",), ("~",)) else model


def captured_hooks(labels: Sequence[str]) -> tuple[str, ...]:
    """Format record labels ("resid_post/3") as variables with layers ("resid_post 0-5"), without scale
    arrays."""
    layers: dict[str, list[int]] = {}
    for label in sorted(labels):
        variable, _, layer = label.partition("/")
        if is_scale(variable):
            continue
        layers.setdefault(variable, []).extend([int(layer)] if layer else [])
    return tuple(f"{name} {ranges(sorted(numbers))}" if numbers else name for name, numbers in layers.items())
