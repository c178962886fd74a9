"""How the results of a workflow came about: every stage behind them, and the command that does it again.

Border: reads keys and provenance, computes nothing, loads no model. What it tells is the same for everybody
who reads the same store: which host or process computed something is left out.
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
    """A setting: its value as JSON, what it does, and whether somebody chose it."""

    name: str
    value: str
    help: str
    is_default: bool


def asked(settings: Any) -> list[Asked]:
    """Every setting of a workflow, in order."""
    found = []
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        told = field.metadata.get("help", "")
        found.append(Asked(field.name, _json(value), told, value == field.default))
    return found


def command(workflow: Reported, verb: str = "report") -> str:
    """What to type to get the same numbers again."""
    words = ["mizarr", verb, workflow.name]
    for setting in asked(workflow.settings):
        if not setting.is_default:
            words += ["--set", f"{setting.name}={setting.value}"]
    return shlex.join(words)


@dataclass(frozen=True)
class Made:
    """One node of the graph behind the results.

    name: as the workflow calls a result, else as the node calls itself; told apart by a number.  stage: name
    and version, or what else it is.  key: digest it is stored under; of forward passes that of their run
    (DATA of `mizarr ls`), of given values that of their content.
    inputs: name of the input -> name of the `Made` it is.  facts: (name, value) for people.
    """

    name: str
    stage: str
    is_result: bool
    key: str
    inputs: tuple[tuple[str, str], ...]
    params: str
    facts: tuple[tuple[str, str], ...]

    @property
    def short(self) -> str:
        """First 12 digits of the key, as figures and `mizarr ls` show it."""
        return self.key.removeprefix("sha256:")[:12]

    @property
    def reads(self) -> list[str]:
        """Names of what it reads, each once."""
        return list(dict.fromkeys(name for _, name in self.inputs))


def made(workflow: Reported) -> list[Made]:
    """Every node behind the results, each after what it reads. Empty for a workflow that stores nothing."""
    store = workflow.store
    if store is None:
        return []
    with one_look():
        names = _names(workflow.nodes)
        once = {name: node for node, name in names.items()}
        return [_told(node, name, names, workflow, store) for name, node in once.items()]


def _names(nodes: Mapping[str, ResultNode]) -> dict[Node, str]:
    """Node -> name, inputs first. Results have the workflow's names; equal constants share one."""
    given: dict[Node, str] = {node: name for name, node in nodes.items()}
    found: dict[Node, str] = {}
    constants: dict[str, str] = {}
    taken = set(given.values())

    def unused(name: str) -> str:
        tried = itertools.chain([name], (f"{name}_{number}" for number in itertools.count(2)))
        return next(each for each in tried if each not in taken)

    def visit(node: Node) -> None:
        if node in found:
            return
        for source in node.inputs:
            visit(source)
        content = node.content if isinstance(node, ConstantNode) else None
        found[node] = given.get(node) or constants.get(content or "") or unused(node.name)
        taken.add(found[node])
        if content is not None:
            constants[content] = found[node]

    for node in nodes.values():
        visit(node)
    return found


def _told(node: Node, name: str, names: Mapping[Node, str], workflow: Reported, store: Store) -> Made:
    is_result = name in workflow.nodes
    inputs = tuple(_inputs(node, names))
    if isinstance(node, CaptureNode):
        entry = _entry(node, store)
        return Made(
            name, "forward passes", is_result, entry.digest, inputs, "", tuple(_passes(node, entry, store))
        )
    if isinstance(node, ResultNode) and (asked := node.key(store)) is not None:
        record = store.lookup(asked)
        told = tuple(facts(store, record)) if record is not None else ()
        params = _json(asked.params) if asked.params else ""
        return Made(name, f"{asked.stage}/{asked.version}", is_result, asked.digest, inputs, params, told)
    key = node.content if isinstance(node, ConstantNode) else ""
    return Made(name, "given values", is_result, key, inputs, "", ())


def _inputs(node: Node, names: Mapping[Node, str]) -> Iterator[tuple[str, str]]:
    """(what the node calls an input, what this page calls it)."""
    ports = getattr(node, "ports", None)
    if ports is None:
        yield from ((source.name, names[source]) for source in node.inputs)
        return
    for name, port in ports.items():
        variable = f"[{port.variable}]" if port.variable else ""
        yield f"{name}{variable}", names[port.node]


def _entry(node: CaptureNode, store: Store) -> LabelledEntry:
    """Where the activations lie: the run itself, or a larger one that holds these prompts."""
    with contextlib.suppress(EntryNotFound):
        own = store.entry(node.run_key, node.dtype)
        if all(own.record(*cell) for cell in node.cells):
            return own
    larger = store.find_prompts(node.run_key, node.tokens, node.dtype, node.cells)
    if larger is None:
        raise EntryNotFound(
            f"the activations of {node!r} vanished from {store.address}; run the workflow again"
        )
    return larger[0]


def _passes(node: CaptureNode, entry: LabelledEntry, store: Store) -> Iterator[tuple[str, str]]:
    """Facts about forward passes, and the keys of the arrays they left behind."""
    yield "prompts", f"{node.tokens.n_prompts:,} ({node.tokens.n_tokens:,} tokens)"
    records = [record for cell in node.cells if (record := entry.record(*cell)) is not None]
    yield "arrays", ", ".join(f"{record.label} {record.short}" for record in records)
    yield from ((name, told) for name, told in facts(store, records[0]) if name != "content")


def facts(store: Store, record: Record) -> Iterator[tuple[str, str]]:
    """When something was computed, from what, how long it took, with which versions."""
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
    if held := highest_peaks([note]):
        yield "memory at most", ", ".join(f"{room} {megabytes(most)}" for room, most in held.items())
    for name, word in (("bytes_read", "read"), ("bytes_written", "wrote")):
        if note.get(name):
            yield word, human_bytes(note[name])
    if note.get("device"):
        yield "device", str(note["device"])
    if note.get("versions"):
        yield "software", ", ".join(f"{name} {version}" for name, version in sorted(note["versions"].items()))


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
