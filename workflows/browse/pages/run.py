"""Page of a captured run: model and dtypes, progress, hook points with sizes, lineage, and the list of
prompts."""

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
"""Number of prompts per page of a run."""
SHOWN = 140
"""Largest number of characters of a prompt's text in the list of prompts."""


def run_page(snapshot: Snapshot, folder: HeldFolder, number: int) -> Page | None:
    """Page of a run: captured activations, lineage, and a section of the prompt list.

    Arguments:
        snapshot: Content of the store.
        folder: Folder of the run.
        number: Number of the page, from 1. Page 1 shows everything; the following pages, further prompts
            only.

    Returns:
        The page; None if the run has fewer pages.
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
    prompts = _prompts_table(run, list(rows), address, digest)
    views: list[View] = []
    if number == 1:
        views += [_run_facts(snapshot, folder), *progress(folder, state), _hook_points_table(run)]
        views += [lineage(snapshot, folder, entry_links(address))]
    # Navigation above and below the table; None if all prompts are on this page.
    views += [view for view in (links, prompts, links) if view is not None]
    return Page(
        address=address,
        title=f"{folder.run.model}, {folder.run.prompts:,} prompts",
        over=f"run {digest[:12]}",
        up=(home(address),),
        views=tuple(views),
        # A complete run does not change any more: its page does not ask for progress.
        live="" if state.is_whole and not state.is_live else f"run/{digest}/live.json",
    )


def progress(folder: HeldFolder, state: Harvest) -> Iterator[HarvestProgress]:
    """Progress bar of a capture: one view, or no view for a complete run.

    Arguments:
        folder: Folder of the run.
        state: Its numbers of finished segments, and of segments that are being computed.
    """
    if not state.is_whole or state.is_live:
        yield HarvestProgress(
            name=digest_of(folder)[:12],
            done=state.done,
            claimed=state.claimed,
            total=state.total,
            told=progress_text(state.done, state.total, state.claimed, state.tokens),
        )


def _run_facts(snapshot: Snapshot, folder: HeldFolder) -> Values:
    """List of a run's model, dtypes, device, size and dates; facts that were not recorded are left out."""
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
        # Notes are sorted by time: the date of the oldest one.
        "first written": str(folder.notes[0].get("at", ""))[:10] if folder.notes else "",
    }
    pairs = tuple((name, str(value)) for name, value in values.items() if value)
    return Values(pairs=pairs, caption=f"If `mizarr gc` runs now, this run {snapshot.fate(folder)}.")


def _hook_points_table(run: OpenedRun) -> View:
    """Table of the run's variables with hook point, finished layers, dims and bytes; a note if it has
    none."""
    finished_layers: dict[str, list[int | None]] = {}
    for variable, layer in run.entry.published():
        finished_layers.setdefault(variable, []).append(layer)
    specs = run.entry.specs
    if not specs:
        return Note(title="Hook points", text="The capture has not stored anything yet.")

    def n_bytes(name: str) -> float:
        spec = specs[name]
        n_rows = float(run.entry.bounds(spec.packed)[-1])
        return n_rows * len(finished_layers.get(name, ())) * spec.row_bytes

    def layers(name: str) -> str:
        if name not in finished_layers:
            return "none finished"
        # "–" for a variable without layers, whose only entry is None.
        return ranges(sorted(layer for layer in finished_layers[name] if layer is not None)) or "–"

    def dims(name: str) -> str:
        # The size of a dim that differs between prompts is not in `sizes`.
        sizes = specs[name].sizes
        return " × ".join(f"{dim} {sizes[dim]}" if dim in sizes else dim for dim in specs[name].dims)

    return Table.of(
        sorted(specs),
        ("variable", lambda name: name),
        ("hook point", lambda name: specs[name].hook.replace("{}", "*")),
        ("layers", layers),
        ("dims", dims),
        ("size uncompressed", n_bytes, sized),
        title="Hook points",
    )


def _prompts_table(run: OpenedRun, prompts: list[int], address: str, digest: str) -> Table:
    """Table of consecutive prompts, each with a link to its page.

    Arguments:
        run: The run.
        prompts: Indices of the prompts.
        address: Address of the page that shows the table.
        digest: Digest of the run.
    """
    packed = run.entry.tokens

    def text(prompt: int) -> str:
        if packed.texts is not None:
            return cut(packed.texts[prompt], SHOWN) or "(empty)"
        # Without stored texts, the first 40 tokens are joined.
        start = int(packed.row_start[prompt])
        return cut(run.passage(range(start, start + min(40, int(packed.row_size[prompt])))), SHOWN)

    return Table.of(
        prompts,
        ("prompt", lambda prompt: linked(str(prompt), address, addresses.prompt(digest, prompt))),
        ("tokens", lambda prompt: int(packed.row_size[prompt]), ",d"),
        ("text", text),
        title="Prompts",
        caption=f"Prompts {prompts[0]:,} to {prompts[-1]:,} of {packed.n_prompts:,}; long texts are cut.",
    )
