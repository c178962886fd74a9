"""Commands on a store: `ls`, `show`, `verify`, `gc`, `pin`. None needs a model or imports torch."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from ....store.display.terminal import echo
from ..options import (
    duration,
    existing_store,
    json_option,
    print_json,
    print_table,
    quiet_option,
    size,
    store_option,
)

if TYPE_CHECKING:
    from ....store import Store
    from ...holdings import AskedQuestion, HeldFolder, Snapshot

DAMAGED = 1
"""Exit code of `verify` if any file is damaged."""
_SETTINGS_CHARACTERS, _DATASET_ROWS = 200, 16
"""Largest number of characters of a workflow's settings, and of rows of a dataset, that `show` prints."""
_SETTINGS_COLUMN = 80
"""Largest number of characters of a workflow's settings in the table that `ls` prints."""


@click.command(epilog="Example: mizarr ls --store activations")
@store_option
@click.option("--all", "has_pieces", is_flag=True, help="List every run and result, also intermediate ones.")
@click.option("--keys", "by_key", is_flag=True, help="List one line per key; a run has one key per layer.")
@json_option
def ls(store_path: str, has_pieces: bool, by_key: bool, as_json: bool) -> None:
    """List the captured runs and computed workflows of a store, newest first.

    Prints a line per captured run and per computed workflow; --all adds intermediate runs and results. RUN
    and KEY are the argument of `mizarr show` and `mizarr export`; KEY of a workflow is the key of its first
    result. --keys prints a line per layer of a captured variable and per result, with the KEY that `mizarr
    pin` takes. Lines with equal DATA belong to the same run; equal CONTENT, a digest of the values, means
    equal numbers.
    """
    from ....store import open_store

    store = open_store(store_path, mode="r")
    if not by_key and not as_json:
        _print_tables(store, has_pieces)
        return
    pins = {key: name for name, key in store.pins().items()}
    rows = [asdict(record) | {"pin": pins.get(record.key)} for record in store.records()]
    if as_json:
        print_json(rows)
        return
    short = [
        {
            "KEY": row["key"][:12],
            "LABEL": row["label"],
            "DATA": row["data"].rpartition("/")[2][:12],
            # The digest alone, without the name of the hash function.
            "CONTENT": row["content"].partition(":")[2][:12],
            "CREATED": row["created"],
            "PIN": row["pin"],
        }
        for row in rows
    ]
    print_table(["KEY", "LABEL", "DATA", "CONTENT", "CREATED", "PIN"], short)


def _print_tables(store: Store, has_pieces: bool) -> None:
    """Print tables of captured runs, of computed workflows, and of results that belong to no workflow.

    Arguments:
        store: The store to list.
        has_pieces: Also list the runs and results that are intermediate steps of workflows.
    """
    from ....pipeline.plan import human_bytes
    from ...holdings import Holdings

    # One look at all folders, so that the three tables are consistent while other processes write.
    snapshot = Holdings(store).look()
    runs = snapshot.runs if has_pieces else snapshot.asked_runs
    results = snapshot.results if has_pieces else snapshot.other_results
    tables = [
        (_RUN_COLUMNS, [_run_row(folder) for folder in runs]),
        (_QUESTION_COLUMNS, [_question_row(snapshot, question) for question in snapshot.questions]),
        (_RESULT_COLUMNS, [_result_row(snapshot, folder) for folder in results]),
    ]
    non_empty_tables = [(columns, rows) for columns, rows in tables if rows]
    for number, (columns, rows) in enumerate(non_empty_tables):
        if number:
            echo()
        # Without pins the column would be empty: it is left out.
        is_pinned = any(row.get("PIN") for row in rows)
        print_table([column for column in columns if column != "PIN" or is_pinned], rows)
    if not non_empty_tables:
        echo("the store is empty", err=True)
    listed = {folder.data for folder in (*runs, *results)}
    listed |= {folder.data for question in snapshot.questions for folder in question.results.values()}
    unlisted = [folder for data, folder in snapshot.folders.items() if data not in listed]
    if unlisted and not has_pieces:
        size = human_bytes(sum(folder.usage.bytes for folder in unlisted))
        echo(f"not listed: {len(unlisted):,} intermediate runs and results ({size}); add --all", err=True)
    for damage in snapshot.damaged:
        echo(f"damaged, not listed: {damage}", err=True)


_RUN_COLUMNS = ("RUN", "MODEL", "PROMPTS", "TOKENS", "HOOK POINTS", "DTYPE", "SIZE", "WRITTEN")
_QUESTION_COLUMNS = ("KEY", "WORKFLOW", "MODEL", "SETTINGS", "SIZE", "ASKED", "PIN")
_RESULT_COLUMNS = ("KEY", "RESULT", "SIZE", "WRITTEN", "PIN")


