"""Figures of weights: norms of a model's matrices by layer.

Border: numbers in, a `Figure` out; conventions and helpers are those of figures.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .figures import _figure, _footer, _integers, _style, _subtitle

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["norms_page"]

SHADES = ("#1d5b7f", "#c2410c", "#4d7c0f", "#7e22ce", "#d08a2e", "#0e7490", "#be185d", "#57534e", "#3f86a6")


def norms_page(
    layers: Sequence[int],
    norms: npt.NDArray[Any],
    names: Sequence[str],
    is_matrix: Sequence[bool],
    *,
    unit: str,
    model: str,
    footer: str,
) -> Figure:
    """A line per matrix, and beside them a line per vector, by layer.

    norms: [layer, matrix], NaN where there is none.  is_matrix: which of them have two axes or more.
    """
    kinds = [("Matrices", [i for i, two in enumerate(is_matrix) if two])]
    kinds.append(("Vectors: norms and biases", [i for i, two in enumerate(is_matrix) if not two]))
    shown = [(title, columns) for title, columns in kinds if columns]
    with _style():
        figure = _figure(4.0 + 4.5 * len(shown), 4.4)
        panels = figure.subplots(1, len(shown), squeeze=False)[0]
        for axes, (title, columns) in zip(panels, shown, strict=True):
            for place, column in enumerate(columns):
                shade = SHADES[place % len(SHADES)]
                mark = "o" if place < len(SHADES) else "s"
                axes.plot(
                    layers, norms[:, column], color=shade, lw=1.6, marker=mark, ms=3.5, label=names[column]
                )
            axes.set(xlabel="layer", ylabel=unit)
            axes.set_ylim(0, 1.08 * float(np.nanmax(norms[:, columns], initial=1e-9)))
            axes.set_title(title, pad=20)
            _subtitle(axes, f"{unit} of the weights as they are stored")
            axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
            _integers(axes.xaxis)
        figure.suptitle(f"The weights of {model}\n", x=0.01, ha="left", fontsize=12, fontweight="bold")
        _footer(figure, footer)
    return figure
