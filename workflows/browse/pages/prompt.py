"""Page of a prompt: its tokens with links, and the norms of the stored activations by layer and token."""

from __future__ import annotations

from ...holdings import HeldFolder, Snapshot
from ...views import Choice, Heatmap, Note, View
from .. import addresses
from ..opened import OpenedRun, open_run
from ..page import Link, Page, TokenLinks
from .parts import digest_of, home, page_of

__all__ = ["PER_PAGE", "prompt_page", "token_links"]

PER_PAGE = 256
"""Number of tokens per page."""
VARIABLES = 6
"""Largest number of variables whose norms are drawn."""
TEXT = 4000
"""Largest number of characters of the prompt that are shown."""


def prompt_page(snapshot: Snapshot, folder: HeldFolder, prompt: int, number: int) -> Page | None:
    """Page of a prompt.

    Arguments:
        snapshot: Content of the store.
        folder: Folder of the run.
        prompt: Index of the prompt in the run.
        number: Number of the page of the prompt's tokens, from 1.

    Returns:
        The page; None if the prompt or the page of tokens does not exist.
    """
    assert folder.run is not None
    run, digest = open_run(snapshot.store, folder), digest_of(folder)
    packed = run.entry.tokens
    if prompt >= packed.n_prompts:
        return None
    address, row = addresses.prompt(digest, prompt, number), packed.row(prompt)
    tokens, links = page_of(
        range(row.start, row.stop),
        number,
        PER_PAGE,
        address,
        lambda page_number: addresses.prompt(digest, prompt, page_number),
    )
    if not tokens:
        return None
    start, stop = tokens[0], tokens[-1] + 1
    views: list[View] = [] if number > 1 else _text(run, prompt)
    views.append(
        token_links(
            run,
            address,
            start,
            stop,
            title="Tokens",
            caption=f"{row.stop - row.start:,} tokens; click a token to see its stored activations.",
        )
    )
    if links is not None:
        views.append(links)
    views.append(_norms(run, start, stop, row.start))
    return Page(
        address=address,
        title=f"Prompt {prompt:,}",
        over=f"{folder.run.model} · run {digest[:12]}",
        up=(home(address), Link(f"run {digest[:12]}", addresses.relative(address, addresses.run(digest)))),
        views=tuple(views),
    )


def token_links(
    run: OpenedRun, address: str, start: int, stop: int, at: int = -1, title: str = "", caption: str = ""
) -> TokenLinks:
    """Tokens of a range of the packed axis, each with a link to its page.

    Arguments:
        run: The run.
        address: Address of the page that shows the tokens.
        start: Packed index of the first token.
        stop: Packed index after the last token.
        at: Packed index of the token that the page is about; -1 for none.
        title: Title of the view.
        caption: Caption of the view.
    """
    digest = digest_of(run.folder)
    start_position = int(run.entry.tokens.position_of(start))
    links = [
        Link(
            text,
            addresses.relative(address, addresses.token(digest, start + i)),
            f"position {start_position + i}",
        )
        for i, text in enumerate(run.texts(range(start, stop)))
    ]
    return TokenLinks(tokens=tuple(links), at=at - start if at >= 0 else -1, title=title, caption=caption)


def _text(run: OpenedRun, prompt: int) -> list[View]:
    """Note with the prompt's text; empty list if the run stores no texts."""
    texts = run.entry.tokens.texts
    if texts is None:
        return []
    text = texts[prompt]
    caption = f"{len(text):,} characters, of which the first {TEXT:,} are shown." if len(text) > TEXT else ""
    return [Note(title="Text", text=text[:TEXT], caption=caption)]


def _norms(run: OpenedRun, start: int, stop: int, prompt_start: int) -> View:
    """Heatmaps of norms by layer and token, one per variable with layers.

    Arguments:
        run: The run.
        start: Packed index of the first token.
        stop: Packed index after the last token.
        prompt_start: Packed index of the first token of the prompt.
    """
    layered = {name: layers for name, layers in run.per_token().items() if None not in layers}
    if not layered:
        return Note(title="Norms", text="No variable with layers and a row for each token is published.")
    # The residual stream first, as it is shown first.
    names = sorted(layered, key=lambda name: (name != "resid_post", name))
    labels = tuple(
        f"{start - prompt_start + i} {text}" for i, text in enumerate(run.texts(range(start, stop)))
    )
    options = tuple(
        # Only the first page of tokens begins with the attention sink.
        (name, heatmap.without_first_token() if start == prompt_start else heatmap)
        for name in names[:VARIABLES]
        for heatmap in [_heatmap(run, name, layered[name], start, stop, labels)]
    )
    omitted = f" {', '.join(names[VARIABLES:])} not drawn." if len(names) > VARIABLES else ""
    caption = f"L2 norm of the stored activations of each token.{omitted}"
    return Choice(title="Norms by layer", name="variable", options=options, caption=caption)


def _heatmap(
    run: OpenedRun, name: str, layers: list[int | None], start: int, stop: int, labels: tuple[str, ...]
) -> Heatmap:
    """Heatmap of the norms of one variable, layers by tokens.

    Arguments:
        run: The run.
        name: Name of the variable.
        layers: Stored layers of the variable.
        start: Packed index of the first token.
        stop: Packed index after the last token.
        labels: Labels of the tokens.
    """
    spec = run.spec(name)
    is_number = not spec.tail
    return Heatmap(
        values=run.norms(name, layers, start, stop),
        rows=tuple(map(str, layers)),
        columns=labels,
        column_name="token",
        value_name=name if is_number else f"norm of {name}",
        # A norm is never negative; a stored number can be.
        low=None if is_number else 0.0,
        upward=True,
    )
