"""Notes on which workflow, model and settings computed the results of a store.

A note is stored in the provenance of a workflow's first result, or of a captured run. It is for display only,
is part of no key, and is written once per question.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from ..catalog import Catalog
from ..digest import digest
from ..provenance import get_provenance, put_provenance

__all__ = ["Question", "is_capture", "note_capture", "note_question"]

NOTE = "question"
"""Field of a provenance note with the question."""
CAPTURE = "capture"
"""Workflow name in the note on a run captured by `mizarr capture`, without a workflow."""
_LONGEST_TEXT, _LONGEST_LIST = 200, 8
"""Limits on the settings in a note: characters of a text, and items of a list."""


@dataclass(frozen=True)
class Question:
    """One workflow that was computed, as noted in the store: name, model, settings and result keys."""

    workflow: str
    """Name of the workflow."""
    model: str
    """Model name or path, as the user gave it."""
    settings: Mapping[str, Any]
    """Settings that differ from the defaults, long ones cut; without the model and the device."""
    results: Mapping[str, str]
    """Key of each result by its name in the workflow."""
    at: float
    """Time of the first computation, in seconds since the epoch."""

    @property
    def settings_line(self) -> str:
        """The settings on one line, `prompts=["Once upon"] top_k=5`; "defaults" where there are none."""
        pairs = (f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in self.settings.items())
        return " ".join(pairs) or "defaults"

    @property
    def digest(self) -> str:
        """64 hex digits of workflow, model, settings and result keys; the time is left out."""
        return digest("question", self.workflow, self.model, self.settings, self.results)

    @classmethod
    def of_note(cls, note: Mapping[str, Any]) -> Question | None:
        """Parse a provenance note; None if it is about no workflow."""
        noted = note.get(NOTE)
        if not isinstance(noted, Mapping) or not noted.get("results"):
            return None
        at = datetime.fromisoformat(note["at"]).timestamp()
        return cls(noted["workflow"], noted["model"], noted["settings"], noted["results"], at)


def note_question(
    store: Catalog, workflow: str, model: str, settings: Mapping[str, Any], results: Mapping[str, str]
) -> None:
    """Note in the store that a workflow was computed, unless it is noted already; does nothing if the store
    is read-only.

    Arguments:
        store: The store.
        workflow: Name of the workflow.
        model: Model name or path, as the user gave it.
        settings: Settings that differ from the defaults, as plain values.
        results: Key of each result, by its name in the workflow.
    """
    if results:
        shortened = {name: _shortened(value) for name, value in settings.items()}
        noted = {"workflow": workflow, "model": model, "settings": shortened, "results": dict(results)}
        _note_once(store, store.record(next(iter(results.values()))).data, noted)


def note_capture(store: Catalog, data: str) -> None:
    """Note in the store that a run was captured by `mizarr capture`, without a workflow.

    Arguments:
        store: The store.
        data: Folder of the run.
    """
    _note_once(store, data, {"workflow": CAPTURE})


def is_capture(note: Mapping[str, Any]) -> bool:
    """Whether a provenance note says that its run was captured by `mizarr capture`, without a workflow."""
    return note.get(NOTE) == {"workflow": CAPTURE}


def _note_once(store: Catalog, data: str, noted: Mapping[str, Any]) -> None:
    if store.read_only or any(note.get(NOTE) == noted for note in get_provenance(store.files, data)):
        return
    put_provenance(store.files, data, {NOTE: noted})


def _shortened(value: Any) -> Any:
    """Truncate long texts and lists of a setting for display."""
    if isinstance(value, str) and len(value) > _LONGEST_TEXT:
        return f"{value[:_LONGEST_TEXT]}…"
    if isinstance(value, list | tuple):
        items = [_shortened(item) for item in value[:_LONGEST_LIST]]
        return [*items, f"… {len(value)} in all"] if len(value) > _LONGEST_LIST else items
    if isinstance(value, Mapping):
        return {str(name): _shortened(item) for name, item in value.items()}
    return value
