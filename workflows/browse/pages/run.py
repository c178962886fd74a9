"""A run: what it was, its hook points with sizes, how far it is, its prompts, and what was made of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ....store.reading.selection import ranges
from ...holdings import HeldFolder, Snapshot
from ...views import Note, Table, Values, View
from .. import addresses
from ..lineage import lineage
from ..opened import Harvest, OpenedRun, harvest, opened
from ..page import HarvestProgress, Page
from .parts import cut, digest_of, home, linked, moment, paged, sized, way_to
from .store import told

__all__ = ["PER_PAGE", "progress", "run_page"]

PER_PAGE = 50
"""Prompts on a page."""
SHOWN = 140
"""Characters of a prompt in a list."""


def run_page(held: Snapshot, folder: HeldFolder, number: int) -> Page | None:
    """A page of a run; None where it has fewer pages of prompts."""
    assert folder.run is not None
    run, state = opened(held.store, folder), harvest(held.store, folder)
    digest = digest_of(folder)
    here = addresses.run(digest, number)
    rows, links = paged(
        range(folder.run.prompts), number, PER_PAGE, here, lambda to: addresses.run(digest, to)
    )
    if not rows:
        return None
    prompts = _prompts(run, list(rows), here, digest)
    views: list[View] = []
    if number == 1:
        views += [_facts(held, folder), *progress(folder, state), _hook_points(run)]
        views += [lineage(held, folder, way_to(here))]
    views += [each for each in (links, prompts, links) if each is not None]
    return Page(
        address=here,
        title=f"{folder.run.model}, {folder.run.prompts:,} prompts",
        over=f"run {digest[:12]}",
        up=(home(here),),
        views=tuple(views),
        live="" if state.is_whole and not state.is_live else f"run/{digest}/live.json",
    )


def progress(folder: HeldFolder, state: Harvest) -> Iterator[HarvestProgress]:
    """How far a run is; nothing for one that is whole."""
    if not state.is_whole or state.is_live:
        words = told(state.done, state.total, state.claimed, state.tokens)
        yield HarvestProgress(
            name=digest_of(folder)[:12], done=state.done, claimed=state.claimed, total=state.total, told=words
        )


def _facts(held: Snapshot, folder: HeldFolder) -> Values:
    """Which passes these were; what was not noted of them is left out."""
    assert folder.run is not None
    identity = folder.note("identity") or {}
    hooks = folder.note("hooks") or {}
    interventions = len(hooks.get("interventions", ()))
    told: dict[str, Any] = {
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
        "first written": str(folder.notes[0].get("at", ""))[:10] if folder.notes else "",
    }
    pairs = tuple((name, str(value)) for name, value in told.items() if value)
    return Values(pairs=pairs, caption=f"mizarr gc: it {held.fate(folder)}.")


def _hook_points(run: OpenedRun) -> View:
    """Variables that are declared, their layers, dims and bytes as published."""
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
        held = published.get(name)
        if not held:
            return "none finished"
        return ranges(sorted(layer for layer in held if layer is not None)) or "–"

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
    for dim in dims:
        yield f"{dim} {sizes[dim]}" if dim in sizes else dim


def _prompts(run: OpenedRun, rows: list[int], here: str, digest: str) -> Table:
    """A line per prompt of some neighbouring rows, which leads to its page."""
    packed = run.entry.tokens

    def text(row: int) -> str:
        if packed.texts is not None:
            return cut(packed.texts[row], SHOWN) or "(empty)"
        start = int(packed.row_start[row])
        return cut(run.passage(range(start, start + min(40, int(packed.row_size[row])))), SHOWN)

    first, last = rows[0], rows[-1]
    return Table.of(
        rows,
        ("prompt", lambda row: linked(str(row), here, addresses.prompt(digest, row))),
        ("tokens", lambda row: int(packed.row_size[row]), ",d"),
        ("text", text),
        title="Prompts",
        caption=f"Prompts {first:,} to {last:,} of {packed.n_prompts:,}; long ones are cut.",
    )
