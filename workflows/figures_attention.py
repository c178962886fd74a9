"""Figures of attention: patterns, dose-response, convergence, and a text cut into tokens.

Border: labelled results in, a `Figure` out; conventions and helpers are those of figures.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..stages.lens import format_token
from .figures import ACCENT, FAINT, INK, _figure, _fit, _footer, _integers, _style, _subtitle

if TYPE_CHECKING:
    import xarray as xr
    from matplotlib.figure import Figure

__all__ = ["convergence_page", "tokens_strip"]

BLUE = "#1d5b7f"


def convergence_page(
    found: xr.Dataset,
    *,
    best: int,
    label: str,
    sweep: Sequence[float],
    threshold: float,
    prompts: tuple[str, str],
    token: str,
    model: str,
    footer: str,
) -> Figure:
    """The convergence matrix, and what strength does at the best layer.

    found: similarity [layer, strength, read_layer], kl [layer, strength].
    """
    matrix = found["similarity"].sel(strength=1.0).transpose("layer", "read_layer").values
    layers = found["layer"].values
    with _style():
        figure = _figure(14.0, 4.9)
        left, middle, right = figure.subplots(1, 3, gridspec_kw={"width_ratios": [1.15, 1, 1]})
        shown = np.where(np.triu(np.ones_like(matrix)) > 0, matrix, np.nan)
        low = min(0.5, float(np.nanmin(shown)))
        image = left.imshow(shown, cmap="YlGnBu", vmin=low, vmax=1, origin="lower", aspect="auto")
        for row, column in zip(*np.nonzero(shown >= threshold), strict=True):
            if column > row:
                left.plot(column, row, "o", color="white", ms=3)
        left.set(xlabel="layer read", ylabel="layer pushed")
        left.set_xticks(range(len(layers)) if len(layers) < 20 else range(0, len(layers), 4))
        left.set_yticks(range(len(layers)) if len(layers) < 20 else range(0, len(layers), 4))
        left.set_title("Cosine with the undisturbed state", pad=20)
        _subtitle(left, f"last token, strength 1; dots: at least {threshold:g}. {label}")
        bar = figure.colorbar(image, ax=left, fraction=0.045, pad=0.03)
        bar.outline.set_visible(False)
        strengths = list(sweep)
        row = found.sel(layer=best, strength=strengths)
        shades = np.linspace(0.25, 1, len(strengths))
        from matplotlib import colormaps

        for number, strength in enumerate(strengths):
            values = row["similarity"].isel(strength=number).values[best:]
            middle.plot(
                layers[best:], values, color=colormaps["YlGnBu"](shades[number]), lw=1.4, marker="o", ms=3
            )
            if number in (0, len(strengths) - 1):
                middle.annotate(
                    f" {strength:g}", (layers[-1], values[-1]), fontsize=7, va="center", annotation_clip=False
                )
        middle.axhline(threshold, color=ACCENT, lw=0.9, ls="--")
        middle.set(xlabel="layer read", ylabel="cosine")
        middle.set_title(f"A push at layer {best}, by strength", pad=20)
        _subtitle(middle, "numbers: strength, light to dark; dashed: absorbed")
        _integers(middle.xaxis)
        right.plot(strengths, row["kl"].values, color=BLUE, lw=2, marker="o", ms=4)
        right.set(xlabel="strength", ylabel="KL from the undisturbed run, nats")
        right.set_ylim(bottom=0)
        right.set_title("What it does to the answer", pad=20)
        _subtitle(right, f"at layer {best}")
        one, other = (_fit(format_token(text), 40) for text in prompts)
        figure.suptitle(f"{model}: {one!r} minus {other!r}, added at {format_token(token)!r}", **_TITLE)
        _footer(figure, footer)
    return figure


def tokens_strip(
    text: str,
    offsets: Sequence[tuple[int, int]],
    tokens: Sequence[str],
    labels: Sequence[str],
    *,
    model: str,
    footer: str,
) -> Figure:
    """The characters of a text in rows, with a box around each token, its position above, labelled spans
    coloured."""
    from matplotlib.patches import Rectangle

    per_row = 60
    rows = max(1, -(-len(text) // per_row))
    names = [
        name for name in dict.fromkeys(label.removesuffix("_final") for label in labels) if name != "other"
    ]
    # Byte-level vocabularies split rare characters: several tokens then begin at one.
    sharing: dict[int, list[int]] = {}
    for i, (start, end) in enumerate(offsets):
        if end > start:
            sharing.setdefault(start, []).append(i)
    shades = ["#d2e3ec", "#fbdcc8", "#dcebc6", "#e6d8f5", "#f7e6a8"]
    with _style():
        figure = _figure(min(13.0, 2.0 + 0.2 * min(per_row, len(text))), 1.5 + 0.8 * rows)
        axes = figure.add_subplot()
        for i, (start, end) in enumerate(offsets):
            name = labels[i].removesuffix("_final")
            colour = shades[names.index(name) % len(shades)] if name in names else "#f4f5f7"
            for line in range(start // per_row, -(-end // per_row) if end > start else 0):
                left, right = max(start, line * per_row), min(end, (line + 1) * per_row)
                corner = (left - line * per_row - 0.5, -line - 0.3)
                axes.add_patch(Rectangle(corner, right - left, 0.6, fc=colour, ec=FAINT, lw=0.8))
        for start, positions in sharing.items():
            at = (start % per_row - 0.4, -(start // per_row) + 0.34)
            number = "–".join(str(i) for i in dict.fromkeys((positions[0], positions[-1])))
            axes.text(
                *at, number, fontsize=6.5, color=FAINT, va="bottom", rotation=90 if "–" in number else 0
            )
        for place, char in enumerate(text):
            shown = "␣" if char == " " else _fit(format_token(char), 2)
            axes.text(
                place % per_row,
                -(place // per_row),
                shown,
                ha="center",
                va="center",
                fontsize=9,
                color=FAINT if char == " " else INK,
                family="monospace",
            )
        axes.set(xlim=(-1, min(per_row, len(text))), ylim=(-rows + 0.4, 0.75))
        axes.axis("off")
        added = [format_token(tokens[i]) for i, (start, end) in enumerate(offsets) if end <= start]
        axes.set_title(f"{len(offsets)} tokens of {model}", pad=20, fontsize=12)
        note = f" Of no character: {', '.join(added)}." if added else ""
        spans = f" Coloured: {', '.join(names)}." if names else ""
        _subtitle(axes, f"Numbers are positions.{note}{spans}")
        _footer(figure, footer)
    return figure


_TITLE: Any = {"x": 0.01, "ha": "left", "fontsize": 12, "fontweight": "bold"}
