"""A prompt of a run: its tokens to click, and how long the states are at each of them, layer by layer."""

from __future__ import annotations

from ...holdings import HeldFolder, Snapshot
from ...views import Choice, Heatmap, Note, View
from .. import addresses
from ..opened import OpenedRun, opened
from ..page import Link, Page, TokenLinks
from .parts import digest_of, home, paged

__all__ = ["PER_PAGE", "prompt_page", "token_links"]

PER_PAGE = 256
"""Tokens on a page."""
VARIABLES = 6
"""Variables of a run whose norms are drawn."""
TEXT = 4000
"""Characters of a prompt that are written out."""


def prompt_page(held: Snapshot, folder: HeldFolder, prompt: int, number: int) -> Page | None:
    """A page of a prompt; None where there is none."""
    assert folder.run is not None
    run, digest = opened(held.store, folder), digest_of(folder)
    packed = run.entry.tokens
    if prompt >= packed.n_prompts:
        return None
    here, row = addresses.prompt(digest, prompt, number), packed.row(prompt)
    part, links = paged(
        range(row.start, row.stop), number, PER_PAGE, here, lambda to: addresses.prompt(digest, prompt, to)
    )
    if not part:
        return None
    start, stop = part[0], part[-1] + 1
    views: list[View] = [] if number > 1 else _text(run, prompt)
    views.append(
        token_links(
            run,
            here,
            start,
            stop,
            title="Tokens",
            caption=f"{row.stop - row.start:,} tokens; each leads to what is stored of it.",
        )
    )
    views += [each for each in (links,) if each is not None]
    views.append(_norms(run, start, stop, row.start))
    return Page(
        address=here,
        title=f"Prompt {prompt:,}",
        over=f"{folder.run.model} · run {digest[:12]}",
        up=(home(here), Link(f"run {digest[:12]}", addresses.to(here, addresses.run(digest)))),
        views=tuple(views),
    )


def token_links(
    run: OpenedRun, here: str, start: int, stop: int, at: int = -1, title: str = "", caption: str = ""
) -> TokenLinks:
    """Tokens of a range, each leading to its page. at: packed place of the one a page is about."""
    digest = digest_of(run.folder)
    first = int(run.entry.tokens.position_of(start))
    links = [
        Link(text, addresses.to(here, addresses.token(digest, start + i)), f"position {first + i}")
        for i, text in enumerate(run.texts(range(start, stop)))
    ]
    return TokenLinks(tokens=tuple(links), at=at - start if at >= 0 else -1, title=title, caption=caption)


def _text(run: OpenedRun, prompt: int) -> list[View]:
    texts = run.entry.tokens.texts
    if texts is None:
        return []
    text = texts[prompt]
    told = f"{len(text):,} characters, of which the first {TEXT:,} are here." if len(text) > TEXT else ""
    return [Note(title="Text", text=text[:TEXT], caption=told)]


def _norms(run: OpenedRun, start: int, stop: int, first: int) -> View:
    """Norms by layer and position, of each variable that has layers."""
    held = {name: layers for name, layers in run.per_token().items() if None not in layers}
    if not held:
        return Note(title="Norms", text="No variable with layers and a row for each token is published.")
    names = sorted(held, key=lambda name: (name != "resid_post", name))
    labels = tuple(f"{start - first + i} {text}" for i, text in enumerate(run.texts(range(start, stop))))
    options = tuple(
        (name, heatmap.without_first_token() if start == first else heatmap)
        for name in names[:VARIABLES]
        for heatmap in [_heatmap(run, name, held[name], start, stop, labels)]
    )
    left_out = f" {', '.join(names[VARIABLES:])} not drawn." if len(names) > VARIABLES else ""
    caption = f"Length (L2) of what is stored of each token.{left_out}"
    return Choice(title="Norms by layer", name="variable", options=options, caption=caption)


def _heatmap(
    run: OpenedRun, name: str, layers: list[int | None], start: int, stop: int, labels: tuple[str, ...]
) -> Heatmap:
    spec = run.spec(name)
    is_number = not spec.tail
    return Heatmap(
        values=run.norms(name, layers, start, stop),
        rows=tuple(map(str, layers)),
        columns=labels,
        column_name="token",
        value_name=name if is_number else f"norm of {name}",
        low=None if is_number else 0.0,
        upward=True,
    )
