"""Commands that bring what one store holds into another: `copy`, `merge`. Neither needs a model or torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ....store.display.terminal import echo
from ..options import json_option, print_json, quiet_option

if TYPE_CHECKING:
    from ....pipeline.progress import Bar
    from ....store import Record, Store
    from ....store.upkeep.copying import Copied


@click.command(epilog="Example: mizarr copy activations s3://bucket/activations --runs 35be")
@click.argument("source")
@click.argument("target")
@click.option(
    "--runs",
    metavar="RUNS",
    help="Runs to copy, such as 35be,7a01 (first characters of RUN in `mizarr ls`); default all.",
)
@click.option(
    "--results",
    metavar="KEYS",
    help="Results to copy, such as 3f9a,c0de (first characters of their keys); default all.",
)
@click.option(
    "--codec",
    type=click.Choice(["zstd", "none"]),
    help="Compress shards of runs in TARGET, to the same numbers and keys, or make them plain again; default "
    "as they are. What is compressed is decoded when it is read, not mapped.",
)
@json_option
@quiet_option
def copy(
    source: str,
    target: str,
    runs: str | None,
    results: str | None,
    codec: str | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Copy SOURCE into TARGET, an existing or a new store.

    Both are folders or URLs such as s3://bucket/prefix. Every file is compared with its recorded digest. What
    TARGET has already stays; a copy that was cut off goes on where it was.
    """
    from ....store import open_store
    from ....store.store import requested_store

    store = open_store(source, mode="r")
    _require_other([source], target)
    records = _chosen(store, runs, results)
    with requested_store(target) as opened:
        _tell(_copied([store], opened, [records], quiet, codec), as_json)


@click.command(epilog="Example: mizarr merge of-monday of-tuesday activations")
@click.argument("sources", nargs=-1, required=True)
@click.argument("target")
@json_option
@quiet_option
def merge(sources: Sequence[str], target: str, as_json: bool, quiet: bool) -> None:
    """Merge all SOURCES into TARGET.

    Where two hold the same key with other contents the first stays, TARGET's before all; those keys are told.
    """
    from ....store import open_store
    from ....store.store import requested_store

    _require_other(sources, target)
    stores = [open_store(source, mode="r") for source in sources]
    records = [list(store.records()) for store in stores]
    with requested_store(target) as opened:
        _tell(_copied(stores, opened, records, quiet), as_json)


def _require_other(sources: Sequence[str], target: str) -> None:
    """Raise UsageError for a source that is the target."""
    for source in sources:
        if source.rstrip("/") == target.rstrip("/") or Path(source).absolute() == Path(target).absolute():
            raise click.UsageError(f"expected a target beside its sources, found {target!r} twice")


def _chosen(store: Store, runs: str | None, results: str | None) -> list[Record]:
    """The records asked for; all where nothing is."""
    if runs is None and results is None:
        return list(store.records())
    for text, option in ((runs, "--runs"), (results, "--results")):
        if text is not None and not text.strip(","):
            raise click.UsageError(f"expected starts of keys with {option}, found {text!r}; leave it out")
    folders = {store.entry(prefix).path for prefix in (runs or "").split(",") if prefix}
    keys = {store.record(prefix).key for prefix in (results or "").split(",") if prefix}
    return [record for record in store.records() if record.data in folders or record.key in keys]


def _copied(
    stores: Sequence[Store],
    target: Store,
    records: Sequence[Sequence[Record]],
    quiet: bool,
    codec: str | None = None,
) -> list[Copied]:
    from ....pipeline.progress import Progress

    found = []
    with Progress(quiet=quiet) as bars:
        for store, asked in zip(stores, records, strict=True):
            bar = bars.task(f"copying from {store.address}", unit="B")

            def advance(done: int, bar: Bar = bar) -> None:
                bar.advance(done - bar.done)

            found.append(store.copy_to(target, asked, advance, codec))
    return found


def _tell(found: Sequence[Copied], as_json: bool) -> None:
    from ....pipeline.plan import human_bytes

    if as_json:
        print_json([asdict(each) for each in found])
        return
    copied, present = sum(len(each.copied) for each in found), sum(len(each.present) for each in found)
    size = human_bytes(sum(each.bytes for each in found)) or "nothing"
    echo(f"{copied} keys copied ({size}), {present} were there")
    for key in (key for each in found for key in each.different):
        echo(f"{key[:12]} is there with another content, which stays", err=True)
