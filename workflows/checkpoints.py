"""One question asked of several revisions of a model: training checkpoints as an axis of any workflow.

    mizarr compute head_detection --set model=org/name --set revision=step1000,step8000,step143000

Every revision is the workflow as it is, with keys of its own: one that was computed alone is not computed
again. Results are theirs along an axis `revision`, in the order given; told are the effects that each
revision claims, beside its own null, and the numbers of its answer, as curves over the revisions.
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
"""Curves of numbers in one panel."""
_OF_A_RUN = ("total_time_secs",)
"""Numbers of a document that say nothing of the model."""


def several_revisions(given: Any) -> tuple[str, ...]:
    """Revisions where several are asked for, as a list or a text with commas; () for one or none.

    Raises ConfigError for one that is named twice, or for nothing between commas.
    """
    if isinstance(given, str):
        found = tuple(part.strip() for part in given.split(",")) if "," in given else ()
    else:
        found = tuple(map(str, given)) if isinstance(given, list | tuple) else ()
    if found and (len(set(found)) < len(found) or not all(found)):
        raise ConfigError(f"expected revisions that differ, such as step1000,step2000, found {given!r}")
    return found


class Checkpoints(Workflow):
    """The answers of several revisions side by side."""

    def __init__(self, each: Mapping[str, Workflow]) -> None:
        """each: the workflow of every revision."""
        first = next(iter(each.values()))
        # What the command line takes, so that a page's recipe makes the same again.
        super().__init__(replace(first.settings, revision=",".join(each)))
        self.each = dict(each)
        self.name = first.name  # type: ignore[misc]  # of an instance: that of what is asked
        self.question = first.question  # type: ignore[misc]
        self.descriptive = first.descriptive  # type: ignore[misc]
        self.nodes = self._of_each(lambda workflow: workflow.nodes)

    def _of_each(self, nodes: Callable[[Workflow], Mapping[str, ResultNode]]) -> dict[str, ResultNode]:
        """Nodes of every revision's workflow, by `name@revision`."""
        return {
            f"{name}@{revision}": node
            for revision, workflow in self.each.items()
            for name, node in nodes(workflow).items()
        }

    def first_nodes(self) -> dict[str, ResultNode]:
        """See `Workflow`: those of every revision."""
        return self._of_each(lambda workflow: workflow.first_nodes())

    def settle(self, store: Store, *, refuses: bool = True) -> Self:
        """See `Workflow`: every revision leaves out its own."""
        self.nodes = self._of_each(lambda workflow: workflow.settle(store, refuses=False).nodes)
        return self

    def run(self, store: Store, **options: Any) -> Self:
        """See `Workflow`; every revision in turn."""
        super().run(store, **options)
        for workflow in self.each.values():
            workflow.open_results(store)
        return self

    def result(self, name: str) -> xr.Dataset:
        """A result of every revision along `revision`, in memory; or one of them, `name@revision`."""
        import xarray as xr

        if "@" in name or not self._results:
            return super().result(name)
        parts = [workflow.result(name).load() for workflow in self.each.values()]
        joined = xr.concat(parts, "revision", join="outer", coords="minimal", compat="override")
        found: xr.Dataset = joined.assign_coords(revision=list(self.each))
        return found

    @cached_property
    def claims_of(self) -> dict[str, tuple[Claim, ...]]:
        """Claims of each revision of the model; () for a revision without claims."""
        return {
            revision: workflow.findings.findings if workflow.makes_claims else ()
            for revision, workflow in self.each.items()
        }

    @cached_property
    def documents(self) -> dict[str, dict[str, Any]]:
        """The answer of each revision, as plain values."""
        return {revision: workflow.to_json() for revision, workflow in self.each.items()}

    @property
    def numbers(self) -> dict[str, list[float]]:
        """Numbers that stand in the answer of every revision and are not the same in all of them."""
        told = list(self.documents.values())
        names = [name for name, value in told[0].items() if _is_number(value) and name not in _OF_A_RUN]
        found = {
            name: [float(each[name]) for each in told]
            for name in names
            if all(_is_number(each.get(name)) for each in told)
        }
        return {name: values for name, values in found.items() if len(set(values)) > 1}

    def views(self) -> Iterator[View]:
        """Each claim as a curve beside its null; the numbers of the answers; all of it by revision."""
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
        """The effect of one claim by revision, and where 95 % of its null lie; NaN where none is made."""
        rows = []
        for found in self.claims_of.values():
            told = found[number] if number < len(found) else None
            rows.append((np.nan,) * 3 if told is None else (told.effect, *told.null.bound()))
        effect, low, high = np.array(rows, float).T
        one = next(found[number] for found in self.claims_of.values() if number < len(found))
        lines = (
            Line("effect", effect, strong=True),
            Line("null, lowest of 95 %", low, control=True),
            Line("null, highest of 95 %", high, control=True),
        )
        return Lines(
            title=one.text,
            caption=f"dashed: {one.null.of}",
            x=tuple(self.each),
            x_name="revision",
            y_name="effect",
            unit=one.unit,
            lines=lines,
        )

    def _curves(self) -> Lines:
        """Numbers of the answer by revision."""
        shown = list(self.numbers.items())[:_MOST]
        return Lines(
            title="Numbers of the answer",
            caption="those that are not the same in all revisions",
            x=tuple(self.each),
            x_name="revision",
            y_name="value",
            lines=tuple(Line(name, np.array(values, float)) for name, values in shown),
            json={"by_revision": self.numbers},
        )

    def _table(self) -> Table:
        """A line per revision: its verdicts, and what it is known by."""
        most = max(map(len, self.claims_of.values()))
        records = [
            {
                "revision": revision,
                "commit": _commit(workflow),
                "effects": [each.effect for each in self.claims_of[revision]],
                "verdicts": [each.verdict for each in self.claims_of[revision]],
            }
            for revision, workflow in self.each.items()
        ]

        def told(number: int) -> Any:
            def of(one: dict[str, Any]) -> str:
                if number >= len(one["effects"]):
                    return dash(None)
                return f"{one['effects'][number]:+.3g}, {one['verdicts'][number]}"

            return of

        return Table.of(
            records,
            ("revision", "revision"),
            ("commit", lambda one: one["commit"][:12]),
            *((f"claim {number + 1}", told(number)) for number in range(most)),
            title=f"{len(records)} revisions of {self.settings.model}",
            caption="claims in the order of the curves; a dash where a revision claims nothing",
            json={"checkpoints": records},
        )


def _commit(workflow: Workflow) -> str:
    """Of the snapshot a workflow is about; "" where it does not say."""
    files = getattr(getattr(workflow, "subject", None), "files", None)
    return str(getattr(files, "revision", None) or "")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and bool(np.isfinite(value))
