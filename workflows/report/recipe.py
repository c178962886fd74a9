"""Provenance of a workflow's results: every stage that computed them, and the command that repeats them.

Equal results give equal provenance: the names of hosts and processes are left out.

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
    """A setting of a workflow, as text for its page."""

    name: str
    """Name of the setting, as an argument of `--set`."""
    value: str
    """Its value as JSON."""
    help: str
    """Text that explains the setting; "" for none."""
    is_default: bool
    """Whether the value is the default of the setting."""


def asked(settings: Any) -> list[Asked]:
    """All settings of a workflow, in order of declaration.

    Arguments:
        settings: The settings, a dataclass instance.
    """
    return [
        Asked(
            name=field.name,
            value=_json(getattr(settings, field.name)),
            help=field.metadata.get("help", ""),
            is_default=getattr(settings, field.name) == field.default,
        )
        for field in dataclasses.fields(settings)
    ]


def command(workflow: Reported, verb: str = "report") -> str:
    """Command line, quoted for a shell, that runs the workflow again with the same settings.

    Arguments:
        workflow: The workflow.
        verb: Subcommand of mizarr: "report" or "compute".
    """
    words = ["mizarr", verb, workflow.name]
    for setting in asked(workflow.settings):
        if not setting.is_default:
            words += ["--set", f"{setting.name}={setting.value}"]
    return shlex.join(words)


@dataclass(frozen=True)
class Made:
    """A node of the computation graph as text for a page: its stage, key, inputs and provenance."""

    name: str
    """Name of the result in the workflow; of an intermediate node the node's name, made unique by a
    number."""
    stage: str
    """Name and version of the stage, such as "lens/2"; "forward passes" or "given values" for other nodes."""
    is_result: bool
    """Whether this node is a result of the workflow, not an intermediate step."""
    key: str
    """Digest of the stage's key; for forward passes the digest of their run (DATA of `mizarr ls`), for given
    values that of their content; "" if the key is not known."""
    inputs: tuple[tuple[str, str], ...]
    """(name of the input, `name` of the node that provides it) of each input."""
    params: str
    """Stage parameters as JSON; "" for a stage without parameters."""
    facts: tuple[tuple[str, str], ...]
    """(name, value) pairs about the computation, as `facts` yields them."""

    @property
    def short(self) -> str:
        """The first 12 digits of the key, which figures and `mizarr ls` show."""
        return self.key.removeprefix("sha256:")[:12]

    @property
    def reads(self) -> list[str]:
        """`name` of each node that this node reads, without duplicates."""
        return list(dict.fromkeys(name for _, name in self.inputs))


def made(workflow: Reported) -> list[Made]:
    """All nodes of the workflow's computation graph, each after its inputs; empty without a store."""
    store = workflow.store
    if store is None:
        return []
    # Within one_look keys are remembered. Else a node's key is computed again for every node that reads it:
    # 2^n look-ups in a chain of n nodes.
    with one_look():
        names = _node_names(workflow.nodes)
        # Constants with equal content share a name, and are listed once.
        unique = {name: node for node, name in names.items()}
        return [_described(node, name, names, workflow, store) for name, node in unique.items()]


def _node_names(results: Mapping[str, ResultNode]) -> dict[Node, str]:
    """Unique name of every node from which results are computed, each node after its inputs.

    A result has its name in the workflow. Constants with equal content share a name.

    Arguments:
        results: Name in the workflow -> node of the result.
    """
    result_names: dict[Node, str] = {node: name for name, node in results.items()}
    names: dict[Node, str] = {}
    # Digest of a constant's content -> name.
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

    for node in results.values():
        visit(node)
    return names


def _described(node: Node, name: str, names: Mapping[Node, str], workflow: Reported, store: Store) -> Made:
    """A node of the graph as text: forward passes, a stage, or values that were passed in.

    Arguments:
        node: The node.
        name: Its name on the page.
        names: Names of all nodes.
        workflow: The workflow, whose results are marked.
        store: Store with the provenance.
    """
    is_result = name in workflow.nodes
    inputs = tuple(_input_names(node, names))
    if isinstance(node, CaptureNode):
        entry = _stored_run(node, store)
        provenance = tuple(_facts_of_passes(node, entry, store))
        return Made(name, "forward passes", is_result, entry.digest, inputs, "", provenance)
    if isinstance(node, ResultNode) and (key := node.key(store)) is not None:
        record = store.lookup(key)
        provenance = tuple(facts(store, record)) if record is not None else ()
        params = _json(key.params) if key.params else ""
        return Made(name, f"{key.stage}/{key.version}", is_result, key.digest, inputs, params, provenance)
    content = node.content if isinstance(node, ConstantNode) else ""
    return Made(name, "given values", is_result, content, inputs, "", ())


def _input_names(node: Node, names: Mapping[Node, str]) -> Iterator[tuple[str, str]]:
    """(name of the input, name on the page of the node that provides it) of each input of a node."""
    ports = getattr(node, "ports", None)
    if ports is None:
        yield from ((source.name, names[source]) for source in node.inputs)
        return
    for name, port in ports.items():
        variable = f"[{port.variable}]" if port.variable else ""
        yield f"{name}{variable}", names[port.node]


def _stored_run(node: CaptureNode, store: Store) -> LabelledEntry:
    """The stored run with the activations of forward passes, or a larger run that contains their prompts.

    Raises:
        EntryNotFound: The activations are no longer in the store.
    """
    # Suppressed: without a run of its own, the prompts may be part of a larger run.
    with contextlib.suppress(EntryNotFound):
        entry = store.entry(node.run_key, node.dtype)
        # A cell is a stored array: (variable, layer).
        if all(entry.record(*cell) for cell in node.cells):
            return entry
    larger_run = store.find_prompts(node.run_key, node.tokens, node.dtype, node.cells)
    if larger_run is None:
        raise EntryNotFound(
            f"the activations of {node!r} are no longer in the store {store.address}, perhaps because "
            "`mizarr gc` removed them; run the workflow again"
        )
    return larger_run[0]


def _facts_of_passes(node: CaptureNode, entry: LabelledEntry, store: Store) -> Iterator[tuple[str, str]]:
    """(name, value) pairs about forward passes: number of prompts, keys of the stored arrays, provenance.

    Arguments:
        node: The forward passes.
        entry: The stored run with their activations.
        store: Store of the run.
    """
    yield "prompts", f"{node.tokens.n_prompts:,} ({node.tokens.n_tokens:,} tokens)"
    records = [record for cell in node.cells if (record := entry.record(*cell)) is not None]
    yield "arrays", ", ".join(f"{record.label} {record.short}" for record in records)
    # `content` would be the digest of the first array alone.
    yield from ((name, value) for name, value in facts(store, records[0]) if name != "content")


def facts(store: Store, record: Record) -> Iterator[tuple[str, str]]:
    """(name, value) pairs about the computation of a result: model, time, memory, device, versions.

    Arguments:
        store: Store of the result.
        record: Record of the result in the store.
    """
    notes = store.provenance(record)
    # Notes are sorted by time; one with a duration describes the computation itself.
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
        yield "memory at most", ", ".join(f"{device} {megabytes(peak)}" for device, peak in peaks.items())
    for field, label in (("bytes_read", "read"), ("bytes_written", "wrote")):
        if note.get(field):
            yield label, human_bytes(note[field])
    if note.get("device"):
        yield "device", str(note["device"])
    if note.get("versions"):
        yield "software", ", ".join(f"{name} {version}" for name, version in sorted(note["versions"].items()))


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
