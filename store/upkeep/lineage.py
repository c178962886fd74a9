"""Where a result came from: from a content digest back through the inputs of each request.

Border: reads provenance; computes and opens nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..catalog import Catalog
from ..errors import EntryNotFound
from ..provenance import get_provenance
from ..records import Record


def lineage(store: Catalog, content: str) -> dict[str, Any]:
    """What made the content R: {content, key, label, request, at, inputs: {name: …the same…}}.

    content: "sha256:…".  An input that is no longer stored appears with its content digest alone. Raises
    EntryNotFound when nothing stored has this content.
    """
    by_content: dict[str, Record] = {}
    for record in store.records():
        by_content.setdefault(record.content, record)
    if content not in by_content:
        raise EntryNotFound(
            f"nothing in {store.address} has content {content}; `mizarr ls` shows what is there"
        )
    return _walk(store, content, by_content)


def _walk(
    store: Catalog, content: str, by_content: dict[str, Record], below: frozenset[str] = frozenset()
) -> dict[str, Any]:
    record = by_content.get(content)
    # A stage may give back its input to the bit; that is an end, not a circle to walk.
    if record is None or content in below:
        return {"content": content}
    notes = get_provenance(store.files, record.data)
    note = next(
        (n for n in notes if n.get("key") == record.key and "request" in n), notes[0] if notes else {}
    )
    inputs = {}
    for name, contents in inputs_of(note).items():
        for number, told in enumerate(contents):
            label = name if len(contents) == 1 else f"{name}[{number}]"
            inputs[label] = _walk(store, told, by_content, below | {content})
    return {
        "content": content,
        "key": record.key,
        "label": record.label,
        "request": note.get("request", note.get("run", {})),
        "at": note.get("at", record.created),
        "inputs": inputs,
    }


def inputs_of(note: Mapping[str, Any]) -> dict[str, list[str]]:
    """What a provenance note says was read: input -> content digests.

    A stage notes the stored arrays behind each input ("parents"): an input made of many layers, or a piece of
    one, has a digest of its own, which names nothing in the store.
    """
    parents = {name: list(told) for name, told in note.get("parents", {}).items() if told}
    # A request names the variable that is read, as in states[resid_post]; a note on parents does not.
    inputs = note.get("request", {}).get("inputs", {})
    plain = {name: [told] for name, told in inputs.items() if name.partition("[")[0] not in parents}
    return {str(name): [str(one) for one in told] for name, told in {**plain, **parents}.items()}
