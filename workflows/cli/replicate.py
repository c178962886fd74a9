"""`mizarr replicate`: repeats a published result, or runs its protocol on a built-in model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from ...store.display.terminal import echo
from .options import command, json_option, print_json, print_table, store_option
from .runs import run_options

if TYPE_CHECKING:
    from ..replications import Replication
    from ..workflow import Workflow

DIFFERS = 1
"""Exit code if a number differs from the published one by more than its tolerance."""


@command(epilog="Example: mizarr replicate logit-lens")
@click.argument("name", required=False)
@click.option("--model", help="Which of the published models to use; default the first.")
@click.option("--fetch", is_flag=True, help="Download missing models; HF_TOKEN gives access to gated ones.")
@store_option
@json_option
@run_options
def replicate(
    name: str | None, model: str | None, fetch: bool, store_path: str, as_json: bool, **options: Any
) -> int:
    """Repeat a published result; without NAME, list them.

    Runs on the published model if it is in the local cache, or with --fetch. Published numbers are printed
    beside the computed ones; exit code 1 if any differs by more than its tolerance. Without the published
    model, the command names the missing files and runs the same protocol on a built-in model: this shows
    that the protocol runs, not that the result replicates.
    """
    from ...store.store import requested_store
    from .. import build
    from ..replications import REPLICATIONS

    if name is None:
        _list(as_json)
        return 0
    replication = _replication(name, REPLICATIONS)
    published = _published_model(replication, model)
    is_cached = bool(published) and _is_cached(replication, published, fetch)
    if published and not is_cached:
        echo(_missing_files(replication, published), err=True)
    settings = replication.asked(published) if is_cached else replication.here
    with requested_store(store_path) as store:
        workflow = build(replication.workflow, **settings).run(store, **options)
    # Numbers of a built-in model are not compared with published ones.
    claims = _compared_claims(replication, published, workflow) if is_cached else []
    header = {
        "replication": name,
        "source": replication.source,
        "is_published_model": is_cached,
        "claims": claims,
    }
    if as_json:
        print_json(header | workflow.to_json())
    else:
        _print(replication, workflow, claims)
    return DIFFERS if any(not claim["agrees"] for claim in claims) else 0


def _replication(name: str, replications: Mapping[str, Replication]) -> Replication:
    """Look up a replication by name; ConfigError suggests the nearest name for an unknown one."""
    from ...store.errors import ConfigError, nearest

    if name not in replications:
        near = nearest(name, replications)
        hint = f"did you mean {near!r}?" if near else f"there are {', '.join(replications)}"
        raise ConfigError(f"no replication {name!r}; {hint}")
    return replications[name]


def _published_model(replication: Replication, model: str | None) -> str:
    """Hub id of the published model to use: `model`, or the first one; "" if no model was published.

    Raises UsageError for a model that the result was not published on.
    """
    if model is None or model in replication.models:
        return model or (replication.models[0] if replication.models else "")
    published = " or ".join(replication.models) or "no model"
    raise click.UsageError(
        f"this result was published for {published}, found --model {model!r}; to run its workflow on another "
        f"model: mizarr compute {replication.workflow} --model {model}"
    )


def _is_cached(replication: Replication, model: str, fetch: bool) -> bool:
    """Whether the model and dictionary of a replication are in the hub's local cache.

    Arguments:
        replication: The replication.
        model: Hub id of the published model.
        fetch: Download missing files first.
    """
    from ...stages.features import download as dictionaries
    from ...stages.features.layers.files import resolve as resolve_dictionary
    from ...stages.forward.models import download
    from ...stages.forward.models.files import resolve
    from ...store.errors import MizarrError

    if fetch:
        download.fetch(model, replication.revision)
        if replication.dictionary:
            dictionaries.fetch(replication.dictionary)
    try:
        # Raises if a file is not in the local cache.
        resolve(model, replication.revision)
        if replication.dictionary:
            resolve_dictionary(replication.dictionary)
    except MizarrError:
        return False
    return True


def _missing_files(replication: Replication, model: str) -> str:
    """Message that names the missing model and dictionary, with their size if the hub can be reached."""
    from ...pipeline.plan import human_bytes
    from ...stages.features.download import files_to_fetch
    from ...stages.features.layers.files import parse_reference
    from ...stages.forward.models.download import hub_errors, listed_files, remote_files
    from ...store.errors import MizarrError

    missing, total = [f"{model} at {replication.revision}"], 0
    try:
        with hub_errors(model, replication.revision):
            total = sum(remote_files(model, replication.revision)[1].values())
        if replication.dictionary:
            repository, folder, revision = parse_reference(replication.dictionary)
            with hub_errors(repository, revision):
                sizes = listed_files(repository, revision)[1]
            total += sum(files_to_fetch(sizes, folder, replication.dictionary).values())
        size = human_bytes(total)
    except MizarrError:
        # Without a connection the message still names what is missing.
        size = "unknown size, because the hub cannot be reached"
    if replication.dictionary:
        missing.append(replication.dictionary)
    return (
        f"not in the local cache: {' and '.join(missing)} ({size}); --fetch downloads it. The same protocol "
        "now runs on a built-in model: this shows that the protocol works, not that the result replicates"
    )


def _compared_claims(replication: Replication, model: str, workflow: Workflow) -> list[dict[str, Any]]:
    """Compare the published numbers of a model with the computed ones.

    Returns:
        JSON object per published number: its place in the paper, the published number, its tolerance, the
        computed number, and whether both agree.
    """
    from ..replications import value_at

    document = workflow.to_json()
    rows = []
    for claim in replication.claims:
        if claim.model == model:
            computed = value_at(document, claim.path)
            numbers = {"published": claim.value, "tolerance": claim.tolerance, "found": computed}
            rows.append({"place": claim.place, **numbers, "agrees": claim.agrees(computed)})
    return rows


def _print(replication: Replication, workflow: Workflow, claims: list[dict[str, Any]]) -> None:
    """Print the workflow's views, and a table that compares published with computed numbers."""
    from ...store.display.console import EscapingConsole

    echo(f"{replication.title} ({replication.source})", err=True)
    workflow.render(EscapingConsole(), None)
    if claims:
        rows = [
            {
                "PLACE IN THE PAPER": claim["place"],
                "PUBLISHED": str(claim["published"]),
                "TOLERANCE": f"{claim['tolerance']:g}",
                "COMPUTED": str(claim["found"]),
                "AGREES": "yes" if claim["agrees"] else "NO",
            }
            for claim in claims
        ]
        print_table(list(rows[0]), rows)


def _list(as_json: bool) -> None:
    """Print all replications as a table or as JSON."""
    from ..replications import REPLICATIONS

    rows = [
        {
            "NAME": name,
            "WORKFLOW": replication.workflow,
            "MODELS": ", ".join(replication.models),
            "SHOWS": replication.title,
        }
        for name, replication in REPLICATIONS.items()
    ]
    if as_json:
        print_json(
            [
                {
                    "name": name,
                    "title": replication.title,
                    "source": replication.source,
                    "workflow": replication.workflow,
                    "models": replication.models,
                    "dictionary": replication.dictionary,
                    "claims": len(replication.claims),
                }
                for name, replication in REPLICATIONS.items()
            ]
        )
    else:
        print_table(("NAME", "WORKFLOW", "MODELS", "SHOWS"), rows)
