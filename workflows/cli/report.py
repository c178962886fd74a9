"""`mizarr report`: writes the result of a workflow as one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...store.display.terminal import echo
from .options import command, print_json
from .runs import on_workflow, run_options

if TYPE_CHECKING:
    from ..workflow import Workflow


@command(
    help="""Compute the stages of a workflow that are not cached; write its result as a page.

    The HTML page holds interactive tables, heatmaps and curves, figures, and the provenance of each result.
    It opens in any browser, offline. An existing page of the same results is not written again. Prints the
    path of the page.

    `mizarr workflows` lists the workflows.
    """,
    epilog="Example: mizarr report logit_lens --output lens.html",
)
@on_workflow
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    metavar="FILE.html",
    help="Where to write; default WORKFLOW.html here.",
)
@run_options
def report(workflow: Workflow, store_path: str, as_json: bool, output: Path | None, **options: Any) -> None:
    """Compute a workflow and write its page; the user's text is `help` above."""
    from ...store.store import requested_store
    from ..report.page import check_output

    path = output or Path(f"{workflow.name}.html")
    # Before the computation: a path that cannot be written must not cost hours of work.
    check_output(path)
    with requested_store(store_path) as store:
        workflow.run(store, **options).report(path)
    if as_json:
        print_json({"workflow": workflow.name, "page": str(path), "bytes": path.stat().st_size})
        return
    echo(path)