def _run_row(folder: HeldFolder) -> dict[str, Any]:
    """Row of the table of captured runs: column name -> text."""
    from ....pipeline.plan import human_bytes
    from ....pipeline.progress import short
    from ....store.upkeep.listing import model_label

    run = folder.run
    assert run is not None
    values = (
        run.run[:12],
        model_label(run.model),
        short(run.prompts),
        short(run.tokens),
        ", ".join(run.hooks) or "none finished",
        run.dtype,
        human_bytes(folder.usage.bytes),
        _minute(folder.written),
    )
    return dict(zip(_RUN_COLUMNS, values, strict=True))


def _question_row(snapshot: Snapshot, computed: AskedQuestion) -> dict[str, Any]:
    """Row of the table of computed workflows: column name -> text."""
    from ....pipeline.plan import human_bytes
    from ....store.upkeep.listing import model_label
    from ...views.paper import fit

    question, first_result = computed.question, next(iter(computed.results.values()))
    values = (
        next(iter(question.results.values()))[:12],
        question.workflow,
        model_label(question.model),
        fit(question.settings_line, _SETTINGS_COLUMN),
        human_bytes(computed.bytes),
        _minute(question.at),
        snapshot.pin(first_result) or None,
    )
    return dict(zip(_QUESTION_COLUMNS, values, strict=True))


def _result_row(snapshot: Snapshot, folder: HeldFolder) -> dict[str, Any]:
    """Row of the table of results that belong to no workflow: column name -> text."""
    from ....pipeline.plan import human_bytes

    size, pin = human_bytes(folder.usage.bytes), snapshot.pin(folder) or None
    values = folder.records[0].short, folder.label, size, _minute(folder.written), pin
    return dict(zip(_RESULT_COLUMNS, values, strict=True))


def _minute(seconds: float) -> str:
    """Date and time in the local time zone, to the minute, of a Unix time in seconds."""
    # Unlike the pages of `mizarr browse` and `mizarr site`, which must not depend on the machine: they use
    # UTC.
    return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M")


@click.command(epilog="Example: mizarr show 3f9a0c --store activations")
@click.argument("key")
@store_option
@json_option
def show(key: str, store_path: str, as_json: bool) -> None:
    """Show one run, array or result with its provenance.

    KEY is any unique start of a key or of a run printed by `mizarr ls`. --json prints the complete
    provenance: versions, parameters, parents, memory.
    """
    from ....store import open_store

    store = open_store(store_path, mode="r")
    dataset = store[key]
    provenance = store.provenance(key)
    if as_json:
        print_json({"dataset": _shape(dataset), "provenance": provenance})
        return
    for name, text in _provenance_lines(provenance):
        echo(f"{name:<10}{text}")
    echo(f"{'open it':<10}mizarr.open_store({store_path!r})[{key!r}]")
    echo()
    with _short_repr():
        echo(repr(dataset))


