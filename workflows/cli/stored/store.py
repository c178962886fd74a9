"""Commands about a store: `ls`, `show`, `verify`, `gc`, `pin`. None needs a model, weights or torch."""

from __future__ import annotations

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

DAMAGED = 1


@click.command(epilog="Example: mizarr ls --store activations")
@store_option
@click.option("--keys", "by_key", is_flag=True, help="A line per key: of a run one for each layer.")
@json_option
def ls(store_path: str, by_key: bool, as_json: bool) -> None:
    """List what a store holds.

    Runs first, those used last on top, then results. RUN and KEY are what `mizarr show` and `mizarr export`
    take. With --keys one line per layer of a captured variable, and per result: what `mizarr pin` takes;
    lines with equal DATA share a run, and CONTENT digests the values: equal contents are equal numbers.
    """
    from ....store import open_store

    store = open_store(store_path, mode="r")
    if not by_key and not as_json:
        _list_for_people(store)
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
            "CONTENT": row["content"].partition(":")[2][:12],
            "CREATED": row["created"],
            "PIN": row["pin"],
        }
        for row in rows
    ]
    print_table(["KEY", "LABEL", "DATA", "CONTENT", "CREATED", "PIN"], short)


def _list_for_people(store: Store) -> None:
    """Runs, and results with their sizes."""
    from ....pipeline.plan import human_bytes
    from ....pipeline.progress import short
    from ....store.records import RESULT

    measured = store.usage()
    runs = [
        {
            "RUN": run.run[:12],
            "MODEL": run.model,
            "PROMPTS": short(run.prompts),
            "TOKENS": short(run.tokens),
            "DTYPE": run.dtype,
            "SIZE": human_bytes(run.bytes),
            "USED": _minute(run.used),
            "HOOK POINTS": ", ".join(run.hooks) or "none finished",
        }
        for run in store.runs(measured)
    ]
    pins, usage = {key: name for name, key in store.pins().items()}, {one.data: one for one in measured}
    results = [
        {
            "KEY": record.key[:12],
            "LABEL": record.label,
            "SIZE": human_bytes(usage[record.data].bytes),
            "USED": _minute(usage[record.data].used),
            "PIN": pins.get(record.key),
        }
        for record in store.records()
        if record.kind == RESULT and record.data in usage
    ]
    if runs:
        print_table(list(runs[0]), runs)
    if runs and results:
        echo()
    if results or not runs:
        print_table(["KEY", "LABEL", "SIZE", "USED", "PIN"], results)


def _minute(seconds: float) -> str:
    """A moment as people write it, in local time."""
    return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M")


@click.command(epilog="Example: mizarr show 3f9a0c --store activations")
@click.argument("key")
@store_option
@json_option
def show(key: str, store_path: str, as_json: bool) -> None:
    """Show one array or result, and the recipe that made it.

    KEY is any unique start of a key printed by `mizarr ls`.
    """
    from ....store import open_store

    store = open_store(store_path, mode="r")
    dataset = store[key]
    provenance = store.provenance(key)
    unchecked = store.unchecked(key)
    if as_json:
        print_json({"dataset": _shape(dataset), "provenance": provenance, "unchecked": unchecked})
        return
    echo(repr(dataset))
    echo()
    print_json(provenance)
    _tell_unchecked(unchecked)


@click.command(epilog="Example: mizarr verify --quick --store activations")
@store_option
@click.option("--quick", is_flag=True, help="Compare existence and sizes only, not digests.")
@click.option("--quarantine", is_flag=True, help="Move the damaged parts aside; the next run computes them.")
@json_option
@quiet_option
def verify(store_path: str, quick: bool, quarantine: bool, as_json: bool, quiet: bool) -> int:
    """Compare the bytes of a store with their recorded digests.

    Exit code 1 if anything is damaged.
    """
    from ....pipeline.progress import Progress
    from ....store import open_store

    store = open_store(store_path, mode="a" if quarantine else "r")
    with Progress(quiet=quiet) as bars:
        read = bars.task("verifying", unit="B")

        def seen(done: int, total: int) -> None:
            read.total = total
            read.advance(done - read.done)

        damage, unchecked = store.verify(quick=quick, progress=seen), store.unchecked()
    for item in damage if quarantine else ():
        store.quarantine(item)
    if as_json:
        print_json([asdict(item) for item in damage])
    else:
        for item in damage:
            echo(str(item))
        echo(f"{len(damage)} damaged files" if damage else "no damage found", err=True)
    _tell_unchecked(unchecked)
    return DAMAGED if damage else 0


@click.command(epilog="Example: mizarr gc --grace 7d --dry-run --store activations")
@store_option
@click.option(
    "--grace",
    callback=duration,
    metavar="TIME",
    default="24h",
    show_default=True,
    help="Keep what is younger.",
)
@click.option(
    "--quota",
    callback=size,
    metavar="SIZE",
    help="Remove least recently used, unpinned data down to this size.",
)
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
@json_option
def gc(store_path: str, grace: float, quota: int | None, dry_run: bool, as_json: bool) -> None:
    """Remove leftovers; with --quota, what was not used lately.

    Pinned keys, and what they were computed from, always stay.
    """
    from ....pipeline.plan import human_bytes

    report = existing_store(store_path).gc(grace=grace, quota=quota, dry_run=dry_run)
    if as_json:
        print_json(asdict(report))
        return
    for name in (*report.leftovers, *report.removed):
        echo(name)
    done = "would be removed" if dry_run else "removed"
    gone, kept = human_bytes(report.bytes) or "nothing", human_bytes(report.kept_bytes) or "nothing"
    echo(f"{gone} {done}, {kept} stays", err=True)
    if report.over_quota:
        over = human_bytes(report.over_quota)
        echo(f"{over} over the quota are pinned or too young; see mizarr pin, --grace", err=True)


@click.command(epilog="Example: mizarr pin figure-3 3f9a0c --store activations")
@click.argument("name")
@click.argument("key", required=False)
@click.option("--remove", is_flag=True, help="Let go of the pin NAME; the data stays until gc.")
@store_option
def pin(name: str, key: str | None, remove: bool, store_path: str) -> None:
    """Keep KEY, and all it was computed from, from gc.

    NAME is yours to choose; KEY is any unique start of a key printed by `mizarr ls`.
    """
    if remove == (key is not None):
        raise click.UsageError("expected NAME and KEY to pin, or NAME and --remove to let go")
    store = existing_store(store_path)
    if key is None:
        store.unpin(name)
        return
    try:
        store.pin(name, key)
    except ValueError as error:
        raise click.UsageError(str(error)) from error


def _tell_unchecked(arrays: list[str]) -> None:
    """Say on stderr which arrays readers cannot check, and what helps."""
    if arrays:
        echo(
            f"{len(arrays)} array{'s carry' if len(arrays) > 1 else ' carries'} no checksums of their own: "
            "older versions wrote none. `mizarr verify` finds a changed byte, readers do not. Capture or "
            "compute into a new store to have every chunk checked",
            err=True,
        )


def _shape(dataset: Any) -> dict[str, Any]:
    """Dims, variables and attributes of a dataset as plain values."""
    return {
        "sizes": dict(dataset.sizes),
        "variables": {
            str(name): {"dims": list(array.dims), "dtype": str(array.dtype), "attrs": dict(array.attrs)}
            for name, array in dataset.data_vars.items()
        },
        "attrs": dict(dataset.attrs),
        "bytes": dataset.nbytes,
    }
