"""`mizarr report`: a workflow's answer as one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from .options import print_json, quiet_option, size
from .runs import NAMES, cluster_option, with_model, workflow_options


@click.command(
    help=f"""Compute a workflow as far as it is not cached; write its answer as one HTML page.

    The page holds tables, heatmaps and curves to look into, figures, and how each result was made. It opens
    in any browser, offline. A page of the same results is left as it is. Its path is printed.

    WORKFLOW is one of {NAMES}.
    """,
    epilog="Example: mizarr report logit_lens --output lens.html",
)
@workflow_options
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    metavar="FILE.html",
    help="Where to write; default WORKFLOW.html here.",
)
@cluster_option
@click.option("--threads", type=click.IntRange(min=1), help="Threads of this process; default one per core.")
@click.option("--memory", callback=size, metavar="SIZE", help="Refuse what would need more than this.")
@quiet_option
def report(
    workflow: str,
    model: str | None,
    trust_layout: bool,
    parameters: dict[str, Any],
    store_path: str,
    as_json: bool,
    output: Path | None,
    cluster: str | None,
    threads: int | None,
    memory: int | None,
    quiet: bool,
) -> None:
    """See `help` above."""
    from ...store import open_store
    from .. import build
    from ..report.page import check_output

    planned = build(workflow, trust_layout=trust_layout, **with_model(parameters, model))
    path = output or Path(f"{workflow}.html")
    check_output(path)
    done = planned.run(open_store(store_path), cluster=cluster, threads=threads, memory=memory, quiet=quiet)
    done.report(path)
    if as_json:
        print_json({"workflow": workflow, "page": str(path), "bytes": path.stat().st_size})
        return
    click.echo(path)