def _provenance_lines(provenance: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """(heading, text) of the lines that `show` prints: workflows, model, settings, inputs, time and versions.

    Arguments:
        provenance: Notes of an entry, as `Store.provenance` returns them, oldest first.
    """
    from ....pipeline.plan import human_bytes
    from ....pipeline.progress import clock
    from ....store.upkeep.listing import model_label
    from ....store.upkeep.questions import Question
    from ...views.paper import fit

    for question in filter(None, map(Question.of_note, provenance)):
        settings = fit(question.settings_line, _SETTINGS_CHARACTERS)
        asked_by = f"{question.workflow} {model_label(question.model)} {settings}"
        yield "asked by", f"{asked_by}, {_minute(question.at)}"
    if model := next((note["model"] for note in provenance if note.get("model")), None):
        yield "model", str(model)
    if request_note := next((note for note in provenance if "request" in note), None):
        request = request_note["request"]
        if request.get("params"):
            yield (
                "settings",
                fit(json.dumps(request["params"], ensure_ascii=False, default=str), _SETTINGS_CHARACTERS),
            )
        if inputs := request_note.get("parents") or request.get("inputs"):
            yield "made from", ", ".join(inputs)
    timed_notes = [note for note in provenance if "seconds" in note]
    if timed_notes:
        # Notes are sorted by time: the last one describes the latest computation.
        last = timed_notes[-1]
        peak = human_bytes(last.get("memory", {}).get("resident", {}).get("peak", 0))
        words = [f"{last['at'][:16].replace('T', ' ')} UTC", f"in {clock(last['seconds'])}"]
        words += [f"{peak} of memory"] if peak else []
        words += [
            f"{name} {last['versions'][name]}" for name in ("mizarr", "torch") if name in last["versions"]
        ]
        yield "computed", ", ".join(words)


def _short_repr() -> AbstractContextManager[None]:
    """Context in which xarray prints a dataset with at most _DATASET_ROWS rows per section."""
    import xarray as xr

    width = shutil.get_terminal_size().columns
    return xr.set_options(  # type: ignore[no-untyped-call]
        display_expand_attrs=False, display_max_rows=_DATASET_ROWS, display_width=width
    )


@click.command(epilog="Example: mizarr verify --quick --store activations")
@store_option
@click.option("--quick", is_flag=True, help="Compare existence and sizes only, not checksums.")
@click.option(
    "--quarantine", is_flag=True, help="Move damaged files aside, so that the next run computes them again."
)
@json_option
@quiet_option
def verify(store_path: str, quick: bool, quarantine: bool, as_json: bool, quiet: bool) -> int:
    """Compare the bytes of a store with their recorded checksums.

    Exit code 1 if anything is damaged.
    """
    from ....pipeline.progress import Progress
    from ....store import open_store

    # Quarantine moves files, for which the store must be writable.
    store = open_store(store_path, mode="a" if quarantine else "r")
    with Progress(quiet=quiet) as bars:
        bar = bars.task("verifying", unit="B")

        def show_progress(bytes_done: int, bytes_total: int) -> None:
            bar.total = bytes_total
            bar.advance(bytes_done - bar.done)

        damage = store.verify(quick=quick, progress=show_progress)
    for item in damage if quarantine else ():
        store.quarantine(item)
    if as_json:
        print_json([asdict(item) for item in damage])
    else:
        for item in damage:
            echo(str(item))
        echo(f"{len(damage)} damaged files found" if damage else "no damage found", err=True)
    return DAMAGED if damage else 0


@click.command(epilog="Example: mizarr gc --grace 7d --dry-run --store activations")
@store_option
@click.option(
    "--grace",
    callback=duration,
    metavar="TIME",
    default="24h",
    show_default=True,
    help="Keep leftovers that are younger than this.",
)
@click.option(
    "--quota",
    callback=size,
    metavar="SIZE",
    help="Remove the least recently used, unpinned data until the store is this small.",
)
@click.option("--dry-run", is_flag=True, help="Show what would be removed; remove nothing.")
@json_option
def gc(store_path: str, grace: float, quota: int | None, dry_run: bool, as_json: bool) -> None:
    """Remove leftovers and, with --quota, the least recently used data.

    Pinned keys, and what they were computed from, always stay.
    """
    from ....pipeline.plan import human_bytes

    report = existing_store(store_path).gc(grace=grace, quota=quota, dry_run=dry_run)
    if as_json:
        print_json(asdict(report))
        return
    for name in (*report.leftovers, *report.removed):
        echo(name)
    action = "would be removed" if dry_run else "removed"
    removed = human_bytes(report.bytes) or "nothing"
    remaining = human_bytes(report.kept_bytes) or "nothing"
    echo(f"{removed} {action}, {remaining} stays", err=True)
    if report.over_quota:
        excess = human_bytes(report.over_quota)
        echo(
            f"the store still exceeds the quota by {excess}: the rest is pinned, or younger than --grace",
            err=True,
        )


@click.command(epilog="Example: mizarr pin figure-3 3f9a0c --store activations")
@click.argument("name")
@click.argument("key", required=False)
@click.option("--remove", is_flag=True, help="Remove the pin NAME; the data stays until gc.")
@store_option
def pin(name: str, key: str | None, remove: bool, store_path: str) -> None:
    """Protect KEY, and everything it was computed from, from gc.

    NAME is any name that you choose; KEY is any unique start of a key printed by `mizarr ls`.
    """
    # Exactly one of KEY and --remove.
    if remove == (key is not None):
        raise click.UsageError("expected NAME and KEY to pin data, or NAME and --remove to remove a pin")
    store = existing_store(store_path)
    if key is None:
        store.unpin(name)
        return
    try:
        store.pin(name, key)
    except ValueError as error:
        raise click.UsageError(str(error)) from error


def _shape(dataset: Any) -> dict[str, Any]:
    """Sizes, variables and attributes of a dataset as JSON values, without its data."""
    return {
        "sizes": dict(dataset.sizes),
        "variables": {
            str(name): {"dims": list(array.dims), "dtype": str(array.dtype), "attrs": dict(array.attrs)}
            for name, array in dataset.data_vars.items()
        },
        "attrs": dict(dataset.attrs),
        "bytes": dataset.nbytes,
    }
