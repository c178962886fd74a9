"""Figures of probes: what can be read off each layer, beside what shuffled targets give.

Border: labelled results in, a `Figure` out; conventions and helpers are those of figures.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from .figures import CONTROL, FAINT, _figure, _fit, _footer, _integers, _style, _subtitle

if TYPE_CHECKING:
    import xarray as xr
    from matplotlib.figure import Figure

__all__ = ["probe_page"]

SHADES = {"true": "#1d5b7f", "shuffled": CONTROL}


def probe_page(
    panels: Sequence[tuple[str, str, xr.Dataset]], *, point: str, model: str, footer: str
) -> Figure:
    """A panel per target: its score by layer with a 95% band, and the same with shuffled targets.

    panels: (target in words, "label" or "number", as `stages.probe` gives it).
    """
    with _style():
        figure = _figure(1.0 + 5.4 * len(panels), 4.4)
        for axes, (name, kind, found) in zip(
            figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True
        ):
            layers = found["layer"].values
            for which, colour in SHADES.items():
                part = found.sel(targets=which)
                axes.fill_between(layers, part["low"], part["high"], color=colour, alpha=0.18, lw=0)
                dashes = "--" if which == "shuffled" else "-"
                axes.plot(layers, part["score"], color=colour, lw=2, ls=dashes, marker="o", ms=4, label=which)
            baseline = float(found["baseline"])
            guess = "commonest label" if kind == "label" else "mean"
            axes.axhline(baseline, color=FAINT, lw=0.9, ls=":", label=f"always the {guess}")
            low = float(np.nanmin(found["low"].values))
            # One shuffled layer far below zero must not flatten the rest.
            bottom = min(0.0, max(low * 1.1, -0.5)) if kind == "number" else max(0.0, low - 0.1)
            axes.set(xlabel="layer", ylabel="accuracy" if kind == "label" else "R²", ylim=(bottom, 1.02))
            axes.set_title(_fit(name, 48), pad=20)
            _subtitle(axes, "on prompts that were not fitted; bands: 95% over these prompts")
            axes.legend(frameon=False, fontsize=8, loc="best")
            _integers(axes.xaxis)
        title = f"What can be read off {point} of {model}, layer by layer\n"
        figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
        _footer(figure, footer)
    return figure
