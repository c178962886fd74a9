"""The main job, offline, on the model that ships with mizarr: capture, logit lens, character count helix.

    mizarr demo

Everything lands in a store; run it again and every stage says that it was cached. Tables go to stdout,
progress and what was cached to stderr, figures into a folder.
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
"""Workflow -> settings: the defaults, so that what is stored is what `mizarr explain` asks for."""


@dataclass
class Demo:
    """What a run of the demo gave."""

    workflows: list[Workflow] = field(default_factory=list)
    figures: list[Path] = field(default_factory=list)
    ran: list[str] = field(default_factory=list)
    """Stages that were computed; empty when all was cached."""

    def to_json(self) -> dict[str, Any]:
        """Results of the workflows, and where the figures are."""
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
    """Run the workflows of the demo on `model`, print tables to `console`, draw into `folder`.

    folder: None draws nothing.  console: for tables, default stdout; talk: for the rest, default stderr.
    loading: options of `ModelRef`.
    """
    from ..store.display.console import EscapingConsole

    console, talk = console or EscapingConsole(), talk or EscapingConsole(stderr=True, quiet=quiet)
    done = Demo()
    started = time.monotonic()
    for name, settings in DEMO.items():
        workflow = build(name, model=model, **loading, **settings)
        talk.print(f"\n[bold]{workflow.question}[/bold]  [dim]{name}[/dim]", highlight=False)
        done.ran += _run(workflow, store, talk, quiet)
        done.workflows.append(workflow)
        console.print()
        drawn = workflow.render(console)
        drawn += _draw(workflow, folder, talk)
        done.figures += drawn
        for path in drawn:
            talk.print(f"figure {path}", highlight=False, soft_wrap=True, markup=False)
    seconds = time.monotonic() - started
    what = f"{len(done.ran)} stages computed" if done.ran else "everything was cached"
    end = f"\n{what}, {seconds:.1f} s. Results are in {store.address}"
    talk.print(end, highlight=False, soft_wrap=True, markup=False)
    return done


def _draw(workflow: Workflow, folder: Path | None, talk: Console) -> list[Path]:
    """The figures, or one line that says what they take: the demo goes on without them."""
    if folder is None:
        return []
    try:
        return workflow.draw(folder)
    except MissingExtra as error:
        talk.print(f"no figures, tables only: {error}", highlight=False, soft_wrap=True, markup=False)
        return []


def _run(workflow: Workflow, store: Store, talk: Console, quiet: bool) -> list[str]:
    """Run one workflow and say of each stage whether it was cached; names of those that ran."""
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
