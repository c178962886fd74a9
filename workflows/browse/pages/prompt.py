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
"""Number of tokens per page of a prompt."""
VARIABLES = 6
"""Largest number of variables, such as "resid_post", of which a page draws a heatmap of norms."""
TEXT = 4000
"""Largest number of characters of a prompt's text that a page shows."""


def prompt_page(snapshot: Snapshot, folder: HeldFolder, prompt: int, number: int) -> Page | None:
    """Page of a prompt: its text, its tokens with links, and the norms of their activations by layer.

    Arguments:
        snapshot: Content of the store.
        folder: Folder of the run.
        prompt: Index of the prompt in the run.
        number: Number of the page among those of the prompt, from 1; a page shows at most PER_PAGE tokens.

    Returns:
        The page; None if there is no such prompt or page.
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
    # Only the first page shows the text.
    views: list[View] = [] if number > 1 else _text_note(run, prompt)
    caption = f"The prompt has {row.stop - row.start:,} tokens. Click a token to see its stored activations."
    views.append(token_links(run, address, start, stop, title="Tokens", caption=caption))
    if links is not None:
        views.append(links)
    views.append(_norm_heatmaps(run, start, stop, row.start))
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
    """View of consecutive tokens of a prompt, each with a link to its page.

    Arguments:
        run: The run.
        address: Address of the page that shows the tokens.
        start: Packed index of the first token.
        stop: Packed index after the last token.
        at: Packed index of the token that is highlighted; -1 for none.
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


def _text_note(run: OpenedRun, prompt: int) -> list[View]:
    """View of the prompt's text, as a list of one; an empty list if the run stores no texts."""
    texts = run.entry.tokens.texts
    if texts is None:
        return []
    text = texts[prompt]
    is_cut = len(text) > TEXT
    caption = f"The first {TEXT:,} of {len(text):,} characters of the prompt." if is_cut else ""
    return [Note(title="Text", text=text[:TEXT], caption=caption)]


def _norm_heatmaps(run: OpenedRun, start: int, stop: int, prompt_start: int) -> View:
    """Heatmaps of activation norms by layer and token, with one heatmap per variable to select from.

    Arguments:
        run: The run.
        start: Packed index of the first token.
        stop: Packed index after the last token.
        prompt_start: Packed index of the first token of the prompt.
    """
    layered = {name: layers for name, layers in run.per_token().items() if None not in layers}
    if not layered:
        text = "The run has no completely captured variable with layers and a value for each token."
        return Note(title="Norms by layer", text=text)
    # The residual stream comes first: a page shows the first heatmap until the reader selects another.
    names = sorted(layered, key=lambda name: (name != "resid_post", name))
    positions_and_texts = enumerate(run.texts(range(start, stop)), start - prompt_start)
    token_labels = tuple(f"{position} {text}" for position, text in positions_and_texts)
    options = []
    for name in names[:VARIABLES]:
        heatmap = _norm_heatmap(run, name, layered[name], start, stop, token_labels)
        # Only the first page of a prompt begins with its first token, the attention sink.
        options.append((name, heatmap.without_first_token() if start == prompt_start else heatmap))
    caption = "Each cell: L2 norm of the stored activation of one token (column) in one layer (row)."
    if names[VARIABLES:]:
        caption += f" Captured, but not drawn: {', '.join(names[VARIABLES:])}."
    return Choice(title="Norms by layer", name="variable", options=tuple(options), caption=caption)


def _norm_heatmap(
    run: OpenedRun, name: str, layers: list[int | None], start: int, stop: int, labels: tuple[str, ...]
) -> Heatmap:
    """Heatmap of the norms of one variable, layers by tokens.

    Arguments:
        run: The run.
        name: Name of the variable, such as "resid_post".
        layers: Captured layers of the variable.
        start: Packed index of the first token.
        stop: Packed index after the last token.
        labels: Label of each token.
    """
    # `tail` is the shape of a token's value: () for a single number.
    is_number = not run.spec(name).tail
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
