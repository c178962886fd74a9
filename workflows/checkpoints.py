"""A workflow over several revisions of a model, such as training checkpoints.

    mizarr compute head_detection --set model=org/name --set revision=step1000,step8000,step143000

Each revision is an ordinary workflow with its own keys, so results of a single revision are reused. Results
are concatenated along an axis `revision`, in the given order. Views show, as curves over revisions, the
effect of each claim with its null distribution, and the numbers of the JSON documents.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from ..store.errors import ConfigError
from .views import Data, Figure, Line, Lines, Table, View, dash
from .workflow import Workflow

if TYPE_CHECKING:
    import xarray as xr

    from ..pipeline.nodes import ResultNode
    from ..store import Store
    from .claim import Claim

__all__ = ["Checkpoints", "several_revisions"]

_MOST = 8
"""Largest number of curves in one panel."""
_OF_A_RUN = ("total_time_secs",)
"""JSON fields that depend on the run instead of the model, such as the computation time."""


def several_revisions(setting: Any) -> tuple[str, ...]:
    """Revisions of the setting `revision` if it names several, as a list or separated by commas; () for a
    single revision or None.

    Raises:
        ConfigError: a revision is empty or named twice.
    """
    if isinstance(setting, str):
        revisions = tuple(part.strip() for part in setting.split(",")) if "," in setting else ()
    else:
        revisions = tuple(map(str, setting)) if isinstance(setting, list | tuple) else ()
    if revisions and (len(set(revisions)) < len(revisions) or not all(revisions)):
        raise ConfigError(
            f"expected different revisions, such as revision=step1000,step2000, found {setting!r}; name each "
            "once"
        )
    return revisions


class Checkpoints(Workflow):
    """Workflow that runs another workflow for several revisions of a model and shows its results as
    curves."""

    by_revision: dict[str, Workflow]
    """The workflow of each revision, by name of the revision."""

    def __init__(self, by_revision: Mapping[str, Workflow]) -> None:
        """by_revision: workflow of each revision."""
        template = next(iter(by_revision.values()))
        # In the form of the command line, so that a page's recipe reproduces the page.
        super().__init__(replace(template.settings, revision=",".join(by_revision)))
        self.by_revision = dict(by_revision)
        # Class variables elsewhere; here they depend on the workflow that is run.
        self.name = template.name  # type: ignore[misc]
        self.question = template.question  # type: ignore[misc]
        self.descriptive = template.descriptive  # type: ignore[misc]
        self.nodes = self._of_each(lambda workflow: workflow.nodes)

    def _of_each(self, nodes: Callable[[Workflow], Mapping[str, ResultNode]]) -> dict[str, ResultNode]:
        """Nodes of all revisions by `name@revision`. nodes: function that returns some nodes of a
        workflow."""
        return {
            f"{name}@{revision}": node
            for revision, workflow in self.by_revision.items()
            for name, node in nodes(workflow).items()
        }

    def fact_nodes(self) -> dict[str, ResultNode]:
        """Nodes of all revisions that rank the answers of general facts; see `Workflow`."""
        return self._of_each(lambda workflow: workflow.fact_nodes())

    def choose_facts(self, store: Store) -> None:
        """Plans each revision anew about the general facts that it knows; see `Workflow`."""
        for workflow in self.by_revision.values():
            if workflow.fact_nodes():
                workflow.choose_facts(store)
        self.nodes = self._of_each(lambda workflow: workflow.nodes)

    def first_nodes(self) -> dict[str, ResultNode]:
        """Nodes of all revisions whose results decide which other nodes are needed; see `Workflow`."""
        return self._of_each(lambda workflow: workflow.first_nodes())

    def settle(self, store: Store, *, refuses: bool = True) -> Self:
        """Removes the nodes of each revision that its first results make unnecessary; never raises, see
        `Workflow`."""
        self.nodes = self._of_each(lambda workflow: workflow.settle(store, refuses=False).nodes)
        return self

    def run(self, store: Store, **options: Any) -> Self:
        """Computes the results of all revisions that are not stored yet, and opens them; see `Workflow.run`
        for `options`."""
        super().run(store, **options)
        for workflow in self.by_revision.values():
            workflow.open_results(store)
        return self

    def result(self, name: str) -> xr.Dataset:
        """Result of all revisions along the axis `revision`, in memory; a name such as `name@revision` gives
        that of a single one."""
        import xarray as xr

        if "@" in name or not self._results:
            return super().result(name)
        parts = [workflow.result(name).load() for workflow in self.by_revision.values()]
        # Where labels of an axis differ between revisions, cells that one lacks become NaN.
        joined = xr.concat(parts, "revision", join="outer", coords="minimal", compat="override")
        result: xr.Dataset = joined.assign_coords(revision=list(self.by_revision))
        return result

    @cached_property
    def claims_of(self) -> dict[str, tuple[Claim, ...]]:
        """Claims of each revision; () for a revision without claims."""
        return {
            revision: workflow.findings.findings if workflow.makes_claims else ()
            for revision, workflow in self.by_revision.items()
        }

    @cached_property
    def documents(self) -> dict[str, dict[str, Any]]:
        """JSON document of each revision."""
        return {revision: workflow.to_json() for revision, workflow in self.by_revision.items()}

    @property
    def numbers(self) -> dict[str, list[float]]:
        """Top-level numbers of the JSON documents that differ between revisions: field name -> value for each
        revision."""
        documents, numbers = list(self.documents.values()), dict[str, list[float]]()
        for name in documents[0]:
            values: list[Any] = [document.get(name) for document in documents]
            if name not in _OF_A_RUN and all(map(_is_number, values)):
                numbers[name] = [float(value) for value in values]
        return {name: values for name, values in numbers.items() if len(set(values)) > 1}

    def views(self) -> Iterator[View]:
        """Views in reading order: curves over revisions of each claim with its null distribution and of the
        documents' numbers, and a table."""
        yield Data(json={"revisions": self.documents})
        panels: list[Lines] = [
            self._claim(number) for number in range(max(map(len, self.claims_of.values())))
        ]
        if self.numbers:
            panels.append(self._curves())
        yield from panels
        yield self._table()
        if panels:
            title = f"{self.question} By revision of {self.settings.model}"
            yield Figure(name=f"{self.name}_checkpoints", title=title, panels=tuple(panels))

    def _claim(self, number: int) -> Lines:
        """Curves of the effect of claim `number` by revision, with the 95 % range of its null; NaN for
        revisions without this claim."""
        # A revision may make fewer claims than others.
        of_revisions = [
            claims[number] if number < len(claims) else None for claims in self.claims_of.values()
        ]
        rows = [
            (np.nan,) * 3 if claim is None else (claim.effect, *claim.null.bound()) for claim in of_revisions
        ]
        effect, low, high = np.array(rows, float).T
        example = next(claim for claim in of_revisions if claim is not None)
        lines = (
            Line("effect", effect, strong=True),
            Line("null, lowest of 95 %", low, control=True),
            Line("null, highest of 95 %", high, control=True),
        )
        return Lines(
            title=example.text,
            caption="x: revision (training checkpoint) of the model. y: the effect that this claim of the "
            f"workflow measures. Dashed: control, the 95 % range of {example.null.of}.",
            x=tuple(self.by_revision),
            x_name="revision",
            y_name="effect",
            unit=example.unit,
            lines=lines,
        )

    def _curves(self) -> Lines:
        """Curves of the documents' numbers by revision."""
        shown = list(self.numbers.items())[:_MOST]
        return Lines(
            title="Numbers of the answer",
            caption="x: revision of the model. y: value in the JSON document. One curve per number at the "
            f"top level of the document that differs between revisions; at most {_MOST} of them.",
            x=tuple(self.by_revision),
            x_name="revision",
            y_name="value",
            lines=tuple(Line(name, np.array(values, float)) for name, values in shown),
            json={"by_revision": self.numbers},
        )

    def _table(self) -> Table:
        """Table with a row per revision: commit, and effects and verdicts of its claims."""
        most = max(map(len, self.claims_of.values()))
        records = [
            {
                "revision": revision,
                "commit": _commit(workflow),
                "effects": [claim.effect for claim in self.claims_of[revision]],
                "verdicts": [claim.verdict for claim in self.claims_of[revision]],
            }
            for revision, workflow in self.by_revision.items()
        ]

        def cell_of_claim(number: int) -> Any:
            def cell(record: dict[str, Any]) -> str:
                if number >= len(record["effects"]):
                    return dash(None)
                return f"{record['effects'][number]:+.3g}, {record['verdicts'][number]}"

            return cell

        return Table.of(
            records,
            ("revision", "revision"),
            ("commit", lambda record: record["commit"][:12]),
            *((f"claim {number + 1}", cell_of_claim(number)) for number in range(most)),
            title=f"{len(records)} revisions of {self.settings.model}",
            caption="One row per revision of the model. Claim 1, claim 2, …: effect and verdict of each "
            "claim, in the order of the curves. A dash: this revision makes no such claim.",
            json={"checkpoints": records},
        )


def _commit(workflow: Workflow) -> str:
    """Commit of a workflow's model files; "" without a known commit."""
    files = getattr(getattr(workflow, "subject", None), "files", None)
    return str(getattr(files, "revision", None) or "")


def _is_number(value: Any) -> bool:
    # In Python True and False are ints.
    return isinstance(value, int | float) and not isinstance(value, bool) and bool(np.isfinite(value))
