"""Page of a run: model and dtypes, progress, hook points with sizes, lineage, and the list of prompts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ....store.arrays import ranges
from ...holdings import HeldFolder, Snapshot
from ...views import Note, Table, Values, View
from .. import addresses
from ..lineage import lineage
from ..opened import Harvest, OpenedRun, harvest, open_run
from ..page import HarvestProgress, Page
from .parts import cut, digest_of, entry_links, home, linked, moment, page_of, sized
from .store import progress_text

__all__ = ["PER_PAGE", "progress", "run_page"]

PER_PAGE = 50
"""Number of prompts per page."""
SHOWN = 140
"""Largest number of characters of a prompt in the list."""


def run_page(snapshot: Snapshot, folder: HeldFolder, number: int) -> Page | None:
    """Page of a run.

    Arguments:
        snapshot: Content of the store.
        folder: Folder of the run.
        number: Number of the page of prompts, from 1; only page 1 shows everything else.

    Returns:
        The page; None if the run has fewer pages of prompts.
    """
    assert folder.run is not None
    run, state = open_run(snapshot.store, folder), harvest(snapshot.store, folder)
    digest = digest_of(folder)
    address = addresses.run(digest, number)
    rows, links = page_of(
        range(folder.run.prompts),
        number,
        PER_PAGE,
        address,
        lambda page_number: addresses.run(digest, page_number),
    )
    if not rows:
        return None
    prompts = _prompts(run, list(rows), address, digest)
    views: list[View] = []
    if number == 1:
        views += [_facts(snapshot, folder), *progress(folder, state), _hook_points(run)]
        views += [lineage(snapshot, folder, entry_links(address))]
    views += [view for view in (links, prompts, links) if view is not None]
    return Page(
        address=address,
        title=f"{folder.run.model}, {folder.run.prompts:,} prompts",
        over=f"run {digest[:12]}",
        up=(home(address),),
        views=tuple(views),
        # A complete run does not change any more: its page does not poll.
        live="" if state.is_whole and not state.is_live else f"run/{digest}/live.json",
    )


def progress(folder: HeldFolder, state: Harvest) -> Iterator[HarvestProgress]:
    """Progress of the capture of a run; no view for a complete run.

    Arguments:
        folder: Folder of the run.
        state: Its committed segments and claims.
    """
    if not state.is_whole or state.is_live:
        yield HarvestProgress(
            name=digest_of(folder)[:12],
            done=state.done,
            claimed=state.claimed,
            total=state.total,
            told=progress_text(state.done, state.total, state.claimed, state.tokens),
        )


def _facts(snapshot: Snapshot, folder: HeldFolder) -> Values:
    """Model, dtypes, device and dates of a run; facts that were not recorded are omitted."""
    assert folder.run is not None
    identity = folder.note("identity") or {}
    hooks = folder.note("hooks") or {}
    interventions = len(hooks.get("interventions", ()))
    values: dict[str, Any] = {
        "model": folder.run.model,
        "weights": str(identity.get("weights", "")).removeprefix("sha256:")[:12],
        "computed in": identity.get("dtype"),
        "forward pass": identity.get("forward"),
        "stored as": folder.run.dtype,
        "tokens": f"{folder.run.tokens:,}",
        "interventions": interventions or "none",
        "device": folder.note("device"),
        "on disk": sized(folder.usage.bytes),
        "last written (UTC)": moment(folder.written),
        # Notes are sorted by time; of the oldest one the date.
        "first written": str(folder.notes[0].get("at", ""))[:10] if folder.notes else "",
    }
    pairs = tuple((name, str(value)) for name, value in values.items() if value)
    return Values(pairs=pairs, caption=f"mizarr gc: it {snapshot.fate(folder)}.")


def _hook_points(run: OpenedRun) -> View:
    """Table of the declared variables with hook point, published layers, dims and bytes."""
    published: dict[str, list[int | None]] = {}
    for variable, layer in run.entry.published():
        published.setdefault(variable, []).append(layer)
    specs = run.entry.specs
    if not specs:
        return Note(title="Hook points", text="None declared yet.")

    def size(name: str) -> float:
        spec = specs[name]
        rows = float(run.entry.bounds(spec.packed)[-1]) * len(published.get(name, ()))
        return rows * spec.row_bytes

    def layers(name: str) -> str:
        published_layers = published.get(name)
        if not published_layers:
            return "none finished"
        return ranges(sorted(layer for layer in published_layers if layer is not None)) or "–"

    return Table.of(
        sorted(specs),
        ("variable", lambda name: name),
        ("hook point", lambda name: specs[name].hook.replace("{}", "*")),
        ("layers", layers),
        ("dims", lambda name: " × ".join(_dims(specs[name].dims, specs[name].sizes))),
        ("values take", size, sized),
        title="Hook points",
    )


def _dims(dims: tuple[str, ...], sizes: Any) -> Iterator[str]:
    """Each dim with its size, if it is fixed: "token", "hidden 64"."""
    for dim in dims:
        yield f"{dim} {sizes[dim]}" if dim in sizes else dim


def _prompts(run: OpenedRun, rows: list[int], address: str, digest: str) -> Table:
    """Table of consecutive prompts with links to their pages.

    Arguments:
        run: The run.
        rows: Indices of the prompts.
        address: Address of the page that shows the table.
        digest: Digest of the run.
    """
    packed = run.entry.tokens

    def text(row: int) -> str:
        if packed.texts is not None:
            return cut(packed.texts[row], SHOWN) or "(empty)"
        # Without stored texts, the first 40 tokens are joined.
        start = int(packed.row_start[row])
        return cut(run.passage(range(start, start + min(40, int(packed.row_size[row])))), SHOWN)

    return Table.of(
        rows,
        ("prompt", lambda row: linked(str(row), address, addresses.prompt(digest, row))),
        ("tokens", lambda row: int(packed.row_size[row]), ",d"),
        ("text", text),
        title="Prompts",
        caption=f"Prompts {rows[0]:,} to {rows[-1]:,} of {packed.n_prompts:,}; long texts are shortened.",
    )
