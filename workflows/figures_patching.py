"""Figures of patching: facts turned into others, and the heads that move.

Border: labelled results in, a `Figure` out; conventions and helpers are those of figures.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..stages.lens import format_token
from .figures import ACCENT, INK, _figure, _fit, _footer, _frame, _integers, _style, _subtitle

if TYPE_CHECKING:
    import xarray as xr
    from matplotlib.figure import Figure

__all__ = ["counterfact_page", "routing_page"]

TYPES = {"fact": "#1d5b7f", "fact_final": ACCENT, "other": "#9aa1b1"}
TYPE_NAMES = {"fact": "the fact", "fact_final": "its last token", "other": "other tokens"}


def counterfact_page(
    patches: xr.Dataset,
    first: xr.Dataset,
    blocks: Sequence[str],
    tokens: Sequence[str],
    *,
    label: str,
    pairs: int,
    predicts: bool,
    model: str,
    footer: str,
) -> Figure:
    """How often the next word changes by block and type of token, and where in the first pair.

    patches: is_different, token_type, block, kl [patch]. first: the same of one pair, whose tokens these are.
    predicts: the fact's last token is the prompt's.
    """
    with _style():
        figure = _figure(min(15.0, 8.0 + 0.32 * len(tokens)), 4.4)
        left, right = figure.subplots(1, 2, gridspec_kw={"width_ratios": [1, 0.35 + 0.075 * len(tokens)]})
        different, kinds = patches["is_different"].values, patches["token_type"].values
        held = [kind for kind in TYPES if (kinds == kind).any()]
        names = TYPE_NAMES | ({"fact_final": "its last token,\nwhich predicts"} if predicts else {})
        width = 0.8 / len(held)
        for i, kind in enumerate(held):
            chosen = [(kinds == kind) & (patches["block"].values == block) for block in range(len(blocks))]
            heights = [100 * different[which].mean() for which in chosen]
            places = np.arange(len(blocks)) + (i - (len(held) - 1) / 2) * width
            left.bar(places, heights, width * 0.92, color=TYPES[kind], label=names[kind])
        left.set_xticks(range(len(blocks)), blocks)
        left.set(xlabel="layers patched together", ylabel="patches that change it, %", ylim=(0, 102))
        left.set_title("How often the next word changes", pad=20)
        _subtitle(left, f"{pairs} pairs of facts, one position at a time")
        told = {"title": "the position is in", "alignment": "left", "fontsize": 8, "frameon": False}
        left.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), **told)
        kl = first["kl"].values.reshape(len(blocks), len(tokens))
        image = right.imshow(kl, cmap="YlGnBu", vmin=0, aspect="auto", origin="lower")
        _clean_ticks(right)
        right.set_xticks(
            range(len(tokens)), [_fit(format_token(t), 12) for t in tokens], rotation=40, ha="right"
        )
        right.set_yticks(range(len(blocks)), blocks)
        right.set_ylabel("layers")
        for place, changes in enumerate(first["is_different"].values):
            if changes:
                right.add_patch(_frame(place % len(tokens), place // len(tokens)))
        right.set_title("One pair: how far the prediction moves", pad=20)
        _subtitle(right, f"{_fit(format_token(label), 72)}; framed: the next word changes")
        bar = figure.colorbar(image, ax=right, fraction=0.05, pad=0.03)
        bar.set_label("KL, nats")
        bar.outline.set_visible(False)
        _title(figure, f"Where {model} can be told another fact")
        _footer(figure, footer)
    return figure


def routing_page(routing: xr.Dataset, blocks: Sequence[str], *, rule: str, model: str, footer: str) -> Figure:
    """Mean |change| of every head's attention to the fact, a panel per block, and the sum of it by block.

    routing: delta [pair, block, layer, head], is_different [pair, block].
    """
    size = np.abs(routing["delta"].transpose("pair", "block", "layer", "head").values).mean(0)
    total = np.abs(routing["delta"].values).sum((2, 3))
    layers, heads = size.shape[1:]
    pairs = routing.sizes["pair"]
    with _style():
        shown = min(len(blocks), 4)
        figure = _figure(3.8 + max(2.2, 0.2 * heads + 0.8) * shown, max(3.4, 2.3 + 0.2 * layers))
        widths = [*[max(1.0, heads / 8)] * shown, 1.3]
        *panels, last = figure.subplots(1, shown + 1, gridspec_kw={"width_ratios": widths})
        # Of many blocks, those where most moves.
        chosen = np.sort(np.argsort(-total.mean(0), kind="stable")[:shown])
        for panel, block in zip(panels, chosen, strict=True):
            image = panel.imshow(
                size[block], cmap="YlOrRd", vmin=0, vmax=size.max(), aspect="auto", origin="lower"
            )
            _clean_ticks(panel)
            _integers(panel.xaxis)
            _integers(panel.yaxis)
            panel.set(xlabel="head", ylabel="layer" if panel is panels[0] else "")
            panel.set_title(f"Layers {blocks[block]} patched", pad=20)
            layer, head = np.unravel_index(int(size[block].argmax()), size[block].shape)
            _subtitle(panel, f"most: layer {layer}, head {head}")
        bar = figure.colorbar(image, ax=list(panels), fraction=0.04, pad=0.02)
        bar.set_label("mean change of attention")
        bar.outline.set_visible(False)
        places = np.arange(len(blocks))
        last.bar(places, total.mean(0), color="#a9c7da", width=0.6)
        jitter = np.linspace(-0.18, 0.18, pairs)
        for block in places:
            last.plot(block + jitter, total[:, block], ".", color=INK, ms=3, alpha=0.6)
        last.set_xticks(places, blocks)
        last.set_ylabel("attention moved, sum over heads")
        last.set_title("How much moves", pad=20)
        _subtitle(last, f"bars: mean of {pairs} pairs; above: next word changes")
        changed, top = 100 * routing["is_different"].values.mean(0), max(float(total.max()), 1e-6)
        last.set_ylim(0, 1.12 * top)
        for block, share in zip(places, changed, strict=True):
            last.text(block, 1.11 * top, f"{share:.0f} %", ha="center", va="top", fontsize=8)
        subject = "where the prompts differ" if rule == "differing" else "the fact's last token"
        _title(figure, f"Which heads of {model} look elsewhere once the subject is another ({subject})")
        _footer(figure, footer)
    return figure


def _clean_ticks(axes: Any) -> None:
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)


def _title(figure: Any, text: str) -> None:
    figure.suptitle(f"{text}\n", x=0.01, ha="left", fontsize=12, fontweight="bold")
