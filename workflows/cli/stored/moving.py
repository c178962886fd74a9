"""Commands that copy runs and results between stores: `copy` and `merge`. Neither imports torch."""

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
    help="Compress the shards of runs in TARGET (zstd), or store them uncompressed (none); default as in "
    "SOURCE. Numbers and keys stay the same. Compressed shards are decoded on access, not memory-mapped.",
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
    TARGET already holds stays; after an interruption the same command continues.
    """
    from ....store import open_store
    from ....store.store import requested_store

    store = open_store(source, mode="r")
    _require_distinct([source], target)
    records = _selected_records(store, runs, results)
    with requested_store(target) as target_store:
        _print_copied(_copy_all([store], target_store, [records], quiet, codec), as_json)


@click.command(epilog="Example: mizarr merge of-monday of-tuesday activations")
@click.argument("sources", nargs=-1, required=True)
@click.argument("target")
@json_option
@quiet_option
def merge(sources: Sequence[str], target: str, as_json: bool, quiet: bool) -> None:
    """Merge all SOURCES into TARGET.

    If two stores hold the same key with different contents, TARGET's content is kept, else that of the first
    source; these keys are printed.
    """
    from ....store import open_store
    from ....store.store import requested_store

    _require_distinct(sources, target)
    stores = [open_store(source, mode="r") for source in sources]
    records = [list(store.records()) for store in stores]
    with requested_store(target) as target_store:
        _print_copied(_copy_all(stores, target_store, records, quiet), as_json)


def _require_distinct(sources: Sequence[str], target: str) -> None:
    """Raise UsageError if a source and the target are the same store."""
    for source in sources:
        # The first comparison is for URLs, which are not paths.
        if source.rstrip("/") == target.rstrip("/") or Path(source).absolute() == Path(target).absolute():
            raise click.UsageError(
                f"the store {target!r} is both source and target; name another store as the target"
            )


def _selected_records(store: Store, runs: str | None, results: str | None) -> list[Record]:
    """Records of the runs and results named by --runs and --results; all records if both are None.

    Arguments:
        store: The source.
        runs: Comma-separated prefixes of run digests.
        results: Comma-separated prefixes of keys.
    """
    if runs is None and results is None:
        return list(store.records())
    for text, option in ((runs, "--runs"), (results, "--results")):
        if text is not None and not text.strip(","):
            raise click.UsageError(
                f"expected {option} to list the first characters of keys, such as 35be,7a01, found {text!r}; "
                "leave it out"
            )
    # A run has a record per variable and layer: they are selected by its folder.
    folders = {store.entry(prefix).path for prefix in (runs or "").split(",") if prefix}
    keys = {store.record(prefix).key for prefix in (results or "").split(",") if prefix}
    return [record for record in store.records() if record.data in folders or record.key in keys]


def _copy_all(
    stores: Sequence[Store],
    target: Store,
    records: Sequence[Sequence[Record]],
    quiet: bool,
    codec: str | None = None,
) -> list[Copied]:
    """Copy records of several stores into one, with one progress bar per store.

    Arguments:
        stores: The stores to copy from.
        target: The store to copy into.
        records: For each store, the records to copy.
        quiet: Show no progress bars.
        codec: "zstd" or "none" for the copied shards; None leaves them as they are.

    Returns:
        For each store, which keys were copied, already present, or present with other contents.
    """
    from ....pipeline.progress import Progress

    summaries = []
    with Progress(quiet=quiet) as bars:
        for store, store_records in zip(stores, records, strict=True):
            bar = bars.task(f"copying from {store.address}", unit="B")

            # `bar` is bound as a default: a closure would see the bar of a later source.
            def advance(bytes_done: int, bar: Bar = bar) -> None:
                bar.advance(bytes_done - bar.done)

            summaries.append(store.copy_to(target, store_records, advance, codec))
    return summaries


def _print_copied(summaries: Sequence[Copied], as_json: bool) -> None:
    """Print how many keys were copied or already present, and which keys differ in content between stores."""
    from ....pipeline.plan import human_bytes

    if as_json:
        print_json([asdict(summary) for summary in summaries])
        return
    n_copied = sum(len(summary.copied) for summary in summaries)
    n_present = sum(len(summary.present) for summary in summaries)
    size = human_bytes(sum(summary.bytes for summary in summaries)) or "nothing"
    echo(f"{n_copied} keys copied ({size}), {n_present} were already in the target")
    for key in (key for summary in summaries for key in summary.different):
        echo(f"{key[:12]} is in the target with other content, which was kept", err=True)
