"""The figure of generated text: tokens in the order they came, shaded by their probability.

Border: texts and numbers in, a `Figure` out; conventions and helpers are those of figures.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..stages.lens import format_token
from .figures import INK, _figure, _fit, _footer, _style, _subtitle

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["tokens_page"]

ROWS, STEPS = 24, 24
"""Continuations and tokens drawn at most."""


def tokens_page(
    labels: Sequence[str],
    tokens: Sequence[Sequence[str]],
    probabilities: Sequence[npt.NDArray[Any]],
    *,
    model: str,
    silenced: Sequence[str],
    footer: str,
) -> Figure:
    """A row per continuation, a cell per token: its text, and how probable the model found it.

    labels: one line each, on the left. tokens, probabilities: of each continuation. silenced: hook points at
    zero, for the title.
    """
    shown = min(len(labels), ROWS)
    steps = min(max(len(row) for row in tokens[:shown]), STEPS)
    grid = np.full((shown, steps), np.nan)
    for row, values in enumerate(probabilities[:shown]):
        grid[row, : min(len(values), steps)] = values[:steps]
    with _style():
        figure = _figure(min(17.0, 4.2 + 0.62 * steps), 1.7 + 0.42 * shown)
        axes = figure.add_subplot()
        image = axes.imshow(grid, cmap="YlGnBu", vmin=0, vmax=1, aspect="auto")
        for row in range(shown):
            for step, token in enumerate(tokens[row][:steps]):
                _cell(axes, step, row, token, grid[row, step])
        axes.set_yticks(range(shown), [_end(label, 38) for label in labels[:shown]])
        axes.set_xticks(range(0, steps, max(1, steps // 8)))
        axes.tick_params(length=0)
        for side in axes.spines.values():
            side.set_visible(False)
        axes.set_xlabel("step")
        without = f", without {', '.join(silenced)}" if silenced else ""
        axes.set_title(f"How {model} goes on{without}", pad=22, fontsize=12)
        left_out = f" The first {shown} of {len(labels)} rows." if shown < len(labels) else ""
        _subtitle(axes, f"Each token generated, shaded by the probability the model gave it.{left_out}")
        bar = figure.colorbar(image, ax=axes, fraction=0.03, pad=0.015)
        bar.set_label("probability")
        bar.outline.set_visible(False)
        _footer(figure, footer)
    return figure


def _cell(axes: Any, step: int, row: int, token: str, probability: float) -> None:
    color = "white" if probability > 0.55 else INK
    text = _fit(format_token(token), 8)
    axes.text(step, row, text, ha="center", va="center", fontsize=7.5, color=color)


def _end(text: str, room: int) -> str:
    return text if len(text) <= room else "…" + text[1 - room :]
