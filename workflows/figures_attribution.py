"""Figures of logit attribution: shares of layers, heads and neurons in what a model says.

Border: labelled results in, a `Figure` out; conventions and helpers are those of figures.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .figures import ACCENT, INK, _figure, _footer, _frame, _integers, _style, _subtitle

if TYPE_CHECKING:
    import xarray as xr
    from matplotlib.figure import Figure

__all__ = ["attribution_page"]

ATTENTION, MLP, REST = "#1d5b7f", "#d08a2e", "#8a90a0"


def attribution_page(
    shares: xr.Dataset,
    neurons: Sequence[tuple[int, int, float]],
    *,
    title: str,
    told: str,
    footer: str,
) -> Figure:
    """Shares of a logit by layer, by head and by neuron, side by side; of several prompts, their mean.

    shares: embed_share, constant, total [prompt], attn_share, mlp_share [layer, prompt], head_share [layer,
    prompt, head].  neurons: (layer, neuron, share), largest first; none leaves the panel out.  told: of which
    prompts, the line under the title.
    """
    layers = shares.sizes["layer"]
    with _style():
        figure = _figure(13.5 if neurons else 10.0, max(4.1, 2.5 + 0.34 * layers))
        widths = [1.15, 1.0, 0.75] if neurons else [1.15, 1.0]
        panels = figure.subplots(1, len(widths), gridspec_kw={"width_ratios": widths})
        _layers(panels[0], shares)
        _heads(figure, panels[1], shares)
        if neurons:
            _neurons(panels[2], neurons)
        figure.suptitle(f"{title}\n{told}\n", x=0.01, ha="left", fontsize=11, fontweight="bold")
        _footer(figure, footer)
    return figure


def _layers(axes: Any, shares: xr.Dataset) -> None:
    """Bars by layer, the embedding below, the whole above."""
    numbers = shares["layer"].values
    rows: list[tuple[float, Any, str]] = [(-1.0, shares["embed_share"], REST)]
    for row, layer in enumerate(numbers):
        part = shares.sel(layer=layer)
        rows += [(row + 0.2, part["mlp_share"], MLP), (row - 0.2, part["attn_share"], ATTENTION)]
    labels = ["embedding", *(str(layer) for layer in numbers)]
    if np.abs(shares["constant"]).max() > 0:
        rows.append((float(len(numbers)), shares["constant"], REST))
        labels.append("biases")
    top = len(labels) - 1.0
    rows.append((top, shares["total"], INK))
    labels.append("sum")
    for place, values, colour in rows:
        height = 0.6 if colour in (REST, INK) else 0.38
        axes.barh(place, float(values.mean()), height=height, color=colour)
        if len(values) > 1:
            ends = np.quantile(values, [0.1, 0.9])
            axes.plot(ends, [place, place], color="#5b6270" if colour == INK else INK, lw=1)
    axes.axvline(0, color="#5b6270", lw=0.8)
    axes.set_yticks(np.arange(len(labels)) - 1, labels)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.set(xlabel="share, logits", ylabel="layer")
    axes.set_title("By layer", pad=20)
    axes.text(0, 1.02, "attention", transform=axes.transAxes, fontsize=8, color=ATTENTION, weight="bold")
    axes.text(0.17, 1.02, "MLP", transform=axes.transAxes, fontsize=8, color=MLP, weight="bold")


def _heads(figure: Any, axes: Any, shares: xr.Dataset) -> None:
    """A cell per head, coloured by its mean share; the largest is framed."""
    values = shares["head_share"].mean("prompt").transpose("layer", "head").values
    most = max(float(np.abs(values).max()), 1e-9)
    image = axes.imshow(values, cmap="RdBu", vmin=-most, vmax=most, aspect="auto", origin="lower")
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)
    _integers(axes.xaxis)
    _integers(axes.yaxis)
    layer, head = map(int, np.unravel_index(int(np.abs(values).argmax()), values.shape))
    axes.add_patch(_frame(head, layer))
    axes.set(xlabel="head", ylabel="layer")
    axes.set_title("By head", pad=20)
    _subtitle(axes, f"framed, most: layer {layer}, head {head}, {values[layer, head]:+.2f}")
    bar = figure.colorbar(image, ax=axes, fraction=0.05, pad=0.03)
    bar.set_label("share, logits")
    bar.outline.set_visible(False)


def _neurons(axes: Any, neurons: Sequence[tuple[int, int, float]]) -> None:
    """The largest neurons, largest on top; those against in another colour."""
    places = np.arange(len(neurons))[::-1]
    values = [share for _, _, share in neurons]
    axes.barh(places, values, height=0.6, color=[MLP if share >= 0 else ACCENT for share in values])
    axes.axvline(0, color="#5b6270", lw=0.8)
    axes.set_yticks(places, [f"layer {layer}, {neuron}" for layer, neuron, _ in neurons])
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.set_xlabel("share, logits")
    axes.set_title("By neuron", pad=20)
    _subtitle(axes, f"the {len(neurons)} largest")
