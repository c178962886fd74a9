"""`mizarr replicate`: a published result asked for again, or its protocol run on a shipped model."""

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


@command(epilog="Example: mizarr replicate logit-lens")
@click.argument("name", required=False)
@click.option("--model", help="Which of the published models to use; default the first.")
@click.option("--fetch", is_flag=True, help="Download missing models; HF_TOKEN gives access to gated ones.")
@store_option
@json_option
@run_options
def replicate(
    name: str | None, model: str | None, fetch: bool, store_path: str, as_json: bool, **how: Any
) -> int:
    """Repeat a published result; without NAME, list them.

    On the published model where it is here, or with --fetch; printed numbers stand beside what was found, and
    the exit code is 1 if any differs by more than it may. Else what would be fetched is told, and the same
    protocol runs on a shipped model: that it runs, not that it replicates.
    """
    from ...store.store import requested_store
    from .. import build
    from ..replications import REPLICATIONS

    if name is None:
        _list(as_json)
        return 0
    chosen = _chosen(name, REPLICATIONS)
    published = _published(chosen, model)
    is_here = bool(published) and _is_here(chosen, published, fetch)
    if published and not is_here:
        echo(_would_fetch(chosen, published), err=True)
    settings = chosen.asked(published) if is_here else chosen.here
    with requested_store(store_path) as store:
        done = build(chosen.workflow, **settings).run(store, **how)
    claims = _compared(chosen, published, done) if is_here else []
    about = {"replication": name, "source": chosen.source, "is_published_model": is_here, "claims": claims}
    if as_json:
        print_json(about | done.to_json())
    else:
        _print(chosen, done, claims)
    return DIFFERS if any(not claim["agrees"] for claim in claims) else 0


def _chosen(name: str, known: Mapping[str, Replication]) -> Replication:
    from ...store.errors import ConfigError, nearest

    if name not in known:
        near = nearest(name, known)
        hint = f"did you mean {near!r}?" if near else f"there are {', '.join(known)}"
        raise ConfigError(f"no replication {name!r}; {hint}")
    return known[name]


def _published(chosen: Replication, model: str | None) -> str:
    """The published model that is asked; "" where none was."""
    if model is None or model in chosen.models:
        return model or (chosen.models[0] if chosen.models else "")
    raise click.UsageError(
        f"expected a model it was published on, {' or '.join(chosen.models) or 'of which there is none'}, "
        f"found {model!r}; for others: mizarr compute {chosen.workflow} --model {model}"
    )


def _is_here(chosen: Replication, model: str, fetch: bool) -> bool:
    """Whether model and dictionary are in the cache, once they were fetched if that is asked."""
    from ...stages.features import download as dictionaries
    from ...stages.features.layers.files import resolve as resolve_dictionary
    from ...stages.forward.models import download
    from ...stages.forward.models.files import resolve
    from ...store.errors import MizarrError

    if fetch:
        download.fetch(model, chosen.revision)
        if chosen.dictionary:
            dictionaries.fetch(chosen.dictionary)
    try:
        resolve(model, chosen.revision)
        if chosen.dictionary:
            resolve_dictionary(chosen.dictionary)
    except MizarrError:
        return False
    return True


def _would_fetch(chosen: Replication, model: str) -> str:
    """What is missing, with its bytes where the hub can be asked."""
    from ...pipeline.plan import human_bytes
    from ...stages.features.download import files_to_fetch
    from ...stages.features.layers.files import parse_reference
    from ...stages.forward.models.download import hub_errors, listed_files, remote_files
    from ...store.errors import MizarrError

    wanted, total = [f"{model} at {chosen.revision}"], 0
    try:
        with hub_errors(model, chosen.revision):
            total = sum(remote_files(model, chosen.revision)[1].values())
        if chosen.dictionary:
            repository, folder, revision = parse_reference(chosen.dictionary)
            with hub_errors(repository, revision):
                sizes = listed_files(repository, revision)[1]
            total += sum(files_to_fetch(sizes, folder, chosen.dictionary).values())
        size = human_bytes(total)
    except MizarrError:
        size = "how many bytes only the hub can say, and it was not reached"
    if chosen.dictionary:
        wanted.append(chosen.dictionary)
    return (
        f"not here: {' and '.join(wanted)} ({size}); fetch with --fetch. The same protocol on a shipped "
        "model follows: it runs, and replicates nothing"
    )


def _compared(chosen: Replication, model: str, done: Workflow) -> list[dict[str, Any]]:
    """Every printed number of a model beside the one found."""
    from ..replications import value_at

    document = done.to_json()
    rows = []
    for claim in chosen.claims:
        if claim.model == model:
            found = value_at(document, claim.path)
            told = {"published": claim.value, "tolerance": claim.tolerance, "found": found}
            rows.append({"place": claim.place, **told, "agrees": claim.agrees(found)})
    return rows


def _print(chosen: Replication, done: Workflow, claims: list[dict[str, Any]]) -> None:
    from ...store.display.console import EscapingConsole

    echo(f"{chosen.title} ({chosen.source})", err=True)
    done.render(EscapingConsole(), None)
    if claims:
        columns = ("PLACE", "PUBLISHED", "WITHIN", "FOUND", "AGREES")
        rows = [
            dict(
                zip(
                    columns,
                    (
                        row["place"],
                        str(row["published"]),
                        f"{row['tolerance']:g}",
                        str(row["found"]),
                        "yes" if row["agrees"] else "NO",
                    ),
                    strict=True,
                )
            )
            for row in claims
        ]
        print_table(columns, rows)


def _list(as_json: bool) -> None:
    from ..replications import REPLICATIONS

    rows = [
        {"NAME": name, "WORKFLOW": each.workflow, "MODELS": ", ".join(each.models), "SHOWS": each.title}
        for name, each in REPLICATIONS.items()
    ]
    if as_json:
        print_json(
            [
                {
                    "name": name,
                    "title": each.title,
                    "source": each.source,
                    "workflow": each.workflow,
                    "models": each.models,
                    "dictionary": each.dictionary,
                    "claims": len(each.claims),
                }
                for name, each in REPLICATIONS.items()
            ]
        )
    else:
        print_table(("NAME", "WORKFLOW", "MODELS", "SHOWS"), rows)
