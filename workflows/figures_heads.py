"""Figures of heads: what they are, by layer and head, and where a marker looks, layer by layer.

Border: labelled results in, a `Figure` out; conventions and helpers are those of figures.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .figures import ACCENT, CONTROL, INK, _figure, _footer, _frame, _integers, _style, _subtitle

if TYPE_CHECKING:
    import numpy.typing as npt
    import xarray as xr
    from matplotlib.figure import Figure

__all__ = ["scan_page", "scores_page", "statistics_page"]

BLUE = "#1d5b7f"
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


def scan_page(
    found: xr.Dataset,
    condition: npt.NDArray[Any],
    names: Sequence[str],
    *,
    best: tuple[int, float],
    model: str,
    footer: str,
) -> Figure:
    """Attention from markers to targets by layer, a dot per sample; and how sure the difference is.

    found: as `layer_scan` gives it.  condition: int [sample], 0 or 1; names: of the two.  best: (layer, p).
    """
    layers = found["layer"].values
    weight = found["weight"].transpose("layer", "sample").values
    mean, std = (found[name].transpose("condition", "layer").values for name in ("mean", "std"))
    rng = np.random.default_rng(0)
    with _style():
        figure = _figure(12.0, 4.4)
        left, right = figure.subplots(1, 2, gridspec_kw={"width_ratios": [1.5, 1]})
        for which, (name, colour) in enumerate(zip(names, (BLUE, CONTROL), strict=True)):
            aside = 0.17 * (2 * which - 1)
            dots = weight[:, condition == which]
            places = layers[:, None] + aside + rng.uniform(-0.07, 0.07, dots.shape)
            left.plot(places.ravel(), dots.ravel(), ".", color=colour, ms=4, alpha=0.45, mew=0)
            style = {"color": colour, "lw": 1.6, "capsize": 3, "marker": "o", "ms": 5}
            left.errorbar(layers + aside, mean[which], yerr=std[which], label=name, **style)
        left.set(xlabel="layer", ylabel="attention, mean over heads and targets")
        left.set_ylim(bottom=min(0.0, float(weight.min())))
        left.set_title("From marker to target", pad=20)
        _subtitle(left, "small: samples; large: mean, with one standard deviation")
        left.legend(frameon=False)
        sure = -np.log10(np.maximum(found["p"].values, np.finfo(float).tiny))
        ahead = mean[0] > mean[1]
        right.bar(layers, sure, width=0.7, color=np.where(ahead, BLUE, CONTROL).tolist())
        for level in (0.05, 0.001):
            right.axhline(-np.log10(level), color="#d5d8df", lw=0.8, zorder=0)
            right.annotate(f" p = {level:g}", (layers[-1] + 0.5, -np.log10(level)), fontsize=7, va="center")
        right.set(xlabel="layer", ylabel="-log10 p", xlim=(layers[0] - 0.6, layers[-1] + 0.6))
        right.set_title("How sure the difference is", pad=20)
        verdict = (
            f"most sure: layer {best[0]}, p = {best[1]:.1e}" if best[1] < 1 else "In no layer is A ahead"
        )
        _subtitle(right, f"Welch's t test; grey: {names[0]} looks less. {verdict}")
        for axes in (left, right):
            _integers(axes.xaxis)
        if best[1] < 1:
            left.axvline(best[0], color=ACCENT, lw=0.8, alpha=0.6, zorder=0)
            right.axvline(best[0], color=ACCENT, lw=0.8, alpha=0.6, zorder=0)
        title = f"{model}: where a marker looks, {names[0]} against {names[1]}\n"
        figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
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
