"""Commands that compute: `demo`, `capture`, `compute`, `explain`."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from . import WORKFLOWS
from .cli_options import (
    Command,
    json_option,
    print_json,
    print_table,
    quiet_option,
    settings,
    size,
    store_option,
)

if TYPE_CHECKING:
    from ..store import Store

NAMES = ", ".join(WORKFLOWS)
HOOKS_EXAMPLE = "--hooks 'blocks.*.hook_resid_post'"


def workflow_options(command: Command) -> Command:
    """What `compute` and `explain` share: the workflow, its settings and where its results lie."""
    options = (
        click.argument("workflow"),
        click.option("--model", help='Hub id, directory or "specimen"; short for --set model=….'),
        click.option(
            "--set",
            "parameters",
            multiple=True,
            callback=settings,
            metavar="NAME=VALUE",
            help="A setting; repeat for more. Values are JSON where they are JSON, else text.",
        ),
        store_option,
        json_option,
    )
    for option in reversed(options):
        command = option(command)
    return command


@click.command(
    help=f"""Compute a workflow, as far as the store does not hold it already, and print the answer.

    WORKFLOW is one of {NAMES}. An unknown setting is an error that names those there are.
    """,
    epilog="Example: mizarr compute logit_lens --set 'prompts=[\"Once upon a time\"]' --figures figures",
)
@workflow_options
@click.option("--figures", type=click.Path(file_okay=False, path_type=Path), help="Draw into this folder.")
@click.option("--cluster", metavar="ADDRESS", help="Dask scheduler, such as tcp://host:8786.")
@click.option("--threads", type=click.IntRange(min=1), help="Threads of this process; default one per core.")
@click.option("--memory", callback=size, metavar="SIZE", help="Refuse what would need more than this.")
@quiet_option
def compute(
    workflow: str,
    model: str | None,
    parameters: dict[str, Any],
    store_path: str,
    as_json: bool,
    figures: Path | None,
    cluster: str | None,
    threads: int | None,
    memory: int | None,
    quiet: bool,
) -> None:
    """See `help` above."""
    from rich.console import Console

    from ..store import open_store
    from . import build

    planned = build(workflow, **_with_model(parameters, model))
    store = open_store(store_path)
    done = planned.run(store, cluster=cluster, threads=threads, memory=memory, quiet=quiet)
    if as_json:
        drawn = done.draw(figures) if figures else []
        print_json(done.to_json() | {"figures": [str(path) for path in drawn]})
        return
    for path in done.render(Console(), figures):
        click.echo(f"wrote {path}", err=True)


@click.command(
    help=f"""Say for each stage of a workflow: cached, or will run because …; and what running it costs.

    WORKFLOW is one of {NAMES}. Nothing is computed or written; no model is loaded.
    """,
    epilog="Example: mizarr explain logit_lens --model specimen",
)
@workflow_options
def explain(
    workflow: str, model: str | None, parameters: dict[str, Any], store_path: str, as_json: bool
) -> None:
    """See `help` above."""
    from ..pipeline import plan
    from . import build

    planned = build(workflow, **_with_model(parameters, model))
    with _store_to_look_into(store_path) as store:
        steps = plan(planned.nodes.values(), store)
    if as_json:
        print_json({"workflow": workflow, "question": planned.question, **steps.to_json()})
        return
    click.echo(planned.question, err=True)
    columns = ["STAGE", "STATE", "CELLS", "READ", "WRITTEN", "PEAK"]
    print_table(columns, [dict(zip(columns, row, strict=True)) for row in steps.rows()])


@contextlib.contextmanager
def _store_to_look_into(path: str) -> Iterator[Store]:
    """The store read-only; an empty one elsewhere if there is none yet, so that looking leaves no trace."""
    from ..store import open_store

    if Path(path).exists():
        yield open_store(path, mode="r")
        return
    with tempfile.TemporaryDirectory() as empty:
        yield open_store(empty)


def _with_model(parameters: dict[str, Any], model: str | None) -> dict[str, Any]:
    if model is None:
        return parameters
    if "model" in parameters:
        raise click.UsageError("the model is given twice: --model and --set model=…; keep one")
    return {**parameters, "model": model}
