"""Figures of experiments on features: what an injection does by position, to heads, and by strength.

Border: numbers in, a `Figure` out; conventions and helpers are those of figures.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..stages.lens import format_probability, format_token
from .figures import ACCENT, CONTROL, INK, _figure, _fit, _footer, _frame, _integers, _style, _subtitle

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["arms_page", "correction_page", "layers_page", "routing_page", "sweep_page"]

BLUE = "#1d5b7f"
Floats = npt.NDArray[Any]


def sweep_page(
    probability: Floats,
    baseline: float,
    tokens: Sequence[str],
    *,
    word: str,
    feature: str,
    model: str,
    footer: str,
) -> Figure:
    """Probability of a word at the prompt's end, by where features were injected; log scale.

    probability: [position]. baseline: the same without injection.
    """
    best = int(probability.argmax())
    names = [_fit(format_token(token), 12) for token in tokens]
    floor = min(probability.min(), baseline) / 3
    with _style():
        figure = _figure(min(15.0, 3.0 + 0.34 * len(tokens)), 4.2)
        axes = figure.add_subplot()
        colours = [ACCENT if place == best else BLUE for place in range(len(tokens))]
        axes.bar(range(len(tokens)), probability - floor, bottom=floor, color=colours, width=0.8)
        axes.axhline(baseline, color=CONTROL, ls="--", lw=1.2)
        axes.annotate(
            format_probability(float(probability[best])), (best, probability[best]), fontsize=9, color=ACCENT,
            ha="center", va="bottom",
        )  # fmt: skip
        _log(axes)
        axes.set_ylim(floor, max(probability.max(), baseline) * 3)
        axes.set_xlim(-0.7, len(tokens) - 0.3)
        axes.set_xticks(range(len(tokens)), names, rotation=55, ha="right")
        axes.set_ylabel(f"probability of {word!r} at the end")
        axes.set_xlabel("token at which features are suppressed and injected")
        axes.set_title(f"Where injecting {feature} makes {model} end on {word!r}", pad=22, fontsize=12)
        _subtitle(
            axes, f"each bar is one run; dashed: without injection, {format_probability(baseline)}; log scale"
        )
        _footer(figure, footer)
    return figure


def routing_page(
    change: Floats,
    strengths: Sequence[float],
    totals: Sequence[float],
    top: Sequence[float],
    *,
    edge: tuple[str, str],
    model: str,
    footer: str,
) -> Figure:
    """How an injection moves one attention edge: every head at one strength, and the sums over strengths.

    change: steered - baseline weight [layer, head]. totals: sum of |change| by strength. top: change of the
    head that moves most.
    """
    layer, head = map(int, np.unravel_index(int(np.abs(change).argmax()), change.shape))
    with _style():
        figure = _figure(11.0, 4.6)
        left, right = figure.subplots(1, 2, gridspec_kw={"width_ratios": [1.1, 1]})
        most = max(float(np.abs(change).max()), 1e-12)
        image = left.imshow(
            change,
            cmap="RdBu_r",
            vmin=-most,
            vmax=most,
            aspect="auto",
            origin="lower",
            interpolation="nearest",
        )
        left.add_patch(_frame(head, layer))
        left.set(xlabel="head", ylabel="layer")
        _integers(left.xaxis)
        _integers(left.yaxis)
        left.set_title("Change of the edge's weight, by head", pad=20)
        _subtitle(left, f"framed: layer {layer}, head {head}, {change[layer, head]:+.4f}")
        bar = figure.colorbar(image, ax=left, fraction=0.045, pad=0.03)
        bar.set_label("attention weight, steered - untouched")
        bar.outline.set_visible(False)
        right.axhline(0, color="#d5d8df", lw=0.8)
        right.plot(strengths, totals, color=INK, lw=2, marker="o", ms=3, label="sum of |change|, all heads")
        right.plot(strengths, top, color=ACCENT, lw=2, marker="o", ms=3, label=f"layer {layer}, head {head}")
        right.set(xlabel="strength", ylabel="change of weight")
        right.set_title("The same by strength", pad=20)
        right.legend(frameon=False, fontsize=8)
        query, key = (format_token(token) for token in edge)
        figure.suptitle(
            f"How injected features move {query!r} looking at {key!r} in {model}",
            x=0.01, ha="left", fontsize=12, fontweight="bold",
        )  # fmt: skip
        _footer(figure, footer)
    return figure


def correction_page(
    strengths: Sequence[float],
    commit: Floats,
    correct: Floats,
    shift: Floats,
    *,
    words: tuple[str, str],
    baseline: tuple[float, float],
    model: str,
    footer: str,
) -> Figure:
    """Probabilities of the word that was committed to and of its correction, and how far attention moved.

    commit, correct, shift: [strength]. baseline: both probabilities without any injection.
    """
    with _style():
        figure = _figure(10.0, 4.2)
        left, right = figure.subplots(1, 2)
        for values, level, word, colour in zip(
            (commit, correct), baseline, words, (BLUE, ACCENT), strict=True
        ):
            left.plot(strengths, values, color=colour, lw=2, marker="o", ms=3, label=repr(word))
            left.axhline(level, color=colour, lw=1, ls="--", alpha=0.6)
        _log(left)
        left.set(xlabel="strength of the correction", ylabel="probability at the end")
        left.set_title("Which word wins", pad=20)
        _subtitle(left, "dashed: without any injection; log scale")
        left.legend(frameon=False, fontsize=8)
        right.plot(strengths, shift, color=INK, lw=2, marker="o", ms=3)
        right.set(xlabel="strength of the correction", ylabel="sum of |change of weight|, all heads")
        right.set_ylim(bottom=0)
        right.set_title("How far attention to the site moved", pad=20)
        figure.suptitle(
            f"A plan for {words[0]!r} corrected to {words[1]!r} in {model}",
            x=0.01, ha="left", fontsize=12, fontweight="bold",
        )  # fmt: skip
        _footer(figure, footer)
    return figure


def arms_page(
    curves: Mapping[str, Floats],
    baseline: float,
    tokens: Sequence[str],
    *,
    word: str,
    model: str,
    footer: str,
) -> Figure:
    """Probability of a word by the position of an injection, a line per protocol; log scale.

    curves: name -> [position]; those of ranked features begin with the kind of transcoder, "clt" or "plt".
    """
    names = [_fit(format_token(token), 12) for token in tokens]
    shades = {
        "clt": iter(("#1d3f5e", BLUE, "#3f86a6", "#7aa6c2", "#a9c8d9")),
        "plt": iter((ACCENT, "#e08a5b")),
    }
    with _style():
        figure = _figure(min(15.0, 6.0 + 0.3 * len(tokens)), 4.6)
        axes = figure.add_subplot()
        _log(axes)
        axes.axhline(baseline, color=CONTROL, ls="--", lw=1.2, label="without injection")
        for name, values in curves.items():
            colour = next(shades[name[:3]]) if name[:3] in shades else INK
            axes.plot(values, color=colour, lw=1.8, marker="o", ms=3, label=name)
        axes.set_xticks(range(len(tokens)), names, rotation=55, ha="right")
        axes.set_ylabel(f"probability of {word!r} at the end")
        axes.set_xlabel("token at which features are suppressed and injected")
        axes.set_title(f"What features of {word!r} do in {model}, by kind of transcoder", pad=12, fontsize=12)
        axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
        _footer(figure, footer)
    return figure


def layers_page(
    counts: Floats, tokens: Sequence[str], *, position: int, name: str, model: str, footer: str
) -> Figure:
    """How many features are active by layer and token; the position probed is marked.

    counts: [layer, position].
    """
    names = [_fit(format_token(token), 12) for token in tokens]
    with _style():
        figure = _figure(min(15.0, 3.0 + 0.36 * len(tokens)), 2.4 + 0.24 * len(counts))
        axes = figure.add_subplot()
        image = axes.imshow(
            counts, cmap="YlGnBu", vmin=0, aspect="auto", origin="lower", interpolation="nearest"
        )
        axes.set_xticks(range(len(tokens)), names, rotation=55, ha="right")
        axes.get_xticklabels()[position].set(color=ACCENT, fontweight="bold")
        axes.tick_params(length=0)
        axes.set_ylabel("layer")
        _integers(axes.yaxis)
        axes.set_title(f"How many features of {_fit(name, 40)} are active in {model}", pad=22, fontsize=12)
        _subtitle(axes, "marked: the token probed")
        bar = figure.colorbar(image, ax=axes, fraction=0.03, pad=0.02)
        bar.set_label("active features")
        bar.outline.set_visible(False)
        _footer(figure, footer)
    return figure


def _log(axes: Any) -> None:
    """A logarithmic y axis with plain labels: mathematics in text is switched off for all figures."""
    from matplotlib.ticker import FuncFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0e}"))
    axes.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: ""))
