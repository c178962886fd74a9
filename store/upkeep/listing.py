"""What a store holds, for people: runs by model and hook points, with their sizes and last use.

Border: reads records, notes and sizes; opens no array and changes nothing, not even when something was used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath

from ..catalog import Catalog
from ..files import Folder
from ..provenance import get_provenance
from ..reading.selection import ranges
from ..records import ACTIVATION
from ..runs.entries import group_attributes
from ..runs.quantised import is_scale
from .collect import Usage

__all__ = ["ListedRun", "captured_hooks", "model_label", "runs"]


@dataclass(frozen=True)
class ListedRun:
    """One run. run: its digest. model: as it was captured by; its digest where nobody noted a name. hooks:
    variables and layers that are published, "resid_post 0-5". bytes: on disk. used: seconds since the
    epoch."""

    run: str
    model: str
    prompts: int
    tokens: int
    hooks: tuple[str, ...]
    dtype: str
    bytes: int
    used: float


def runs(store: Catalog, measured: Sequence[Usage]) -> list[ListedRun]:
    """Every run that has been begun, the one used last first. measured: by `usage`."""
    found = []
    for each in measured:
        if each.kind != ACTIVATION:
            continue
        about = group_attributes(store.files, each.data)["mizarr"]
        found.append(
            ListedRun(
                each.data.rpartition("/")[2],
                _model(store.files, each.data) or about["run"]["model"][:12],
                about["n_prompts"],
                about["n_tokens"],
                captured_hooks(each.labels),
                about["dtype"],
                each.bytes,
                each.used,
            )
        )
    return sorted(found, key=lambda run: (-run.used, run.run))


def model_label(model: str) -> str:
    """The name of a model in a list: of a path its last part, any other name whole.

    >>> model_label("/models/gemma.gguf"), model_label("google/gemma-3-270m")
    ('gemma.gguf', 'google/gemma-3-270m')
    """
    path = PurePath(model)
    return path.name if path.is_absolute() or path.parts[:1] in ((".",), ("..",), ("~",)) else model


def _model(files: Folder, data: str) -> str | None:
    """The name that stands in a run's notes."""
    names = (note.get("model") for note in get_provenance(files, data))
    return next((name for name in names if isinstance(name, str)), None)


def captured_hooks(labels: Sequence[str]) -> tuple[str, ...]:
    """Captured variables with their layers, "resid_post 0-5", from labels of records ("resid_post/3").

    The scales of a quantised variable are not listed.
    """
    layers: dict[str, list[int]] = {}
    for label in sorted(labels):
        variable, _, layer = label.partition("/")
        if is_scale(variable):
            continue
        layers.setdefault(variable, []).extend([int(layer)] if layer else [])
    return tuple(f"{name} {ranges(sorted(held))}" if held else name for name, held in layers.items())
