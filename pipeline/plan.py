"""Plans: the nodes of a workflow in order, with the expected work of each, before anything runs.

Border: calls the nodes' `status` and `estimate`; computes nothing, and works on a read-only store.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ..store.arrays import shown
from ..store.display import html
from ..store.errors import PlanError
from .nodes import Estimate, Node, Status, estimate_of, one_look, status_of
from .sources import ConstantNode

if TYPE_CHECKING:
    from ..store import Store
    from .context import Context


@dataclass(frozen=True)
class Step:
    """One step of a plan, a stage or capture: whether its result is stored, and the expected cost
    otherwise."""

    name: str
    """Name of the node."""
    status: Status
    """Whether its result is stored, or why it will run."""
    estimate: Estimate
    """Bytes, memory and seconds of the missing work."""

    @property
    def state(self) -> str:
        """State as text: "cached", or "will run because …"."""
        work = f": {self.estimate.work}" if self.estimate.work else ""
        state = "cached" if self.status.is_cached else f"will run because {self.status.reason}{work}"
        return f"{state} ({self.status.warning})" if self.status.warning else state

    def to_json(self) -> dict[str, Any]:
        """Plain values: `name`, `state`, and all fields of `Status` and `Estimate`."""
        return {"name": self.name, "state": self.state, **asdict(self.status), **asdict(self.estimate)}


@dataclass(frozen=True)
class Plan:
    """What a run of a workflow would do, step by step: state and expected cost of each step."""

    steps: tuple[Step, ...]
    """The steps in order, each after the steps whose results it reads."""

    @property
    def is_cached(self) -> bool:
        """Whether all steps are cached, so that nothing will run."""
        return all(step.status.is_cached for step in self.steps)

    @property
    def bytes_read(self) -> int:
        """Sum of the bytes that all steps read; a cached step reads none."""
        return sum(step.estimate.bytes_read for step in self.steps)

    @property
    def bytes_written(self) -> int:
        """Sum of the bytes that steps will write; a step of unknown size counts as 0."""
        return sum(step.estimate.bytes_written for step in self.steps)

    @property
    def peak_bytes(self) -> int:
        """Largest memory that any part of a step computed at once needs, in bytes; unknown ones count as
        0."""
        return max((step.estimate.peak_bytes for step in self.steps), default=0)

    @property
    def seconds(self) -> float | None:
        """Expected wall time of all steps in sequence; None if that of any step is unknown.

        The set-up (reading the model) is counted once.
        """
        estimates = [step.estimate for step in self.steps if not step.status.is_cached]
        if any(estimate.seconds is None for estimate in estimates):
            return None
        # Each estimate includes the set-up, so it is subtracted per step and added once.
        work = sum((estimate.seconds or 0.0) - estimate.setup_seconds for estimate in estimates)
        return round(work + max((estimate.setup_seconds for estimate in estimates), default=0.0), 3)

    def check_memory(self, budget: int | None) -> None:
        """Check that every step fits a memory budget.

        Arguments:
            budget: Bytes of memory; None for no limit.

        Raises:
            PlanError: The largest part of a step that is computed at once needs more.
        """
        for step in self.steps:
            if budget is not None and step.estimate.peak_bytes > budget:
                raise PlanError(
                    f"the step {step.name} needs about {human_bytes(step.estimate.peak_bytes)} of memory at "
                    f"once, and --memory (memory=) allows {human_bytes(budget)}; allow more, or capture with "
                    "smaller segments"
                )

    def to_json(self) -> dict[str, Any]:
        """Plain values: all steps, and totals of bytes, peak memory and seconds (None: unknown)."""
        return {
            "steps": [step.to_json() for step in self.steps],
            "is_cached": self.is_cached,
            "bytes_read": self.bytes_read,
            "bytes_written": self.bytes_written,
            "peak_bytes": self.peak_bytes,
            "seconds": self.seconds,
        }

    def rows(self) -> list[tuple[str, str, str, str, str, str, str]]:
        """Table of the plan as text, a row per step.

        Returns:
            Per step (name, state, cells stored / all cells, bytes read, bytes written, peak memory, time).
        """
        rows = []
        for step in self.steps:
            status, cost = step.status, step.estimate
            cells = f"{status.cells_cached}/{status.cells}" if status.cells > 1 else ""
            sizes = [human_bytes(size) for size in (cost.bytes_read, cost.bytes_written, cost.peak_bytes)]
            time = "" if status.is_cached else human_seconds(cost.seconds)
            rows.append((step.name, step.state, cells, sizes[0], sizes[1], sizes[2], time))
        return rows

    def _repr_html_(self) -> str:
        """HTML table for a notebook: one row per step, and totals as the caption."""
        columns = ["stage", "state", "cells stored", "reads", "writes", "peak memory", "expected time"]
        sizes = [human_bytes(size) or "nothing" for size in (self.bytes_read, self.bytes_written)]
        seconds = (
            "" if self.seconds is None else f"; takes about {self.seconds:.3g} s, judged by earlier runs"
        )
        work = f"All steps together: read {sizes[0]}, write {sizes[1]}{seconds}."
        totals = "All results are stored already; nothing will run." if self.is_cached else work
        return html.shown("Plan", html.table(columns, self.rows(), right=[2, 3, 4, 5, 6]), totals)


def plan(nodes: Node | Iterable[Node], store: Store, where: Context | None = None) -> Plan:
    """List what computing some nodes would do, given what is stored; computes nothing.

    Arguments:
        nodes: One or several nodes of a workflow's graph; their inputs are planned as well.
        store: The store to look results up in.
        where: Threads or workers of the run, to check whether they can compute the nodes; None for no check.

    Raises:
        PlanError: The nodes cannot run with these settings.
    """
    with one_look():
        ordered = [node for node in in_order(nodes) if not isinstance(node, ConstantNode)]
        result = Plan(tuple(Step(n.name, status_of(n, store), estimate_of(n, store)) for n in ordered))
        if where is not None and where.has_workers and not result.is_cached:
            where.require_shared(store)
            for node in ordered:
                if not status_of(node, store).is_cached:
                    node.require_workers(where)
        return result


def in_order(nodes: Node | Iterable[Node]) -> Sequence[Node]:
    """Nodes of a workflow's graph and all their direct and indirect inputs, each once, inputs first."""
    ordered: dict[int, Node] = {}

    def visit(node: Node) -> None:
        # By identity: nodes have no equality, and two equal nodes have one key anyway.
        if id(node) not in ordered:
            for input_node in node.inputs:
                visit(input_node)
            ordered[id(node)] = node

    for node in [nodes] if isinstance(nodes, Node) else nodes:
        visit(node)
    return list(ordered.values())


