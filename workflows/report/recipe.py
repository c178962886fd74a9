"""Provenance of a workflow's results: all stages of its graph, and the command that repeats it.

The output is the same for all readers of a store: host and process of a computation are left out.

Border: reads keys and provenance, computes nothing, loads no model.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...pipeline.memory import highest_peaks, megabytes
from ...pipeline.nodes import ResultNode, one_look
from ...pipeline.plan import human_bytes
from ...pipeline.sources import ConstantNode
from ...stages.forward.capture.capture import CaptureNode
from ...store.errors import EntryNotFound

if TYPE_CHECKING:
    from ...pipeline.nodes import Node
    from ...store import Store
    from ...store.reading.labelled import LabelledEntry
    from ...store.records import Record
    from .reported import Reported

__all__ = ["Asked", "Made", "asked", "command", "facts", "made"]


@dataclass(frozen=True)
class Asked:
    """A setting of a workflow."""

    name: str
    """Name of the setting."""
    value: str
    """Value as JSON."""
    help: str
    """Help text."""
    is_default: bool
    """Whether the value is the default."""


def asked(settings: Any) -> list[Asked]:
    """All settings of a workflow, in order."""
    return [
        Asked(
            field.name,
            _json(getattr(settings, field.name)),
            field.metadata.get("help", ""),
            getattr(settings, field.name) == field.default,
        )
        for field in dataclasses.fields(settings)
    ]


def command(workflow: Reported, verb: str = "report") -> str:
    """Command line that reproduces the results.

    Arguments:
        workflow: The workflow.
        verb: Subcommand of mizarr.
    """
    words = ["mizarr", verb, workflow.name]
    for setting in asked(workflow.settings):
        if not setting.is_default:
            words += ["--set", f"{setting.name}={setting.value}"]
    return shlex.join(words)


@dataclass(frozen=True)
class Made:
    """A node of the computation graph: its stage, key, inputs and provenance."""

    name: str
    """Result name in the workflow, or else node name, numbered if several nodes share it."""
    stage: str
    """Name and version of the stage, "forward passes" or "given values"."""
    is_result: bool
    """Whether this node is a result of the workflow, not an intermediate stage."""
    key: str
    """Digest of its key; for forward passes that of their run (DATA of `mizarr ls`), for constants that of
    their content."""
    inputs: tuple[tuple[str, str], ...]
    """(name of the input, `name` of the node that provides it)."""
    params: str
    """Parameters of the stage as JSON; empty for none."""
    facts: tuple[tuple[str, str], ...]
    """(name, value) of provenance to show."""

    @property
    def short(self) -> str:
        """First 12 digits of the key, as figures and `mizarr ls` show it."""
        return self.key.removeprefix("sha256:")[:12]

    @property
    def reads(self) -> list[str]:
        """Names of the nodes that it reads, without duplicates."""
        return list(dict.fromkeys(name for _, name in self.inputs))


def made(workflow: Reported) -> list[Made]:
    """All nodes of the graph, inputs first; empty for a workflow without a store."""
    store = workflow.store
    if store is None:
        return []
    # Else each node's key is computed again for every node that reads it: 2^n look-ups in a chain of n.
    with one_look():
        names = _names(workflow.nodes)
        unique = {name: node for node, name in names.items()}
        return [_described(node, name, names, workflow, store) for name, node in unique.items()]


def _names(nodes: Mapping[str, ResultNode]) -> dict[Node, str]:
    """Node -> name, inputs first. Results have the workflow's names; equal constants share one."""
    result_names: dict[Node, str] = {node: name for name, node in nodes.items()}
    names: dict[Node, str] = {}
    constants: dict[str, str] = {}
    # Reserved first: an intermediate node must not take the name of a result.
    used = set(result_names.values())

    def unused(name: str) -> str:
        candidates = itertools.chain([name], (f"{name}_{number}" for number in itertools.count(2)))
        return next(candidate for candidate in candidates if candidate not in used)

    def visit(node: Node) -> None:
        if node in names:
            return
        for source in node.inputs:
            visit(source)
        content = node.content if isinstance(node, ConstantNode) else None
        names[node] = result_names.get(node) or constants.get(content or "") or unused(node.name)
        used.add(names[node])
        if content is not None:
            constants[content] = names[node]

    for node in nodes.values():
        visit(node)
    return names


