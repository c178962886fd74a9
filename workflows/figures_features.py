"""Figures of experiments on features: what an injection does by position and by strength.

Border: numbers in, a `Figure` out; conventions and helpers are those of figures.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from ..stages.logits.lens import format_token
from .figures import ACCENT, CONTROL, INK, _figure, _fit, _footer, _integers, _style, _subtitle

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["arms_page", "correction_page", "layers_page"]

BLUE = "#1d5b7f"
Floats = npt.NDArray[Any]


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