_UNITS = {"B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
_UNITS |= {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def as_bytes(size: int | str | None) -> int | None:
    """Convert a memory budget to bytes, from a number of bytes or a text like "2GiB"; None stays None.

    Raises:
        PlanError: The value is neither a number of bytes nor such a text.
    """
    if size is None or (isinstance(size, int) and not isinstance(size, bool) and size >= 0):
        return size
    text = size.replace(" ", "").upper() if isinstance(size, str) else ""
    # rstrip removes the unit, whose letters are all in this set.
    number = text.rstrip("KMGTIB")
    with suppress(ValueError, KeyError, OverflowError):
        if (count := int(float(number) * _UNITS[text[len(number) :] or "B"])) >= 0:
            return count
    raise PlanError(
        f'expected --memory (memory=) as a size such as "2GiB" or "500MB", or a number of bytes, found '
        f"{shown(size)}"
    )


def human_seconds(seconds: float | None) -> str:
    """Format expected seconds as text: "about 3.1 s"; "unknown" for None."""
    return "unknown" if seconds is None else f"about {seconds:.2g} s"


def human_bytes(size: float) -> str:
    """Format a number of bytes in binary units: "1.5 MiB"; empty for 0."""
    if not size:
        return ""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1023.5:
            # 1000 to 1023 need four digits; %.3g would print 1.02e+03.
            return f"{size:.3g} {unit}" if size < 999.5 else f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.3g} TiB"
