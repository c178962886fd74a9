"""Lineage: from the content digest of a result back through the inputs of each request. Reads provenance
only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..catalog import Catalog
from ..errors import EntryNotFound
from ..provenance import get_provenance
from ..records import Record


def lineage(store: Catalog, content: str) -> dict[str, Any]:
    """Trace stored data, given by its content digest, back through the inputs it was computed from.

    Arguments:
        store: The store.
        content: Content digest, "sha256:…".

    Returns:
        {content, key, label, request, at, inputs: {name: the same, recursively}}. An input that is not stored
        any more has its content digest alone.

    Raises:
        EntryNotFound: Nothing in the store has this content.
    """
    by_content: dict[str, Record] = {}
    for record in store.records():
        # Several keys may have one content; any of them explains how it came about.
        by_content.setdefault(record.content, record)
    if content not in by_content:
        raise EntryNotFound(
            f"nothing in {store.address} has the content digest {content}; `mizarr ls` lists what is stored"
        )
    return _walk(store, content, by_content)


def _walk(
    store: Catalog, content: str, by_content: dict[str, Record], below: frozenset[str] = frozenset()
) -> dict[str, Any]:
    """The mapping that `lineage` returns, for one content; `below`: contents that are being traced
    already."""
    record = by_content.get(content)
    # A stage may return its input unchanged: the same content is then its own input, and the walk ends here.
    if record is None or content in below:
        return {"content": content}
    notes = get_provenance(store.files, record.data)
    requests = [note for note in notes if note.get("key") == record.key and "request" in note]
    # A run has no note per array: its first note describes the whole run.
    note = next(iter(requests or notes), {})
    inputs = {}
    for name, contents in inputs_of(note).items():
        for number, input_content in enumerate(contents):
            label = name if len(contents) == 1 else f"{name}[{number}]"
            inputs[label] = _walk(store, input_content, by_content, below | {content})
    return {
        "content": content,
        "key": record.key,
        "label": record.label,
        "request": note.get("request", note.get("run", {})),
        "at": note.get("at", record.created),
        "inputs": inputs,
    }


def inputs_of(note: Mapping[str, Any]) -> dict[str, list[str]]:
    """Inputs of a computation according to its provenance note: name -> content digests.

    A stage notes the stored arrays behind each input as "parents", because an input that is a part of an
    array, or is made of many layers, has a digest of its own that no stored array has.
    """
    parents = {name: list(digests) for name, digests in note.get("parents", {}).items() if digests}
    # A request names the variable that is read, as in states[resid_post]; a note on parents does not.
    inputs = note.get("request", {}).get("inputs", {})
    others = {name: [digest] for name, digest in inputs.items() if name.partition("[")[0] not in parents}
    return {str(name): [str(digest) for digest in digests] for name, digests in {**others, **parents}.items()}
