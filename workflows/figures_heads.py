"""Figures of heads: what they are, by layer and head.

Border: labelled results in, a `Figure` out; conventions and helpers are those of figures.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .figures import INK, _figure, _footer, _frame, _style, _subtitle

if TYPE_CHECKING:
    import xarray as xr
    from matplotlib.figure import Figure

__all__ = ["scores_page", "statistics_page"]

CELLS = 16
"""Heads of a layer, and layers, up to which each cell carries its number."""
KINDS = {
    "previous_token_head": ("Previous token", "looks at the token before"),
    "duplicate_token_head": ("Duplicate token", "looks where its token stood before"),
    "induction_head": ("Induction", "looks behind where its token stood before"),
}
STATISTICS = {
    "entropy": ("Entropy", "nats; 0: one key only"),
    "bos_share": ("On the first token", "share of the weight"),
    "current_share": ("On the current token", "share of the weight"),
    "distance": ("How far back", "tokens, mean"),
}


def scores_page(found: xr.Dataset, *, measure: str, model: str, told: str, footer: str) -> Figure:
    """A column per kind: scores by layer and head above, the same on shuffled tokens below; the best head is
    framed.

    found: score, control [kind, layer, head].  measure: what the numbers are.
    """
    layers = found.sizes["layer"]
    with _style():
        figure = _figure(13.0, 3.0 + 0.56 * min(layers, 40))
        panels = figure.subplots(2, len(KINDS), squeeze=False)
        low = min(0.0, float(found["score"].min()), float(found["control"].min()))
        for column, (kind, (title, looks)) in enumerate(KINDS.items()):
            part = found.sel(kind=kind).transpose("layer", "head")
            best = np.unravel_index(int(part["score"].values.argmax()), part["score"].shape)
            for panel, name in zip(panels[:, column], ("score", "control"), strict=True):
                image = _heat(panel, part[name], low=low, top=1.0)
                panel.add_patch(_frame(int(best[1]), int(best[0])))
            layer, head = int(found["layer"][best[0]]), int(found["head"][best[1]])
            panels[0, column].set_title(f"{title}, best: layer {layer}, head {head}", pad=20)
            _subtitle(panels[0, column], looks)
            panels[1, column].set_title("Tokens shuffled", pad=20)
            _subtitle(panels[1, column], "the same places, other tokens there")
        bar = figure.colorbar(image, ax=panels, fraction=0.02, pad=0.01)
        bar.set_label(measure)
        bar.outline.set_visible(False)
        title = f"What the heads of {model} do on {told}"
        figure.suptitle(f"{title}\n", x=0.01, ha="left", fontsize=12, fontweight="bold")
        _footer(figure, footer)
    return figure


def statistics_page(found: xr.Dataset, *, model: str, told: str, footer: str) -> Figure:
    """What each head's attention is like, a panel per statistic.

    found: entropy, bos_share, current_share, distance [layer, head].
    """
    with _style():
        figure = _figure(14.0, 2.6 + 0.3 * min(found.sizes["layer"], 40))
        panels = figure.subplots(1, len(STATISTICS))
        for panel, (name, (title, told_as)) in zip(panels, STATISTICS.items(), strict=True):
            values = found[name].transpose("layer", "head")
            image = _heat(panel, values, low=0.0, top=1.0 if name.endswith("share") else None)
            figure.colorbar(image, ax=panel, fraction=0.045, pad=0.02).outline.set_visible(False)
            panel.set_title(title, pad=20)
            _subtitle(panel, told_as)
        title = f"Where the heads of {model} look: {told}"
        figure.suptitle(f"{title}\n", x=0.01, ha="left", fontsize=12, fontweight="bold")
        _footer(figure, footer)
    return figure


def _heat(axes: Any, values: xr.DataArray, *, low: float, top: float | None) -> Any:
    """A cell per layer and head; with its number where there is room for it."""
    table = values.values
    top = max(float(table.max()), 1e-9) if top is None else top
    image = axes.imshow(table, cmap="YlGnBu", vmin=low, vmax=top, origin="lower", aspect="auto")
    layers, heads = table.shape
    if max(layers, heads) <= CELLS:
        for layer, head in np.ndindex(layers, heads):
            value = float(table[layer, head])
            share = (value - low) / (top - low)
            text = f"{value:.2f}" if top <= 2 else f"{value:.1f}"
            colour = "white" if share > 0.55 else INK
            axes.text(head, layer, text, ha="center", va="center", fontsize=7, color=colour)
    step = 1 if layers <= 20 else 4
    axes.set_yticks(range(0, layers, step), values["layer"].values[::step])
    across = 1 if heads <= 20 else 4
    axes.set_xticks(range(0, heads, across), values["head"].values[::across])
    axes.set(xlabel="head", ylabel="layer")
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)
    return image