def _described(node: Node, name: str, names: Mapping[Node, str], workflow: Reported, store: Store) -> Made:
    is_result = name in workflow.nodes
    inputs = tuple(_inputs(node, names))
    if isinstance(node, CaptureNode):
        entry = _entry(node, store)
        return Made(
            name, "forward passes", is_result, entry.digest, inputs, "", tuple(_passes(node, entry, store))
        )
    if isinstance(node, ResultNode) and (key := node.key(store)) is not None:
        record = store.lookup(key)
        provenance = tuple(facts(store, record)) if record is not None else ()
        params = _json(key.params) if key.params else ""
        return Made(name, f"{key.stage}/{key.version}", is_result, key.digest, inputs, params, provenance)
    content = node.content if isinstance(node, ConstantNode) else ""
    return Made(name, "given values", is_result, content, inputs, "", ())


def _inputs(node: Node, names: Mapping[Node, str]) -> Iterator[tuple[str, str]]:
    """(name of an input in the node, name of its source on the page)."""
    ports = getattr(node, "ports", None)
    if ports is None:
        yield from ((source.name, names[source]) for source in node.inputs)
        return
    for name, port in ports.items():
        variable = f"[{port.variable}]" if port.variable else ""
        yield f"{name}{variable}", names[port.node]


def _entry(node: CaptureNode, store: Store) -> LabelledEntry:
    """Entry of the activations: the run itself, or a larger run that contains these prompts."""
    # Not found under its own key: the prompts may be part of a larger run.
    with contextlib.suppress(EntryNotFound):
        entry = store.entry(node.run_key, node.dtype)
        if all(entry.record(*cell) for cell in node.cells):
            return entry
    larger = store.find_prompts(node.run_key, node.tokens, node.dtype, node.cells)
    if larger is None:
        raise EntryNotFound(
            f"the activations of {node!r} vanished from {store.address}; run the workflow again"
        )
    return larger[0]


def _passes(node: CaptureNode, entry: LabelledEntry, store: Store) -> Iterator[tuple[str, str]]:
    """Provenance of forward passes, with the keys of their stored arrays."""
    yield "prompts", f"{node.tokens.n_prompts:,} ({node.tokens.n_tokens:,} tokens)"
    records = [record for cell in node.cells if (record := entry.record(*cell)) is not None]
    yield "arrays", ", ".join(f"{record.label} {record.short}" for record in records)
    # `content` would be the digest of the first array alone.
    yield from ((name, value) for name, value in facts(store, records[0]) if name != "content")


def facts(store: Store, record: Record) -> Iterator[tuple[str, str]]:
    """Provenance of a record to show: model, content, time, duration, memory, bytes, device and versions.

    Arguments:
        store: The store of the results.
        record: Provenance of the result.
    """
    notes = store.provenance(record)
    timed = [note for note in notes if "seconds" in note]
    note = (timed or notes or [{}])[0]
    if "identity" in note:
        identity = note["identity"]
        yield "model", f"{note.get('model', '')} · weights {identity['weights'].removeprefix('sha256:')[:12]}"
        yield "computed in", f"{identity['dtype']}, {identity['forward']}"
    yield "content", record.content
    yield "computed", note.get("at", record.created)
    if "seconds" in note:
        yield "took", f"{note['seconds']:.3g} s"
    if peaks := highest_peaks([note]):
        yield "memory at most", ", ".join(f"{room} {megabytes(most)}" for room, most in peaks.items())
    for name, word in (("bytes_read", "read"), ("bytes_written", "wrote")):
        if note.get(name):
            yield word, human_bytes(note[name])
    if note.get("device"):
        yield "device", str(note["device"])
    if note.get("versions"):
        yield "software", ", ".join(f"{name} {version}" for name, version in sorted(note["versions"].items()))


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
