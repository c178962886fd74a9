"""The demo: capture, logit lens and character count helix, offline, on the model that ships with mizarr.

    mizarr demo

All results are stored; in a second run every stage is cached. Tables go to stdout, progress and the status of
stages to stderr, figures into a folder.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..store.errors import MissingExtra
from . import build

if TYPE_CHECKING:
    from rich.console import Console

    from ..pipeline import Plan
    from ..store import Store
    from .workflow import Workflow

__all__ = ["DEMO", "Demo", "run"]

DEMO: dict[str, dict[str, Any]] = {
    "logit_lens": {},
    "character_count_helix": {},
}
"""Workflows of the demo, with their settings: the defaults, so that `mizarr explain` finds the same results
stored."""


@dataclass
class Demo:
    """What a run of the demo computed and drew."""

    workflows: list[Workflow] = field(default_factory=list)
    """The workflows, with open results."""
    figures: list[Path] = field(default_factory=list)
    """Files of the figures."""
    ran: list[str] = field(default_factory=list)
    """Stages that were computed; empty if all were cached."""

    def to_json(self) -> dict[str, Any]:
        """Documents of the workflows, computed stages and paths of figures, as JSON values."""
        return {
            "ran": self.ran,
            "figures": [str(path) for path in self.figures],
            "workflows": {workflow.name: workflow.to_json() for workflow in self.workflows},
        }


def run(
    store: Store,
    folder: Path | None,
    *,
    console: Console | None = None,
    talk: Console | None = None,
    model: str = "specimen",
    quiet: bool = False,
    **loading: Any,
) -> Demo:
    """Run the workflows of the demo, print their tables and draw their figures.

    Arguments:
        store: store of the results.
        folder: folder of the figures; None to draw none.
        console: console for tables; None for stdout.
        talk: console for all other output; None for stderr.
        model: name of the model.
        quiet: whether to hide progress.
        loading: options of `ModelRef`.
    """
    from ..store.display.console import EscapingConsole

    console, talk = console or EscapingConsole(), talk or EscapingConsole(stderr=True, quiet=quiet)
    demo = Demo()
    started = time.monotonic()
    for name, settings in DEMO.items():
        workflow = build(name, model=model, **loading, **settings)
        talk.print(f"\n[bold]{workflow.question}[/bold]  [dim]{name}[/dim]", highlight=False)
        demo.ran += _run(workflow, store, talk, quiet)
        demo.workflows.append(workflow)
        console.print()
        drawn = workflow.render(console)
        drawn += _draw(workflow, folder, talk)
        demo.figures += drawn
        for path in drawn:
            talk.print(f"figure {path}", highlight=False, soft_wrap=True, markup=False)
    seconds = time.monotonic() - started
    status = f"{len(demo.ran)} stages computed" if demo.ran else "everything was cached"
    end = f"\n{status}, {seconds:.1f} s. Results are in {store.address}"
    talk.print(end, highlight=False, soft_wrap=True, markup=False)
    return demo


def _draw(workflow: Workflow, folder: Path | None, talk: Console) -> list[Path]:
    """Draw the figures of a workflow and return their paths; without the plotting extra, print how to install
    it and return none."""
    if folder is None:
        return []
    try:
        return workflow.draw(folder)
    except MissingExtra as error:
        talk.print(f"no figures, tables only: {error}", highlight=False, soft_wrap=True, markup=False)
        return []


def _run(workflow: Workflow, store: Store, talk: Console, quiet: bool) -> list[str]:
    """Run one workflow and print for each stage whether it was cached; returns names of computed stages."""
    from ..pipeline import plan

    before = plan(workflow.nodes.values(), store)
    started = time.monotonic()
    workflow.run(store, quiet=quiet)
    seconds = time.monotonic() - started
    for line in _report(before):
        talk.print(line, highlight=False)
    ran = [step.name for step in before.steps if not step.status.is_cached]
    if ran:
        talk.print(f"[dim]{seconds:.1f} s[/dim]", highlight=False)
    return ran


def _report(before: Plan) -> list[str]:
    return [
        f"  {'[green]cached[/green]  ' if step.status.is_cached else '[yellow]computed[/yellow]'} {step.name}"
        for step in before.steps
    ]
